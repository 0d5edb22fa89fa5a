"""`callsheet exec` runs real scripts in real processes: same output, exit code and weights, and a run's folder."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from callsheet.report import RunFolder
from forked import run_forked  # type: ignore[import-not-found]  # pytest has its folder on the path

from .scripts import SCRIPTS

SCRIPT = """
import argparse, hashlib, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--end", default="")
end = parser.parse_args().end
torch.manual_seed(0)
x = torch.randn(96, 4)
y = x.sum(1, keepdim=True)
train, test = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True), DataLoader(TensorDataset(x, y), batch_size=48)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    model.train()
    for inputs, targets in train:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print("evaluation", [float(model(inputs).mean()) for inputs, _ in test])
if end == "error":
    raise ValueError("the script's own error")
if end == "exit":
    sys.exit(7)
print(losses, hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest())
"""


def executed(folder: Path, *words: str, exec_words: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script under `callsheet exec` with these options, or alone. Unlike `run_forked`, this starts a new interpreter.

    This is for tests of what depends on the interpreter's start or end, such as tracebacks, signals and the import of torch.
    """
    command = [sys.executable, *(["-m", "callsheet.exec", *exec_words] if exec_words is not None else []), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120, check=False)


def executed_alone_and_observed(folder: Path) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Run `train.py` alone, and under `callsheet exec` as the run `a`. Both must succeed and print the same."""
    alone = run_forked(folder, "train.py")
    observed = run_forked(folder, "train.py", exec_words=["--run_name", "a", "--log_interval", "1"])
    assert (alone.returncode, observed.returncode) == (0, 0), alone.stderr + observed.stderr
    assert alone.stdout == observed.stdout  # the losses and a hash of the weights
    return alone, observed


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_report_that_cannot_be_written_does_not_hide_the_summary(script: Path) -> None:
    script.write_text(f"{SCRIPT}\nimport pathlib; pathlib.Path('runs/a/report.html/taken').mkdir(parents=True)\n")
    observed = run_forked(script.parent, "train.py", exec_words=["--run_name", "a"])
    assert observed.returncode == 0
    assert re.search(
        r"^callsheet: a: 12 steps, .*; files: runs/a; the report could not be written: .*", observed.stderr, re.MULTILINE
    )
    assert "Traceback" not in observed.stderr


def test_a_compiled_module_inside_a_wrapper_gets_no_hooks(script: Path) -> None:
    wraps = "model.compile(backend='eager')\nmodel = nn.parallel.DistributedDataParallel(model)\noptimizer = torch"
    begins = "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\ntorch.manual_seed"
    hooks = "\nassert not model.module._forward_pre_hooks and not model.module._forward_hooks\n"
    script.write_text(SCRIPT.replace("optimizer = torch", wraps).replace("torch.manual_seed", begins) + hooks)
    executed_alone_and_observed(script.parent)
    assert len(RunFolder.read(script.parent / "runs" / "a").evaluations) == 2


@pytest.mark.parametrize("evaluated", ["model", "inner"])
def test_an_evaluation_with_the_module_inside_a_wrapper_is_observed_once(evaluated: str, script: Path) -> None:
    wraps = "inner = model\nmodel = nn.parallel.DistributedDataParallel(inner)\noptimizer = torch"
    begins = "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\ntorch.manual_seed"
    content = SCRIPT.replace("optimizer = torch", wraps).replace("torch.manual_seed", begins)
    script.write_text(content.replace("model(inputs).mean()", f"{evaluated}(inputs).mean()"))
    executed_alone_and_observed(script.parent)
    run = RunFolder.read(script.parent / "runs" / "a")
    assert (run.outcome, run.last_step, len(run.evaluations)) == ("finished", 12, 2)
    timed = [each for window in run.windows for each in window.slices]
    assert sum(each.name == "forward" for each in timed) == sum(each.name == "optimizer_step" for each in timed)


def test_a_script_is_observed_and_unchanged(script: Path) -> None:
    alone, observed = executed_alone_and_observed(script.parent)
    run = RunFolder.read(script.parent / "runs" / "a")
    losses = json.loads(alone.stdout.splitlines()[-1].rpartition(" ")[0])
    assert [record.values["train/loss"] for record in run.records if "train/loss" in record.values] == pytest.approx(losses)
    assert (run.outcome, run.last_step, len(run.evaluations)) == ("finished", 12, 2)
    timed = {each.name for window in run.windows for each in window.slices}
    assert {"fetch", "train_step", "forward", "backward", "optimizer_step"} <= timed
    assert max(record.values.get("l2_norm/grad/global", 0.0) for record in run.records) > 1.01  # before clipping
    assert (script.parent / "runs" / "a" / "report.html").exists()
    last = observed.stderr.rstrip().splitlines()[-1]
    rate = r"[\d.,e+]+"
    assert re.fullmatch(
        rf"callsheet: a: 12 steps, {rate} m?s a step, {rate} samples/s, train/loss {losses[-1]:.4g}, .*; report: runs/a/report\.html",
        last,
    ), last


@pytest.mark.test_all
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_of_each_kind_is_observed_and_unchanged(name: str, tmp_path: Path) -> None:
    text, steps, epochs = SCRIPTS[name]
    (tmp_path / "train.py").write_text(text)
    alone, observed = executed_alone_and_observed(tmp_path)
    run = RunFolder.read(tmp_path / "runs" / "a")
    assert (run.outcome, run.last_step, run.events[-1]["epoch"]) == ("finished", steps, epochs), observed.stderr
    losses = {record.step: record.values["train/loss"] for record in run.records if "train/loss" in record.values}
    expected = dict(enumerate(json.loads(alone.stdout.splitlines()[-2]), 1))
    if name == "scaled":
        assert not math.isfinite(losses.pop(3, math.inf))  # its step was skipped
        del expected[3]
    assert losses == pytest.approx(expected, rel=1e-6)
    timed = {each.name for window in run.windows for each in window.slices}
    assert {"train_step", "backward", "optimizer_step"} <= timed
    assert ("forward" in timed) or name == "compiled_in_place"
    assert "Traceback" not in observed.stderr


@pytest.mark.parametrize(("end", "status"), [("error", 1), ("exit", 7)])
def test_errors_and_exit_codes_are_those_of_the_script(script: Path, end: str, status: int) -> None:
    alone = executed(script.parent, "train.py", "--end", end)
    observed = executed(script.parent, "train.py", "--end", end, exec_words=["--run_name", "a"])
    assert alone.returncode == observed.returncode == status
    assert alone.stdout == observed.stdout
    assert alone.stderr in observed.stderr  # a traceback without frames of callsheet
    assert RunFolder.read(script.parent / "runs" / "a").outcome == "failed"


SIGNALED = """
import os, signal, torch
model = torch.nn.DataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
    if step == 5:
        os.kill(os.getpid(), signal.NAME)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_end_the_script_as_without_callsheet(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SIGNALED.replace("NAME", name))
    alone = executed(tmp_path, "train.py")
    observed = executed(tmp_path, "train.py", exec_words=["--run_name", "a"])
    assert alone.returncode == observed.returncode != 0
    assert alone.stdout == observed.stdout
    assert alone.stderr in observed.stderr


