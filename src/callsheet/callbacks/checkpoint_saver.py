"""Decides when checkpoints are saved, and how many are kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from callsheet.callbacks.support.metric_mode import Mode, sign_of
from callsheet.checkpoint.rotation import checkpoints_kept_for, forget, is_of_run, rotate
from callsheet.core.callback import Callback, label_of, one_of
from callsheet.core.context import Context
from callsheet.core.control import SaveKind
from callsheet.core.time import Interval, Time
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")


class CheckpointSaver(Callback):
    """Save checkpoints regularly, at the end and when a metric is at its best, and delete old checkpoints.

    An old checkpoint is deleted once a newer one is safely stored, unless another callback requested the old one as well.
    Checkpoints whose weights or loss were not finite are deleted first, so that they never displace good ones. The best
    checkpoint does not count among the `keep` regular ones. To use several savers, give each its own `name`: for example one that
    keeps three, and `CheckpointSaver(save_interval="1000ba", keep=None, name="milestones")`. A checkpoint that two savers
    requested is deleted when neither saver keeps it any more.

    Args:
        save_interval: how often, such as `"500ba"` or `"10m"`; a whole number means batches; None saves only the last and the best.
        keep: how many regular checkpoints to keep, including the final one and that of a preempted run; None keeps all. In the loop
            of a framework that writes the checkpoints itself, such as Hugging Face's Trainer, only the framework deletes them.
        save_at_end: also save when `max_duration` is reached or a callback requests a stop.
        monitor: `<dataset>/<metric>` of the evaluation, such as `"validation/loss"`: its best checkpoint is kept in addition.
        mode: whether the best is the `"min"` or the `"max"`; a value that is not finite is never the best.
        name: the callback's name; the class's name if empty.
        before_eval: whether to save before an evaluation that is due after the same step, in case the evaluation fails; the best
            checkpoint is still saved after the evaluation.

    Raises:
        ConfigError: an argument is invalid, or an evaluation does not have the metric `monitor`.
    """

    phase = "save"
    collective = True
    requests = ("save",)

    def __init__(
        self,
        *,
        save_interval: str | int | Time | None = "1ep",
        keep: int | None = 3,
        save_at_end: bool = True,
        monitor: str | None = None,
        mode: Mode = "min",
        before_eval: bool = False,
        name: str = "",
    ) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep}: keep at least one checkpoint, or all with None")
        if save_interval is None and not save_at_end and monitor is None:
            raise ConfigError("nothing would ever be saved; give a save_interval, save_at_end or a monitor")
        self._interval = Interval.of("save_interval", save_interval) if save_interval is not None else None
        self._save_at_end = save_at_end
        self._monitor = monitor
        self._sign = sign_of(mode)
        self._before_eval = before_eval
        self.name = name
        self._keep = keep
        self._passed = 0  # how many save intervals have passed since the start of the run
        # `_saved_at`: the step of the last checkpoint. `_best_at`: the step of the best evaluation, until that step is saved.
        self._saved_at = self._best_at = -1
        self._saved_stop = False  # whether a stop was already requested when the last checkpoint was saved
        self._is_warned = False
        self._best_score = math.inf  # best value of `monitor` so far, multiplied by `_sign` so that lower is better
        self._before_best = (-1, math.inf)  # the step of the best evaluation so far, and the best value before that evaluation

    def on_train_start(self, ctx: Context) -> None:
        """Skip the save intervals that have already passed, so that a resumed run does not save a checkpoint at its start."""
        if self._interval is not None:
            self._passed = self._interval.index(ctx.state.timestamp, ctx.state.elapsed)

    def on_eval_all_end(self, ctx: Context) -> None:
        """If the monitored metric has its best value so far, store the step, so that `on_checkpoint_due` requests a checkpoint."""
        if ctx.standalone:  # ignore an evaluation that the user called directly, because it may use other data
            return
        self._saved_at = -1  # allow another checkpoint of this step: an earlier one does not contain the evaluation's results
        if self._monitor is None:
            return
        dataset = self._monitor.partition("/")[0]
        if dataset in ctx.state.evaluators and dataset not in ctx.eval_results:
            return  # the monitored dataset was not evaluated: it was not due, or a signal interrupted the evaluation
        scores = {f"{name}/{metric}": value for name, result in ctx.eval_results.items() for metric, value in result.items()}
        score = self._sign * scores[one_of("monitor", self._monitor, tuple(scores))]
        if score < self._best_score and math.isfinite(score):
            self._before_best = ctx.step, self._best_score
            self._best_score, self._best_at = score, ctx.step

    def on_checkpoint_due(self, ctx: Context) -> None:
        """Request a checkpoint if one is due.

        A step gets at most one checkpoint, and another one if an evaluation or a stop request came after the first. All ranks
        make the same decision.
        """
        is_early = ctx.boundary == "before_eval"
        if is_early and not self._before_eval:
            return
        step, elapsed = ctx.step, ctx.state.elapsed
        passed = self._interval.index(ctx.state.timestamp, elapsed) if self._interval is not None else 0
        is_periodic, self._passed = passed > self._passed, passed
        is_over = ctx.state.is_complete or ctx.control.stop_requested is not None
        is_final = is_over and self._save_at_end and not is_early
        # If a stop was requested after this step's checkpoint was saved, save again, because a checkpoint records a requested
        # stop, and `resume="auto"` does not continue a run with such a record.
        is_stopped = ctx.control.stop_requested is not None
        if (is_periodic or is_final) and (self._saved_at != step or (is_final and is_stopped and not self._saved_stop)):
            self._saved_at, self._saved_stop = step, is_stopped
            why = "training ends here" if is_final else str(self._interval)
            kind: SaveKind = "final" if is_final else "periodic"
            ctx.control.save(why, kind=kind, by=label_of(self), replicated=True)
        if self._best_at == step:
            self._saved_at, self._best_at, self._saved_stop = step, -1, is_stopped
            why = f"{self._monitor} is {self._sign * self._best_score:g}, the best so far"
            ctx.control.save(why, kind="best", by=self._best_label, metric=self._monitor or "", replicated=True)

    def on_preempt(self, ctx: Context) -> None:
        """Request a checkpoint before the preempted run ends. The checkpoint counts as one of this saver's regular checkpoints."""
        ctx.control.save("the run is preempted", kind="preempt", by=label_of(self), replicated=True)

    def on_checkpoint_published(self, ctx: Context) -> None:
        """Add the checkpoint to this saver's checkpoints if this saver requested it, and delete this saver's old checkpoints.

        Checkpoints that another framework's loop wrote are not deleted here; that framework deletes them.
        """
        info = ctx.checkpoint
        if (
            info is not None
            and not info.is_finite
            and self._best_label in info.requested_by
            and info.step == self._before_best[0]
        ):
            # The checkpoint's weights or loss are NaN or infinite, so it cannot be used. Restore the previous best score.
            self._best_score = self._before_best[1]
        if info is None or is_of_run(ctx, info.path):
            self._take(ctx)
        elif self._keep is not None and label_of(self) in info.requested_by and not self._is_warned:
            self._is_warned = True
            if ctx.run.is_world_process_zero:
                logger.warning(
                    "%s: keep=%d has no effect, because %s was written by the training framework, which alone deletes its checkpoints. "
                    "Limit them there (save_total_limit in transformers, n_saved in Ignite), and give keep=None",
                    label_of(self),
                    self._keep,
                    info.path,
                )

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Add the loaded checkpoint to this saver's checkpoints if this saver had requested it.

        The state in a checkpoint does not list the checkpoint itself, because a checkpoint is added to the list only when it is
        published, after its state was saved. A checkpoint of another run is not added.
        """
        self._saved_at = self._best_at = -1
        info = ctx.checkpoint
        if info is None or not is_of_run(ctx, info.path):
            forget(ctx)
        elif self._take(ctx):
            self._saved_at = info.step
        has_best = ctx.gather(bool(checkpoints_kept_for(ctx, self._best_label)))[0]
        if not has_best:  # the best checkpoint was deleted: forget its score, so that the next evaluation counts as the best
            self._best_score = math.inf

    def state_dict(self) -> Mapping[str, Any]:
        return {"best_score": self._best_score}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best_score = state["best_score"]

    def _take(self, ctx: Context) -> bool:
        is_regular, is_best = rotate(ctx, label_of(self), self._keep), rotate(ctx, self._best_label, 1)
        return is_regular or is_best

    @property
    def _best_label(self) -> str:
        return f"{label_of(self)}/best"
