"""Regular loops: after some steps callsheet removes its hooks from the model. The records stay right if the loop then changes."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from callsheet.exec.bare_loop import REGULAR_STEPS
from callsheet.report import RunFolder
from forked import run_forked  # type: ignore[import-not-found]  # pytest has its folder on the path

from .scripts import _BEGIN

LATER = REGULAR_STEPS + 16  # a step long after the hooks were removed; the next epoch of 12 steps begins after it
STEPS = 48

_LOOP = f"""{_BEGIN}
from torch.utils.data import DataLoader, TensorDataset
model, other = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)) for _ in range(2))
optimizer, steps_other = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, other))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
step, counts = 0, []
SETUPdef squared(inputs, targets):
    return nn.functional.mse_loss(model(inputs), targets)
def evaluate():
    with torch.no_grad():
        model(x)
for epoch in range(4):
    for inputs, targets in loader:
        step += 1
        counts.append(len(model._forward_pre_hooks))
BODY
    END
print(json.dumps(counts))
end(model, other)
"""
_BODY = """
optimizer.zero_grad()
loss = squared(inputs, targets)
loss.backward()
optimizer.step()
losses.append(loss.item())
"""
"""The body of the loop. `BEFORE` and `AFTER` in the scripts below are additional lines that run from step `LATER` on."""


def run_loop(
    folder: Path,
    *,
    before: str = "",
    after: str = "",
    end: str = "",
    body: str = _BODY,
    setup: str = "",
    loop: str = _LOOP,
    callbacks: str = "- class_path: callsheet.loggers.JSONLLogger\n",
    interval: int = 1,
) -> tuple[list[float], list[int], RunFolder]:
    """Run the loop alone and under `callsheet exec`, and return its losses, the numbers of its hooks at each step, and the run.

    From step `LATER` on, each step begins with `before` and ends with `after`. `end` is at the end of each epoch, and
    `setup` before the first. `callbacks` is the YAML file of the callbacks; if it is empty, the default ones observe.
    """
    lines = [body]
    if before:
        lines.insert(0, f"if step >= {LATER}:{indent(before, '    ')}")
    if after:
        lines.append(f"if step >= {LATER}:{indent(after, '    ')}")
    script = (
        loop.replace("SETUP", setup)
        .replace("BODY", indent("\n".join(lines), " " * 8))
        .replace("    END", indent(end or "pass", "    "))
    )
    (folder / "train.py").write_text(script)
    alone = run_forked(folder, "train.py")
    options = ["--run_name", "a", "--log_interval", str(interval)]
    if callbacks:
        (folder / "callbacks.yaml").write_text(callbacks)
        options += ["--callbacks", "callbacks.yaml"]
    seen = run_forked(folder, "train.py", exec_words=options)
    assert (alone.returncode, seen.returncode) == (0, 0), alone.stderr + seen.stderr
    assert alone.stdout.splitlines()[1:] == seen.stdout.splitlines()[1:]  # the losses and a hash of the weights
    assert "does not expect" not in seen.stderr
    assert "does not call" not in seen.stderr
    counts, losses = (json.loads(line) for line in seen.stdout.splitlines()[:2])
    return losses, counts, RunFolder.read(folder / "runs" / "a")


def losses_of(run: RunFolder) -> list[float | None]:
    """Return the recorded loss of each step, None if a step has none."""
    found = {record.step: record.values.get("train/loss") for record in run.records}
    return [found.get(step) for step in range(1, run.last_step + 1)]


def test_the_model_hooks_of_a_regular_loop_are_removed_between_epochs(tmp_path: Path) -> None:
    losses, counts, run = run_loop(tmp_path)
    assert losses_of(run) == pytest.approx(losses)
    assert [record.values["time/epoch"] for record in run.records] == [epoch for epoch in range(4) for _ in range(12)]
    assert [record.values["time/sample"] for record in run.records] == [8 * step for step in range(1, STEPS + 1)]
    assert set(counts[2 : REGULAR_STEPS - 1]) == {1}
    assert 0 in counts[REGULAR_STEPS:]
    assert (
        counts.count(0) > 10
    )  # the hook is registered again at the beginning of each epoch, since an evaluation may begin there


@pytest.mark.parametrize("mode", ["model.eval()", "model.eval(); list(DataLoader(TensorDataset(x, y)))"])
def test_an_evaluation_of_a_regular_loop_is_observed(mode: str, tmp_path: Path) -> None:
    losses, counts, run = run_loop(tmp_path, after=f"\nif step % 5 == 0:\n    {mode}\n    evaluate()\n    model.train()")
    assert losses_of(run) == pytest.approx(losses)
    assert [each["step"] for each in run.evaluations] == [step for step in range(LATER, STEPS + 1) if step % 5 == 0]
    assert 0 in counts[REGULAR_STEPS:LATER]


@pytest.mark.parametrize(
    ("name", "does"),
    {
        "another optimizer": {"before": "\nother(x).mean().backward()\nsteps_other.step()"},
        "another optimizer, after the step": {"after": "\nother(x).mean().backward()\nsteps_other.step()"},
        "another optimizer, within the step": {
            "body": _BODY.replace("optimizer.step()", f"if step >= {LATER}:\n    steps_other.step()\noptimizer.step()")
        },
        "another loss of the same model": {"before": "\nsquared(x, y).backward()\noptimizer.zero_grad()"},
        "a batch that is fetched ahead": {"before": "\nahead = next(iter(DataLoader(TensorDataset(x, y))))"},
        "a batch that is used again": {"after": f"\n{_BODY}"},
        "a batch that is left out": {"before": "\nif step % 5 == 0:\n    continue"},
        "an attack on the model in evaluation mode": {
            "after": (
                "\nif step % 3 == 0:\n    model.eval()\n    inside = inputs.clone().requires_grad_()\n"
                "    squared(inside, targets).backward()\n    model.train()"
            )
        },
        "a model that is called but not trained": {"before": "\nevaluate()"},
        "a part of the model in evaluation mode": {"before": "\nmodel[1].eval()"},
        "a second part of the batch": {
            "body": (
                "\noptimizer.zero_grad()\nloss = squared(inputs, targets)\nloss.backward()\nmore = squared(inputs[:4], targets[:4])\n"
                "more.backward()\noptimizer.step()\nlosses.append((loss + more).item())"
            )
        },
    }.items(),
)
@pytest.mark.test_all
def test_losses_are_right_after_a_regular_loop_becomes_irregular(name: str, does: dict[str, Any], tmp_path: Path) -> None:
    """Each recorded loss is right; at most one step, in which the loop becomes irregular, has none."""
    losses, _, run = run_loop(tmp_path, **does)
    found = losses_of(run)
    assert len(found) == len(losses)
    known = [(recorded, loss) for recorded, loss in zip(found, losses, strict=True) if recorded is not None]
    assert len(known) >= len(losses) - 1
    assert [recorded for recorded, _ in known] == pytest.approx([loss for _, loss in known])


ACCUMULATES = """
if batches_left == 0:
    optimizer.zero_grad()
    total, batches_left = 0.0, BATCHES_PER_STEP
