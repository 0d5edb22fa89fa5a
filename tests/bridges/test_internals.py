"""The parts of the frameworks that are not public API: the lists of those that are used, and what happens if one is missing."""

from __future__ import annotations

import ast
import dis
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import EnumType
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import nn

import callsheet.bridges
from callsheet import Callback, Context, attach
from callsheet.bridges import versions
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.versions import has
from callsheet.callbacks import LRMonitor
from callsheet.errors import NotSupported
from callsheet.testing import Recorder
from forked import run_forked  # type: ignore[import-not-found]  # pytest has its folder on the path

from .cells import loop_of
from .faults import FailsInSpan
from .hidden import hide
from .loops import automodel, bare, huggingface
from .loops.job import POINTS
from .private_names import SOURCE, components, lists_of, own_names, private_uses, tree_of, words
from .test_exec_frameworks import DATA, HUGGINGFACE, KERAS
from .test_versions import BRIDGES, PACKAGES

ROOT = Path(__file__).resolve().parents[2]

# --- the lists are complete ---


@functools.cache
def internals_of(framework: str) -> Any:
    """Return the module that has the framework's lists. Its package is not imported, because that may need the framework."""
    file = "torch_internals.py" if framework == "torch" else f"{framework}/internals.py"
    return SimpleNamespace(**runpy.run_path(str(SOURCE / "bridges" / file)))


FOLDERS = sorted(path.name for path in (SOURCE / "bridges").iterdir() if any(path.glob("hosts.py")))
LISTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    framework: lists_of(internals_of(framework)) for framework in ("torch", *FOLDERS)
}
"""For each framework, the names in each of its lists."""


def listed(framework: str, *lists: str) -> set[str]:
    return {name for each in lists for name in LISTS[framework][each]}


SHARED = [path for folder in ("bridges", "core", "run") for path in sorted((SOURCE / folder).glob("*.py"))]
"""The files whose names the bridges and `callsheet exec` use."""

EVERY = ("HOST", "GUEST", "WITHOUT")
OF_EXEC = {name for framework in LISTS for name in listed(framework, "EXEC")}
OF_TORCH = listed("torch", *EVERY)
OF_A_RELEASE = {"_build_train_pipeline"}
"""Names that no code uses, because they only show that a release is new enough."""


def files_in(folder: str) -> list[Path]:
    return [path for path in sorted((SOURCE / folder).glob("*.py")) if "internals" not in path.name]


FOLDER_NAMES: Mapping[str, tuple[list[Path], set[str], set[str]]] = {
    "bridges": (files_in("bridges"), OF_TORCH, set()),
    "exec": (files_in("exec"), OF_TORCH | OF_EXEC, OF_EXEC),
    **{folder: (files_in(f"bridges/{folder}"), OF_TORCH | listed(folder, *EVERY), listed(folder, *EVERY)) for folder in FOLDERS},
}
"""For each folder, its files, the names that they may use, and those that they must use."""


def names_in(kind: Callable[[ast.Module], frozenset[str]], files: Iterable[Path]) -> frozenset[str]:
    return frozenset[str]().union(*(kind(tree_of(path)) for path in files))


@pytest.mark.parametrize("folder", FOLDER_NAMES)
def test_every_private_name_that_is_used_is_in_a_list(folder: str) -> None:
    files, allowed, _ = FOLDER_NAMES[folder]
    own, known = names_in(own_names, {*files, *SHARED}), components(allowed)
    unlisted = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in files
        for line, name in private_uses(tree_of(path), own)
        if name not in known
    ]
    assert not unlisted, "add these names to `internals.py` of the framework, with what happens without them"


@pytest.mark.parametrize("folder", FOLDER_NAMES)
def test_every_private_name_in_a_list_is_used(folder: str) -> None:
    files, _, needed = FOLDER_NAMES[folder]
    used = names_in(words, files) | OF_A_RELEASE
    assert not [name for name in needed if name.rpartition(".")[2] not in used]


def test_every_private_name_in_the_list_of_torch_is_used() -> None:
    used = names_in(words, (path for files, _, _ in FOLDER_NAMES.values() for path in files))
    assert not [name for name in OF_TORCH if name.rpartition(".")[2] not in used]


def test_private_names_are_found_in_attributes_imports_and_strings() -> None:
    source = """
from package._part import thing, _other
import package._module
class Ours:
    __slots__ = ("_slot",)
    def __init__(self, theirs):
        self._own = theirs._attribute
        self._not_ours
        theirs._own
        getattr(theirs, "_text", None)
        wrap(theirs, "_own", "_slot", "package._dotted", "keras.src.thing")
        name.endswith("_suffix"), f"{name}_part", "_ two words", __name__, theirs._replace(), theirs.__dict__
"""
    tree = ast.parse(source)
    found = [name for _, name in private_uses(tree, own_names(tree))]
    theirs = ["_part", "_other", "_module", "_attribute", "_not_ours", "_own", "_text", "_dotted", "src"]
    assert sorted(found) == sorted(theirs)


