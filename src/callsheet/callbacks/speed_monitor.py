"""How fast training is: batches, samples, tokens and FLOPs per second, and how much of the device that uses."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from callsheet.callback import Callback, label_of, one_of
from callsheet.callbacks.flop_count import StepFlops
from callsheet.callbacks.peak_flops import PRECISIONS, device_name, peak_flops
from callsheet.callbacks.speed_window import SpeedWindow
from callsheet.context import Context
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

_COUNTING = ("on_forward_end", "on_forward_backward_end")  # heard until nothing is left to be counted
_BATCHES = ("on_fetch_end", "on_forward_backward_start")  # heard until it shows that the run counts the same


class SpeedMonitor(Callback):
    """Add the speed of training to every record, over a window that rolls along.

    Adds `throughput/batches_per_second`, `throughput/samples_per_second`, `throughput/tokens_per_second` and
    `throughput/flops_per_second`, each over all ranks, and per rank as `throughput/device/...`; samples and tokens where they
    are counted. `throughput/device/mfu` (model FLOPs utilization, a fraction) is a rank's FLOP/s by what its device can do at
    most. With a `name` of its own, such as `throughput/long`, a second monitor logs under that instead.

    A rate is what was completed within the window, by the seconds that training took for it: waiting for data is in them, and
    callbacks, and compiling in the first steps; evaluating and saving are not. Nothing is timed here: the counts are the run's
    own timestamp, which the ranks agree on at every record. The window goes on across a resume.

    The FLOPs are those of forward and backward, a multiplication and an addition being two. Where the model has a
    `flops_per_batch(batch)` or a `floating_point_ops(inputs)`, or such a number, it is asked for every fetched batch. Else
    torch's formulas count the second step of the process, which then takes a little longer: products of matrices, convolutions
    and attention (as if nothing was masked). What activation checkpointing computes again is left out; a kernel that torch does
    not know counts nothing.
    A step has as many for each token (or number in the first tensor of its batches) as that one; this is kept across a resume.
    Where these are the tokens that the run counts anyway, as a record shows, nothing is heard of a step any more.
    Where `torch.compile` is at work nothing can be counted: it says so once.

    Args:
        window_size: how many of the last batches; where a record is made less often than that, those since the last record.
        count_flops: False leaves FLOPs and MFU out.
        peak_flops: what a rank's device can do at most, in FLOP/s; None is the vendor's figure for dense arithmetic where it is
            known (`callsheet.callbacks.peak_flops`).
        precision: of that figure: `fp32`, `tf32`, `bf16`, `fp16` or `fp8`; `auto` is the one in which most operations of the
            counted step were done, which is seen for models that tell their FLOPs too; under `torch.compile` the 16-bit type of
            outputs or parameters, or else fp32.

    Raises:
        ConfigError: an argument that cannot work, or a model that says something other than a number.
    """

    collective = True

    def __init__(
        self, *, window_size: int = 100, count_flops: bool = True, peak_flops: float | None = None, precision: str = "auto"
    ) -> None:
        if window_size < 1:
            raise ConfigError(f"window_size={window_size}: give at least one batch")
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ConfigError(f"peak_flops={peak_flops}: give what one device can do in FLOP/s, such as 312e12")
        self._precision = one_of("precision", precision, ("auto", *PRECISIONS))
        self._window = SpeedWindow(window_size)
        self._window_size = window_size
        self._counts_flops = count_flops
        self._peak_flops = peak_flops
        self._device, self._is_cpu = "", False
        self._flops = StepFlops()
        self._told: set[str] = set()

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """A new run has a new window, and a model that was not counted."""
        self._told.clear()
        if ctx.checkpoint is None:
            self._window = SpeedWindow(self._window_size)
            self._flops = StepFlops()

    def on_train_start(self, ctx: Context) -> None:
        """The first rate is taken from here."""
        self._window.begin(ctx.state.timestamp)
        self._device, self._is_cpu = device_name(ctx.run.device), ctx.run.device.startswith("cpu")
        is_known = any(peak_flops(self._device, precision) for precision in PRECISIONS)
        self._flops.begin_run(ctx.model, needs_precision=is_known and self._peak_flops is None and self._precision == "auto")
        ctx.unmute(self, *_BATCHES, *_COUNTING)
        if not self._counts_flops:
            ctx.mute(self, *_BATCHES, *_COUNTING)

    def on_fetch_end(self, ctx: Context) -> None:
        """Ask the model, or see how large the batch is."""
        if ctx.batch is not None:
            self._flops.fetched(ctx.batch)

    def on_forward_backward_start(self, ctx: Context) -> None:
        """Count the step, if it is the one."""
        self._flops.begin_step()

    def on_forward_end(self, ctx: Context) -> None:
        """Where nothing can be counted, the outputs may show the precision."""
        if self._flops.is_guessing:
            self._flops.guess(ctx.model, ctx.outputs)

    def on_forward_backward_end(self, ctx: Context) -> None:
        """The step has been counted, and most often that was all."""
        if self._flops.counter is not None:
            self._flops.end_step()
        if self._flops.is_settled:
            ctx.mute(self, *_COUNTING, *(_BATCHES if self._flops.by_tokens else ()))

    def on_log(self, ctx: Context) -> None:
        """Add the rates to the record that is being told."""
        now = ctx.state.timestamp
        if not self._window.moves_to(now):  # an evaluation's record: nothing was trained meanwhile
            return
        family, ranks, values = self.name or "throughput", ctx.run.world_size, ctx.record.values
        flops = None
        if self._counts_flops:
            tokens = self._window.tokens_to(now)
            there = ctx.gather(self._flops.take(tokens / ranks))
            known = [each for each, _ in there if each is not None]
            flops = sum(known) if known else None
            numbers = [each for _, each in there]
            if not self._flops.by_tokens and None not in numbers and sum(numbers) == tokens:
                self._flops.by_tokens = True
                ctx.mute(self, *_BATCHES)
        for name, rate in self._window.add(now, flops).items():
            # Written into this record, for the loggers after us: what `ctx.log` takes here would stand in the next one.
            values[f"{family}/{name}_per_second"] = rate
            values[f"{family}/device/{name}_per_second"] = rate / ranks
        self._add_mfu(values, f"{family}/device/")

    def _add_mfu(self, values: dict[str, float], family: str) -> None:
        if self._flops.trouble:
            self._say(
                "no FLOPs are told: %s; let the model have a flops_per_batch(batch), of forward and backward", self._flops.trouble
            )
        rate = values.get(f"{family}flops_per_second")
        precision = self._flops.precision if self._precision == "auto" else self._precision
        peak = self._peak_flops or peak_flops(self._device, precision)
        if rate is not None and peak is not None:
            values[f"{family}mfu"] = rate / peak
        elif rate is not None and self._flops.is_done and not self._is_cpu:  # nobody knows what a CPU could do at most
            what = f"{self._device!r} in {precision or 'an unknown precision'}"
            self._say("no MFU is told: what %s can do at most is not known; give peak_flops=, in FLOP/s per device", what)

    def _say(self, message: str, why: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.info(f"%s: {message}", label_of(self), why)

    def on_run_end(self, ctx: Context) -> None:
        """Count no more, also after an exception, and let go of the model."""
        self._flops.begin_run(None)

    def state_dict(self) -> Mapping[str, Any]:
        """The window, and what was counted."""
        return {"window": self._window.state_dict(), "flops": self._flops.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._window.load_state_dict(state["window"])
        self._flops.load_state_dict(state["flops"])
