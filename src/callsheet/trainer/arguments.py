"""What the Trainer is given, checked before anything runs. Every refusal names the argument and the mend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from callsheet.errors import ConfigError
from callsheet.time import Interval, Time, TimeUnit
from callsheet.trainer.batches import Loader, made


def duration(given: str | int | Time, epochs_per_round: int | None) -> Time:
    """How long to train; a whole number means epochs."""
    try:
        time = Time.parse(given, TimeUnit.EPOCH)
    except ConfigError as error:
        raise ConfigError(f"max_duration={given!r}: {error}") from None
    if time.value <= 0 or time.unit is TimeUnit.DURATION:
        raise ConfigError(f"max_duration={given!r}: give more than 0 epochs, batches, samples, tokens or seconds, such as '2ep'")
    if time.unit is TimeUnit.ROUND and epochs_per_round is None:
        raise ConfigError(f"max_duration={given!r} counts rounds; say how many epochs make one with epochs_per_round")
    return time


def interval(name: str, given: str | int | Time, default: TimeUnit) -> Interval:
    """How often; a whole number counts `default`."""
    try:
        return Interval(given, default=default)
    except ConfigError as error:
        raise ConfigError(f"{name}={given!r}: {error}") from None


def positive(name: str, value: Any, kind: type[int] | type[float]) -> Any:
    """None, or a number above zero; a whole one where `kind` is int."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isinstance(value, (int, kind)) or not value > 0:
        raise ConfigError(f"{name}={value!r}: give {'a whole' if kind is int else 'a'} number above 0, or None")
    return value


def named_loaders(loaders: Loader | Mapping[str, Loader] | None, argument: str) -> dict[str, Iterable[Any]]:
    """The dataloaders by name; one alone is called `validation`."""
    named = loaders if isinstance(loaders, Mapping) else {"validation": loaders}
    return {name: made(loader, f"{argument} {name!r}") for name, loader in named.items() if loader is not None}


def checked_optimizer(given: Any, model: nn.Module) -> Optimizer:
    """The optimizer, or what its factory makes of the parameters that are trained."""
    optimizer = given
    if not isinstance(given, Optimizer):
        optimizer = given([parameter for parameter in model.parameters() if parameter.requires_grad])
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer gave {type(optimizer).__name__}; give a torch optimizer, or a function of the parameters")
    ours = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in ours for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer holds parameters that are not the model's (was the model copied or moved after it was made?); "
            "give a function instead, which is called once the model is final: optimizer=lambda params: AdamW(params, lr=...)"
        )
    return optimizer


def checked_scheduler(given: Any, optimizer: Optimizer | None) -> LRScheduler:
    """The scheduler, or what its factory makes of the optimizer."""
    if optimizer is None:
        raise ConfigError("a scheduler needs an optimizer; give the Trainer both")
    scheduler = given
    if callable(given) and not isinstance(given, LRScheduler):
        try:
            scheduler = given(optimizer)
        except TypeError as error:
            raise ConfigError(f"scheduler={given!r} is no function of the optimizer alone: {error}") from error
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        kind = type(scheduler).__name__
        raise ConfigError(
            f"scheduler gave {kind}; give a torch LRScheduler that steps without a metric, or a function of the optimizer"
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError("the scheduler is another optimizer's; give a function instead: scheduler=lambda optimizer: ...")
    return scheduler
