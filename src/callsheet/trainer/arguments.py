"""Checks of the Trainer's arguments, made before a run begins."""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from callsheet.core.background import inner
from callsheet.core.callback import Callback, label_of
from callsheet.core.ranks import Ranks
from callsheet.core.run_state import TrainState
from callsheet.core.time import Interval, Time, TimeUnit
from callsheet.errors import CallsheetError, ConfigError
from callsheet.loggers import ConsoleLogger, ProgressBarLogger
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.run_guard import check_lock_timeout
from callsheet.run.run_names import check_folder, check_run_name, new_name
from callsheet.trainer.batches import Loader
from callsheet.trainer.parallel import Parallel

logger = logging.getLogger("callsheet")

_ARGUMENTS_THAT_MAY_DIFFER = ("self", "device", "config", "runs_folder", "log_ranks", "callbacks", "loggers")
"""Arguments of the Trainer that may differ between ranks, except that callbacks which need all ranks must be the same on all."""


def duration(given: str | int | Time, epochs_per_round: int | None, argument: str = "max_duration") -> Time:
    """Return `max_duration` as a Time.

    A number without a unit is rejected, because its unit would be unclear: some frameworks count epochs, others batches.
    """
    bare = str(given).strip()
    if not isinstance(given, (Time, bool)) and re.fullmatch(r"\d+\.\d*", bare):
        whole, _, fraction = bare.partition(".")
        if fraction.strip("0"):
            raise ConfigError(
                f"{argument}={given!r} has no unit: give whole epochs, such as '3ep', or whole batches, such as '3ba'"
            )
        bare = whole
    if not isinstance(given, (Time, bool)) and bare.isdecimal() and int(bare):
        raise ConfigError(f"{argument}={given!r} has no unit: give '{bare}ep' for epochs, or '{bare}ba' for batches")
    try:
        time = Time.parse(given, TimeUnit.EPOCH)
    except ConfigError as error:
        raise ConfigError(f"{argument}={given!r}: {error}") from None
    if time.value <= 0 or time.unit is TimeUnit.DURATION:
        raise ConfigError(f"{argument}={given!r}: give more than 0 epochs, batches, samples, tokens or seconds, such as '2ep'")
    if time.unit is TimeUnit.ROUND and epochs_per_round is None:
        raise ConfigError(f"{argument}={given!r} counts rounds; say how many epochs make one with epochs_per_round")
    return time


def log_boundary(given: str | int | Time) -> Interval:
    """Return `log_interval` as an Interval, which says how often a metrics record is made.

    The unit must be batches, epochs or rounds, because the counts of all other units are updated only at log boundaries.
    """
    every = Interval.of("log_interval", given)
    if every.every.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.ROUND):
        raise ConfigError(
            f"log_interval={given!r}: give batches, epochs or rounds; the other units advance only at log boundaries"
        )
    return every


def check_same_on_all_ranks(
    groups: ProcessGroups, arguments: Mapping[str, Any], evaluators: Mapping[str, Any], callbacks: Iterable[Callback]
) -> None:
    """Raise ConfigError if arguments differ between the ranks. All ranks must call this function.

    Ranks with different arguments would later run different collectives, and hang.

    An argument that is not a plain value, such as a function, must be given on all ranks or on none. A callback that needs all
    ranks must be given on every rank.
    """
    here = {name: _text_of(value) for name, value in arguments.items() if name not in _ARGUMENTS_THAT_MAY_DIFFER}
    here["evaluators"] = repr([(name, evaluator.interval) for name, evaluator in evaluators.items()])
    here["callbacks that need all ranks"] = repr([label_of(callback) for callback in callbacks if callback.collective])
    of_ranks: list[dict[str, str]] = groups.gather(here)
    for rank, there in enumerate(of_ranks):
        for name, value in there.items():
            if value != of_ranks[0][name]:
                raise ConfigError(
                    f"{name} is {value} on rank {rank}, and {of_ranks[0][name]} on rank 0; give the same on every rank (a callback gates "
                    "its own writing)"
                )


