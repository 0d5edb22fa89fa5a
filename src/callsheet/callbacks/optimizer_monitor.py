"""Logs norms of gradients and weights, and the optimizer's own metrics."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.errors import ConfigError
from callsheet.run.devices import on_one_device

_REPORT_METHOD = "report_per_parameter_metrics"  # optimizer method that returns metrics; the name is Composer's


class OptimizerMonitor(Callback):
    """Log the norm of every parameter's gradient, and of all gradients together, at an interval of steps.

    Logs `l2_norm/grad/<parameter>` and `l2_norm/grad/global` for the whole step's gradients, unscaled and before clipping. With
    `weights`, also logs `l2_norm/weight/<parameter>` and `l2_norm/weight/global` for the weights before the step. If the
    optimizer has the method `report_per_parameter_metrics(parameter, name, metrics)`, as Composer's and LLM Foundry's optimizers
    do, the metrics that this method returns are logged too. The method is called after the step, when gradients are clipped.
    Norms of sharded tensors, as with FSDP, are those of the whole tensor; this takes one small reduction for all parameters
    together at each measured step. A record has the values of the last measured step. If the monitor has a `name`, the name is
    used instead of `l2_norm`.

    Nothing waits for the device: the values stay on it until the record is made. Parameters that are added to the model are not
    measured before the next epoch.

    Args:
        batch_log_interval: the number of steps from one measurement to the next. Use the log interval or a multiple of it; otherwise
            measurements are logged late or not at all.
        per_parameter: whether to log the norm of each parameter as well as the global norms.
        weights: also log norms of weights.
        log_optimizer_metrics: also log what the optimizer reports.

    Raises:
        ConfigError: an argument is invalid.
    """

    collective = True  # all ranks must call the handlers, because norms of sharded tensors are reduced over the ranks
    required_fields = ("model", "optimizer")

    def __init__(
        self,
        *,
        batch_log_interval: int = 50,
        per_parameter: bool = True,
        weights: bool = False,
        log_optimizer_metrics: bool = True,
    ) -> None:
        if batch_log_interval < 1:
            raise ConfigError(f"batch_log_interval={batch_log_interval}: give at least one batch")
        self._interval = batch_log_interval
        self._per_parameter = per_parameter
        self._weights = weights
        self._log_optimizer_metrics = log_optimizer_metrics
        self._parameters: list[tuple[str, nn.Parameter]] = []

    def on_train_start(self, ctx: Context) -> None:
        """Mute `on_train_step_end`, which logs the optimizer's own metrics, if the optimizer reports no metrics."""
        (ctx.mute if self._report(ctx) is None else ctx.unmute)(self, "on_train_step_end")

    def on_epoch_start(self, ctx: Context) -> None:
        """Discard the list of the model's parameters, because parameters may have been added to the model since the last epoch.

        The list is kept during an epoch because finding the parameters takes longer than computing their norms.
        """
        self._parameters = []

    on_run_end = on_epoch_start

    def on_forward_backward_end(self, ctx: Context) -> None:
        """Log the norms of gradients and weights. At this event the gradients are complete and unscaled."""
        if ahead := -ctx.step % self._interval:
            ctx.mute(self, "on_forward_backward_end", "on_train_step_end", until=ctx.step + ahead)
            return
        self._parameters = self._parameters or list(ctx.model.named_parameters())
        self._log(ctx, "grad", [(name, each.grad) for name, each in self._parameters if each.grad is not None])
        if self._weights:
            self._log(ctx, "weight", [(name, each.detach()) for name, each in self._parameters])

    def on_train_step_end(self, ctx: Context) -> None:
        """Log the optimizer's own metrics. These metrics need the optimizer's state, which exists only after the optimizer's first step."""
        if ctx.step % self._interval or (report := self._report(ctx)) is None:
            return
        metrics: dict[str, Any] = {}
        for name, parameter in self._parameters:
            if parameter.grad is not None:
                metrics = report(parameter, name, metrics)
        ctx.log({name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in metrics.items()})

    def _report(self, ctx: Context) -> Any:
        return getattr(ctx.optimizer, _REPORT_METHOD, None) if self._log_optimizer_metrics else None

    def _log(self, ctx: Context, kind: str, named: list[tuple[str, Tensor]]) -> None:
        if not named:
            return
        family = f"{self.name or 'l2_norm'}/{kind}"
        order, norms = _norms([tensor for _, tensor in named])
        values: dict[Any, Tensor] = {f"{family}/global": torch.linalg.vector_norm(norms)}
        if self._per_parameter:
            values[tuple([f"{family}/{named[place][0]}" for place in order])] = norms
        ctx.log(values, across="same")


@torch.no_grad()
def _norms(tensors: list[Tensor]) -> tuple[list[int], Tensor]:
    """Compute the norm of each tensor, in float32 or wider. Return the tensors' indices and, in the same order, their norms.

    The tensors are grouped by device and sharding, and the norms of each group are reduced together.
    """
    groups: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        layout = None
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                tensors[place] = tensor = tensor.full_tensor()
            else:
                layout = (tensor.device_mesh, tensor.placements)
        elif tensor.layout is torch.sparse_coo:  # such as the gradient of an embedding; elements that are not stored are zero
            tensors[place] = tensor.coalesce().values()
        groups.setdefault((tensor.device, layout), []).append(place)
    parts = []
    for (_, layout), places in groups.items():
        here = [tensor.to_local() if isinstance(tensor := tensors[place], DTensor) else tensor for place in places]
        wide = reduce(torch.promote_types, {tensor.dtype for tensor in here}, torch.float32)
        norms = torch.stack(torch._foreach_norm(here, 2.0, dtype=wide))
        if layout is not None:
            mesh, placements = layout
            squares = norms.double().square()
            for dimension, placement in enumerate(placements):
                if placement.is_shard():
                    distributed.all_reduce(squares, group=mesh.get_group(dimension))
            norms = squares.sqrt().to(wide)
        parts.append(norms)
    order = [place for places in groups.values() for place in places]
    return order, parts[0] if len(parts) == 1 else torch.cat(on_one_device(parts))