HANDLES_SIGNALS = """
import signal, sys, torch

class Handler:
    def __call__(self, *given):
        self.stop()
    def stop(self):
        raise TimeoutError("too slow")

def stop(number, frame):
    raise TimeoutError("too slow")

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
signal.signal(signal.SIGUSR1, HANDLER)
caught = 0
for step in range(8):
    try:
        optimizer.zero_grad()
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    except TimeoutError:
        caught += 1
print(caught)
"""
SIGNALS = """
import os, signal
from callsheet import Callback

class Signals(Callback):
    def __init__(self, event, collective):
        self.collective, self.has_signaled = collective, False
        setattr(self, event, self.signal)

    def signal(self, ctx):
        if ctx.step == 4 and not self.has_signaled:
            self.has_signaled = True
            os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.test_all
@pytest.mark.parametrize("handler", ["stop", "Handler()", "lambda *given: sys.exit(3)"])
@pytest.mark.parametrize(
    ("event", "collective"),  # the errors of the callback are isolated, or end the observation if it is collective
    [("on_backward_end", False), ("on_train_step_start", True), ("on_optimizer_step_start", True)],
)
def test_an_error_of_the_script_s_signal_handler_reaches_the_script(
    handler: str, event: str, collective: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(HANDLES_SIGNALS.replace("HANDLER", handler))
    (tmp_path / "signals.py").write_text(SIGNALS)
    options = f"{{event: {event}, collective: {collective}}}"
    (tmp_path / "callbacks.yaml").write_text(f"- class_path: signals.Signals\n  init_args: {options}\n")
    observed = run_forked(tmp_path, "train.py", exec_words=["--callbacks", "callbacks.yaml", "--run_name", "a"])
    expected = (3, "") if "exit" in handler else (0, "1\n")
    assert (observed.returncode, observed.stdout) == expected, observed.stderr
    assert "TimeoutError" not in observed.stderr


@pytest.mark.parametrize(
    ("collective", "message"),
    [(False, "training continues: RuntimeError: broken"), (True, "callsheet cannot follow this script after step 1")],
)
def test_a_failing_callback_does_not_end_the_script(script: Path, collective: bool, message: str) -> None:
    (script.parent / "broken.py").write_text(
        "from callsheet import Callback\n\nclass Broken(Callback):\n    def __init__(self, collective):\n        self.collective = collective\n\n"
        "    def on_train_step_end(self, ctx):\n        raise RuntimeError('broken')\n"
    )
    (script.parent / "callbacks.yaml").write_text(f"- class_path: broken.Broken\n  init_args: {{collective: {collective}}}\n")
    observed = run_forked(script.parent, "train.py", exec_words=["--callbacks", "callbacks.yaml", "--run_name", "a"])
    assert observed.returncode == 0
    assert observed.stdout == run_forked(script.parent, "train.py").stdout
    assert message in observed.stderr
    assert RunFolder.read(script.parent / "runs" / "a").outcome == ("failed" if collective else "finished")


def test_callsheet_callbacks_in_the_environment_names_the_file_of_callbacks(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script.parent / "named.yaml").write_text("- class_path: EarlyStopper\n  init_args: {monitor: validation/loss}\n")
    monkeypatch.setenv("CALLSHEET_CALLBACKS", "named.yaml")
    assert "EarlyStopper asks for ctx.control.stop" in executed(script.parent, "train.py", exec_words=[]).stderr


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        ("EarlyStopper", "monitor: validation/loss", "EarlyStopper asks for ctx.control.stop"),
        ("CheckpointSaver", "save_interval: 1ba", "CheckpointSaver asks for ctx.control.save"),
        ("EMA", "half_life: 2", "EMA changes the training"),
    ],
)
def test_a_callback_that_acts_on_training_is_rejected_by_name(script: Path, callback: str, options: str, message: str) -> None:
    (script.parent / "callbacks.yaml").write_text(f"- class_path: {callback}\n  init_args: {{{options}}}\n")
    observed = run_forked(script.parent, "train.py", exec_words=["--callbacks", "callbacks.yaml"])
    assert observed.returncode == 0
    assert observed.stdout == run_forked(script.parent, "train.py").stdout
    (line,) = [line for line in observed.stderr.splitlines() if line.startswith("callsheet")]  # callsheet prints no other line
    assert message in line
    assert line.endswith("use callsheet.attach. The script continues without callbacks")
    assert not (script.parent / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "there is no script nothing.py"),
        (["."], "the folder . has no __main__.py; give the path of a script"),
        ([], "give a script, or -m and the name of a module"),
        (["--log_interval", "0", "train.py"], "is not a whole number above 0"),
        (["--callbacks", "none.yaml", "train.py"], "the file of callbacks none.yaml: No such file"),
        (["--run_nme", "a", "train.py"], "--run_nme"),
    ],
)
def test_invalid_options_are_rejected_before_the_script_runs(script: Path, words: list[str], message: str) -> None:
    found = executed(script.parent, exec_words=words)
    assert (found.returncode, found.stdout) == (2, "")
    assert message in found.stderr


FORKS = """
import os, torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()


