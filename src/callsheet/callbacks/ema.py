"""An exponential moving average of the weights, in their place while they are evaluated and saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from callsheet.callback import Callback, at, label_of
from callsheet.checkpoint.tensors import all_finite, local_part
from callsheet.context import Context
from callsheet.errors import CheckpointError, ConfigError
from callsheet.time import Interval, Time, TimeUnit

_OF: WeakKeyDictionary[nn.Module, EMA] = WeakKeyDictionary()
"""The one that may change a model, while a run lasts."""


class EMA(Callback):
    """Keep an exponential moving average of the weights, and evaluate, save and end with it.

    Every `update_interval` steps the average moves towards the weights, `average += (1 - decay) * (weights - average)`, from what they
    were when it began. Training goes on with its own weights, which are the same to the last bit with an EMA and without. The average
    stands in the model, put there before all other callbacks and taken out after them, while it is evaluated, tested or asked to
    predict, and while a checkpoint is saved; and, unless `at_end` is False, from the end of training on, so that `trainer.export` writes it.

    A checkpoint's model is therefore the average, which is what its evaluation judged: whoever reads it, as `LoadCheckpoint` does, gets
    that. The weights that were trained stand in this callback's state, and a run that is resumed with an EMA goes on with them, exactly.
    Without one it would go on from the average. Where the trained weights are not finite, they are saved themselves, so that
    the checkpoint is known as a bad one. Of a sharded model every rank keeps and saves its own shards: such a checkpoint is resumed
    on as many ranks.

    Averaged are the parameters that are trained (what is unfrozen later, from the next epoch on), and buffers of floating point, such as batch norm's statistics; rank 0's count. The
    average takes as much of the device's memory as the parameters, half precision twice that: it is kept in single precision.

    Args:
        half_life: after so many steps a weight counts half; a whole number, or a time in batches such as `"1000ba"`.
        decay: in place of `half_life`: what remains of the average at an update, such as 0.999.
        update_interval: steps between updates.
        start: when the average begins, such as `"500ba"` or `"0.7dur"`; nothing is put in the weights' place before.
        at_end: whether the average stays in the model when training has ended; a further `fit` trains on with the weights.

    Raises:
        ConfigError: an argument that cannot work, or a second EMA of one model.
        CheckpointError: a sharded average that another number of ranks saved.
    """

    phase = "change"
    collective = True

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
            raise ConfigError(f"half_life={half_life!r} beside decay={decay!r}; give one of them")
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
        self._trained: dict[str, Tensor] = {}  # while the average is in their place
        self._moving: tuple[list[Tensor], list[Tensor]] = ([], [])  # the averages, and the weights to which they move
        self._wanted = 0  # by how many spans the average is wanted in the model
        self._stays = self._is_spoilt = False
        self._layout = ""  # whole, or in which shards
        self._own: set[str] = set()  # what this rank has to save: the shards, and on rank 0 the rest

    def on_run_start(self, ctx: Context) -> None:
        """Make sure that the model is ours to change."""
        other = _OF.setdefault(ctx.model, self)
        if other is not self:
            raise ConfigError(
                f"{label_of(other)} and {label_of(self)} would put their averages in the same model; keep one of them"
            )

    def on_run_end(self, ctx: Context) -> None:
        """Leave the model to others."""
        if _OF.get(ctx.model) is self:
            del _OF[ctx.model]

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Forget an earlier run."""
        self._begin()

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Put back the weights that were trained; what every rank has whole, rank 0 has saved."""
        there, *names = ctx.gather((self._layout, list(self._trained), list(self._average)))[0]
        tensors = _tensors(ctx.model)
        self._find_out(ctx, tensors)
        if there and there != self._layout:
            raise CheckpointError(
                f"{label_of(self)} was saved {there}, and the model is {self._layout} now: its state cannot be spread anew; resume as it "
                "was, or begin a new run from the averaged weights, with LoadCheckpoint"
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
        """Train on with the weights; begin the average, where it is to begin with them."""
        if self._stays:
            self._stays = False
            self._release(ctx)
        self._find_averaged(ctx)

    @at("measure")
    def on_epoch_start(self, ctx: Context) -> None:
        """Take in what has been unfrozen."""
        self._find_averaged(ctx)

    @torch.no_grad()
    def on_train_step_end(self, ctx: Context) -> None:
        """Move the average."""
        if ctx.step % self._update_interval or ctx.step_skipped:
            return
        averages, weights = self._moving
        if not averages:
            self._find_averaged(ctx)
            return
        weights = [to if to.dtype is mean.dtype else to.to(mean.dtype) for mean, to in zip(averages, weights, strict=True)]
        torch._foreach_lerp_(averages, weights, 1 - self._decay)

    def on_eval_all_start(self, ctx: Context) -> None:
        """Put the average in the model, before anybody else is told."""
        self._want(ctx)

    @at("restore")
    def on_eval_all_end(self, ctx: Context) -> None:
        """Put the weights back, after everybody else has been told."""
        self._release(ctx)

    on_test_start = on_predict_start = on_eval_all_start
    on_test_end = on_predict_end = on_eval_all_end

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """Have the average saved as the model, unless the weights are spoilt: then these, so that all can see it."""
        weights = self._trained or _tensors(ctx.model)
        self._is_spoilt = not all(ctx.gather(all_finite(weights.values())))
        if self._is_spoilt:
            self._swap_out(ctx)
        else:
            self._want(ctx)

    @at("restore")
    def on_checkpoint_save_end(self, ctx: Context) -> None:
        """Go on as before."""
        if self._is_spoilt and self._wanted:
            self._swap_in(ctx)
        elif not self._is_spoilt:
            self._release(ctx)

    @at("restore")
    def on_train_end(self, ctx: Context) -> None:
        """Leave the average in the model."""
        if self._at_end:
            self._stays = True
            self._want(ctx)

    @at("restore")
    def on_exception(self, ctx: Context) -> None:
        """Whoever looks at the model of a run that failed in training finds what was trained."""
        self._wanted = int(self._stays)
        if not self._stays:
            self._swap_out(ctx)

    def _find_out(self, ctx: Context, tensors: Mapping[str, Tensor]) -> None:
        """How the model lies on the ranks."""
        shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        meshes = {tuple(tensor.device_mesh.shape) for tensor in shards.values()}
        self._layout = f"in shards on a mesh of {', '.join(map(str, sorted(meshes)))}" if meshes else "whole"
        self._own = set(shards) if ctx.run.rank else set(tensors)

    @torch.no_grad()
    def _find_averaged(self, ctx: Context) -> None:
        """Begin with every tensor that is to be averaged and is not yet: before the start, none."""
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
            if ctx.run.world_size > 1 and not isinstance(tensor, nn.Parameter):  # statistics of one rank's own samples
                distributed.broadcast(mean, src=0)
            trained = part.detach().clone()
            part.copy_(mean)
            if mean.dtype is part.dtype:  # its memory is free until it comes back
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
        """The weights that the average has the place of, and what of the average is not in the model exactly."""
        if not self._average and not self._trained:
            return {}
        trained, average = (
            {name: kept for name, kept in several.items() if name in self._own} for several in (self._trained, self._average)
        )
        return {"layout": self._layout, "trained": trained, "average": average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; `on_checkpoint_load_end` puts it where it belongs."""
        self._layout = state["layout"]
        self._trained, self._average = dict(state["trained"]), dict(state["average"])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of floating point, tied ones once; asking for the state has a sharded model put its shards in place."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _wide(tensor: Tensor) -> torch.dtype:
    """What it is averaged in: half precision would lose the small steps."""
    return tensor.dtype if tensor.itemsize >= 4 else torch.float32


def _steps(half_life: str | int | Time) -> float:
    time = Time.parse(half_life, TimeUnit.BATCH)
    if time.unit is not TimeUnit.BATCH or time.value <= 0:
        raise ConfigError(f"half_life={half_life!r}: give a number of steps above 0, such as '1000ba'")
    return time.value
