"""Unusual scripts, with which wrapping torch's functions could interfere: each prints the same as without callsheet."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent

import pytest

from callsheet.report import RunFolder
from forked import run_forked  # type: ignore[import-not-found]  # pytest has its folder on the path

from .scripts import _BEGIN
from .test_exec import executed, executed_alone_and_observed

_STEP = """
optimizer.zero_grad()
loss = nn.functional.mse_loss(model(x), y)
loss.backward()
losses.append(loss.item())
optimizer.step()
"""
_LOOP = f"for step in range(8):{indent(_STEP, '    ')}"
_LINEAR = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

SPAWNED = """
import multiprocessing, torch
from torch import nn
def work(number):
    return number * number
class Kept:
    pass
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2, 3]))
    import pickle, sys
    assert sys.modules["__main__"].Kept is Kept and type(pickle.loads(pickle.dumps(Kept()))) is Kept
"""

OVERRIDDEN_PARAMETERS = f"""{_BEGIN}
class Net(nn.Linear):
    def parameters(self, kind):
        return [self.weight, self.bias]
model = Net(4, 1)
optimizer = torch.optim.SGD(model.parameters("all"), lr=0.1)
{_LOOP}
end(model)
"""

SCRIPTED = f"""{_BEGIN}
{_LINEAR}
{_LOOP}
scripted = torch.jit.script(model)
traced = torch.jit.trace(model, x)
@torch.jit.script
class Pair:
    def __init__(self, first: torch.Tensor):
        self.first = first
@torch.jit.script
def first(pair: Pair) -> torch.Tensor:
    return pair.first
print(float(scripted(x).sum()), float(traced(x).sum()), float(first(Pair(x)).sum()))
import io
torch.save(model, io.BytesIO())
end(model)
"""

SCRIPTED_BY_IMPORTED_NAMES = f"""{_BEGIN}
from torch.jit import script, trace
@script
class Before:
    def __init__(self, first: torch.Tensor):
        self.first = first
@script
def first_of(pair: Before) -> torch.Tensor:
    return pair.first.relu()
{_LINEAR}
inner = script(nn.Linear(4, 4))
{_LOOP}
def local():
    @script
    class After:
        def __init__(self, first: torch.Tensor):
            self.first = first
    return After
scripted, outer = script(model), script(nn.Sequential(inner, model))
assert not scripted._forward_pre_hooks
print(float(scripted(x).sum()), float(outer(x).sum()), float(trace(model, x)(x).sum()), scripted.code, trace(outer, x).code)
print(float(first_of(Before(x)).sum()), local().__name__, torch.jit.script is script)
{_LOOP}
end(model)
"""

_GRAPHS = f"""{_BEGIN}
graphs = []
def backend(graph, inputs):
    graphs.append(graph.code)
    return graph
{_LINEAR}
"""
COMPILED_STEP = f"""{_GRAPHS}
compiled_step = torch.compile(optimizer.step, backend=backend)
{_LOOP.replace("optimizer.step()", "compiled_step()").replace("range(8)", "range(30)")}
print(graphs)
end(model)
"""

COMPILED_TRAINING = f"""{_GRAPHS}
@torch.compile(backend=backend)
def train(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()
for step in range(30):
    losses.append(train(x, y).item())
print(graphs)
end(model)
"""

SCRIPT_MODULE = f"""{_BEGIN}
import gc
gc.disable()  # so that the module from which the ScriptModule is made is not freed, though nothing uses it any more
model = torch.jit.script(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{_LOOP}
import copy, io
torch.jit.save(copy.deepcopy(model), io.BytesIO())
end(model)
"""

SPARSE_GRADIENTS = f"""{_BEGIN}
model = nn.EmbeddingBag(96, 1, sparse=True)
optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
{_LOOP.replace("model(x)", "model(torch.randint(96, (96, 3)))")}
end(model)
"""

COMPILED_LATER = f"""{_BEGIN}
{_LINEAR}
{_LOOP}
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
print(float(compiled(x).sum()))
{_LOOP.replace("model(x)", "compiled(x)")}
end(model)
"""

LOGGED_TO_STDOUT = f"""{_BEGIN}
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)
logging.getLogger("mine").info("a line of the script")
{_LINEAR}
{_LOOP}
end(model)
"""

DEFAULT_DEVICE = f"""{_BEGIN}
torch.set_default_device("cpu")
{_LINEAR}
{_LOOP}
end(model)
"""

CLIPS_ANOTHER_MODEL = f"""{_BEGIN}
{_LINEAR}
other = nn.Linear(4, 1)
other(x).sum().backward()
{_LOOP.replace("optimizer.step()", "nn.utils.clip_grad_norm_(other.parameters(), 1.0); nn.utils.clip_grad_norm_((p for p in model.parameters()), 0.01); optimizer.step()")}
end(model)
"""

LOSS_OF_ONE_ELEMENT = f"""{_BEGIN}
{_LINEAR}
{_LOOP.replace("mse_loss(model(x), y)", "mse_loss(model(x), y).reshape(1)")}
end(model)
"""

ONE_BATCH_OF_EACH_ITERATION = f"""{_BEGIN}
from torch.utils.data import DataLoader, TensorDataset
{_LINEAR}
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
for step in range(8):
    inputs, targets = next(iter(loader))
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
end(model)
"""

PARTS_CALLED = f"""{_BEGIN}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{_LOOP.replace("model(x)", "model.head(model.body(x))")}
end(model)
"""

LOSS_DISCARDED = f"""{_BEGIN}
{_LINEAR}
for step in range(8):
    loss = nn.functional.mse_loss(model(x[:5]), y[:5]) * 1000
    loss.backward()
    {indent(_STEP, "    ")}
    optimizer.zero_grad()
end(model)
"""

BACKWARD_FAILS_ONCE = f"""{_BEGIN}
class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given.clone()
    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory, say")
{_LINEAR}
for step in range(8):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    try:
        Failing.apply(loss).backward()
    except RuntimeError:
        pass
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
end(model)
"""

LOSS_CHANGED_IN_PLACE = f"""{_BEGIN}
{_LINEAR}
for step in range(8):{indent(_STEP, "    ")}
    loss.detach().mul_(2)
end(model)
"""

CLIPS_COMPILED = f"""{_BEGIN}
{_LINEAR}
import pickle
assert pickle.loads(pickle.dumps(nn.utils.clip_grad_norm_)) is nn.utils.clip_grad_norm_
clip = torch.compile(lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e6), fullgraph=True, backend="eager")
for step in range(8):{indent(_STEP, "    ")}
    clip(list(model.parameters()))
