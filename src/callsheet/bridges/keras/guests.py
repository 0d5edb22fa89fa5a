"""Runs Keras's callbacks in callsheet's loop (as guests). The callbacks are called in Keras's order and with Keras's logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import keras
import torch

from callsheet.bridges.guest_base import Facade, Guest
from callsheet.bridges.keras.internals import PACKAGE
from callsheet.bridges.keras.run import KerasRun
from callsheet.core.callback import Phase
from callsheet.core.context import Context
from callsheet.core.time import TimeUnit
from callsheet.core.wrappers import Handler
from callsheet.errors import ConfigError, NotSupported

EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_train_start": ("on_train_begin",),
    "on_epoch_start": ("on_epoch_begin",),
    "on_train_step_start": ("on_train_batch_begin",),
    "on_train_step_end": ("on_train_batch_end",),
    "on_eval_all_start": ("on_test_begin",),
    "on_eval_step_start": ("on_test_batch_begin",),
    "on_eval_step_end": ("on_test_batch_end",),
    "on_eval_all_end": ("on_test_end", "on_epoch_end"),
    "on_epoch_end": ("on_epoch_end",),
    "on_checkpoint_due": ("on_epoch_end",),
    "on_train_end": ("on_epoch_end", "on_train_end"),
    "on_predict_start": ("on_predict_begin",),
    "on_predict_step_start": ("on_predict_batch_begin",),
    "on_predict_step_end": ("on_predict_batch_end",),
    "on_predict_end": ("on_predict_end",),
}
"""For each event of callsheet, the methods of the wrapped Keras callback that are called at the event.

Keras calls `on_epoch_end` after the epoch's evaluation. So the method is listed at several events, and is called at the first of
them that is fired.
"""

ALIASES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
"""For methods of a Keras callback, the older names, such as `on_batch_end`. By default, a method calls the one with the older name."""

REJECTED: Mapping[str, str] = {
    "ModelCheckpoint": "it writes Keras models, and there is none; use callsheet.callbacks.CheckpointSaver",
    "OrbaxCheckpoint": "it writes Keras models, and there is none; use callsheet.callbacks.CheckpointSaver",
    "BackupAndRestore": "it writes Keras models, and there is none; use callsheet.callbacks.CheckpointSaver, and resume",
    "TensorBoard": "it reads a Keras model's graph and layers; use callsheet.loggers.TensorboardLogger",
    "SwapEMAWeights": "the averages are those of a Keras optimizer; use callsheet.callbacks.EMA",
}
"""Keras's callbacks that cannot be guests, with the reason for each."""


def guest(foreign: Any, *, verbose: int = 1, name: str = "", phase: Phase = "measure", strict: bool = True) -> KerasGuest:
    """Wrap a Keras callback as a callsheet callback.

    The callback's `model` has only these attributes: `stop_training`, which stops callsheet's loop, `optimizer.learning_rate`,
    which may be set, `get_weights` and `set_weights`. The callback's `logs` contain the mean loss of the epoch so far, and after
    an evaluation also the evaluation's results, such as `val_loss`.

    Args:
        foreign: the callback, an instance.
        verbose: the value of `verbose` in the callback's `params`, as in `fit(verbose=...)`.
        name: the name under which the callback's state is saved; by default that of its class.
        phase: the callback's phase.
        strict: has no effect, because callsheet fires every event of Keras.

    Returns:
        A callback for `Trainer(callbacks=[...])`, `attach` or a host of another framework.

    Raises:
        ConfigError: Keras runs on another backend than torch.
        NotSupported: the callback needs a Keras model, as `ModelCheckpoint` does; or, while training,
            it reads an attribute of `model` that is not listed above.
    """
    check_backend()
    return KerasGuest(foreign, verbose=verbose, name=name, phase=phase, strict=strict)


def check_backend() -> None:
    """Raise ConfigError if Keras does not run on the torch backend."""
    if keras.backend.backend() != "torch":
        raise ConfigError(
            f"Keras runs on {keras.backend.backend()}, but the bridge needs torch: set KERAS_BACKEND=torch before keras is imported"
        )