loss = squared(inputs, targets)
loss.backward()
total, batches_left = total + loss.item(), batches_left - 1
if batches_left == 0:
    optimizer.step()
    losses.append(total)
"""


@pytest.mark.parametrize("batches_per_step", ["2", "1 + step % 3", "1 if step < 30 else 2"])
def test_losses_and_samples_of_a_regular_loop_with_gradient_accumulation_are_right(batches_per_step: str, tmp_path: Path) -> None:
    """Steps of several batches, and epochs that end within a step: losses, samples and epochs are right."""
    setup = "import weakref\nbatches_left, references = 0, []\n"
    ends = f"\nif batches_left == 0:{indent(f'{chr(10)}if step > 40: assert all(each() is None for each in references[:-1])', '    ')}\n"
    body = ACCUMULATES.replace("BATCHES_PER_STEP", batches_per_step) + ends + "references.append(weakref.ref(inputs))\n"
    losses, _, run = run_loop(tmp_path, body=body, setup=setup)
    assert losses_of(run) == pytest.approx(losses)
    samples = [record.values["time/sample"] for record in run.records]
    assert samples[-1] in (8 * STEPS, 8 * (STEPS - 1))  # the last step may lack its second batch
    assert samples == sorted(samples)
    assert run.records[-1].values["time/epoch"] in (3, 4)


BETWEEN = """
optimizer.zero_grad()
loss = squared(inputs, targets)
loss.backward()
if step == 44:
    model.eval(); evaluate(); model.train()
