"""Checks the model and the optimizer that the user passes to `attach` or to the host of another framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from callsheet.errors import ConfigError


def check_accumulation(steps: Any) -> None:
    """Raise ConfigError if `gradient_accumulation_steps=` is not a whole number above 0."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"gradient_accumulation_steps={steps!r}: give a whole number above 0")


def check_model(model: Any) -> None:
    """Raise ConfigError if `model` is not a `torch.nn.Module`."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        raise ConfigError(
            f"model= is the class {model.__name__}, and not a model. Give the model that the loop trains, such as {model.__name__}(...)"
        )
    if isinstance(model, (list, tuple, set, Mapping)):
        raise ConfigError(
            f"model= is a {type(model).__name__} of {len(model)}, and callbacks observe one model with one optimizer. Give the model whose "
            "forward and loss callbacks should see. To observe several models as one, give a torch.nn.Module whose forward calls them"
        )
    parts = [f"model=model.{name}" for name, value in _attributes(model) if isinstance(value, nn.Module)]
    raise ConfigError(
        f"model= is a {type(model).__name__}, which is not a torch.nn.Module. Give the module that the loop trains"
        + (f": {' or '.join(parts)}" if parts else "")
    )


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer that the loop steps: `optimizer`, or the optimizer inside a wrapper such as fastai's OptimWrapper.

    Raises:
        ConfigError: there is no such optimizer, or several.
    """
    if isinstance(optimizer, type):
        made = f"{optimizer.__name__}(model.parameters(), lr=0.1)"
        raise ConfigError(
            f"optimizer= is the class {optimizer.__name__}, and not an optimizer. Give the optimizer that the loop steps, such as {made}"
        )
    if hasattr(optimizer, "register_step_post_hook"):
        return optimizer  # type: ignore[no-any-return]
    if isinstance(optimizer, (list, tuple, set, Mapping)):
        raise ConfigError(
            f"optimizer= is a {type(optimizer).__name__} of {len(optimizer)}, and callbacks observe one model with one optimizer. Give the one "
            "that the loop steps last: callbacks see its step"
        )
    inside = [value for _, value in _attributes(optimizer) if isinstance(value, Optimizer)]
    if len(inside) == 1:
        return inside[0]
    raise ConfigError(
        f"optimizer= is a {type(optimizer).__name__}, which is not a torch.optim.Optimizer, so that its steps cannot be observed. Give the "
        "torch.optim.Optimizer that the loop steps; with fastai, train with OptimWrapper(opt=torch.optim.AdamW) and give that"
    )


def check_others(*, scheduler: Any, evaluate: Any, config: Any) -> None:
    """Raise ConfigError if `scheduler=`, `evaluate=` or `config=` is neither None nor what the run needs."""
    if scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise ConfigError(
            f"scheduler= is a {type(scheduler).__name__} without state_dict() and load_state_dict(), so that checkpoints cannot hold its "
            "state. Give the scheduler that the loop steps, or leave scheduler= out"
        )
    if evaluate is not None and not callable(evaluate):
        raise ConfigError(f"evaluate={evaluate!r}: give a function that evaluates, and returns the results by dataset name")
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config= is a {type(config).__name__}; give the settings by name, such as {{'width': 64}}")


def check_results(results: Any, source: str) -> None:
    """Raise ConfigError if the results of an evaluation are not numbers by dataset name and metric name.

    The message begins with `source`, which says where the results come from. `{}` in `source` is replaced by the wrong value.
    """
    hint = "give the results by dataset name, such as {'validation': {'loss': 1.2}}"
    if not isinstance(results, Mapping):
        raise ConfigError(f"{source.format(str(results)[:40])}: {hint}")
    for name, found in results.items():
        if not isinstance(found, Mapping):
            raise ConfigError(f"{source.format(f'{{{name!r}: {str(found)[:40]}}}')}: {hint}")
        for metric, value in found.items():
            try:
                float(value)
            except (TypeError, ValueError, RuntimeError):
                raise ConfigError(
                    f"{source.format(f'{name}/{metric} = {str(value)[:40]}')}: this is not a number; {hint}"
                ) from None


def without_ddp(model: Any) -> Any:
    """Return the module inside a DistributedDataParallel wrapper, for callbacks. Return any other model unchanged."""
    return getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    return list(getattr(thing, "__dict__", {}).items())