class KerasGuest(Guest):
    """The callsheet callback that `guest` returns: it calls a Keras callback.

    The arguments are those of `guest`.
    """

    FRAMEWORK = "Keras"
    PACKAGE = PACKAGE
    BASE = keras.callbacks.Callback
    EVENTS = EVENTS
    COMMON = KerasRun
    OWN_HANDLERS: ClassVar[Mapping[str, str]] = {
        "on_train_start": "_set_up",
        "on_eval_all_start": "_set_up_evaluation",
        "on_predict_start": "_set_up",
    }

    common: KerasRun

    def __init__(self, foreign: Any, *, verbose: int, name: str, phase: Phase, strict: bool) -> None:
        for kind in type(foreign).__mro__:
            if kind.__module__.startswith("keras.") and kind.__name__ in REJECTED:
                raise NotSupported(f"Keras's {kind.__name__} cannot be a guest: {REJECTED[kind.__name__]}")
        self._verbose = verbose
        self._model = GuestModel(self)
        super().__init__(foreign, name=name, phase=phase, strict=strict)

    def listens_to(self, theirs: str) -> bool:
        """Return whether the callback overrides the method `theirs`, or its older name, such as `on_batch_end`."""
        return super().listens_to(theirs) or (theirs in ALIASES and super().listens_to(ALIASES[theirs]))

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """Return a handler that calls `method` as Keras does: with the number of the batch or epoch, from 0, and the logs."""
        if theirs == "on_epoch_begin":
            return lambda ctx: method(ctx.epoch - 1, {})
        if theirs == "on_epoch_end":
            return lambda ctx: method(self.common.ended, self.common.logs) if self.common.ended is not None else None
        if theirs == "on_train_batch_end":
            return lambda ctx: method(self.common.batch, logs=self.common.logs)
        if theirs in ("on_train_batch_begin", "on_test_batch_begin", "on_test_batch_end", "on_predict_batch_begin"):
            return lambda ctx: method(self.common.batch, logs={})
        if theirs == "on_predict_batch_end":
            return lambda ctx: method(self.common.batch, logs={"outputs": ctx.outputs})
        if theirs == "on_test_end":
            return lambda ctx: method(self.common.found)
        if theirs == "on_train_end":
            return lambda ctx: method(self.common.logs)
        return lambda ctx: method({})

    def _set_up(self, ctx: Context) -> None:
        run, longest = self.common, ctx.state.max_duration
        epochs = int(longest.value) if longest is not None and longest.unit is TimeUnit.EPOCH else 1
        if self.listens_to("on_train_batch_end"):
            run.listens_to_batches = run.needs_loss = True
        elif self.listens_to("on_epoch_end") or self.listens_to("on_train_end"):
            run.needs_loss = True
        self.foreign.set_params({"verbose": self._verbose, "epochs": epochs, "steps": ctx.state.epoch_batches})
        self.foreign.set_model(self._model)

    def _set_up_evaluation(self, ctx: Context) -> None:
        if ctx.standalone:
            self._set_up(ctx)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the epoch's loss so far, and the state of the Keras callback if it has a `state_dict`."""
        return {**self.common.state_dict(), "foreign": super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.common.load_state_dict(state)
        super().load_state_dict(state["foreign"])


class GuestModel(Facade):
    """Takes the place of the Keras model for Keras callbacks in callsheet's loop, with only those attributes that they may use."""

    REPLACED_OBJECT = "Keras's model"
    WRITABLE = frozenset({"history"})

    def __init__(self, guest: KerasGuest) -> None:
        self._guest = guest
        self._optimizer = GuestOptimizer(self)

    _ctx = property(lambda self: self._guest.common.ctx)

    @property
    def stop_training(self) -> bool:
        """Whether a stop was requested."""
        return self._ctx.control.stop_requested is not None

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self._ctx.control.stop(f"{self._guest.name} set model.stop_training")

    @property
    def optimizer(self) -> GuestOptimizer:
        """The optimizer, with the interface of a Keras optimizer."""
        return self._optimizer

    @property
    def metrics(self) -> list[Any]:
        """An empty list, because callsheet's loop has no Keras metrics."""
        return []

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return type(self._ctx.model).__name__

    def get_weights(self) -> list[Any]:
        """Return copies of all of the model's tensors, as arrays."""
        return [value.detach().cpu().numpy().copy() for value in self._ctx.model.state_dict().values()]

    def set_weights(self, weights: list[Any]) -> None:
        """Copy the arrays into the model's tensors."""
        with torch.no_grad():
            for value, weight in zip(self._ctx.model.state_dict().values(), weights, strict=True):
                value.copy_(torch.as_tensor(weight))


class GuestOptimizer(Facade):
    """Takes the place of the Keras optimizer for Keras callbacks in callsheet's loop, with the attributes that they may use."""

    REPLACED_OBJECT = "Keras's optimizer"

    def __init__(self, model: GuestModel) -> None:
        self._model = model

    @property
    def learning_rate(self) -> float:
        """The learning rate of the optimizer's first parameter group."""
        return float(self._model._ctx.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        groups = self._model._ctx.optimizer.param_groups
        if len({float(group["lr"]) for group in groups}) > 1:
            raise NotSupported("Keras's optimizers have one learning rate, but the groups of this optimizer have different ones")
        for group in groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(value))
            else:
                group["lr"] = float(value)

    lr = learning_rate

    @property
    def iterations(self) -> int:
        """The number of completed steps."""
        batch: int = self._model._ctx.state.timestamp.batch
        return batch

    @property
    def name(self) -> str:
        """The name of the optimizer's class."""
        return type(self._model._ctx.optimizer).__name__
