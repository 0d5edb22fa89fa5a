"""Scripts that train with Ignite's engines: they print the same as without callsheet, and the run has the engines' epochs and results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from callsheet.report import RunFolder
from forked import run_forked  # type: ignore[import-not-found]  # pytest has its folder on the path

from .scripts import _BEGIN
from .test_exec import executed

pytestmark = pytest.mark.test_all  # they need Ignite

_ENGINES = f"""{_BEGIN}
import ignite.distributed as idist
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Loss, RunningAverage
from torch.utils.data import DataLoader, TensorDataset
train, held_out = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
train_loader, val_loader = DataLoader(train, batch_size=16, shuffle=True), DataLoader(held_out, batch_size=16)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mse = nn.MSELoss()
evaluator = create_supervised_evaluator(model, {{"loss": Loss(mse)}})
found = []
def evaluate(name, engine, loader):
    engine.run(loader)
    found.append([name, engine.state.metrics["loss"]])
"""

SUPERVISED = f"""{_ENGINES}
trainer = create_supervised_trainer(model, optimizer, mse)
RunningAverage(output_transform=lambda output: output).attach(trainer, "average")
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluate("train_data", evaluator, train_loader))
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluate("validation", evaluator, val_loader))
trainer.run(train_loader, max_epochs=3)
print(json.dumps(found))
end(model)
"""

PROCESS_FUNCTION = f"""{_ENGINES}
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
def step(engine, batch):
    model.train()
    loss = mse(model(batch[0]), batch[1]) / 2
    scaler.scale(loss).backward()
    if engine.state.iteration % 2 == 1:
        losses.append(0.0)
    losses[-1] += loss.item()
    if engine.state.iteration % 2 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
trainer = Engine(step)
trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), lambda: evaluate("validation", evaluator, val_loader))
trainer.add_event_handler(Events.COMPLETED, lambda: evaluate("validation", evaluator, val_loader))
trainer.run(train_loader, max_epochs=4, epoch_length=3)
print(json.dumps(found))
end(model)
"""

ENGINES_OF_EACH_EPOCH = f"""{_ENGINES}
average = torch.optim.swa_utils.AveragedModel(model)
of_average = create_supervised_evaluator(average, {{"loss": Loss(mse)}})
for epoch in range(3):
    trainer = create_supervised_trainer(model, optimizer, mse)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: average.update_parameters(model))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.run(train_loader, max_epochs=1)
    evaluate("validation", evaluator, DataLoader(held_out, batch_size=8))
    evaluate("validation_2", of_average, DataLoader(held_out, batch_size=8))
print(json.dumps(found))
end(model)
"""

EPOCHS_CUT_SHORT = f"""{_ENGINES}
batches = list(train_loader)
trainer = create_supervised_trainer(model, optimizer, mse, deterministic=False)
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=lambda engine, at: at in (2, 5)),
                          lambda: trainer.terminate_epoch(skip_epoch_completed=trainer.state.epoch == 1))
trainer.add_event_handler(Events.EPOCH_COMPLETED(every=2), lambda: evaluate("validation", evaluator, val_loader))
trainer.run(batches, max_epochs=4)
print(json.dumps(found))
end(model)
"""

GETTING_WORSE = f"""{_ENGINES}
trainer = create_supervised_trainer(model, optimizer, mse)
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
worse = create_supervised_evaluator(model)
worse.add_event_handler(Events.COMPLETED, lambda: worse.state.metrics.update(loss=trainer.state.epoch))
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluate("validation", worse, val_loader))
trainer.run(train_loader, max_epochs=9)
end(model)
"""

ON_TWO_RANKS = f"""{_ENGINES}
idist.initialize("gloo")
parallel = idist.auto_model(model)
trainer = create_supervised_trainer(parallel, optimizer, mse)
of_rank_zero = create_supervised_evaluator(model)
of_rank_zero.add_event_handler(Events.COMPLETED, lambda: of_rank_zero.state.metrics.update(epoch=trainer.state.epoch))
if idist.get_rank() == 0:
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: of_rank_zero.run(val_loader))
trainer.run(train_loader, max_epochs=2)
if idist.get_rank() == 0:
    end(model)
