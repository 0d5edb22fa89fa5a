"""An exponential moving average of the weights, used for evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from callsheet.checkpoint.tensors import local_part
from callsheet.core.callback import Callback, at, label_of
from callsheet.core.context import Context
from callsheet.core.time import Interval, Time, TimeUnit
from callsheet.errors import CheckpointError, ConfigError

_EMA_OF_MODEL: WeakKeyDictionary[nn.Module, EMA] = WeakKeyDictionary()
"""For each model that is being trained, the `EMA` callback that may swap the model's weights. A model can have only one `EMA`."""


class EMA(Callback):
    """Keep an exponential moving average of the weights, and use it for evaluations, for checkpoints and as the final model.

    Every `update_interval` steps the average moves towards the weights: `average += (1 - decay) * (weights - average)`. When the
    average begins, it equals the weights. Training itself uses the trained weights, which are bitwise the same with and without
    an EMA. During evaluation, test, prediction and saving, the average is in the model: it is put there before all other
    callbacks are called, and removed after them. Unless `at_end` is False, it also stays there when training ends, so that
    `trainer.export` writes it.

    So the model in a checkpoint is the average, which was also evaluated, and `LoadCheckpoint` and other readers get the average.
    The trained weights are saved in this callback's state. A run that is resumed with an EMA continues exactly with these;
    without an EMA it would continue from the average. If the trained weights are not finite, the checkpoint is marked as invalid,
    even if the average is finite. With a sharded model every rank keeps and saves its own shards, so a run can be resumed from
    that checkpoint only on the same device mesh.

    The average covers trainable parameters and floating-point buffers, such as batch norm statistics. All ranks use rank 0's
    averages of the buffers. Parameters that are unfrozen later are added at the next epoch. The average takes as much device
    memory as the parameters, and twice that in half precision, because it is kept in single precision.

    Args:
        half_life: the number of steps after which a step's weights have half their influence on the average; a whole number, or a
            time in batches such as `"1000ba"`.
        decay: the fraction of the average that an update keeps, such as 0.999; use it instead of `half_life`.
        update_interval: steps between updates.
        start: when the average begins, such as `"500ba"` or `"0.7dur"`; before that, the trained weights are evaluated and saved.
        at_end: whether the average stays in the model when training has ended; another `fit` continues with the trained weights.

    Raises:
        ConfigError: an argument is invalid, or the model already has an EMA.
        CheckpointError: a sharded average was saved on another mesh.
    """

    phase = "change"
    collective = True
    required_fields = ("model",)
    weights_in_state = "trained"

    def __init__(
        self,
        *,
        half_life: str | int | Time | None = None,
        decay: float | None = None,
        update_interval: int = 1,
        start: str | int | Time | None = None,
        at_end: bool = True,
    ) -> None:
        if half_life is not None and decay is not None:
            raise ConfigError(f"half_life={half_life!r} and decay={decay!r} exclude each other; give one of them")
        if update_interval < 1:
            raise ConfigError(f"update_interval={update_interval}: give at least one step")
        self._decay = decay if decay is not None else 0.5 ** (update_interval / _steps(1000 if half_life is None else half_life))
        if not 0 < self._decay < 1:
            raise ConfigError(f"decay={decay!r}: give a number between 0 and 1, such as 0.999")
        self._update_interval = update_interval
        self._start = Interval.of("start", start) if start is not None else None
        self._at_end = at_end
        self._begin()

    def _begin(self) -> None:
        self._average: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}  # backup of the trained weights while the model holds the average
        # Two lists of tensors in the same order: the averages, and the model's weights.
        self._moving: tuple[list[Tensor], list[Tensor]] = ([], [])
        # The number of evaluations, saves and so on that are in progress and need the average in the model.
        self._wanted = 0
        self._stays = False
        self._layout = ""  # how the model is sharded: "whole" (not sharded), or a description of the device mesh
        # Names of the tensors that this rank saves: all sharded tensors, and on rank 0 also those that are not sharded.
        self._own: set[str] = set()

    def on_run_start(self, ctx: Context) -> None:
        """Raise ConfigError if another EMA callback already swaps the weights of this model."""
        other = _EMA_OF_MODEL.setdefault(ctx.model, self)
        if other is not self:
            raise ConfigError(
                f"{label_of(other)} and {label_of(self)} would put their averages in the same model; keep one of them"
            )

    def on_run_end(self, ctx: Context) -> None:
        """Allow another EMA callback to swap the model's weights after this run."""
        if _EMA_OF_MODEL.get(ctx.model) is self:
            del _EMA_OF_MODEL[ctx.model]

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self._begin()

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Restore the trained weights and the average. Rank 0 broadcasts unsharded tensors, because only rank 0 has saved them."""
        there, *names = ctx.gather((self._layout, list(self._trained), list(self._average)))[0]
        tensors = _tensors(ctx.model)
        self._find_out(ctx, tensors)
        if there and there != self._layout:
            raise CheckpointError(
                f"{label_of(self)} was saved {there}, but the model is now {self._layout}, and its state cannot be resharded; resume on the "
                "same mesh, or start a new run from the averaged weights with LoadCheckpoint"
            )
        for kept, its_names in zip((self._trained, self._average), names, strict=True):
            for name in its_names:
                part = local_part(tensors[name])
                dtype = part.dtype if kept is self._trained else _wide(part)
                kept[name] = (
                    kept[name].to(part.device) if name in kept else torch.empty_like(part, dtype=dtype, requires_grad=False)
                )
                if ctx.run.world_size > 1 and not isinstance(tensors[name], DTensor):
                    distributed.broadcast(kept[name], src=0)
        self._swap_out(ctx)

    def on_train_start(self, ctx: Context) -> None:
        """If the last `fit` left the average in the model, restore the trained weights. Begin averaging unless `start` is later."""
        if self._stays:
            self._stays = False
            self._release(ctx)
        self._find_averaged(ctx)

    @at("measure")
    def on_epoch_start(self, ctx: Context) -> None:
        """Start averages for parameters that were unfrozen since the last epoch."""
        self._find_averaged(ctx)

    @torch.no_grad()
    def on_train_step_end(self, ctx: Context) -> None:
        """Every `update_interval` steps, move the average towards the model's present weights."""
        if ctx.step % self._update_interval or ctx.step_skipped:
            return
        averages, weights = self._moving
        if not averages:
            self._find_averaged(ctx)
            return
        weights = [to if to.dtype is mean.dtype else to.to(mean.dtype) for mean, to in zip(averages, weights, strict=True)]
        torch._foreach_lerp_(averages, weights, 1 - self._decay)

    def on_eval_all_start(self, ctx: Context) -> None:
        """Swap the average into the model before other callbacks are called for this event."""
        self._want(ctx)

    @at("restore")
    def on_eval_all_end(self, ctx: Context) -> None:
        """Swap the trained weights back into the model after other callbacks have been called for this event."""
        self._release(ctx)

    on_test_start = on_predict_start = on_checkpoint_save_start = on_eval_all_start
    on_test_end = on_predict_end = on_checkpoint_save_end = on_eval_all_end

    @at("restore")
    def on_train_end(self, ctx: Context) -> None:
        """If `at_end` is True, leave the average in the model as its final weights."""
        if self._at_end:
            self._stays = True
            self._want(ctx)

    @at("restore")
    def on_exception(self, ctx: Context) -> None:
        """If training failed, put the trained weights back into the model."""
        self._wanted = int(self._stays)
        if not self._stays:
            self._swap_out(ctx)

    def _find_out(self, ctx: Context, tensors: Mapping[str, Tensor]) -> None:
        """Determine how the model is sharded, and which tensors this rank saves."""
        shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        meshes = {tuple(tensor.device_mesh.shape) for tensor in shards.values()}
        self._layout = f"in shards on a mesh of {', '.join(map(str, sorted(meshes)))}" if meshes else "whole"
        self._own = set(shards) if ctx.run.rank else set(tensors)

    @torch.no_grad()
    def _find_averaged(self, ctx: Context) -> None:
        """Start an average of each trainable parameter and buffer that has no average yet. Before the time `start`, do nothing."""
        if self._start is not None and not self._average and not self._start.index(ctx.state.timestamp, ctx.state.elapsed):
            return
        tensors = _tensors(ctx.model)
        self._find_out(ctx, tensors)
        for name, tensor in tensors.items():
            part = local_part(tensor)
            if name not in self._average and (tensor.requires_grad or not isinstance(tensor, nn.Parameter)):
                self._average[name] = part.detach().to(_wide(part), copy=True)
        self._moving = (list(self._average.values()), [local_part(tensors[name]) for name in self._average])

    def _want(self, ctx: Context) -> None:
        self._wanted += 1
        if self._wanted == 1:
            self._swap_in(ctx)

    def _release(self, ctx: Context) -> None:
        self._wanted -= 1
        if self._wanted == 0:
            self._swap_out(ctx)

    @torch.no_grad()
    def _swap_in(self, ctx: Context) -> None:
        for name, tensor in _tensors(ctx.model).items():
            mean, part = self._average.get(name), local_part(tensor)
            if mean is None:
                continue
            # Buffers such as batch norm statistics differ between the ranks, so all ranks use the average of rank 0.
            if ctx.run.world_size > 1 and not isinstance(tensor, nn.Parameter):
                distributed.broadcast(mean, src=0)
            trained = part.detach().clone()
            part.copy_(mean)
            if mean.dtype is part.dtype:  # same dtype: store the trained weights in the average's memory
                trained = self._average.pop(name).copy_(trained)
            self._trained[name] = trained

    @torch.no_grad()
    def _swap_out(self, ctx: Context) -> None:
        for name, tensor in _tensors(ctx.model).items():
            trained, part = self._trained.pop(name, None), local_part(tensor)
            if trained is None:
                continue
            mean = part.detach().clone()
            part.copy_(trained)
            if name not in self._average:
                self._average[name] = trained.copy_(mean)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the averages and trained weights that this rank saves in addition to the model, and how the model is sharded."""
        if not self._average and not self._trained:
            return {}
        trained, average = (
            {name: kept for name, kept in several.items() if name in self._own} for several in (self._trained, self._average)
        )
        return {"layout": self._layout, "trained": trained, "average": average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store the state until `on_checkpoint_load_end` copies it into the model."""
        self._layout = state["layout"]
        self._trained, self._average = dict(state["trained"]), dict(state["average"])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's floating-point parameters and buffers by name. A tensor that has several names (tied) appears once.

    Calling `state_dict` also makes a sharded model register its shards as its parameters.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype for a tensor's average: at least single precision, because half precision would lose small updates."""
    return tensor.dtype if tensor.itemsize >= 4 else torch.float32


def _steps(half_life: str | int | Time) -> float:
    time = Time.parse(half_life, TimeUnit.BATCH)
    if time.unit is not TimeUnit.BATCH or time.value <= 0:
        raise ConfigError(f"half_life={half_life!r}: give a number of steps above 0, such as '1000ba'")
    return time.value
