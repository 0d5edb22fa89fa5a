"""Logs the training speed: batches, samples, tokens and FLOPs per second, and the device's utilization."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from callsheet.callbacks.support.flop_count import StepFlops
from callsheet.callbacks.support.peak_flops import PRECISIONS, PeakPrecision, device_name, peak_flops
from callsheet.callbacks.support.speed_window import SpeedWindow
from callsheet.core.callback import Callback, label_of, one_of
from callsheet.core.context import Context
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

PrecisionChoice = Literal["auto", PeakPrecision]
PRECISION_CHOICES: tuple[PrecisionChoice, ...] = get_args(PrecisionChoice)

# Events whose handlers are muted once the FLOPs of a step are known.
_FLOP_EVENTS = ("on_forward_end", "on_forward_backward_end")
# Events whose handlers are muted if FLOPs can be derived from the run's token count.
_BATCH_EVENTS = ("on_fetch_end", "on_forward_backward_start")


class SpeedMonitor(Callback):
    """Add the speed of training, over a sliding window, to every metrics record.

    Adds `throughput/batches_per_second`, `throughput/samples_per_second`, `throughput/tokens_per_second` and
    `throughput/flops_per_second`, each summed over all ranks, and also per rank as `throughput/device/...`. Rates of samples and
    tokens are added only if these are counted. `throughput/device/mfu` (model FLOPs utilization, a fraction) is a rank's FLOP/s
    divided by the peak of its device. If the monitor has a `name`, such as `throughput/long`, the name is used instead of
    `throughput`.

    A rate is what was completed within the window, divided by the seconds of training. These include waiting for data, callbacks,
    and compiling in the first steps, but no evaluations and saves. The monitor measures no time itself: counts and seconds come
    from the run's timestamp, on which the ranks agree at every record. The window survives a resume.

    The FLOPs are those of forward and backward; a multiplication and an addition count as two. If the model has a method or
    number `flops_per_batch(batch)` or `floating_point_ops(inputs)`, it gives the FLOPs of every batch. Otherwise torch's formulas
    are used to count the second step of the process, which then takes a little longer. The formulas cover matrix products,
    convolutions and attention (as if nothing was masked). Recomputation by activation checkpointing is not counted, and neither
    are kernels for which torch has no formula. Other steps are assumed to have the same FLOPs per token, or per element of the
    first tensor in their batches; this ratio survives a resume. If the run counts exactly these elements as its tokens, the
    monitor uses the run's count, and no longer listens to the events of a step. If `torch.compile` is used, nothing can be
    counted, and the log says so once.

    Args:
        window_size: the number of batches in the window; if there are more batches between two records, the window covers the
            batches since the last record.
        count_flops: False leaves FLOPs and MFU out.
        peak_flops: the peak of a rank's device in FLOP/s; None uses the vendor's figure for dense arithmetic if it is known
            (`callsheet.callbacks.support.peak_flops`).
        precision: the precision whose peak is used: `fp32`, `tf32`, `bf16`, `fp16` or `fp8`. `auto` uses the precision of most
            FLOPs in the counted step (one step is counted for this even if the model reports its FLOPs). With `torch.compile`,
            `auto` uses the 16-bit type of outputs or parameters or, if there is none, `tf32` or `fp32`, depending on torch's
            settings.

    Raises:
        ConfigError: an argument is invalid, or the model reports something other than a number.
    """

    collective = True
    required_fields = ("model", "batch", "outputs")

    def __init__(
        self,
        *,
        window_size: int = 100,
        count_flops: bool = True,
        peak_flops: float | None = None,
        precision: PrecisionChoice = "auto",
    ) -> None:
        if window_size < 1:
            raise ConfigError(f"window_size={window_size}: give at least one batch")
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ConfigError(f"peak_flops={peak_flops}: give what one device can do in FLOP/s, such as 312e12")
        self._precision = one_of("precision", precision, PRECISION_CHOICES)
        self._window = SpeedWindow(window_size)
        self._window_size = window_size
        self._counts_flops = count_flops
        self._peak_flops = peak_flops
        self._device, self._is_cpu = "", False
        self._flops = StepFlops()
        self._logged: set[str] = set()

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """In a new run, discard the measurements, because this object may have made them in an earlier run."""
        self._logged.clear()
        if ctx.checkpoint is None:
            self._window = SpeedWindow(self._window_size)
            self._flops = StepFlops()

    def on_train_start(self, ctx: Context) -> None:
        self._window.begin(ctx.state.timestamp)
        self._device, self._is_cpu = device_name(ctx.run.device), ctx.run.device.startswith("cpu")
        is_known = any(peak_flops(self._device, precision) for precision in PRECISIONS)
        self._flops.begin_run(ctx.model, needs_precision=is_known and self._peak_flops is None and self._precision == "auto")
        ctx.unmute(self, *_BATCH_EVENTS, *_FLOP_EVENTS)
        if not self._counts_flops:
            ctx.mute(self, *_BATCH_EVENTS, *_FLOP_EVENTS)

    def on_fetch_end(self, ctx: Context) -> None:
        """Pass the batch to the FLOP counter."""
        if ctx.batch is not None:
            self._flops.add_batch(ctx.batch)

    def on_forward_backward_start(self, ctx: Context) -> None:
        """Inform the FLOP counter that a step begins. The counter counts the FLOPs of only one step of the run."""
        self._flops.begin_step()

    def on_forward_end(self, ctx: Context) -> None:
        """Guess the precision from the dtype of the outputs if the FLOPs cannot be counted."""
        if self._flops.is_guessing:
            self._flops.guess(ctx.model, ctx.outputs)

    def on_forward_backward_end(self, ctx: Context) -> None:
        """Stop counting FLOPs. When all measurements are done, mute the handlers that only measure."""
        if self._flops.counter is not None:
            self._flops.end_step()
        if self._flops.is_settled:
            ctx.mute(self, *_FLOP_EVENTS, *(_BATCH_EVENTS if self._flops.by_tokens else ()))

    def on_log(self, ctx: Context) -> None:
        now = ctx.state.timestamp
        # If no step was trained since the last record, the new record is about an evaluation, so it gets no speed.
        if not self._window.moves_to(now):
            return
        family, ranks = self.name or "throughput", ctx.run.world_size
        flops = None
        if self._counts_flops:
            tokens = self._window.tokens_to(now)
            there = ctx.gather(self._flops.take(tokens / ranks))
            known = [each for each, _ in there if each is not None]
            flops = sum(known) if known else None
            numbers = [each for _, each in there]
            if not self._flops.by_tokens and None not in numbers and sum(numbers) == tokens:
                self._flops.by_tokens = True
                ctx.mute(self, *_BATCH_EVENTS)
        if self._flops.trouble:
            self._log_once(
                "FLOPs are not logged: %s; give the model a flops_per_batch(batch) for forward and backward", self._flops.trouble
            )
        rates = self._window.add(now, flops)
        values = {f"{family}/{name}_per_second": rate for name, rate in rates.items()}
        values |= {f"{family}/device/{name}_per_second": rate / ranks for name, rate in rates.items()}
        mfu = self._mfu(rates["flops"] / ranks) if "flops" in rates else None
        ctx.log(values if mfu is None else values | {f"{family}/device/mfu": mfu}, across="same")

    def _mfu(self, rate: float) -> float | None:
        """Return the MFU: `rate` in FLOP/s as a fraction of the device's peak. Return None if the peak is not known."""
        precision = self._flops.precision if self._precision == "auto" else self._precision
        peak = self._peak_flops or peak_flops(self._device, precision)
        # The peak FLOP/s of a CPU is never known, so do not warn about an unknown peak on a CPU.
        if peak is None and self._flops.is_done and not self._is_cpu:
            what = f"{self._device!r} in {precision or 'an unknown precision'}"
            self._log_once("MFU is not logged: the peak of %s is not known; give peak_flops=, in FLOP/s per device", what)
        return rate / peak if peak is not None else None

    def _log_once(self, message: str, detail: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.info(f"%s: {message}", label_of(self), detail)

    def on_run_end(self, ctx: Context) -> None:
        """Stop counting FLOPs, also after an exception, and drop the reference to the model."""
        self._flops.begin_run(None)

    def state_dict(self) -> Mapping[str, Any]:
        return {"window": self._window.state_dict(), "flops": self._flops.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._window.load_state_dict(state["window"])
        self._flops.load_state_dict(state["flops"])