def classes() -> Iterator[type]:
    """Yield the classes of the bridges whose frameworks are installed."""
    for found in pkgutil.walk_packages(callsheet.bridges.__path__, "callsheet.bridges.", onerror=lambda name: None):
        try:
            module = importlib.import_module(found.name)
        except ImportError:
            continue
        yield from (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == found.name)


def private_attributes(kind: type) -> set[str]:
    """Return the private attributes that callsheet's code in the class and its bases defines or assigns."""
    ours = [each for base in kind.__mro__ if base.__module__.startswith("callsheet.") for each in vars(base).items()]
    functions = [value for _, value in ours if inspect.isfunction(value)]
    assigned = {each.argval for function in functions for each in dis.get_instructions(function) if each.opname == "STORE_ATTR"}
    return {name for name in {name for name, _ in ours} | assigned if re.fullmatch("_[^_].*", name)}


def test_private_base_class_attributes_that_callsheet_overrides_or_sets_are_in_a_list() -> None:
    standard = {*sys.stdlib_module_names, "callsheet"}
    theirs = {
        name
        for kind in classes()
        for base in kind.__mro__
        if base.__module__.partition(".")[0] not in standard
        for name in private_attributes(kind)
        if has(f"{base.__module__}.{base.__qualname__}.{name}")
    }
    assert {"_fire_event", "_train_state", "_max_steps"} <= theirs
    assert theirs <= components(name for framework in LISTS for name in listed(framework, *EVERY))


# --- parts that are not public API ---


def is_installed(framework: str) -> bool:
    try:
        return bool(importlib.metadata.version(internals_of(framework).PACKAGE))
    except importlib.metadata.PackageNotFoundError:
        return False


def names_of(framework: str, *lists: str) -> list[str]:
    """Return the names in these lists of the framework, from the package on."""
    base = "lightning.pytorch." if framework == "lightning" else ""
    return sorted(f"{base}{name}" for name in listed(framework, *lists))


OF_HOSTS = [(bridge, name) for bridge in BRIDGES for name in names_of(bridge, "HOST")]
OF_GUESTS = [(bridge, name) for bridge in BRIDGES for name in names_of(bridge, "GUEST")]
INSTALLED = [name for framework in LISTS if is_installed(framework) for name in names_of(framework, *EVERY, "EXEC")]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_installed_version_has_the_names_in_the_lists(name: str) -> None:
    if name.startswith("megatron."):  # its modules can be imported only with a GPU
        file, kind, attribute = re.fullmatch(r"(.*)\.(.*)\.(.*)", name).groups()  # type: ignore[union-attr]
        text = Path(
            str(importlib.metadata.distribution("megatron-bridge").locate_file(f"{file.replace('.', '/')}.py"))
        ).read_text()
        assert f"self.{attribute} = " in text.partition(f"class {kind}")[2]
    else:
        assert has(name)


def test_a_name_is_found_in_modules_classes_and_their_instances() -> None:
    assert has("logging.Handler.emit")
    assert has("logging.Handler.formatter")  # the constructor sets it
    assert has("callsheet.bridges.versions.TESTED")
    assert not has("logging.Handler.no_such_thing")
    assert not has("logging.no_such_thing")
    assert not has("no_such_package.thing")