end(model)
"""

MANY_LOOPS = """
import torch
for number in range(24):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(22):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
"""

_ASKS_ALL_FINDERS = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            for finder in sys.meta_path:
                if finder is not self and (spec := finder.find_spec(name, path)) is not None:
                    return spec
sys.meta_path.insert({position}, Finder())
"""

UNUSUAL_SCRIPTS = {
    "overridden_parameters": OVERRIDDEN_PARAMETERS,
    "scripted": SCRIPTED,
    "scripted_by_imported_names": SCRIPTED_BY_IMPORTED_NAMES,
    "script_module": SCRIPT_MODULE,
    "sparse_gradients": SPARSE_GRADIENTS,
    "compiled_later": COMPILED_LATER,
    "logged_to_stdout": LOGGED_TO_STDOUT,
    "default_device": DEFAULT_DEVICE,
    "clips_another_model": CLIPS_ANOTHER_MODEL,
    "loss_of_one_element": LOSS_OF_ONE_ELEMENT,
    "one_batch_of_each_iteration": ONE_BATCH_OF_EACH_ITERATION,
    "parts_called": PARTS_CALLED,
    "loss_discarded": LOSS_DISCARDED,
    "backward_fails_once": BACKWARD_FAILS_ONCE,
    "loss_changed_in_place": LOSS_CHANGED_IN_PLACE,
    "clips_compiled": CLIPS_COMPILED,
}


@pytest.mark.test_all
@pytest.mark.parametrize("name", UNUSUAL_SCRIPTS)
def test_an_unusual_script_is_observed_and_unchanged(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNUSUAL_SCRIPTS[name])
    alone, observed = executed_alone_and_observed(tmp_path)
    assert "Traceback" not in observed.stderr
    run = RunFolder.read(tmp_path / "runs" / "a")
    expected = json.loads(alone.stdout.splitlines()[-2])
    assert (run.outcome, run.last_step, run.events[-1]["epoch"]) == ("finished", len(expected), 1), observed.stderr
    losses = {record.step: record.values["train/loss"] for record in run.records if "train/loss" in record.values}
    if name == "parts_called":
        del losses[1]
        assert "does not call Net itself" in observed.stderr
        assert list(losses) == list(range(3, 9))
    for step, value in losses.items():
        assert value == pytest.approx(expected[step - 1], rel=1e-6)
    if name == "script_module":
        assert observed.stderr.count("this script") == 1, observed.stderr
        assert "trains a ScriptModule, so its forward passes and evaluations are not observed" in observed.stderr
    if name == "sparse_gradients":
        assert "failed" not in observed.stderr
        assert all(record.values["l2_norm/grad/global"] > 0 for record in run.records[1:])
    if name == "loss_discarded":
        assert run.records[-1].values["time/sample"] == 7 * 96  # without a dataloader, the samples of the first step are unknown
    if name == "clips_another_model":
        clipped = [each.step for window in run.windows for each in window.slices if each.name == "clip_gradients"]
        assert clipped
        assert len(set(clipped)) == len(clipped)  # clipping is reported once per step, and only for the trained model


