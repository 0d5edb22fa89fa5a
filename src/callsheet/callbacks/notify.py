"""Word of a run to people: by webhook, Slack or mail."""

from __future__ import annotations

import logging
import math
import operator
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from callsheet.callback import Callback, label_of, one_of
from callsheet.callbacks.delivery import longest, why_not_delivered
from callsheet.callbacks.destinations import Address, Destination, Notification
from callsheet.context import Context, Outcome
from callsheet.errors import ConfigError
from callsheet.lanes import LaneOptions
from callsheet.time import Interval, Time, Timestamp, elapsed_fraction

logger = logging.getLogger("callsheet")

EVENTS = ("start", "end", "failure", "preemption")

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_RULE = re.compile(r"\s*(\S+?)\s*(<=|>=|<|>)\s*(\S+)\s*")
_LONGEST = 3000  # characters of what an exception says


class Notify(Callback):
    """Tell people how the run fares: by a webhook, Slack or mail.

    A webhook gets JSON: `text`, and the facts `event`, `run`, `step`, `epoch`, `elapsed` (a fraction), `outcome`, `time` (seconds
    since 1970), `metrics`, of a crossing its `rule`, of a failure `exception` with `type`, `message`, `span` and `rank`. Slack and
    mail get the text.

    It is sent in a lane: training does not wait for it; a checkpoint, which holds what was told, and the end of the run do, as long as
    the tries of one notification may take. What does not arrive is said in the log, and lost. Rank 0 alone sends; of another rank's
    failure it tells what it knows.

    Addresses are often secrets: `url_env` and `password_env` name environment variables that hold them. Of an address in `to` the
    log and the run's records show the host; a configuration file that it was written in does not hide it. Several stand side by
    side if each has a `name`.

    Args:
        to: `https://...` (or `http`), `slack:https://...`, `mailto:me@example.org,you@example.org`; beside `url_env`, `webhook` or
            `slack`. With none there is nothing to do, which is said once.
        url_env: the variable that holds the URL.
        on: which of `start`, `end` (of training that finished, was stopped or interrupted), `failure`, `preemption` (a signal asked
            the run to make way).
        every: also so often, such as `"1ep"` or `"6h"`, at the next record; a whole number means batches.
        when: rules such as `"validation/loss < 1.5"`: told when a record's metric comes to that side, and again only after it was
            on the other. Which were told survives a resume.
        timeout: seconds for each try.
        retries: how many more there are where they may help.
        server: for mail: `smtp://host`, `smtp+starttls://user@host:587` or `smtps://user@host`.
        sender: for mail: the address it comes from; the first recipient's where it is empty.
        password_env: for mail: the variable that holds the user's password.

    Raises:
        ConfigError: an argument that cannot work.
    """

    phase = "report"
    ranks = "zero"
    lane = "background"
    on_error = "isolate"

    def __init__(
        self,
        *,
        to: str = "",
        url_env: str = "",
        on: str | Sequence[str] = EVENTS,
        every: str | int | Time | None = None,
        when: str | Sequence[str] = (),
        timeout: float = 5.0,
        retries: int = 2,
        server: str = "smtp://localhost",
        sender: str = "",
        password_env: str = "",
    ) -> None:
        self._address = Address(to, url_env, server, sender, password_env)
        positional, named = self._arguments  # they are written to the run's folder, and to reports
        self._arguments = (positional, {**named, "to": self._address.without_secrets} if to else named)
        if not (timeout > 0 and retries >= 0):
            raise ConfigError(f"timeout={timeout}, retries={retries}: give more than 0, and 0 or more")
        self._timeout, self._retries = timeout, retries
        self.lane_options = LaneOptions(overflow="drop_oldest", deadline=longest(timeout, retries) + 1)
        self._on = {one_of("event to notify of", word, EVENTS) for word in ([on] if isinstance(on, str) else on)}
        self._every = Interval.of("every", every) if every is not None else None
        self._rules = {rule: _read_rule(rule) for rule in ([when] if isinstance(when, str) else when)}
        self._destination: Destination | None = None  # of this run
        self._begin()

    def _begin(self) -> None:
        self._crossed = dict.fromkeys(self._rules, False)
        self._seen: Timestamp | None = None  # at the last record
        self._values: dict[str, float] = {}
        self._is_training = self._has_started = False

    def on_run_start(self, ctx: Context) -> None:
        """Find out where to send to."""
        try:
            self._destination = self._address.destination()
        except ConfigError as error:
            logger.warning("%s sends nothing: %s", label_of(self), error)
            return
        if self._destination is None:
            logger.warning("%s has nowhere to send to; give it to= or url_env=", label_of(self))

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Forget an earlier run."""
        self._begin()

    def on_train_start(self, ctx: Context) -> None:
        """Training begins, or goes on."""
        self._seen = self._seen or ctx.state.timestamp
        self._is_training = True
        if not self._has_started:
            how = f"goes on from step {ctx.step}" if ctx.step else "starts"
            ranks = f" on {ctx.run.world_size} ranks" if ctx.run.world_size > 1 else ""
            self._tell(ctx, "start", f"{how}, to {ctx.state.max_duration}{ranks} ({ctx.run.device})")
        self._has_started = True

    def on_log(self, ctx: Context) -> None:
        """Look whether a rule or an interval is due."""
        if not self._is_training:
            return
        self._values |= ctx.record.values
        for rule, (name, compare, bound) in self._rules.items():
            value = ctx.record.values.get(name)
            if value is None or math.isnan(value):
                continue
            was, self._crossed[rule] = self._crossed[rule], compare(value, bound)
            if self._crossed[rule] and not was:
                self._tell(ctx, "crossing", f"{name} is {value:.6g} ({rule}) at step {ctx.step}", rule=rule)
        state, before = ctx.state, self._seen or ctx.state.timestamp
        self._seen, elapsed = state.timestamp, elapsed_fraction(before, state.max_duration)
        if self._every is not None and self._every.is_due(before, state.timestamp, elapsed, state.elapsed):
            part = f", {state.elapsed:.0%} of {state.max_duration}" if state.elapsed is not None else ""
            self._tell(ctx, "progress", f"is at step {ctx.step}{part}", self._losses())

    def on_preempt(self, ctx: Context) -> None:
        """A signal came."""
        self._tell(ctx, "preemption", f"makes way at step {ctx.step}: a signal asked for it")

    def on_exception(self, ctx: Context) -> None:
        """What was raised, and where."""
        error = ctx.exception
        if error is None or isinstance(error, KeyboardInterrupt):  # Ctrl-C is an end
            return
        kind, said = type(error).__name__, str(error)[:_LONGEST]
        more = "\n".join((f"{kind}: {said}", *getattr(error, "__notes__", ())))[: 2 * _LONGEST]
        facts = {"type": kind, "message": said, "span": ctx.span, "rank": ctx.run.rank}
        where = f"at step {ctx.step}, in {ctx.span}, on rank {ctx.run.rank}"
        self._tell(ctx, "failure", f"failed {where}: {kind}", more, exception=facts)

    def on_train_end(self, ctx: Context) -> None:
        """Records that come now are of evaluations by hand."""
        self._is_training = False
        for name in {name for name, _, _ in self._rules.values()} - self._values.keys():
            logger.warning("%s waited for %r, which no record has told", label_of(self), name)

    def on_run_end(self, ctx: Context) -> None:
        """How it ended."""
        if self._has_started and ctx.run.outcome not in (Outcome.FAILED, Outcome.PREEMPTED):
            seconds = ctx.state.timestamp.seconds
            self._tell(ctx, "end", f"{ctx.run.outcome} after {ctx.step} steps, {seconds:.0f} s of training", self._losses())
        self._destination = None

    def _tell(self, ctx: Context, event: str, title: str, more: str = "", **facts: Any) -> None:
        if self._destination is None or (event in EVENTS and event not in self._on):
            return
        now = {
            "step": ctx.step,
            "epoch": ctx.epoch,
            "elapsed": ctx.state.elapsed,
            "outcome": ctx.run.outcome,
            "time": time.time(),
        }
        known = {"event": event, "run": ctx.run.name, **now, "metrics": dict(self._values), **facts}
        notification = Notification(f"{ctx.run.name} {title}", more, known)
        if why := why_not_delivered(notification, self._destination, timeout=self._timeout, retries=self._retries):
            logger.warning("%s: %r did not reach %s: %s", label_of(self), event, self._destination.shown, why)

    def _losses(self) -> str:
        wanted = {name for name, _, _ in self._rules.values()}
        told = [name for name in self._values if name in wanted or name.endswith("/loss")]
        return "\n".join(f"{name}: {self._values[name]:.6g}" for name in told)

    def state_dict(self) -> Mapping[str, Any]:
        """Which rules were told, and when the last record was."""
        return {"crossed": dict(self._crossed), "seen": self._seen.to_dict() if self._seen is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._crossed |= {rule: was for rule, was in state["crossed"].items() if rule in self._rules}
        self._seen = Timestamp.from_dict(state["seen"]) if state["seen"] is not None else None


def _read_rule(text: str) -> tuple[str, Any, float]:
    """The metric, the comparison and the bound of a rule."""
    found = _RULE.fullmatch(text)
    try:
        name, sign, bound = found.groups() if found is not None else ("", "", "nan")
        number = float(bound)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ConfigError(f"when={text!r}: write a metric, one of <, <=, >, >=, and a number, as in 'validation/loss < 1.5'")
    return name, _COMPARE[sign], number
