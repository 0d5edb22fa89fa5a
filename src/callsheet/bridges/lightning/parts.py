"""Parts of `LightningHost`: wrappers of methods of the LightningModule and the Trainer, and names of datasets and metrics."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from callsheet.bridges.backward_watch import BackwardWatch
from callsheet.bridges.count_check import Counts
from callsheet.bridges.forward_hooks import ForwardHooks, Mode, start_forward
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.torch_hooks import Hook
from callsheet.core.context import Context
from callsheet.run.copies import replace

_STEP_METHODS: Mapping[Mode, str] = {
    "train": "training_step",
    "eval": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


class Methods:
    """Wraps methods of one object. `put_back` restores the original methods."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._restores: list[Callable[[], None]] = []

    def replace(self, name: str, around: Callable[..., Any]) -> None:
        """Replace the method `name` by one that calls `around(method, *args, **kwargs)`, where `method` is the original method."""
        method = getattr(self._owner, name)

        @functools.wraps(method)  # Lightning inspects the method's parameters, and whether the method is overridden
        def called(*args: Any, **given: Any) -> Any:
            return around(method, *args, **given)

        self._restores.append(replace(self._owner, name, called))

    def put_back(self) -> None:
        """Restore the original methods."""
        while self._restores:
            self._restores.pop()()


