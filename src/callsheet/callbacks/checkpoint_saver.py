"""When checkpoints are saved, and which of them are kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callsheet.callback import Callback, label_of, one_of
from callsheet.checkpoint import delete_checkpoint, read_manifest
from callsheet.context import CheckpointInfo, Context
from callsheet.control import SAVE_KINDS
from callsheet.errors import CheckpointError, ConfigError
from callsheet.time import Interval, Time, TimeUnit

logger = logging.getLogger("callsheet")

_HOLDERS = "checkpoint_saver"  # in `ctx.user_state`: by saver, the checkpoints that it holds, so that none deletes another's


class CheckpointSaver(Callback):
    """Ask for checkpoints regularly, at the end and when a metric is at its best, and delete old ones.

    A checkpoint goes only after a newer one is durable, and only if this callback had asked for it in this run, before a resume or
    after. Deleted are the oldest beyond `keep`; those whose weights or loss were not finite go first, so that they never push out good
    ones. The best one does not count among them. One that a user's callback asked for at the same boundary stays for good.
    Several savers stand side by side if each has a `name` of its own.

    Args:
        save_interval: how often, such as `"500ba"` or `"10m"`; a whole number means epochs; None leaves it to the end and the best.
        keep: how many of the regular and final ones are kept; None keeps all.
        save_at_end: also when `max_duration` is reached, or somebody asked that training stop.
        monitor: `<dataset>/<metric>` of the evaluation, such as `"validation/loss"`: its best checkpoint is kept besides.
        mode: whether the best is the `"min"` or the `"max"`; a value that is not finite is never the best.
        before_eval: save before an evaluation that is due at the same boundary, in case it fails; the best is saved after it all the same.

    Raises:
        ConfigError: an argument that cannot work; at an evaluation, when it does not tell `monitor`.
    """

    phase = "save"
    collective = True

    def __init__(
        self,
        *,
        save_interval: str | int | Time | None = "1ep",
        keep: int | None = 3,
        save_at_end: bool = True,
        monitor: str | None = None,
        mode: str = "min",
        before_eval: bool = False,
    ) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep}: keep at least one checkpoint, or all with None")
        if save_interval is None and not save_at_end and monitor is None:
            raise ConfigError("nothing would ever be saved; give a save_interval, save_at_end or a monitor")
        self._interval = Interval(save_interval, default=TimeUnit.EPOCH) if save_interval is not None else None
        self._keep = keep
        self._save_at_end = save_at_end
        self._monitor = monitor
        self._sign = {"min": 1.0, "max": -1.0}[one_of("mode", mode, ("min", "max"))]
        self._before_eval = before_eval
        self._passed = 0  # intervals
        self._begin()
        self._forget()

    def _begin(self) -> None:
        self._saved_at = self._final_at = self._best_at = -1  # steps
        self._evaluated_since = False

    def _forget(self) -> None:
        self._best_score = math.inf  # by `_sign`, less is better
        self._best = ""
        self._rolling: dict[str, bool] = {}  # of those that `keep` counts, oldest first: whether all was finite
        self._mine: list[str] = []  # what may be deleted once nobody holds it
        self._asked: list[dict[str, Any]] = []  # not published yet

    # --- when to save ---

    def on_train_start(self, ctx: Context) -> None:
        """What is completed by now is not due again."""
        if self._interval is not None:
            self._passed = self._interval.index(ctx.state.timestamp, ctx.state.elapsed)

    def on_eval_all_end(self, ctx: Context) -> None:
        """See whether this is the best evaluation so far."""
        if ctx.standalone:  # somebody's look at other data says nothing about the best
            return
        self._evaluated_since = True
        if self._monitor is None:
            return
        scores = {f"{name}/{metric}": value for name, result in ctx.eval_results.items() for metric, value in result.items()}
        score = self._sign * scores[one_of("monitor", self._monitor, tuple(scores))]
        if score < self._best_score and math.isfinite(score):
            self._best_score, self._best_at = score, ctx.step

    def on_checkpoint_due(self, ctx: Context) -> None:
        """Ask for a checkpoint, once for all reasons; every rank decides the same."""
        is_early = ctx.boundary == "before_eval"
        if is_early and not self._before_eval:
            return
        step, elapsed = ctx.step, ctx.state.elapsed
        reasons: dict[str, str] = {}
        if self._interval is not None:
            passed = self._interval.index(ctx.state.timestamp, elapsed)
            if passed > self._passed and self._saved_at != step:
                reasons["periodic"] = str(self._interval)
            self._passed = passed
        if self._best_at == step and not is_early:
            reasons["best"] = f"{self._monitor} is {self._sign * self._best_score:g}, the best so far"
            self._best_at = -1
        if self._save_at_end and not is_early and self._final_at != step:
            if (elapsed is not None and elapsed >= 1.0) or ctx.control.stop_requested is not None:
                if self._saved_at != step or self._evaluated_since:
                    reasons["final"] = "training ends here"
                self._final_at = step
        if reasons:
            other = ctx.control.save_requested
            is_shared = other is not None and other.kind == "requested"
            self._asked.append({"step": step, "reasons": list(reasons), "is_shared": is_shared})
            self._saved_at, self._evaluated_since = step, False
            ctx.control.save("; ".join(reasons.values()), kind=max(reasons, key=SAVE_KINDS.index), replicated=True)

    # --- what to keep ---

    def on_checkpoint_published(self, ctx: Context) -> None:
        """Take it into the list if it was asked for here, and delete what the list no longer has room for."""
        assert ctx.checkpoint is not None
        asked = self._take_asked(ctx.checkpoint)
        if asked is not None:
            self._take(ctx, ctx.checkpoint, asked)
            self._delete_old(ctx)

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Take the resumed checkpoint into the list; forget what is gone, and all of it where another run's is resumed."""
        self._begin()
        info = ctx.checkpoint
        if info is None or Path(_name(ctx, info.path)).is_absolute():
            self._forget()
            self._hold(ctx)
            return
        asked = self._take_asked(info)
        if asked is None and info.kind == "preempt":  # nobody else would ever delete these
            asked = {"step": info.step, "reasons": ["periodic"], "is_shared": False}
        self._asked = []
        if asked is not None:
            self._take(ctx, info, asked)
            self._saved_at = info.step
        names = {*self._rolling, *self._mine, self._best} - {""}
        there: set[str] = set(ctx.gather([name for name in names if _path(ctx, name).exists()])[0])
        self._rolling = {name: good for name, good in self._rolling.items() if name in there}
        self._mine = [name for name in self._mine if name in there]
        if self._best not in there:  # without its checkpoint, a score to beat would keep the next best from being saved
            self._best, self._best_score = "", math.inf
        self._hold(ctx)

    def state_dict(self) -> Mapping[str, Any]:
        """The best so far, and the lists."""
        return {
            "best_score": self._best_score,
            "best": self._best,
            "rolling": dict(self._rolling),
            "mine": list(self._mine),
            "asked": [dict(asked) for asked in self._asked],  # this very checkpoint is among them
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._best_score, self._best = state["best_score"], state["best"]
        self._rolling, self._mine = dict(state["rolling"]), list(state["mine"])
        self._asked = [dict(asked) for asked in state["asked"]]

    def _take_asked(self, info: CheckpointInfo) -> dict[str, Any] | None:
        """The request that this checkpoint answers, if it is one of ours."""
        if info.kind == "requested":  # ours would have given it another kind
            return None
        found = next((asked for asked in self._asked if asked["step"] == info.step), None)
        if found is not None:
            self._asked.remove(found)
        return found

    def _take(self, ctx: Context, info: CheckpointInfo, asked: Mapping[str, Any]) -> None:
        name = _name(ctx, info.path)
        if "best" in asked["reasons"]:
            self._best = name
        if asked["is_shared"]:
            return
        if asked["reasons"] != ["best"]:
            self._rolling.pop(name, None)  # one that stood there before a resume was replaced
            self._rolling[name] = not ctx.run.is_world_process_zero or _is_finite(info.path)
        if name not in self._mine:
            self._mine.append(name)

    def _delete_old(self, ctx: Context) -> None:
        if ctx.run.is_world_process_zero:
            self._rolling = {name: good for name, good in self._rolling.items() if _path(ctx, name).exists()}
        while self._keep is not None and len(self._rolling) > self._keep:
            del self._rolling[next((name for name, good in self._rolling.items() if not good), next(iter(self._rolling)))]
        held = self._hold(ctx)
        old = [name for name in self._mine if name not in held]
        self._mine = [name for name in self._mine if name in held]
        for name in old if ctx.run.is_world_process_zero else ():
            if _path(ctx, name).exists():
                try:
                    delete_checkpoint(_path(ctx, name))
                except CheckpointError as error:
                    logger.warning("an old checkpoint stays: %s", error)

    def _hold(self, ctx: Context) -> set[str]:
        """Say which checkpoints this saver holds; all that any of them holds."""
        holders: dict[str, list[str]] = ctx.user_state.setdefault(_HOLDERS, {})
        holders[label_of(self)] = [*self._rolling, *([self._best] if self._best else [])]
        return {name for names in holders.values() for name in names}


def _name(ctx: Context, path: str) -> str:
    """The path from the run's folder, so that the folder may move; whole where it leads elsewhere."""
    whole, folder = Path(path).absolute(), ctx.run.folder
    is_inside = folder is not None and whole.is_relative_to(folder.absolute())
    return whole.relative_to(folder.absolute()).as_posix() if folder is not None and is_inside else str(whole)


def _path(ctx: Context, name: str) -> Path:
    return (ctx.run.folder or Path()).absolute() / name


def _is_finite(path: str) -> bool:
    try:
        return bool(read_manifest(Path(path)).info.get("is_finite", True))
    except CheckpointError:  # another framework's checkpoint, which does not say
        return True