@pytest.mark.test_all
@pytest.mark.parametrize("script", [COMPILED_STEP, COMPILED_TRAINING], ids=["step", "training"])
def test_a_compiled_step_is_observed_and_has_the_same_graphs(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    _, observed = executed_alone_and_observed(tmp_path)
    assert "Dynamo does not know" not in observed.stderr  # the warning that Dynamo cannot trace a function
    run = RunFolder.read(tmp_path / "runs" / "a")
    assert (run.outcome, run.last_step) == ("finished", 30), observed.stderr


@pytest.mark.test_all
def test_only_the_first_20_loops_of_a_script_are_observed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MANY_LOOPS)
    observed = run_forked(tmp_path, "train.py", exec_words=["--run_name", "a"])
    assert observed.returncode == 0, observed.stderr
    assert len([path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]) == 20
    assert observed.stderr.count("20 loops of this script were observed; further ones are not") == 1


def test_a_spawned_process_can_unpickle_functions_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    observed = executed(tmp_path, "train.py", exec_words=[])
    assert (observed.returncode, observed.stdout) == (0, "[1, 4, 9]\n"), observed.stderr


def test_exec_does_not_import_torch_before_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('torch' in sys.modules)\nimport torch\n")
    assert executed(tmp_path, "train.py", exec_words=[]).stdout == "False\n"


@pytest.mark.parametrize("position", [0, 1])
def test_a_script_with_a_module_finder_that_asks_all_finders_is_observed(position: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_ASKS_ALL_FINDERS.format(position=position) + f"{_BEGIN}{_LINEAR}{_LOOP}end(model)\n")
    observed = executed(tmp_path, "train.py", exec_words=["--run_name", "a"])
    assert observed.returncode == 0, observed.stderr
    assert RunFolder.read(tmp_path / "runs" / "a").last_step == 8


@pytest.mark.test_all
def test_each_of_several_loops_in_sequence_has_its_own_run(tmp_path: Path) -> None:
    """Such loops are the folds of a cross-validation. A later loop is recognized at its 20th step, so its run has no earlier steps."""
    loop = _LOOP.replace("range(8)", "range(30)").replace("\n", "\n    ")
    (tmp_path / "train.py").write_text(
        f"{_BEGIN}\nfor fold in range(3):\n    {_LINEAR.strip().replace(chr(10), chr(10) + '    ')}\n    {loop}\nend(model)\n"
    )
    alone, observed = executed_alone_and_observed(tmp_path)
    runs = [RunFolder.read(tmp_path / "runs" / name) for name in ("a", "a-2", "a-3")]
    assert [(run.outcome, run.last_step) for run in runs] == [("finished", 30), ("finished", 11), ("finished", 11)], (
        observed.stderr
    )
    losses = json.loads(alone.stdout.splitlines()[-2])
    assert runs[1].records[-1].values["train/loss"] == pytest.approx(losses[59])


def test_a_second_run_with_the_same_name_gets_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{_BEGIN}{_LINEAR}{_LOOP}end(model)\n")
    for _ in range(2):
        observed = run_forked(tmp_path, "train.py", exec_words=["--run_name", "a"])
    assert "so this run is called a-2" in observed.stderr
    assert (tmp_path / "runs" / "a-2" / "report.html").exists()


def test_a_module_that_does_not_exist_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    observed = executed(tmp_path, exec_words=["-m", "nothing_here.train"])
    assert observed.returncode == 1
    assert observed.stderr == "callsheet exec: -m nothing_here.train: No module named 'nothing_here'\n"


