"""Parts of the model stand still for a while."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from fnmatch import fnmatchcase

from torch import nn

from callsheet.callback import Callback, label_of
from callsheet.context import Context
from callsheet.errors import ConfigError, did_you_mean
from callsheet.time import Interval, Time

logger = logging.getLogger("callsheet")


class FreezeUnfreeze(Callback):
    """Freeze modules when training begins, and train them too from some time on.

    While they are frozen neither the weights below them move, weight decay included, nor, unless `statistics` is True, what they keep by
    themselves: they are in evaluation mode, so that batch norm uses its statistics as they are and dropout is off. The norm of the
    gradients is that of the rest. On one rank frozen parameters take no gradients; on several they do, since the ranks have laid out
    their communication by then, and these are thrown away before they are clipped.

    The optimizer has to hold the parameters from the beginning, in groups and with rates of their own as you like: it leaves alone what has
    no gradient, keeps no moments for it, and finds it in its group when it is unfrozen. It keeps no state: a resumed run knows by its
    time what is frozen. Several stand side by side, each with its modules and its time.

    Args:
        modules: names of modules as `model.named_modules()` gives them, or patterns of them such as `"encoder.layers.*"`; with each goes
            what is below it.
        until: when they are trained too, such as `"1ep"` or `"0.1dur"`; a whole number means batches; None is never.
        statistics: whether frozen modules stay in training mode.

    Raises:
        ConfigError: no patterns; when training begins, one that matches no module with parameters, or parameters that are to be
            trained later and that the optimizer does not hold.
    """

    phase = "change"
    collective = True

    def __init__(self, *, modules: str | Sequence[str], until: str | int | Time | None = None, statistics: bool = False) -> None:
        self._patterns = [modules] if isinstance(modules, str) else list(modules)
        if not self._patterns or not all(self._patterns):
            raise ConfigError(f"modules={modules!r}: name the modules to freeze, such as 'encoder'")
        self._until = Interval.of("until", until) if until is not None else None
        self._statistics = statistics
        self._forget()

    def _forget(self) -> None:
        self._frozen: list[nn.Parameter] = []
        self._quiet: list[nn.Module] = []

    def on_run_start(self, ctx: Context) -> None:
        """Another run, another model."""
        self._forget()

    def on_train_start(self, ctx: Context) -> None:
        """Freeze, unless the time is over."""
        self._unfreeze()
        if self._is_over(ctx):
            return
        found = self._found(ctx.model)
        ctx.model.state_dict(keep_vars=True)  # has a sharded model put its shards in place
        its_own = dict.fromkeys(parameter for module in found for parameter in module.parameters())
        self._check_optimizer(ctx, its_own)
        self._frozen = [parameter for parameter in its_own if parameter.requires_grad]
        if ctx.run.world_size == 1:
            for parameter in self._frozen:
                parameter.requires_grad_(False)
        if not self._statistics:
            self._quiet = [below for module in found for below in module.modules() if below.training]
            for module in self._quiet:
                module.training = False
        count = sum(parameter.numel() for parameter in self._frozen)
        logger.info("%s: %d parameters are frozen%s", label_of(self), count, f" until {self._until.every}" if self._until else "")

    def on_train_step_start(self, ctx: Context) -> None:
        """See whether the time has come."""
        if self._until is not None and (self._frozen or self._quiet) and self._is_over(ctx):
            self._unfreeze()
            logger.info("%s: unfrozen at step %d", label_of(self), ctx.step)

    def on_forward_backward_end(self, ctx: Context) -> None:
        """Throw away gradients that came all the same."""
        for parameter in self._frozen:
            parameter.grad = None

    def on_train_end(self, ctx: Context) -> None:
        """Leave the model as it was given."""
        self._unfreeze()

    def on_exception(self, ctx: Context) -> None:
        """Likewise."""
        self._unfreeze()

    def _is_over(self, ctx: Context) -> bool:
        return self._until is not None and self._until.index(ctx.state.timestamp, ctx.state.elapsed) > 0

    def _unfreeze(self) -> None:
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        for module in self._quiet:
            module.training = True
        self._forget()

    def _found(self, model: nn.Module) -> list[nn.Module]:
        modules = {name: module for name, module in model.named_modules() if name and any(True for _ in module.parameters())}
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in modules):
                near = did_you_mean(pattern, modules)
                raise ConfigError(f"no module with parameters is called {pattern!r}{near} (there are {', '.join(modules)})")
        return [module for name, module in modules.items() if any(fnmatchcase(name, pattern) for pattern in self._patterns)]

    def _check_optimizer(self, ctx: Context, parameters: Container[nn.Parameter]) -> None:
        held = {id(parameter) for group in ctx.optimizer.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in ctx.model.named_parameters() if parameter in parameters]
        missing = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in held]
        if missing and self._until is not None:
            raise ConfigError(
                f"the optimizer does not hold {', '.join(missing)}, to be trained from {self._until.every} on; give it all that is ever "
                "trained, in groups with rates of their own if need be"
            )