def agree_on_name_and_seed(
    groups: ProcessGroups, arguments: Mapping[str, Any], evaluators: Mapping[str, Any], callbacks: Iterable[Callback]
) -> tuple[str, int]:
    """Return the run's name and the seed of its data, which are the same on all ranks. All ranks must call this function.

    Raise ConfigError and close the groups if arguments differ between the ranks.
    """
    try:
        check_same_on_all_ranks(groups, arguments, evaluators, callbacks)
        name: str = arguments["run_name"] or groups.of_rank_zero(new_name())
        seed: int = arguments["seed"] if arguments["seed"] is not None else groups.of_rank_zero(secrets.randbits(31))
    except BaseException:
        groups.close()
        raise
    return name, seed


def _text_of(value: Any) -> str:
    return (
        repr(value)
        if value is None or isinstance(value, (bool, int, float, str, tuple, os.PathLike, Time, Parallel))
        else "given"
    )


def progress_shown(is_wanted: bool, ranks: Ranks, callbacks: Iterable[Callback]) -> list[Callback]:
    """Return a list with a progress bar, or an empty list if stderr is no terminal or a callback already shows progress."""
    if not is_wanted or ranks.rank != 0 or not sys.stderr.isatty() or any(map(_shows_progress, callbacks)):
        return []
    return [ProgressBarLogger()]


def _shows_progress(callback: Callback) -> bool:
    shown = inner(callback)
    # If `shown` wraps a callback of another framework, use the class of the wrapped callback.
    name = type(getattr(shown, "foreign", shown)).__name__.lower()
    return isinstance(shown, (ProgressBarLogger, ConsoleLogger)) or any(word in name for word in ("progress", "progbar", "tqdm"))


def resolve_device(given: str | torch.device, ranks: Ranks) -> torch.device:
    """Return the device that this rank uses.

    `auto` means CUDA if it is available. `cuda` with several ranks means the rank's own CUDA device.
    """
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if given == "auto" else given)
    except RuntimeError as error:
        raise ConfigError(f"device={given!r} is not a device that torch knows: {str(error).splitlines()[0]}") from error
    _check_usable(device)
    if device.type != "cuda" or ranks.world_size == 1:
        return device
    if ":" not in str(device):
        device = torch.device("cuda", ranks.local_rank)
    if device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {ranks.local_rank} wants {device}, and this machine has {torch.cuda.device_count()}; start as many ranks per "
            "machine as it has devices (torchrun --nproc_per_node), or give device='cpu'"
        )
    torch.cuda.set_device(device)
    return device


_MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""The modes of `torch.compile` that record CUDA graphs."""


def check_cuda_graphs(compile: bool | Mapping[str, Any], device: torch.device, *, has_microbatches: bool) -> None:
    """Raise ConfigError if the model is compiled with CUDA graphs and gradients are accumulated over several microbatches.

    Each forward pass of a CUDA graph overwrites the gradients of the microbatch before it, and torch raises an error.
    """
    mode = compile.get("mode") if isinstance(compile, Mapping) else None
    if device.type == "cuda" and has_microbatches and mode in _MODES_WITH_CUDA_GRAPHS:
        raise ConfigError(
            f"compile={{'mode': {mode!r}}} records CUDA graphs, with which gradients cannot be accumulated over several microbatches; "
            "give the mode 'default' or 'max-autotune-no-cudagraphs', or leave out gradient_accumulation_steps and microbatch_size"
        )


def _check_usable(device: torch.device) -> None:
    """Raise ConfigError if this machine does not have the device."""
    if device.type == "cuda" and torch.cuda.is_available():
        here = torch.cuda.device_count()
        if device.index is not None and device.index >= here:
            raise ConfigError(f"device='{device}': this machine has {here} CUDA devices, the first is cuda:0; give one of them")
        return  # do not create a test tensor, because CUDA must not be initialized before the rank's device is set
    try:
        torch.empty(0, device=device)
    except Exception as error:  # AssertionError, RuntimeError or NotImplementedError, depending on the device
        why = str(error).splitlines()[0].split(". ")[0].rstrip(".")
        raise ConfigError(
            f"device='{device}' cannot be used here: {why} (torch {torch.__version__}); give 'cpu', or 'auto' to use what is available"
        ) from None


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Make the model recompute activations in its backward pass.

    Raises:
        ConfigError: the model does not support gradient checkpointing.
    """
    # The method that enables gradient checkpointing has an old and a new name in transformers. Use the one that exists.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    name = next((name for name in names if hasattr(model, name)), None)
    if name is None:
        raise ConfigError(
            f"gradient_checkpointing=True: {type(model).__name__} has no gradient_checkpointing_enable(), as Hugging Face models do; "
            "wrap its blocks in torch.utils.checkpoint instead"
        )
    enable: Any = getattr(model, name)
    try:
        enable(**{name.replace("enable", "kwargs"): {"use_reentrant": False}})
    except ValueError as error:  # raised by a Hugging Face model that does not support gradient checkpointing
        raise ConfigError(f"gradient_checkpointing=True: {error}") from error


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if the Trainer's model, one of its numbers, its run's name or a folder cannot be used."""
    if not isinstance(arguments["model"], nn.Module):
        raise ConfigError(f"model is {type(arguments['model']).__name__}, not a torch.nn.Module")
    for name in ("microbatch_size", "gradient_accumulation_steps", "epochs_per_round"):
        positive(name, arguments[name], int)
    for name in ("clip_grad_norm", "grace_seconds"):
        positive(name, arguments[name], float, may_be_infinite=True)
    positive("timeout_seconds", arguments["timeout_seconds"], float)
    if arguments["gradient_accumulation_steps"] is None:
        raise ConfigError("gradient_accumulation_steps=None: give 1 for one batch per step")
    if arguments["timeout_seconds"] is None:
        raise ConfigError("timeout_seconds=None: a rank that waits forever reports nothing; give a number of seconds")
    if arguments["grace_seconds"] is None:
        raise ConfigError("grace_seconds=None: give a number of seconds, or math.inf if nothing kills the process")
    check_lock_timeout(arguments["lock_timeout_seconds"])
    seed = arguments["seed"]
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"seed={seed!r}: give a whole number, or None")
    check_run_name(arguments["run_name"], arguments["resume"])
    for name in ("runs_folder", "checkpoints_folder"):
        check_folder(name, arguments[name])


def positive(name: str, value: Any, kind: type[int] | type[float], *, may_be_infinite: bool = False) -> Any:
    """Return `value`. Raise ConfigError if `value` is neither None nor a number above zero.

    If `kind` is int, the number must be whole. The number must be finite unless `may_be_infinite` is set.
    """
    if value is None:
        return None
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not (is_number and value > 0 and (may_be_infinite or value < math.inf)):
        what = "a whole" if kind is int else "a" if may_be_infinite else "a finite"
        raise ConfigError(f"{name}={value!r}: give {what} number above 0{'' if name.endswith('seconds') else ', or None'}")
    return value


def not_negative(name: str, value: float) -> float:
    """Return `value`. Raise ConfigError if `value` is not a finite number of 0 or more."""
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name}={value!r}: give a finite number of 0 or more")
    return value


def named_loaders(loaders: Loader | Mapping[str, Loader] | None) -> dict[str, Loader]:
    """Return the evaluation dataloaders by name. A single dataloader gets the name `validation`."""
    named = loaders if isinstance(loaders, Mapping) else {"validation": loaders}
    return {name: loader for name, loader in named.items() if loader is not None}


def check_optimizer(given: Any, model: nn.Module) -> Optimizer:
    """Return the given optimizer or, if a function is given, the optimizer that the function makes from the trainable parameters.

    Raise ConfigError if the optimizer cannot be used.
    """
    optimizer = given
    if not isinstance(given, Optimizer):
        if not callable(given):
            raise ConfigError(
                f"optimizer={given!r}: give a torch optimizer, or a function of the parameters, such as "
                "lambda params: torch.optim.AdamW(params, lr=1e-3)"
            )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise ConfigError("the model has no trainable parameter (requires_grad), so there is nothing to optimize")
        optimizer = _call_factory("optimizer", given, trained)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is or returned {type(optimizer).__name__}; give a torch optimizer, or a function of the parameters"
        )
    if _needs_closure(optimizer):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} needs a closure that computes the loss several times in a step, which the Trainer does "
            "not pass; give another optimizer, or write the loop yourself with callsheet.attach"
        )
    ours = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in ours for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer holds parameters that are not the model's (was the model copied or moved after it was made?); "
            "give a function instead, which is called once the model is final: optimizer=lambda params: AdamW(params, lr=...)"
        )
    return optimizer


def _needs_closure(optimizer: Optimizer) -> bool:
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):  # a compiled function has no signature that Python can read
        return False
    return closure is not None and closure.kind is closure.POSITIONAL_OR_KEYWORD and closure.default is closure.empty


def _call_factory(name: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """Return the optimizer or scheduler that `function` makes. Convert an error about wrong arguments to a ConfigError."""
    try:
        return function(argument)
    except (CallsheetError, torch.OutOfMemoryError):
        raise
    # torch raises RuntimeError for options that exclude each other, or that a device does not support.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name}: it cannot be created: {type(error).__name__}: {error}; give other arguments") from error


def check_scheduler(given: Any, optimizer: Optimizer | None) -> LRScheduler:
    """Return the given scheduler or, if a function is given, the scheduler that the function makes for the optimizer.

    Raise ConfigError if the scheduler cannot be used.
    """
    if optimizer is None:
        raise ConfigError("a scheduler needs an optimizer; pass both to the Trainer")
    scheduler = given
    if callable(given) and not isinstance(given, LRScheduler):
        scheduler = _call_factory("scheduler", given, optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        kind = type(scheduler).__name__
        raise ConfigError(
            f"scheduler is or returned {kind}; give a torch LRScheduler that steps without a metric, or a function of the optimizer"
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError("the scheduler belongs to another optimizer; give a function instead: scheduler=lambda optimizer: ...")
    return scheduler


def warn_of_short_schedule(scheduler: LRScheduler | None, state: TrainState) -> None:
    """Log a warning for each `OneCycleLR` whose `step` would raise an error before the end of the run.

    The scheduler may be one, or contain some. The length of the run is known only if it is given in batches or epochs, and a callback
    may end the run earlier.
    """
    longest, now, epoch = state.max_duration, state.timestamp, state.epoch_batches
    if scheduler is None or longest is None:
        return
    if longest.unit is TimeUnit.BATCH:
        length = int(longest.value)
    elif longest.unit is TimeUnit.EPOCH and epoch:
        length = now.batch + (int(longest.value) - now.epoch) * epoch - now.batch_in_epoch
    else:
        return
    for possible, needed in _short_cycles(scheduler, now.batch - _count_of(scheduler), length):
        way_out = f"give total_steps={needed}"
        if state.baseline.batch:
            way_out = "total_steps is a part of the checkpoint: start a new run for another length, or use another scheduler"
        logger.warning(
            "scheduler: OneCycleLR raises an error after %d steps, and the run takes %d (max_duration=%s); %s",
            possible, length, longest, way_out,
        )  # fmt: skip


def _count_of(scheduler: LRScheduler) -> int:
    """Return how many steps the scheduler has taken, or 0 if it does not count them."""
    if isinstance(scheduler, ChainedScheduler):
        return _count_of(scheduler._schedulers[0])
    return getattr(scheduler, "last_epoch", 0)


def _short_cycles(scheduler: LRScheduler, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Find each `OneCycleLR` that is too short. It is the scheduler, or one of the schedulers within it.

    Yield the step of the run after which it raises an error, and the `total_steps` that it needs.

    Args:
        begin: the step of the run from which the scheduler counts its steps.
        end: the last step of the run in which the scheduler is used.
    """
    if type(scheduler) is OneCycleLR:
        if end - begin > scheduler.total_steps:
            yield begin + scheduler.total_steps, end - begin
    elif isinstance(scheduler, ChainedScheduler):
        for each in scheduler._schedulers:
            yield from _short_cycles(each, begin, end)
    elif isinstance(scheduler, SequentialLR):
        begins = [begin, *(begin + milestone for milestone in scheduler._milestones)]
        ends = [*(milestone - 1 for milestone in begins[1:]), end]
        for each, first, last in zip(scheduler._schedulers, begins, ends, strict=True):
            yield from _short_cycles(each, first, min(last, end))
