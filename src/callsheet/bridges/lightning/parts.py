"""Parts of the host in Lightning's Trainer: what is replaced in module and Trainer while somebody hears it, and what things are called."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from callsheet.bridges.copies import add_hook, replace
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.torch_hooks import NotCopied, start_forward
from callsheet.context import Context

_STEPS: Mapping[str, str] = {"validation_step": "eval", "test_step": "test", "predict_step": "predict"}


class Methods:
    """Methods of one object, each with another in its place until `put_back`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._restores: list[Callable[[], None]] = []

    def replace(self, name: str, around: Callable[..., Any]) -> None:
        """`around` is called in the method's place, with the method before its arguments."""
        method = getattr(self._owner, name)

        @functools.wraps(method)  # by which Lightning knows whether it was overridden, and what it takes
        def called(*args: Any, **given: Any) -> Any:
            return around(method, *args, **given)

        self._restores.append(replace(self._owner, name, called))

    def put_back(self) -> None:
        """Leave the object as it was."""
        while self._restores:
            self._restores.pop()()


class StepHooks(NotCopied):
    """Tells the forward of a LightningModule, or of its only child, where its steps call that; and its outputs, which may be replaced.

    Lightning gives no hook around a step, and under DDP it calls the module itself to get into one, so the steps are replaced.
    """

    def __init__(self, driver: LifecycleDriver, ctx: Context, module: nn.Module) -> None:
        self._driver, self._ctx, self._module = driver, ctx, module
        self._methods = Methods(module)
        self._removals: list[Callable[[], None]] = []
        self._is_inside = False  # of a step
        self._caller: nn.Module | None = None  # the module whose call is told
        self.replaced: Any = None
        """What a callback has put into the place of the step's batch, in a list."""

    def listen(self, name: str, has_listeners: bool) -> None:
        """Stand around the step of this name and in the model, or leave both as they were."""
        if has_listeners and not self._removals:
            self._kind = _STEPS.get(name, "")
            self._methods.replace(name, self._step)
            children = [child for child in self._module.children() if any(True for _ in child.parameters())]
            for each in (self._module, *(children if len(children) == 1 else [])):
                self._removals += [
                    add_hook(each.register_forward_pre_hook, self._begins),
                    add_hook(each.register_forward_hook, self._ends),
                ]
        elif self._removals and not has_listeners:
            self.remove()

    def _step(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        if self.replaced is not None:  # also where an optimizer evaluates its closure again
            (batch,) = self.replaced
        self._is_inside = True
        try:
            return step(batch, *rest)
        finally:
            self._is_inside = False

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        if not self._is_inside or self._caller is not None:
            return
        kind, driver = self._kind, self._driver
        try:
            if driver.is_open(f"{kind}_step" if kind else "microbatch"):
                self._caller = module
                if kind:
                    driver.start(f"{kind}_forward")
                else:
                    start_forward(driver, self._ctx)
        except Exception as error:
            driver.give_up(error)

    def _ends(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if self._caller is not module:
            return outputs
        self._caller = None
        if not self._is_inside:
            return outputs
        kind, driver, ctx = self._kind, self._driver, self._ctx
        try:
            if driver.is_open(f"{kind}_forward" if kind else "forward"):
                ctx.outputs = outputs
                if kind:
                    driver.end(f"{kind}_forward")
                else:
                    driver.start("loss")  # which ends the forward
                return ctx.outputs
        except Exception as error:
            driver.give_up(error)
        return outputs

    def remove(self) -> None:
        """Leave the module as it was."""
        self._methods.put_back()
        while self._removals:
            self._removals.pop()()
        self._caller, self._is_inside = None, False


class ClipHook:
    """Tells that gradients are clipped, behind the LightningModule's own clipping."""

    def __init__(self, module: nn.Module, clipped: Callable[[], None]) -> None:
        self._methods = Methods(module)
        self._clipped = clipped
        self.is_on = False

    def listen(self, has_listeners: bool) -> None:
        """Stand around the clipping, or leave it as it was."""
        if has_listeners is not self.is_on:
            self.is_on = has_listeners
            if has_listeners:
                self._methods.replace("configure_gradient_clipping", self._clip)
            else:
                self._methods.put_back()

    def remove(self) -> None:
        """Leave it as it was."""
        self.listen(False)

    def _clip(self, clip: Callable[..., Any], *args: Any, **given: Any) -> Any:
        result = clip(*args, **given)
        self._clipped()
        return result


class Saves:
    """Hears `trainer.save_checkpoint` while training runs."""

    def __init__(self, trainer: Any, told: Any) -> None:
        self._methods = Methods(trainer)
        self._methods.replace("save_checkpoint", told)

    def remove(self) -> None:
        """Leave the Trainer as it was."""
        self._methods.put_back()


class Cadence:
    """How often Lightning evaluates, with another cadence in its place while it is asked for an evaluation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._own: tuple[Any, Any] | None = None

    def ask(self) -> None:
        """Have it evaluate behind the step in hand, or the next."""
        trainer = self._trainer
        if self._own is None:
            self._own = trainer.val_check_batch, trainer.check_val_every_n_epoch
            trainer.val_check_batch = trainer.check_val_every_n_epoch = 1

    def remove(self) -> None:
        """As it was."""
        if self._own is not None:
            (self._trainer.val_check_batch, self._trainer.check_val_every_n_epoch), self._own = self._own, None


def duration_of(trainer: Any) -> str | None:
    """How long `fit` will train: by whichever of Lightning's two limits comes first, as far as that is known."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    has_epochs = epochs is not None and epochs >= 0
    batches = trainer.num_training_batches
    if steps >= 0 and has_epochs and batches != float("inf"):
        has_epochs = epochs * -(-int(batches) // trainer.accumulate_grad_batches) < steps
    elif steps >= 0:
        has_epochs = False
    return f"{epochs}ep" if has_epochs else f"{steps}ba" if steps >= 0 else None


def dataset_names(loaders: Any) -> list[str]:
    """The datasets' names: those of a dictionary, numbers where there are several, else `validation`."""
    if isinstance(loaders, Mapping):
        return [str(name).replace("/", "_") for name in loaders]
    if isinstance(loaders, (list, tuple)) and len(loaders) > 1:
        return [f"validation_{index}" for index in range(len(loaders))]
    return ["validation"]


def plain_name(name: str, prefix: str) -> str:
    """`loss` of `val_loss`, `val/loss`, `validation_loss` and `val_loss/dataloader_idx_1`."""
    name = re.sub(r"/dataloader_idx_\d+$", "", name) if prefix == "val" else name
    return re.sub(r"^(val|valid|validation)[_/.-]" if prefix == "val" else rf"^{prefix}[_/.-]", "", name) or name