train(3)
child = os.fork()
train(2)
if child:
    _, status = os.waitpid(child, 0)
    print("ended with", status)
"""


def test_a_process_that_the_script_forks_is_not_observed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORKS)
    _, observed = executed_alone_and_observed(tmp_path)
    assert "ended with 0" in observed.stdout
    run = RunFolder.read(tmp_path / "runs" / "a")
    assert [record.step for record in run.records] == [1, 2, 3, 4, 5]
    assert sum(event["event"] == "run_end" for event in run.events) == 1, run.events
    assert len([line for line in observed.stderr.splitlines() if line.startswith("callsheet")]) == 2, observed.stderr


BAR = """
import torch, tqdm
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in tqdm.tqdm(range(5), desc="my bar", mininterval=0):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
"""


def test_a_message_is_printed_on_its_own_line_above_a_progress_bar(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BAR)
    _, observed = executed_alone_and_observed(tmp_path)
    before, found, after = observed.stderr.partition(f"callsheet: observing Linear and SGD, in {tmp_path / 'runs' / 'a'}\n")
    assert found, observed.stderr
    # The bar is erased with spaces before the line, and drawn again below it. Each carriage return was read as a newline.
    bar, blank, rest = before.rsplit("\n", 2)
    assert "my bar" in bar
    assert (blank.strip(), rest) == ("", "")
    assert "my bar: 100%" in after