class StepHooks(ForwardHooks):
    """Reports the forward pass in each step of a LightningModule, and the model's outputs, which a callback may replace.

    If the module has a single child with parameters, a call of that child is reported too. Methods such as `training_step` are
    wrapped, because Lightning has no hook around them, and because under DDP it calls the module itself to begin a step.
    """

    def __init__(self, driver: LifecycleDriver, ctx: Context, module: nn.Module, mode: Mode = "train") -> None:
        super().__init__(driver, ctx, module, mode)
        self._module, self._name = module, _STEP_METHODS[mode]
        self._methods = Methods(module)
        self._of_child: tuple[Hook, ...] = ()
        self._is_inside = False  # whether the module's step method is running
        self._caller: nn.Module | None = None  # the module whose forward pass is running, if its events are fired; otherwise None
        self.replaced: Any = None
        """A list with only the new batch, if a callback has replaced the step's batch; otherwise None."""

    def listen(self, has_listeners: bool) -> None:
        """If there are listeners, wrap the module's step method and register the hooks in the model; otherwise, remove both."""
        if has_listeners is self._before.is_registered:
            return
        super().listen(has_listeners)
        if has_listeners:
            self._methods.replace(self._name, self._step)
            children = [child for child in self._module.children() if any(True for _ in child.parameters())]
            if len(children) == 1:
                before, after = self._of_child = (
                    Hook(children[0].register_forward_pre_hook),
                    Hook(children[0].register_forward_hook),
                )
                before.install(True, self._begins)
                after.install(True, self._ends)
        else:
            self._methods.put_back()
            for hook in self._of_child:
                hook.remove()
            self._of_child = ()
            self._caller, self._is_inside = None, False

    def _step(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        # Do not reset `replaced` here. An optimizer may call its closure several times, and the closure calls this method.
        if self.replaced is not None:
            (batch,) = self.replaced
        self._is_inside = True
        try:
            return step(batch, *rest)
        finally:
            self._is_inside = False

    def _begins(self, model: nn.Module, inputs: Any) -> None:
        if not self._is_inside or self._caller is not None:
            return
        try:
            if self._around.is_open:
                self._caller = model
                if self._is_training:
                    start_forward(self._driver, self._ctx)
                else:
                    self._driver.start(self._forward.name)
        except Exception as error:
            self._driver.give_up(error)

    def _ends(self, model: nn.Module, inputs: Any, outputs: Any) -> Any:
        if self._caller is not model:
            return outputs
        self._caller = None
        return super()._ends(model, inputs, outputs) if self._is_inside else outputs


class ClosureWatch(BackwardWatch):
    """A `BackwardWatch` for Lightning, whose forward and backward pass run in a closure that the optimizer's `step` calls.

    If an optimizer calls the closure several times in one step, only the last loss is used.
    """

    before: Tensor | None = None
    """The sum of the losses of the step's batches before the current batch, or None."""
    last: Tensor | None = None
    """The sum of the losses in the step so far, including the loss of the closure's last call."""

    def stop(self) -> None:
        """Store the step's loss, and ignore later calls of `backward`."""
        self.keep_last()
        self.is_on = False

    def keep_last(self) -> None:
        """Store the loss of the closure's last call. This loss replaces those of earlier calls in the same step."""
        if self.total is not None:
            self.last = self.total if self.before is None else self.before + self.total
            self.total = None


class ClipHook:
    """Calls `clipped` after the LightningModule has clipped the gradients."""

    def __init__(self, module: nn.Module, clipped: Callable[[], None]) -> None:
        self._methods = Methods(module)
        self._clipped = clipped
        self.is_on = False

    def listen(self, has_listeners: bool) -> None:
        """Wrap the method that clips gradients if a callback listens to clipping; otherwise remove the wrapper."""
        if has_listeners is not self.is_on:
            self.is_on = has_listeners
            if has_listeners:
                self._methods.replace("configure_gradient_clipping", self._clip)
            else:
                self._methods.put_back()

    def remove(self) -> None:
        """Remove the wrapper of the method that clips gradients."""
        self.listen(False)

    def _clip(self, clip: Callable[..., Any], *args: Any, **given: Any) -> Any:
        result = clip(*args, **given)
        self._clipped()
        return result


class Saves:
    """Wraps `trainer.save_checkpoint` during training, so that the host can report each checkpoint that Lightning writes."""

    def __init__(self, trainer: Any, around: Any) -> None:
        self._methods = Methods(trainer)
        self._methods.replace("save_checkpoint", around)

    def remove(self) -> None:
        """Restore Lightning's own `save_checkpoint`."""
        self._methods.put_back()


class Cadence:
    """Carries out callbacks' requests for evaluations, by changing Lightning's evaluation interval temporarily."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._own: tuple[Any, Any] | None = None

    @staticmethod
    def is_able(trainer: Any) -> bool:
        """Return whether `ask` can work. A Trainer that evaluates at time intervals does not have the needed `val_check_batch`."""
        return getattr(trainer, "val_check_batch", None) is not None

    def ask(self) -> None:
        """Make Lightning evaluate after the current step or the next one."""
        trainer = self._trainer
        if self._own is None:
            self._own = trainer.val_check_batch, trainer.check_val_every_n_epoch
            trainer.val_check_batch = trainer.check_val_every_n_epoch = 1

    def remove(self) -> None:
        """Restore Lightning's own evaluation interval."""
        if self._own is not None:
            (self._trainer.val_check_batch, self._trainer.check_val_every_n_epoch), self._own = self._own, None


def duration_of(trainer: Any) -> str | None:
    """Return how long `fit` will train: the limit in steps or in epochs, whichever comes first.

    If it is not known which comes first, return the limit in steps.
    """
    steps, epochs = trainer.max_steps, trainer.max_epochs
    has_epochs = epochs is not None and epochs >= 0
    batches = trainer.num_training_batches
    if steps >= 0 and has_epochs and batches != float("inf"):
        has_epochs = epochs * -(-int(batches) // trainer.accumulate_grad_batches) < steps
    elif steps >= 0:
        has_epochs = False
    return f"{epochs}ep" if has_epochs else f"{steps}ba" if steps >= 0 else None


def read_counts(trainer: Any) -> Counts:
    """Return how many steps and epochs Lightning has counted.

    With manual optimization, `global_step` adds up the steps of all optimizers. So count each batch as one step, as the host does.
    """
    loop = trainer.fit_loop
    is_automatic = trainer.lightning_module.automatic_optimization
    steps = trainer.global_step if is_automatic else loop.epoch_loop.batch_progress.total.processed
    # Unlike `current_epoch`, `processed` counts an epoch that is just ending.
    return Counts(steps, loop.epoch_progress.current.processed)


def dataset_names(loaders: Any) -> list[str]:
    """Return callsheet's names for Lightning's validation dataloaders.

    They are the keys of a dictionary, `validation_<index>` for a list of several, otherwise `validation`.
    """
    if isinstance(loaders, Mapping):
        return [str(name).replace("/", "_") for name in loaders]
    if isinstance(loaders, (list, tuple)) and len(loaders) > 1:
        return [f"validation_{index}" for index in range(len(loaders))]
    return ["validation"]


def plain_name(name: str, prefix: str) -> str:
    """Return a metric's name without Lightning's prefix and suffix: `loss` for `val/loss` and `val_loss/dataloader_idx_1`."""
    name = re.sub(r"/dataloader_idx_\d+$", "", name) if prefix == "val" else name
    return re.sub(r"^(val|valid|validation)[_/.-]" if prefix == "val" else rf"^{prefix}[_/.-]", "", name) or name