def test_a_script_with_a_syntax_error_gets_only_python_s_message(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nloss = (\n")
    observed = executed(tmp_path, exec_words=["train.py"])
    assert observed.returncode == 1
    assert observed.stderr.startswith("  File ")
    assert observed.stderr.endswith("SyntaxError: '(' was never closed\n")
    assert "no training was recognized" not in observed.stderr


NEW_LOADERS = f"""{_BEGIN}
from torch.utils.data import DataLoader, TensorDataset
{_LINEAR}
data = TensorDataset(x, y)
for epoch in range(3):
    for index, (inputs, targets) in enumerate(DataLoader(data, batch_size=8, shuffle=True)):
        model.train()
        {indent(_STEP.replace("model(x), y", "model(inputs), targets"), "        ")}
        if index == LAST:
            break
    for inputs, targets in DataLoader(data, batch_size=16):
        model.eval()  # only here, as skorch does
        with torch.no_grad():
            model(inputs)
end(model)
"""


@pytest.mark.parametrize(
    "last", [pytest.param(-1, id="whole epochs"), pytest.param(3, id="left early", marks=pytest.mark.test_all)]
)
def test_steps_epochs_and_evaluations_are_right_with_new_dataloaders_in_each_epoch(last: int, tmp_path: Path) -> None:
    """When a batch is fetched from a new loader, it is not known yet whether it is for the next epoch or for an evaluation."""
    (tmp_path / "train.py").write_text(NEW_LOADERS.replace("LAST", str(last)))
    alone, observed = executed_alone_and_observed(tmp_path)
    assert "does not expect" not in observed.stderr
    run = RunFolder.read(tmp_path / "runs" / "a")
    losses = json.loads(alone.stdout.splitlines()[0])
    steps = len(losses) // 3
    assert [each["step"] for each in run.evaluations] == [steps, 2 * steps, 3 * steps]
    assert [record.values["time/epoch"] for record in run.records] == [epoch for epoch in range(3) for _ in range(steps)]
    assert [record.values["train/loss"] for record in run.records] == pytest.approx(losses)
    assert run.records[-1].values["time/sample"] == 8 * len(losses)


EVALUATES_ON_ITS_LOADER = f"""{_BEGIN}
from torch.utils.data import DataLoader, TensorDataset
{_LINEAR}
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
def evaluate_without_gradients():
    model.eval()
    with torch.no_grad():
        for inputs, targets in loader:
            model(inputs)
def evaluate_in_eval_mode():
    model.eval()
    for inputs, targets in loader:
        with torch.no_grad():
            model(inputs)
evaluate_without_gradients()
for epoch in range(3):
    for index, (inputs, targets) in enumerate(loader):
        model.train()
        {indent(_STEP.replace("model(x), y", "model(inputs), targets"), "        ")}
        if index == 2:
            EVALUATE()
    evaluate_in_eval_mode()
    evaluate_without_gradients()
end(model)
"""


@pytest.mark.parametrize("evaluate", ["evaluate_without_gradients", "evaluate_in_eval_mode"])
def test_an_evaluation_on_the_training_dataloader_is_not_counted_as_an_epoch(evaluate: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EVALUATES_ON_ITS_LOADER.replace("EVALUATE", evaluate))
    _, observed = executed_alone_and_observed(tmp_path)
    assert "does not expect" not in observed.stderr
    run = RunFolder.read(tmp_path / "runs" / "a")
    assert [record.values["time/epoch"] for record in run.records] == [epoch for epoch in range(3) for _ in range(6)]
    assert [record.values["time/sample"] for record in run.records] == [16 * step for step in range(1, 19)]
    assert [each["step"] for each in run.evaluations] == [3, 6, 9, 12, 15, 18]
    assert run.events[-1]["epoch"] == 3


DISCARDS_GRADIENTS = f"""{_BEGIN}
from torch.utils.data import DataLoader, TensorDataset
{_LINEAR}
def clear():
    for parameter in model.parameters():
        parameter.grad = None
for inputs, targets in DataLoader(TensorDataset(x, y), batch_size=16):
    loss = nn.functional.mse_loss(model(inputs), targets)
    LOSSES
    losses.append(loss.item())
    optimizer.step()
    CLEAR
end(model)
"""
_AGAIN = "loss = nn.functional.mse_loss(model(inputs), targets)"


@pytest.mark.test_all
@pytest.mark.parametrize("clear", ["clear()", "optimizer.zero_grad(set_to_none=False)"])
@pytest.mark.parametrize(
    "losses",
    [
        "CLEAR; loss.backward()",
        "loss.backward(); CLEAR; loss = loss * 1; loss.backward()",  # two losses of the same outputs
        f"loss.backward(); {_AGAIN}; CLEAR; loss.backward()",
        f"loss.backward(); CLEAR; {_AGAIN}; loss.backward()",  # as sharpness-aware minimization does
    ],
)
def test_a_loss_whose_gradients_are_discarded_is_not_recorded(losses: str, clear: str, tmp_path: Path) -> None:
    losses = losses.replace("loss.backward();", "loss.backward(retain_graph=True);", 1)
    text = DISCARDS_GRADIENTS.replace("LOSSES", losses).replace("CLEAR", clear)
    (tmp_path / "train.py").write_text(text)
    alone, _ = executed_alone_and_observed(tmp_path)
    run = RunFolder.read(tmp_path / "runs" / "a")
    expected = json.loads(alone.stdout.splitlines()[-2])
    assert [record.values["train/loss"] for record in run.records[1:]] == pytest.approx(expected[1:])
    assert [record.values["time/sample"] for record in run.records] == [16 * step for step in range(1, 7)]


FREES_BATCHES = f"""{_BEGIN}
import weakref
from torch.utils.data import DataLoader
{_LINEAR}
def step(inputs):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    return weakref.ref(inputs)
def step_of_new_batch():
    return step(torch.randn(8, 4))
for epoch in range(2):
    for index in range(4):
        losses.append(step_of_new_batch()() is None)
    batches = iter(DataLoader(x, batch_size=16))
    batch = next(batches)
    for index in range(5):
        following = next(batches)  # fetched ahead
        found = step(batch)
        batch = following
        losses.append(found() is None)
assert all(losses)
end(model)
"""


def test_a_batch_is_freed_after_its_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FREES_BATCHES)
    executed_alone_and_observed(tmp_path)
    assert RunFolder.read(tmp_path / "runs" / "a").last_step == 18


TRAINS_IN_A_THREAD = f"""{_BEGIN}
import threading
{_LINEAR}
main_has_ended = threading.Event()
def train():
    BEFORE
    {_LOOP.replace(chr(10), chr(10) + "    ")}
    BETWEEN
    {_LOOP.replace(chr(10), chr(10) + "    ")}
    end(model)
thread = threading.Thread(target=train)
thread.start()
AFTER
threading.Thread(target=lambda: (threading.main_thread().join(), main_has_ended.set())).start()
raise SystemExit(3)
"""


@pytest.mark.parametrize("waits", ["BEFORE", "BETWEEN"])
def test_a_thread_that_trains_after_the_end_of_the_main_thread_is_observed(waits: str, tmp_path: Path) -> None:
    text = TRAINS_IN_A_THREAD.replace(waits, "main_has_ended.wait()")
    if waits == "BETWEEN":  # the script ends after the first loop was recognized
        text = text.replace("AFTER", "while len(losses) < 8: pass")
    for name in ("BEFORE", "BETWEEN", "AFTER"):
        text = text.replace(name, "pass")
    (tmp_path / "train.py").write_text(text)
    alone, observed = (executed(tmp_path, "train.py", exec_words=words) for words in (None, ["--run_name", "a"]))
    assert (alone.returncode, observed.returncode) == (3, 3), observed.stderr
    assert alone.stdout == observed.stdout
    assert RunFolder.read(tmp_path / "runs" / "a").last_step == 16


SHARDED_LOSS = f"""{_BEGIN}
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
model = nn.Linear(4, 1)
distribute_module(model, mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = distribute_tensor(x, mesh, [Shard(0)])
for step in range(8):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    if REPLICATED:
        loss = loss.redistribute(mesh, [Replicate()])
    loss.backward()
    optimizer.step()
    losses.append(loss.full_tensor().item())
if dist.get_rank() == 0:
    print(losses)
dist.destroy_process_group()
"""


@pytest.mark.test_all
@pytest.mark.parametrize("replicated", [False, True])
def test_a_sharded_loss_is_not_recorded_and_a_replicated_one_is(replicated: bool, tmp_path: Path) -> None:
    """Reading a sharded loss on rank 0 alone would hang."""
    (tmp_path / "train.py").write_text(SHARDED_LOSS.replace("REPLICATED", str(replicated)))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    alone = run_forked(tmp_path, "train.py", ranks=2)
    observed = executed(tmp_path, *command, "-m", "callsheet.exec", "--run_name", "a", "--log_interval", "1", "train.py")
    assert (alone.returncode, observed.returncode) == (0, 0), observed.stderr
    assert alone.stdout == observed.stdout
    run = RunFolder.read(tmp_path / "runs" / "a")
    assert (run.outcome, run.last_step) == ("finished", 8), observed.stderr
    recorded = [record.values["train/loss"] for record in run.records[1:] if "train/loss" in record.values]
    assert recorded == pytest.approx(json.loads(alone.stdout)[1:] if replicated else [])
    assert observed.stderr.count("only a part of the loss") == (0 if replicated else 1)