def remove(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a function from a framework's module, or a method or property from its class. Attributes that only instances have are reported as missing."""
    owner, _, attribute = name.rpartition(".")
    module, _, kind = owner.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    if isinstance(found, ModuleType):
        monkeypatch.delattr(found, attribute)
        return
    if isinstance(found, EnumType) or not hasattr(found, attribute):
        really_has = versions.has
        monkeypatch.setattr(versions, "has", lambda queried: queried != name and really_has(queried))
    for each in found.__mro__:
        if attribute in vars(each) and not isinstance(found, EnumType):
            monkeypatch.delattr(each, attribute)


def host_of(bridge: str) -> Callable[[], Any]:
    """Return a function that creates a host. The host's arguments are created beforehand."""
    host, model = importlib.import_module(f"callsheet.bridges.{bridge}").host, torch.nn.Linear(2, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    if bridge == "accelerate":
        return functools.partial(host, [], accelerator=accelerate.Accelerator(cpu=True), **given)
    return functools.partial(host, [], **(given if bridge == "ignite" else {}))


@pytest.mark.parametrize(("bridge", "name"), OF_HOSTS)
def test_a_host_rejects_a_framework_without_a_part_that_it_needs(bridge: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = host_of(bridge)
    make()
    remove(name, monkeypatch)
    wanted = (
        rf"this host needs {re.escape(name)}, which {PACKAGES[bridge]} [\d.]+ does not have; install one of the tested versions"
    )
    with pytest.raises(NotSupported, match=wanted):
        make()


@pytest.mark.parametrize(("bridge", "name"), OF_GUESTS)
def test_a_guest_rejects_a_framework_without_a_part_that_it_needs(
    bridge: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {
        "huggingface": transformers.TrainerCallback,
        "ignite": importlib.import_module("callsheet.bridges.ignite").GuestEngine,
        "torchtnt": importlib.import_module("torchtnt.framework.callback").Callback,
    }[bridge]()
    remove(name, monkeypatch)
    with pytest.raises(
        NotSupported, match=rf"a guest of .* needs {re.escape(name)}, which {PACKAGES[bridge]} [\d.]+ does not have"
    ):
        importlib.import_module(f"callsheet.bridges.{bridge}").guest(foreign)


# --- what a bridge does without a part that it does not need ---


@pytest.fixture
def hidden() -> Iterator[Callable[..., None]]:
    """Return `hide`, which is undone after the test."""
    undo: list[Callable[[], None]] = []
    yield lambda *given: undo.append(hide(*given))
    while undo:
        undo.pop()()


def trained(loop: Any, folder: Path, *callbacks: Callback, strict: bool = True) -> tuple[list[str], list[float]]:
    """Train in a loop. Return the events, and the weights."""
    recorder = Recorder()
    model: nn.Module = loop.train(POINTS, folder, [recorder, *callbacks], strict=strict)
    return recorder.events, [float(each) for tensor in model.parameters() for each in tensor.detach().flatten()]


NOT_NEEDED = [
    *((framework, name) for framework in ("automodel", "lightning") for name in names_of(framework, "WITHOUT")),
    ("keras", "torch.Tensor._version"),
    ("megatron_bridge", "torch.autograd.Variable._execution_engine"),
]
CONSEQUENCES = {name: text for framework in LISTS for name, text in getattr(internals_of(framework), "WITHOUT", {}).items()}


@pytest.mark.parametrize(("framework", "name"), NOT_NEEDED)
def test_a_host_fires_the_same_events_without_a_part_that_it_does_not_need(
    framework: str, name: str, hidden: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_of(framework)
    # A listener to each event needs the parts that are used only for some events.
    expected = trained(loop, tmp_path / "expected", LRMonitor(), strict=False)
    caplog.clear()
    hidden(name, automodel.Recipe) if framework == "automodel" else hidden(name)
    assert trained(loop, tmp_path / "found", LRMonitor(), strict=False) == expected
    text = CONSEQUENCES[name.removeprefix("lightning.pytorch.")]
    assert ("warning" in text) == (name.rpartition(".")[2] in caplog.text)
    assert "cannot follow" not in caplog.text


def test_lightning_without_its_evaluation_interval_rejects_requests_for_evaluations(
    hidden: Callable[..., None], tmp_path: Path
) -> None:
    hidden("lightning.pytorch.Trainer.val_check_batch")
    with pytest.raises(NotSupported, match=r"Evaluates .*ctx\.control\.evaluate"):
        trained(loop_of("lightning"), tmp_path, Evaluates())


class Evaluates(Callback):
    requests = ("evaluate",)

    def on_train_step_end(self, ctx: Context) -> None:
        ctx.control.evaluate("asked")


@pytest.mark.parametrize("edge", ["start", "end"])
def test_a_failing_optimizer_hook_does_not_change_training_if_it_cannot_be_removed(
    edge: str, hidden: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(bare, tmp_path / "expected")[1]
    hidden("torch.optim.Optimizer._optimizer_step_pre_hooks")
    hidden("torch.optim.Optimizer._optimizer_step_post_hooks")
    fails_in_span = FailsInSpan("optimizer_step", edge)
    with pytest.MonkeyPatch.context() as patch:
        begin: Any = HostedRun.begin

        def begin_and_keep_run(self: Any, *args: Any, **given: Any) -> Any:
            fails_in_span.run = self
            return begin(self, *args, **given)

        patch.setattr(HostedRun, "begin", begin_and_keep_run)
        assert trained(bare, tmp_path / "found", fails_in_span)[1] == expected
    assert fails_in_span.faults == 1
    assert caplog.text.count("callsheet cannot follow") == 1


def test_a_loss_scaler_without_its_scale_is_rejected(hidden: Callable[..., None], tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    given: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "runs_folder": tmp_path}

    def begin(*, enabled: bool) -> None:
        with attach(**given, run_name=None, scaler=torch.amp.GradScaler("cpu", enabled=enabled)):
            pass

    begin(enabled=True)
    hidden("torch.amp.GradScaler._scale")
    begin(enabled=False)
    with pytest.raises(
        NotSupported, match=r"GradScaler has no _scale, .* tested versions of torch, 2\.\d+ to 2\.\d+, or train without"
    ):
        begin(enabled=True)


IN_A_NEW_PROCESS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bridges.hidden import hide
from callsheet.bridges.torch_internals import WITHOUT
assert "callsheet.bridges.torch_hooks" not in sys.modules
for name in WITHOUT:
    if not name.startswith("torch._dynamo"):  # to import it takes seconds
        hide(name)
from bridges.loops import bare
from bridges.loops.job import POINTS
from callsheet.bridges import torch_hooks
from callsheet.testing import Recorder
assert torch_hooks._is_tracing is torch_hooks.torch.jit.is_tracing and not torch_hooks._HAS_COMPILING_FLAG
recorder = Recorder()
observed, alone = (bare.train(POINTS, Path(sys.argv[2]), given).state_dict() for given in ([recorder], None))
assert all(torch_hooks.torch.equal(observed[name], alone[name]) for name in alone)
print(json.dumps(recorder.events))
"""


def in_a_new_process(source: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KERAS_BACKEND": "torch"}
    return subprocess.run(
        [sys.executable, "-c", source, *words],
        cwd=folder, capture_output=True, text=True, env=environment, timeout=200, check=False,
    )  # fmt: skip


def test_a_loop_fires_the_same_events_without_any_private_part_of_torch(tmp_path: Path) -> None:
    found = in_a_new_process(IN_A_NEW_PROCESS, str(ROOT / "tests"), str(tmp_path / "found"), folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == trained(bare, tmp_path / "expected")[0]


EXEC_WITHOUT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from bridges.hidden import hide
for name in sys.argv.pop(1).split():
    hide(name)
from callsheet.exec.command import main
main(["--run_name", "a", "train.py", "1"])
"""
SCRIPT = f"""{DATA}
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in DataLoader(TensorDataset(x, y), batch_size=8):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
end(model)
"""


@pytest.mark.parametrize(
    ("script", "names", "message"),
    [
        (SCRIPT, ["torch.nn.Module._compiled_call_impl", "torch.jit._recursive.create_script_module"], "a: 8 steps, "),
        *(
            pytest.param(script, [name], message, marks=pytest.mark.test_all)
            for script, name, message in [
                (SCRIPT, "torch.utils.data.dataloader._BaseDataLoaderIter", "loops cannot be observed (ImportError: "),
                (SCRIPT, "torch.nn.Module._modules", "the loop cannot be observed (AttributeError: "),
                (HUGGINGFACE, "transformers.Trainer.callback_handler", "the trainer cannot be observed (AttributeError: "),
                (KERAS, "keras.src.backend.torch.trainer.TorchTrainer.fit", "has no TorchTrainer.fit, so its trainers are not observed"),
            ]
        ),
    ],
    ids=lambda each: each[0].rpartition(".")[2] if isinstance(each, list) else "",
)  # fmt: skip
def test_a_script_under_exec_is_unchanged_without_a_private_part(
    script: str, names: list[str], message: str, tmp_path: Path
) -> None:
    assert {name.rpartition(".")[2] for name in names} <= components(OF_EXEC)
    (tmp_path / "train.py").write_text(script)
    alone = run_forked(tmp_path, "train.py", "1")
    found = in_a_new_process(EXEC_WITHOUT, str(ROOT / "tests"), " ".join(names), folder=tmp_path)
    assert (alone.returncode, found.returncode) == (0, 0), alone.stderr + found.stderr
    assert alone.stdout.splitlines()[-1] == found.stdout.splitlines()[-1]  # a hash of the weights
    assert message in found.stderr
    if "cannot" in message:
        assert names[0].rpartition(".")[2] in found.stderr


class RecordsEvents(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_event(self, ctx: Context) -> None:
        self.events.append(str(ctx.event))


def test_a_trainer_without_inner_training_loop_fires_the_same_events_and_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def events(folder: str) -> list[str]:
        records = RecordsEvents()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=3, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True
        )
        transformers.Trainer(
            huggingface.with_loss(POINTS), arguments, train_dataset=huggingface.Rows(POINTS.train),
            callbacks=[importlib.import_module("callsheet.bridges.huggingface").host([records], strict=False)],
        ).train()  # fmt: skip
        return records.events

    expected = events("expected")
    assert expected[-1] == "on_run_end"
    assert "_inner_training_loop" not in caplog.text
    inner = transformers.Trainer._inner_training_loop
    monkeypatch.delattr(transformers.Trainer, "_inner_training_loop")
    monkeypatch.setattr(
        transformers.Trainer, "train", lambda self: inner(self, batch_size=self._train_batch_size, args=self.args)
    )
    assert events("found") == expected
    assert "it has no _inner_training_loop" in caplog.text
