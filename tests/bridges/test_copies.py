"""A model that is copied or pickled while callbacks observe its training: the copy contains nothing of callsheet."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn

from callsheet import Callback, Context, attach
from callsheet.bridges import torch_hooks
from callsheet.run import copies

from .cells import loop_of
from .loops.job import POINTS
from .test_matrix import LOOPS

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
)

OBSERVING = [name for name in LOOPS if name != "instructlab"]  # InstructLab does not provide the model to callbacks


class Copies(Callback):
    """Copies model and optimizer at every event of the second step, and counts the events of each step."""

    def __init__(self, *, is_copying: bool) -> None:
        self.is_copying = is_copying
        self.events: list[str] = []
        self.found: list[str] = []

    def _count(self, ctx: Context) -> None:
        self.events.append(str(ctx.event))
        if self.is_copying and ctx.step == 2:
            for name, thing in (("model", ctx.model), ("optimizer", ctx.optimizer)):
                self._look_at(f"{name} at {ctx.event}", thing)

    on_microbatch_start = on_forward_start = on_forward_end = on_backward_end = on_optimizer_step_end = _count
    on_train_step_end = on_eval_step_start = on_eval_forward_end = on_eval_all_end = _count

    def _look_at(self, where: str, thing: Any) -> None:
        for kind in (copy.copy, copy.deepcopy):
            try:
                copied = kind(thing)
            except NotImplementedError:
                continue  # a Keras model without `get_config`
            for name, module in copied.named_modules() if isinstance(copied, nn.Module) else [("", copied)]:
                for container in HOOKS:
                    if any("callsheet" in _origin(hook) for hook in vars(module).get(container, {}).values()):
                        self.found.append(f"{where}: {kind.__name__} has {container} of {name}")
                for attribute, value in vars(module).items():
                    if _origin(value).startswith(("callsheet.bridges", "callsheet.run")):
                        self.found.append(f"{where}: {kind.__name__} has {attribute} of {name}")
        if type(thing).__module__.startswith("callsheet.bridges"):
            return  # a facade that the host created, not an object of the user
        for dumps in (pickle.dumps, cloudpickle.dumps, _saved):
            try:
                written = dumps(thing)
            except (AttributeError, NotImplementedError, TypeError, pickle.PicklingError):
                continue  # this object cannot be pickled without callsheet either
            if b"callsheet" in written.replace(b"callsheet.testing.small_run", b""):  # the module of the model's class
                self.found.append(f"{where}: {dumps.__name__}")


def _origin(value: Any) -> str:
    function = getattr(value, "__func__", getattr(value, "func", value))
    return str(getattr(function, "__module__", "")) + str(getattr(getattr(value, "__self__", None), "__module__", ""))


def _saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


@pytest.mark.parametrize("where", OBSERVING)
def test_a_copied_model_contains_nothing_of_callsheet(where: str, tmp_path: Path) -> None:
    try:
        here = loop_of(where)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed here")
    copying, plain = Copies(is_copying=True), Copies(is_copying=False)
    model = here.train(POINTS, tmp_path / "copied", [copying], strict=False)
    assert copying.found == []
    without = here.train(POINTS, tmp_path / "plain", [plain], strict=False)
    assert copying.events == plain.events  # the model is observed as before
    assert "on_train_step_end" in plain.events
    for one, other in zip(model.parameters(), without.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not isinstance(copyreg.dispatch_table.get(type(model)), copies._Reducer)


def loop(model: nn.Module, callbacks: list[Any], *, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.randn(steps, 4, 4, generator=torch.Generator().manual_seed(7))
    with attach(model=model, optimizer=optimizer, callbacks=callbacks) as run:
        for batch in run.steps(list(inputs)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return optimizer


class CallsAtForwardEnd(Callback):
    """Calls a function at the end of the forward pass, while callsheet's hooks are registered."""

    def __init__(self, function: Any) -> None:
        self.function, self.times = function, 0

    def on_forward_end(self, ctx: Context) -> None:
        self.times += 1
        self.function(ctx)


