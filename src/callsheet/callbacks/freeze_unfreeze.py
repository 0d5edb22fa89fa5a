"""Freezes modules for a part of training."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from fnmatch import fnmatchcase

from torch import nn

from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.time import Interval, Time
from callsheet.errors import ConfigError, did_you_mean

logger = logging.getLogger("callsheet")


class FreezeUnfreeze(Callback):
    """Freeze modules when training begins, and optionally unfreeze them later.

    While modules are frozen, their weights do not change, not even by weight decay. Unless `statistics` is True they are in evaluation
    mode as well, so that batch norm does not update its statistics and dropout is off. The gradient norm covers only parameters
    that are not frozen. On one rank, frozen parameters get no gradients. On several ranks they get gradients, because the
    communication of gradients is already set up; this callback discards these gradients before clipping.

    The optimizer must hold the parameters from the beginning, in groups with any learning rates. It skips parameters without a
    gradient, keeps no moments for them, and updates them with their group's settings once they are unfrozen. This callback keeps
    no state: a resumed run knows from its timestamp which modules are frozen. For modules that are unfrozen at different times,
    use several callbacks.

    Args:
        modules: names of modules as in `model.named_modules()`, or patterns such as `"encoder.layers.*"`. Everything inside a module is
            frozen with it.
        until: when to unfreeze, such as `"1ep"` or `"0.1dur"`; a whole number means batches; None means never.
        statistics: whether frozen modules stay in training mode.

    Raises:
        ConfigError: no patterns were given; or, when training begins, a pattern matches no module with parameters, or parameters
            that will be unfrozen are missing in the optimizer.
    """

    phase = "change"
    collective = True
    required_fields = ("model", "optimizer")

    def __init__(self, *, modules: str | Sequence[str], until: str | int | Time | None = None, statistics: bool = False) -> None:
        self._patterns = [modules] if isinstance(modules, str) else list(modules)
        if not self._patterns or not all(self._patterns):
            raise ConfigError(f"modules={modules!r}: name the modules to freeze, such as 'encoder'")
        self._until = Interval.of("until", until) if until is not None else None
        self._statistics = statistics
        self._forget()

    def _forget(self) -> None:
        self._frozen: list[nn.Parameter] = []
        self._in_eval_mode: list[nn.Module] = []

    def on_run_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run with another model."""
        self._forget()

    def on_train_start(self, ctx: Context) -> None:
        """Freeze the modules, unless it is already time to unfreeze them."""
        self._unfreeze()
        if self._is_over(ctx):
            return
        found = self._find_modules(ctx.model)
        ctx.model.state_dict(keep_vars=True)  # called for its side effect: a sharded model registers its shards as parameters
        its_own = dict.fromkeys(parameter for module in found for parameter in module.parameters())
        self._check_optimizer(ctx, its_own)
        self._frozen = [parameter for parameter in its_own if parameter.requires_grad]
        if ctx.run.world_size == 1:
            for parameter in self._frozen:
                parameter.requires_grad_(False)
        if not self._statistics:
            self._in_eval_mode = [below for module in found for below in module.modules() if below.training]
            for module in self._in_eval_mode:
                module.training = False
        count = sum(parameter.numel() for parameter in self._frozen)
        logger.info("%s: %d parameters are frozen%s", label_of(self), count, f" until {self._until.every}" if self._until else "")

    def on_train_step_start(self, ctx: Context) -> None:
        """Unfreeze the modules once the time `until` has come."""
        if self._until is not None and (self._frozen or self._in_eval_mode) and self._is_over(ctx):
            self._unfreeze()
            logger.info("%s: unfrozen at step %d", label_of(self), ctx.step)

    def on_forward_backward_end(self, ctx: Context) -> None:
        """Discard the gradients of frozen parameters. With several ranks, these parameters keep `requires_grad` and get gradients."""
        for parameter in self._frozen:
            parameter.grad = None

    def on_train_end(self, ctx: Context) -> None:
        self._unfreeze()

    def on_exception(self, ctx: Context) -> None:
        self._unfreeze()

    def _is_over(self, ctx: Context) -> bool:
        return self._until is not None and self._until.index(ctx.state.timestamp, ctx.state.elapsed) > 0

    def _unfreeze(self) -> None:
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        for module in self._in_eval_mode:
            module.training = True
        self._forget()

    def _find_modules(self, model: nn.Module) -> list[nn.Module]:
        modules = {name: module for name, module in model.named_modules() if name and any(True for _ in module.parameters())}
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in modules):
                near = did_you_mean(pattern, modules)
                raise ConfigError(f"no module with parameters matches {pattern!r}{near}; the model has {', '.join(modules)}")
        return [module for name, module in modules.items() if any(fnmatchcase(name, pattern) for pattern in self._patterns)]

    def _check_optimizer(self, ctx: Context, parameters: Container[nn.Parameter]) -> None:
        held = {id(parameter) for group in ctx.optimizer.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in ctx.model.named_parameters() if parameter in parameters]
        missing = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in held]
        if missing and self._until is not None:
            raise ConfigError(
                f"the optimizer does not hold {', '.join(missing)}, which are to be trained from {self._until.every} on; give it all parameters "
                "that are ever trained, if necessary in groups with their own learning rates"
            )