optimizer.step()
losses.append(loss.item())
if step in (38, 47):
    model.eval(); evaluate(); model.train()
"""


def test_an_evaluation_within_a_step_does_not_hide_later_evaluations(tmp_path: Path) -> None:
    losses, _, run = run_loop(tmp_path, body=BETWEEN)
    assert losses_of(run) == pytest.approx(losses)
    assert [each["step"] for each in run.evaluations] == [38, 47]


LEFT_EARLY = """
if step == 40:
    model.eval()
    for index, batch in enumerate(validation):
        if index == 3:
            break
        with torch.no_grad():
            model(batch[0])
    model.train()
    reference = weakref.ref(batch[0])
    del batch
if step == 42:
    assert reference() is None
if step == 44:
    model[1].eval()
    REPEATED
"""


def test_an_evaluation_that_is_left_early_neither_ends_an_epoch_nor_keeps_its_batch(tmp_path: Path) -> None:
    setup = "import weakref\nvalidation = DataLoader(TensorDataset(x, y), batch_size=4)\n"
    after = LEFT_EARLY.replace("REPEATED", _BODY.strip().replace("\n", "\n    "))
    losses, _, run = run_loop(tmp_path, setup=setup, after=after)
    assert losses_of(run) == pytest.approx(losses)
    steps = [*range(44), *range(43, STEPS)]  # step 44 is repeated
    assert [record.values["time/epoch"] for record in run.records] == [step // 12 for step in steps]


def test_batches_that_are_none_do_not_change_the_dataloader(tmp_path: Path) -> None:
    setup = (
        "box = []\ndef collate(items):\n    box.append(torch.utils.data.default_collate(items))\n"
        "loader = DataLoader(TensorDataset(x, y), batch_size=8, collate_fn=collate)\nother_batches = iter(DataLoader(x, batch_size=4))\n"
    )
    loop = _LOOP.replace("for inputs, targets in loader:", "for _ in loader:")
    body = f"\ninputs, targets = box.pop()\nif step == 6: next(other_batches){_BODY}"
    losses, _, run = run_loop(tmp_path, setup=setup, body=body, loop=loop)
    assert losses_of(run) == pytest.approx(losses)
    assert [record.values["time/epoch"] for record in run.records] == [epoch for epoch in range(4) for _ in range(12)]


@pytest.mark.parametrize(
    ("name", "within", "after"),
    [
        ("clips the gradients", "assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)) > 0", ""),
        ("computes the gradients again", "optimizer.zero_grad()\nloss = squared(2 * inputs, targets)\nloss.backward()", ""),
        ("adds a loss", "more = squared(inputs[:4], targets[:4])\nmore.backward()\nloss = loss + more", ""),
        ("begins an iteration", "next(iter(DataLoader(TensorDataset(x, y))))", ""),
        ("sets the evaluation mode", "model.eval()\nmodel.train()", ""),
        ("steps with a closure", "", "optimizer.step(lambda: closing(inputs, targets))"),
    ],
)
def test_losses_are_right_if_a_regular_loop_does_something_else_within_a_step(
    name: str, within: str, after: str, tmp_path: Path
) -> None:
    """Something happens between the loss and the optimizer's step, when the start of the step was not reported yet."""
    setup = "def closing(inputs, targets):\n    optimizer.zero_grad()\n    loss = squared(inputs, targets)\n    loss.backward()\n    return loss\n"
    indented = indent(f"\n{within}\n", "    ")
    body = _BODY.replace("optimizer.step()", f"if step >= {LATER} and step % 3 == 0:{indented}    pass\noptimizer.step()")
    if after:
        body += f"\nif step >= {LATER} and step % 3 == 0:\n    losses.append({after}.item())\n"
    losses, _, run = run_loop(tmp_path, body=body, setup=setup)
    assert losses_of(run) == pytest.approx(losses)