def test_a_saved_model_loads_with_weights_only_and_without_callsheet_installed(tmp_path: Path) -> None:
    loop(nn.Linear(4, 4), [CallsAtForwardEnd(lambda ctx: torch.save(ctx.model, tmp_path / "model.pt"))])
    with torch.serialization.safe_globals([nn.Linear]):
        assert isinstance(torch.load(tmp_path / "model.pt", weights_only=True), nn.Linear)
    reads = (
        "import sys; sys.modules['callsheet'] = None; import torch;"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False);"
        "model(torch.ones(1, 4)).sum().backward(); print(len(model._forward_hooks))"
    )
    done = subprocess.run([sys.executable, "-c", reads], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.returncode) == ("0", 0), done.stderr


def test_hooks_of_the_user_are_copied_and_can_be_removed() -> None:
    calls: list[str] = []
    model = nn.Linear(4, 4)
    handle = model.register_forward_hook(lambda *_: calls.append("theirs"))
    copied: list[nn.Module] = []
    loop(model, [CallsAtForwardEnd(lambda ctx: copied.append(copy.copy(ctx.model)))], steps=2)
    assert len(calls) == 2
    assert [len(each._forward_hooks) for each in copied] == [1, 1]
    handle.remove()
    loop(model, [])
    assert len(calls) == 2


class OwnGetstate(nn.Linear):
    """A module that defines its own pickled state."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "kept": True}


class OwnDeepcopy(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDeepcopy:
        made = type(self).__new__(type(self))
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made


class CountsGetstateCalls(nn.Linear):
    """A module whose pickled state is its own dictionary of attributes, with a count of how often the state was read."""

    times = 0

    def __getstate__(self) -> Any:
        self.times += 1
        return vars(self)


class OwnReduce(nn.Linear):
    def __reduce__(self) -> Any:
        return _made, (type(self), vars(self))


def _made(kind: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    made = kind.__new__(kind)
    vars(made).update(attributes)
    return made


def _traced(size: int, outputs: int) -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(size, outputs)))


@pytest.mark.parametrize("kind", [OwnGetstate, OwnDeepcopy, CountsGetstateCalls, OwnReduce, _traced])
def test_a_model_with_its_own_copy_method_is_copied_without_callsheet_s_hooks(kind: Callable[..., nn.Module]) -> None:
    copied: list[nn.Module] = []
    at = CallsAtForwardEnd(lambda ctx: copied.append(copy.deepcopy(ctx.model)))
    written: list[bytes] = []
    saves = CallsAtForwardEnd(lambda ctx: written.append(_saved(ctx.model)))
    model = kind(4, 4)
    attributes = list(vars(model))
    loop(model, [at, saves])
    assert at.times == saves.times == 3
    assert not any(b"callsheet" in each for each in written)
    copied += [torch.load(io.BytesIO(each), weights_only=False) for each in written]
    for each in copied:
        assert not each._forward_hooks
        assert not each._forward_pre_hooks
        each(torch.ones(1, 4)).sum().backward()
    assert kind is not OwnGetstate or vars(copied[0])["kept"] is True
    assert kind is not CountsGetstateCalls or vars(model).pop("times") == 6
    assert list(vars(model)) == attributes
    assert type(model) not in copyreg.dispatch_table


def test_copies_of_a_model_that_shares_the_attributes_have_that_model_s_weights() -> None:
    """Some scripts copy a module's dictionary of attributes into a new module, and then set other weights."""
    found: list[float] = []

    def share(ctx: Context) -> None:
        model: Any = ctx.model
        shared = nn.Linear.__new__(nn.Linear)
        shared.__dict__ = {**vars(model), "_parameters": {"weight": nn.Parameter(torch.zeros(4, 4)), "bias": None}}
        read: Any = torch.load(io.BytesIO(_saved(shared)), weights_only=False)
        for each in (copy.copy(shared), copy.deepcopy(shared), read):
            assert not each._forward_hooks
            found.append(float(each.weight.detach().abs().sum()))

    loop(nn.Linear(4, 4), [CallsAtForwardEnd(share)])
    assert found == [0.0] * 9


