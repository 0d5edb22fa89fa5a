"""Scripts that train with Accelerate: they print the same as without callsheet, and the run has the batches that the script gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from callsheet.report import RunFolder
from forked import run_forked  # type: ignore[import-not-found]  # pytest has its folder on the path

from .scripts import _BEGIN

pytestmark = pytest.mark.test_all  # they need Accelerate

ACCUMULATING = f"""{_BEGIN}
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(x[:90], y[:90])  # whose last batch is smaller
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(dispatch_batches=DISPATCH))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, train, held_out = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=32))
total = 0.0
for epoch in range(3):
    model.train()
    for number, (inputs, targets) in enumerate(train):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            total += loss.item() / 2
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(total)
                total = 0.0
            optimizer.step()
            optimizer.zero_grad()
        if number == LAST:
            break
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics(model(inputs)) for inputs, _ in held_out]
    mean = torch.cat(found).mean().reshape(1)
    accelerator.log({{"outputs": mean, "text": "not a number"}})
    mean.zero_()  # what was logged before stays
if accelerator.is_main_process:
    end(accelerator.unwrap_model(model))
accelerator.end_training()
"""


def run_alone_and_observed(folder: Path, text: str, ranks: int) -> tuple[RunFolder, list[float]]:
    """Run the script alone and observed. Return the observed run, and the losses that both have printed."""
    (folder / "train.py").write_text(text)
    alone = run_forked(folder, "train.py", ranks=ranks)
    observed = run_forked(folder, "train.py", ranks=ranks, exec_words=["--run_name", "a", "--log_interval", "1"])
    assert (alone.returncode, observed.returncode) == (0, 0), alone.stderr + observed.stderr
    assert alone.stdout == observed.stdout  # the losses and a hash of the weights
    assert "Traceback" not in observed.stderr
    return RunFolder.read(folder / "runs" / "a"), json.loads(alone.stdout.splitlines()[0])


@pytest.mark.parametrize(
    ("ranks", "dispatch", "steps", "samples"),
    [(1, False, 9, 3 * 90), (2, False, 6, 3 * 96), (2, True, 6, 3 * 90)],
    ids=["one rank", "two ranks", "batches sent from rank 0"],
)
def test_recorded_steps_epochs_and_samples_equal_those_of_the_script(
    ranks: int, dispatch: bool, steps: int, samples: int, tmp_path: Path
) -> None:
    """Accelerate fetches one batch ahead, so the end of the data comes before the last step."""
    run, losses = run_alone_and_observed(tmp_path, ACCUMULATING.replace("DISPATCH", str(dispatch)).replace("LAST", "-1"), ranks)
    assert (run.outcome, run.last_step, run.events[-1]["epoch"]) == ("finished", steps, 3)
    assert [each["step"] for each in run.evaluations] == [steps // 3, 2 * steps // 3, steps]
    logged = [record for record in run.records if "train/loss" in record.values]
    assert [record.values["time/epoch"] for record in logged] == [epoch for epoch in range(3) for _ in range(steps // 3)]
    assert [record.values["train/loss"] for record in logged] == pytest.approx(losses)
    assert logged[-1].values["time/sample"] == samples


def test_samples_are_counted_if_each_epoch_is_left_early(tmp_path: Path) -> None:
    run, losses = run_alone_and_observed(tmp_path, ACCUMULATING.replace("DISPATCH", "False").replace("LAST", "3"), 1)
    assert (run.last_step, run.events[-1]["epoch"], run.records[-1].values["time/sample"]) == (len(losses), 3, 3 * 64)


def test_accelerate_s_settings_and_logged_values_are_recorded(tmp_path: Path) -> None:
    run, _ = run_alone_and_observed(tmp_path, ACCUMULATING.replace("DISPATCH", "False").replace("LAST", "-1"), 1)
    settings = json.loads((tmp_path / "runs" / "a" / "hyperparameters.json").read_text())
    assert settings["framework"].startswith("Accelerate 1.")
    assert (settings["gradient_accumulation_steps"], settings["mixed_precision"]) == (2, "no")
    assert [record.step for record in run.records if "accelerate/outputs" in record.values] == [4, 7, 9]
    assert all(record.values.get("accelerate/outputs") != 0 for record in run.records)
    assert not any("accelerate/text" in record.values for record in run.records)