def test_losses_are_right_if_a_regular_loop_repeats_a_failed_backward(tmp_path: Path) -> None:
    setup = "def fails(gradient):\n    raise MemoryError\n"
    again = "try:\n    loss.backward()\nexcept MemoryError:\n    loss = squared(inputs, targets)\n    loss.backward()\n"
    fails = "if step % 5 == 0:\n    loss.register_hook(fails)\n"
    end = "\nif epoch == 3: squared(inputs, targets).backward()"
    losses, _, run = run_loop(tmp_path, body=_BODY.replace("loss.backward()\n", fails + again), setup=setup, end=end)
    assert losses_of(run) == pytest.approx(losses)
    assert run.last_step == STEPS
    assert run.records[-1].values["time/sample"] == 8 * STEPS


FETCHES_AHEAD = """
optimizer.zero_grad()
loss = squared(inputs, targets)
loss.backward()
following = next(batches, None)
optimizer.step()
losses.append(loss.item())
"""


def test_losses_and_epochs_are_right_if_the_next_batch_is_fetched_within_the_step(tmp_path: Path) -> None:
    """Each epoch's data ends within the last step of the epoch, so the epoch ends after this step."""
    losses, _, run = run_loop(tmp_path, body=FETCHES_AHEAD, loop=_AHEAD)
    assert losses_of(run) == pytest.approx(losses)
    assert [record.values["time/epoch"] for record in run.records] == [epoch for epoch in range(4) for _ in range(12)]
    assert [record.values["time/sample"] for record in run.records] == [8 * step for step in range(1, STEPS + 1)]


_AHEAD = _LOOP.replace(
    "    for inputs, targets in loader:\n",
    "    batches = iter(loader)\n    following = next(batches)\n    while following is not None:\n        inputs, targets = following\n",
)
_LONG = "range(14)"  # epochs


def test_batches_are_freed_between_records_of_the_default_observers(tmp_path: Path) -> None:
    """The observers mute their handlers for some steps, and the loop is regular and has no listeners in these steps."""
    setup = "import weakref\nreferences = []\n"
    after = "\nassert not any(each() is not None for each in references), step\nreferences[:] = [*references[-30:], weakref.ref(inputs)]\n"
    _, _, run = run_loop(tmp_path, after=after, setup=setup, loop=_LOOP.replace("range(4)", _LONG), callbacks="", interval=23)
    assert run.last_step == 14 * 12
    assert len([record for record in run.records if "l2_norm/grad/global" in record.values]) >= 5


def test_each_record_of_a_loop_that_fetches_ahead_has_the_default_observers_values(tmp_path: Path) -> None:
    _, _, run = run_loop(tmp_path, body=FETCHES_AHEAD, loop=_AHEAD.replace("range(4)", _LONG), callbacks="", interval=23)
    scheduled = [record for record in run.records if record.step % 23 == 0]
    assert [record.step for record in scheduled] == [23 * number for number in range(1, 8)]
    assert all("l2_norm/grad/global" in record.values for record in scheduled)


LISTENS_AT_TIMES = """
from callsheet import Callback
class Listens(Callback):
    def on_log(self, ctx):
        print("leftover", [name for name in ("batch", "learning_rate", "loss") if ctx.has(name)])
    def on_train_step_end(self, ctx):
        assert ctx.batch is not None
        print("rate", ctx.step, float(ctx.learning_rate))
        ctx.mute(self, "on_train_step_end", until=ctx.step + 30)
"""