class PicklesItsHooks(torch.optim.SGD):
    """An optimizer whose pickled state is its dictionary of attributes, with its hooks."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


def test_the_pickle_of_an_optimizer_with_its_hooks_contains_nothing_of_callsheet() -> None:
    written: list[bytes] = []
    model = nn.Linear(4, 4)
    optimizer = PicklesItsHooks(model.parameters(), lr=0.1)
    at = CallsAtForwardEnd(lambda ctx: written.append(pickle.dumps(copy.deepcopy(ctx.optimizer))))
    with attach(model=model, optimizer=optimizer, callbacks=[at]) as run:
        for batch in run.steps([torch.ones(2, 4)] * 2):
            model(batch).sum().backward()
            optimizer.step()
    assert len(written) == 2
    assert not any(b"callsheet" in each for each in written)


def test_a_copyreg_reducer_of_the_user_is_used_and_restored() -> None:
    class Own(nn.Linear):
        pass

    def reduce(model: Own) -> Any:
        return _made, (nn.Linear, {**vars(model), "reduced": True})

    copied: list[nn.Module] = []
    copyreg.pickle(Own, reduce)
    try:
        loop(Own(4, 4), [CallsAtForwardEnd(lambda ctx: copied.append(copy.deepcopy(ctx.model)))])
        assert copyreg.dispatch_table[Own] is reduce
    finally:
        del copyreg.dispatch_table[Own]
    assert all(vars(each)["reduced"] and not each._forward_hooks for each in copied)


def test_a_copy_can_be_trained_and_is_not_observed() -> None:
    copied: list[Any] = []
    at = CallsAtForwardEnd(lambda ctx: copied.append(copy.deepcopy(ctx.model)))
    loop(nn.Linear(4, 4), [at])
    loop(copied[0], [])
    assert at.times == 3


def test_a_compiled_model_is_compiled_once_although_hooks_are_registered() -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    given: Any = torch.compile(model, backend=backend)
    at = CallsAtForwardEnd(lambda ctx: None)
    loop(given, [at])
    assert (at.times, len(compiled)) == (3, 1)


def test_two_replacements_of_one_method_can_be_removed_in_any_order() -> None:
    class Thing:
        def name(self) -> str:
            return "theirs"

    for order in ((0, 1), (1, 0)):
        thing = Thing()
        removals = [copies.replace(thing, "name", lambda: "first"), copies.replace(thing, "name", lambda: "second")]
        assert thing.name() == "second"
        assert copy.copy(thing).name() == "theirs"
        for index in order:
            removals[index]()
        assert thing.name() == "theirs"
        assert not vars(thing)


def test_not_compiled_returns_the_function_if_torch_lacks_the_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> int:
        return 1

    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameAction")
    assert torch_hooks.not_compiled(function) is function
    assert function() == 1


def test_a_trace_of_the_model_contains_no_hook_even_if_an_earlier_forward_pass_has_failed() -> None:
    def double(ctx: Context) -> None:
        ctx.outputs = ctx.outputs * 2

    model, at = nn.Linear(4, 4), CallsAtForwardEnd(double)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(7))
    traced = []
    with attach(model=model, optimizer=optimizer, callbacks=[at]) as run:
        for batch in run.steps([inputs, inputs]):
            with pytest.raises(RuntimeError, match="shapes"):
                model(batch[:, :2])  # the end of this forward pass is never reported
            traced.append(torch.jit.trace(model, batch, check_trace=False))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert at.times == 2
    assert all(torch.equal(each(inputs), nn.functional.linear(inputs, each.weight, each.bias)) for each in traced)
