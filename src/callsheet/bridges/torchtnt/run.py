"""One run as its guests from torchtnt see it: what torchtnt keeps once for all callbacks, kept once for all guests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

from torchtnt.framework.state import ActivePhase, EntryPoint, PhaseState
from torchtnt.utils.progress import Progress

from callsheet.bridges.guest_base import Common
from callsheet.context import Context
from callsheet.errors import NotSupported
from callsheet.time import TimeUnit

PHASES: Mapping[str, ActivePhase] = {
    "train": ActivePhase.TRAIN,
    "eval": ActivePhase.EVALUATE,
    "predict": ActivePhase.PREDICT,
}
_MOST_TIMES = 5000  # that torchtnt keeps of a name


class TorchTNTRun(Common):
    """The progress of torchtnt's loops, their states, and how long steps and the waiting for data took; told our events by their names."""

    def __init__(self) -> None:
        self.ctx: Any = None  # until the run begins
        self.entry_point = EntryPoint.TRAIN
        self.phase = "train"
        self.was_stopped = False
        self.progress: Mapping[str, Progress] = {phase: Progress() for phase in PHASES}
        self.phases: Mapping[str, GuestPhase] = {phase: GuestPhase() for phase in PHASES}
        self._count_step = self.progress["train"].increment_step
        self._asked_at: float | None = None
        self._began_at = 0.0
        self._timer = self.phases["train"].iteration_timer  # of the loop in hand
        self._late: float | None = None  # a step's time that is still to be written down

    def state_dict(self) -> dict[str, Any]:
        """The progress that is not our own timestamp's."""
        return {phase: self.progress[phase].state_dict() for phase in ("eval", "predict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        for phase in ("eval", "predict"):
            self.progress[phase].load_state_dict(state[phase])

    # --- training ---

    def on_run_start(self, ctx: Context) -> None:
        """From here on there is a run to look at."""
        self.ctx, self.was_stopped = ctx, False

    def on_train_start(self, ctx: Context) -> None:
        """As far as the run has come."""
        now = ctx.state.timestamp
        self._turn_to("train")
        self.progress["train"].load_state_dict({
            "num_epochs_completed": now.epoch,
            "num_steps_completed": now.batch,
            "num_steps_completed_in_epoch": now.batch_in_epoch,
        })  # fmt: skip
        self._enter(EntryPoint.FIT if ctx.state.evaluators else EntryPoint.TRAIN, ctx)

    def on_epoch_start(self, ctx: Context) -> None:
        """Training again, after an evaluation."""
        self._turn_to("train")

    def on_fetch_start(self, ctx: Context) -> None:
        """It waits for its batch from here; of several for a step, from the first."""
        if self._asked_at is None:
            self._asked_at = perf_counter()

    def on_train_step_start(self, ctx: Context) -> None:
        """To here."""
        if self.phase != "train":  # there was an evaluation within the epoch
            self._turn_to("train")
        self._began_at = now = perf_counter()
        durations = self._timer.recorded_durations
        if (late := self._late) is not None:  # torchtnt writes it down behind the hooks of the step's end
            self._late = None
            durations["train_iteration_time"].append(late)
        if (asked := self._asked_at) is not None:  # and this behind the hook of the batch, where nothing reads it
            self._asked_at = None
            waits = durations["data_wait_time"]
            waits.append(now - asked)
            if len(waits) > _MOST_TIMES:
                self._shorten()

    def on_train_step_end(self, ctx: Context) -> None:
        """A step is completed."""
        self._late = perf_counter() - self._began_at
        self._count_step()

    def on_epoch_end(self, ctx: Context) -> None:
        """An epoch is."""
        self._turn_to("train")
        self._asked_at = None
        self.progress["train"].increment_epoch()

    def on_train_end(self, ctx: Context) -> None:
        """Nothing more is timed."""
        self._turn_to("train")

    # --- evaluation and prediction ---

    def on_eval_start(self, ctx: Context) -> None:
        """Of one dataset: torchtnt knows no more."""
        self._judge("eval", EntryPoint.EVALUATE if ctx.standalone else None, ctx)

    def on_predict_start(self, ctx: Context) -> None:
        """A prediction begins."""
        self._judge("predict", EntryPoint.PREDICT, ctx)

    def on_eval_step_start(self, ctx: Context) -> None:
        """Its batch has come."""
        self._write_time()
        self._began_at = now = perf_counter()
        if self._asked_at is not None:
            self._add("data_wait_time", now - self._asked_at)

    def on_eval_step_end(self, ctx: Context) -> None:
        """A batch is over."""
        self._asked_at = now = perf_counter()
        self.progress[self.phase].increment_step()
        self._late = now - self._began_at

    def on_eval_end(self, ctx: Context) -> None:
        """The dataset is."""
        self._write_time()
        self._asked_at = None
        self.progress[self.phase].increment_epoch()

    on_predict_step_start, on_predict_step_end, on_predict_end = on_eval_step_start, on_eval_step_end, on_eval_end

    def _judge(self, phase: str, entry_point: EntryPoint | None, ctx: Context) -> None:
        self._turn_to(phase)
        if entry_point is not None:
            self._enter(entry_point, ctx)
        self._asked_at = perf_counter()

    def _turn_to(self, phase: str) -> None:
        self._write_time()
        self.phase, self._timer = phase, self.phases[phase].iteration_timer

    def _enter(self, entry_point: EntryPoint, ctx: Context) -> None:
        self.entry_point = entry_point
        self.phases["train"].limit(ctx)

    def _write_time(self) -> None:
        """torchtnt writes a step's time down behind the hooks of its end."""
        if self._late is not None:
            self._add(f"{self.phase}_iteration_time", self._late)
            self._late = None

    def _add(self, name: str, seconds: float) -> None:
        times = self._timer.recorded_durations[name]
        times.append(seconds)
        if len(times) > _MOST_TIMES:
            self._shorten()

    def _shorten(self) -> None:
        for times in self._timer.recorded_durations.values():
            del times[: -_MOST_TIMES // 2]


class GuestPhase(PhaseState):  # type: ignore[misc]  # torchtnt's types are not read
    """torchtnt's state of one of its loops."""

    def __init__(self) -> None:
        super().__init__(dataloader=_Length(None))

    def limit(self, ctx: Context) -> None:
        """How long the loop will run."""
        longest = ctx.state.max_duration
        self._dataloader = _Length(ctx.state.epoch_batches)
        if longest is not None and longest.unit is TimeUnit.EPOCH:
            self._max_epochs = int(longest.value)
        elif longest is not None and longest.unit is TimeUnit.BATCH:
            self._max_steps = int(longest.value)

    @property
    def step_output(self) -> Any:
        """Refused: what a unit's step returns is its own."""
        raise NotSupported(
            "torchtnt's state has here no 'step_output': a step of ours returns nothing; run the callback at home for that"
        )


class _Length:
    """In the place of the dataloader: how many batches it has, where that is known, and no batches."""

    def __init__(self, length: int | None) -> None:
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("how many batches there are is not known")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        raise NotSupported("torchtnt's state has here no batches to iterate over, but only their number")