@pytest.mark.parametrize(
    "rate", ["np.float64(0.05 - 0.0002 * step)", "torch.tensor(0.05 - 0.0002 * step)", "0.05 - 0.0002 * step"]
)
def test_a_handler_that_is_unmuted_reads_the_fields_of_its_own_step(rate: str, tmp_path: Path) -> None:
    (tmp_path / "listens.py").write_text(LISTENS_AT_TIMES)
    setup = "import numpy as np\nrates = {}\n"
    body = f"\noptimizer.param_groups[0]['lr'] = {rate}\nrates[step] = float(optimizer.param_groups[0]['lr']){_BODY}"
    script = (
        _LOOP.replace("SETUP", setup)
        .replace("BODY", indent(body, " " * 8))
        .replace("    END", "    pass")
        .replace("range(4)", _LONG)
    )
    (tmp_path / "train.py").write_text(f"{script}\nprint('rates', json.dumps(rates))\n")
    (tmp_path / "callbacks.yaml").write_text("- class_path: callsheet.loggers.JSONLLogger\n- class_path: listens.Listens\n")
    done = run_forked(
        tmp_path, "train.py", exec_words=["--run_name", "a", "--log_interval", "1", "--callbacks", "callbacks.yaml"]
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    seen = {int(line.split()[1]): float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("rate ")}
    (rates,) = (json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("rates "))
    assert len(seen) >= 5
    assert {line for line in done.stdout.splitlines() if line.startswith("leftover")} == {"leftover []"}
    assert seen == pytest.approx({step: rates[str(step)] for step in seen})
    records = RunFolder.read(tmp_path / "runs" / "a").records
    assert [record.values["train/learning_rate"] for record in records] == pytest.approx(list(rates.values()))


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("of another dataloader", "if step % 10 == 1: next(iter(validation))"),
        ("of another dataloader, in each step", "next(of_validation)"),
        ("of a dataloader that is deleted", "next(iter(DataLoader(TensorDataset(x, y), batch_size=5)))"),
        ("of another dataloader, all of it", "if step % 10 == 1: list(validation)"),
    ],
)
def test_a_batch_of_another_dataloader_in_the_first_step_is_not_counted(name: str, within: str, tmp_path: Path) -> None:
    setup = (
        "validation = DataLoader(TensorDataset(x, y), batch_size=5)\nimport itertools\n"
        "of_validation = itertools.chain.from_iterable(validation for _ in range(99))\n"
    )
    losses, _, run = run_loop(tmp_path, body=_BODY.replace("optimizer.step()", f"{within}\noptimizer.step()"), setup=setup)
    assert losses_of(run) == pytest.approx(losses)
    assert [record.values["time/epoch"] for record in run.records] == [epoch for epoch in range(4) for _ in range(12)]
    assert [record.values["time/sample"] for record in run.records] == [8 * step for step in range(1, STEPS + 1)]


def test_single_batches_from_new_iterators_are_not_counted_as_epochs(tmp_path: Path) -> None:
    loop = _LOOP.replace("for inputs, targets in loader:", "for _ in range(12):")
    body = f"\ninputs, targets = following{_BODY}".replace("optimizer.step()", "following = next(iter(loader))\noptimizer.step()")
    losses, _, run = run_loop(tmp_path, body=body, setup="following = next(iter(loader))\n", loop=loop)
    assert losses_of(run) == pytest.approx(losses)
    assert [record.values["time/epoch"] for record in run.records] == [0] * STEPS


WHOLE_EPOCHS = """
optimizer.zero_grad()
total = 0.0
for inputs, targets in loader:
    loss = squared(inputs, targets)
    loss.backward()
    total += loss.item()
optimizer.step()
losses.append(total)
counts.append(0)
"""


def test_an_epoch_that_ends_within_the_first_step_is_counted(tmp_path: Path) -> None:
    """Each step accumulates the gradients of a whole epoch."""
    loop = _LOOP.replace(
        "    for inputs, targets in loader:\n        step += 1\n        counts.append(len(model._forward_pre_hooks))\n",
        "    if True:\n",
    )
    losses, _, run = run_loop(tmp_path, body=WHOLE_EPOCHS, loop=loop)
    assert losses_of(run) == pytest.approx(losses)
    assert [record.values["time/sample"] for record in run.records] == [96 * step for step in range(1, 5)]
    assert json.loads((tmp_path / "runs" / "a" / "events.jsonl").read_text().splitlines()[-1])["epoch"] == 4


SECOND_LOOP = """
second = nn.Linear(4, 1)
steps_second = torch.optim.SGD(second.parameters(), lr=0.05)
for inputs, targets in [batch for _ in range(3) for batch in DataLoader(TensorDataset(x, y), batch_size=4)]:
    steps_second.zero_grad()
    nn.functional.mse_loss(second(inputs), targets).backward()
    steps_second.step()
"""


def test_the_first_step_of_a_second_loop_has_no_samples_of_the_first_loop(tmp_path: Path) -> None:
    run_loop(tmp_path, loop=_LOOP.replace("print(json.dumps(counts))", f"{SECOND_LOOP}print(json.dumps(counts))"))
    (folder,) = (each for each in (tmp_path / "runs").iterdir() if each.is_dir() and each.name != "a")
    assert RunFolder.read(folder).records[0].values["time/sample"] in (0, 4)  # 0: its batch was fetched before it was recognized