idist.finalize()
"""

SCRIPTS: dict[str, tuple[str, int, int]] = {
    "supervised": (SUPERVISED, 3, 192),
    "process function": (PROCESS_FUNCTION, 4, 192),
    "engines of each epoch": (ENGINES_OF_EACH_EPOCH, 3, 192),
    "epochs cut short": (EPOCHS_CUT_SHORT, 4, 0),
}
"""By name: the script, its epochs, and its samples, or 0 if they are not counted, as without a dataloader."""


def run_alone_and_observed(folder: Path, text: str, *exec_words: str) -> tuple[RunFolder, list[str]]:
    """Run the script alone and observed. Return the observed run, and the lines of the output, which must be the same."""
    (folder / "train.py").write_text(text)
    alone = run_forked(folder, "train.py")
    observed = run_forked(folder, "train.py", exec_words=["--run_name", "a", "--log_interval", "1", *exec_words])
    assert (alone.returncode, observed.returncode) == (0, 0), alone.stderr + observed.stderr
    assert alone.stdout == observed.stdout  # the evaluations, the losses and a hash of the weights
    assert "does not expect" not in observed.stderr
    assert "Traceback" not in observed.stderr
    return RunFolder.read(folder / "runs" / "a"), alone.stdout.splitlines()


@pytest.mark.parametrize("name", SCRIPTS)
def test_recorded_epochs_losses_and_evaluations_equal_those_of_the_engines(name: str, tmp_path: Path) -> None:
    text, epochs, samples = SCRIPTS[name]
    run, (found, losses, _) = run_alone_and_observed(tmp_path, text)
    expected = json.loads(losses)
    assert (run.outcome, run.last_step, run.events[-1]["epoch"]) == ("finished", len(expected), epochs)
    logged = {record.step: record.values["train/loss"] for record in run.records if "train/loss" in record.values}
    assert logged == pytest.approx(dict(enumerate(expected, 1)), rel=1e-5)
    assert not samples or run.records[-1].values["time/sample"] == samples
    results = [[name, values["loss"]] for each in run.evaluations for name, values in each["results"].items()]
    assert results == [[name, pytest.approx(value)] for name, value in json.loads(found)]
    assert json.loads((tmp_path / "runs" / "a" / "hyperparameters.json").read_text())["framework"].startswith("Ignite 0.")


def test_metrics_of_the_trainer_are_logged_at_the_end_of_its_epoch(tmp_path: Path) -> None:
    run, _ = run_alone_and_observed(tmp_path, SUPERVISED)
    assert [record.step for record in run.records if "ignite/average" in record.values] == [4, 8, 12]
    assert [each["step"] for each in run.evaluations] == [4, 8, 12]


def test_a_callback_stops_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "callbacks.yaml").write_text("- class_path: EarlyStopper\n  init_args: {monitor: validation/loss, patience: 1}\n")
    (tmp_path / "train.py").write_text(GETTING_WORSE)
    observed = run_forked(tmp_path, "train.py", exec_words=["--run_name", "a", "--callbacks", "callbacks.yaml"])
    assert observed.returncode == 0, observed.stderr
    run = RunFolder.read(tmp_path / "runs" / "a")
    assert (run.outcome, run.last_step, len(run.evaluations)) == ("stopped", 8, 2), observed.stderr
    assert len(json.loads(observed.stdout.splitlines()[0])) == 8


def test_an_error_in_an_evaluator_ends_the_script_as_without_callsheet(tmp_path: Path) -> None:
    text = SUPERVISED.replace(
        "\ntrainer.run(", "\nevaluator.add_event_handler(Events.COMPLETED, lambda: 1 / (2 - trainer.state.epoch))\ntrainer.run("
    )
    (tmp_path / "train.py").write_text(text)
    alone = executed(tmp_path, "train.py")
    observed = executed(tmp_path, "train.py", exec_words=["--run_name", "a"])
    assert (alone.returncode, alone.stdout) == (observed.returncode, observed.stdout) == (1, "")
    assert observed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert RunFolder.read(tmp_path / "runs" / "a").outcome == "failed"


def test_an_evaluator_that_runs_on_one_of_two_ranks_is_observed(tmp_path: Path) -> None:
    """callsheet on rank 0 does not wait for the other rank."""
    (tmp_path / "train.py").write_text(ON_TWO_RANKS)
    alone = run_forked(tmp_path, "train.py", ranks=2)
    observed = run_forked(tmp_path, "train.py", ranks=2, exec_words=["--run_name", "a", "--log_interval", "1"])
    assert (alone.returncode, observed.returncode) == (0, 0), alone.stderr + observed.stderr
    assert alone.stdout == observed.stdout
    run = RunFolder.read(tmp_path / "runs" / "a")
    assert (run.outcome, run.last_step, run.events[-1]["epoch"]) == ("finished", 8, 2), observed.stderr
    assert [each["results"] for each in run.evaluations] == [{"validation": {"epoch": 1.0}}, {"validation": {"epoch": 2.0}}]
