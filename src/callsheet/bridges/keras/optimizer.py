"""Observes the steps of a Keras optimizer, and gives it the interface of a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import keras
from torch import Tensor

from callsheet.bridges.guest_base import Facade, NotOnTheList
from callsheet.bridges.hosted_run import HostedRun


class Steps:
    """Fires the events of a Keras optimizer's step.

    Keras optimizers have no hooks, so this class replaces the optimizer's `apply`.
    """

    def __init__(self, run: HostedRun, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.has_stepped = False
        driver, apply = run.driver, optimizer.apply
        step, clip, own = (driver.spans[name] for name in ("train_step", "clip_gradients", "optimizer_step"))

        def applied(*args: Any, **named: Any) -> Any:
            if not step.is_open:
                return apply(*args, **named)
            try:
                if not clip.has_no_listeners:
                    driver.start_and_end("clip_gradients")  # fired before `apply`, because Keras clips the gradients in `apply`
                if driver.is_read:
                    driver.start("optimizer_step")
            except Exception as error:
                driver.give_up(error)
            result = apply(*args, **named)
            self.has_stepped = True
            try:
                if not own.has_no_listeners:
                    driver.end("optimizer_step")
            except Exception as error:
                driver.give_up(error)
            return result

        optimizer.apply = applied

    def remove(self) -> None:
        """Restore the optimizer's own `apply`."""
        if "apply" in vars(self._optimizer):
            del self._optimizer.apply


class Scale:
    """Wraps Keras's loss scale as an object with those parts of torch's `GradScaler` that callsheet uses."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @staticmethod
    def is_in(optimizer: Any) -> bool:
        """Return whether the Keras optimizer scales the loss."""
        return hasattr(optimizer, "dynamic_scale") or getattr(optimizer, "loss_scale_factor", None) is not None

    def is_enabled(self) -> bool:
        """Return True, because a `Scale` is made only for an optimizer that scales the loss."""
        return True

    @property
    def _scale(self) -> Any:
        own = getattr(self._optimizer, "dynamic_scale", None)
        return own.value if own is not None else self._optimizer.loss_scale_factor


class KerasOptimizer(Facade):
    """Makes a Keras optimizer look like a torch optimizer with one parameter group."""

    REPLACED_OBJECT = "Keras's optimizer"

    def __init__(self, optimizer: Any, model: Any) -> None:
        self._optimizer = optimizer
        self._model = model
        self._groups = [_Group(optimizer, [variable.value for variable in model.trainable_variables])]

    @property
    def param_groups(self) -> list[_Group]:
        """A list with one parameter group: `params` has all trainable parameters, and `lr` may be set."""
        return self._groups

    def state_dict(self) -> dict[str, Tensor]:
        """Return all variables of the Keras optimizer, by index and path."""
        return {f"{i}:{variable.path}": variable.value.detach() for i, variable in enumerate(self._optimizer.variables)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Assign the saved values to the optimizer's variables. Raise ValueError if the numbers of values and variables differ."""
        if not self._optimizer.built:
            self._optimizer.build(self._model.trainable_variables)
        variables = self._optimizer.variables
        if len(variables) != len(state):
            raise ValueError(f"the state has {len(state)} variables, but this optimizer has {len(variables)}")
        for name, value in state.items():
            variables[int(name.partition(":")[0])].assign(value)


def wrap_optimizer(optimizer: Any, model: Any) -> KerasOptimizer:
    """Wrap the optimizer in a `KerasOptimizer` whose class has the name of the optimizer's class, such as `Adam`.

    Metrics records and checkpoints contain this name.
    """
    kind: type[KerasOptimizer] = type(type(optimizer).__name__, (KerasOptimizer,), {})
    return kind(optimizer, model)


class _Group(MutableMapping[str, Any]):
    def __init__(self, optimizer: Any, parameters: list[Any]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._rate = 0.0
        self._version: int | None = None

    def __getitem__(self, name: str) -> Any:
        if name == "params":
            return self._parameters
        if name != "lr":
            raise KeyError(name)
        rate = self._optimizer.learning_rate
        if not isinstance(rate, keras.Variable):  # if the rate is not a variable, it is the value of a learning rate schedule
            return rate
        version = getattr(rate.value, "_version", None)
        if version is None or version != self._version:  # convert only a changed rate, because `float` waits for the device
            self._rate, self._version = float(rate.value), version
        return self._rate

    def __setitem__(self, name: str, value: Any) -> None:
        if name != "lr":
            raise NotOnTheList(f"{KerasOptimizer.REPLACED_OBJECT}: a callback may not write {name!r}, only lr")
        self._optimizer.learning_rate = float(value)

    def __delitem__(self, name: str) -> None:
        raise NotOnTheList(f"{KerasOptimizer.REPLACED_OBJECT}: a callback may not delete {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(("params", "lr"))

    def __len__(self) -> int:
        return 2
