"""Sends notifications about a run by webhook, Slack or mail."""

from __future__ import annotations

import logging
import math
import operator
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from callsheet.callbacks.support.delivery import longest, why_not_delivered
from callsheet.callbacks.support.destinations import Address, Destination, Notification
from callsheet.core.callback import Callback, label_of, one_of
from callsheet.core.context import Context
from callsheet.core.lane_options import LaneOptions
from callsheet.core.ranks import RankGate
from callsheet.core.run_state import Outcome
from callsheet.core.time import Interval, Time, Timestamp, elapsed_fraction
from callsheet.errors import ConfigError, text_of

logger = logging.getLogger("callsheet")

NotifiedEvent = Literal["start", "end", "failure", "preemption"]
EVENTS: tuple[NotifiedEvent, ...] = get_args(NotifiedEvent)

_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_RULE_PATTERN = re.compile(r"\s*(\S+?)\s*(<=|>=|<|>)\s*(\S+)\s*")
_MAX_MESSAGE_CHARACTERS = 3000  # longer exception messages are truncated in a notification


class Notify(Callback):
    """Notify people of a run's progress by webhook, Slack or mail.

    A webhook receives JSON: `text`, and the facts `event`, `run`, `step`, `epoch`, `elapsed` (the completed fraction of
    `max_duration`), `outcome`, `time` (seconds since 1970) and `metrics`; for a rule of `when` that became true, also `rule`; for
    a failure, also `exception` with `type`, `message`, `span` and `rank`. Slack and mail receive the text.

    Notifications are sent from a background thread (a lane), so training does not wait for them. A checkpoint waits for the
    notifications before it, because it records what was sent, and so does the end of the run. They wait at most as long as all
    attempts to send one notification may take. A notification that cannot be delivered is logged and dropped. Only rank 0 sends
    notifications. If another rank fails, rank 0 reports what it knows about the failure.

    Addresses are often secrets: `url_env` and `password_env` name environment variables that hold them. For an address in `to`, the log
    and the run's records show only the host, but a configuration file that contains the address shows it in full. To use several
    of these callbacks, give each its own `name`.

    Args:
        to: `https://...` (or `http`), `slack:https://...`, `mailto:me@example.org,you@example.org`; or, if the URL is in the
            variable `url_env`, only `webhook` or `slack`. Without an address there is nothing to do, and a warning says so.
        url_env: the environment variable that holds the URL.
        on: which of these events to report: `start`, `end` (training finished, was stopped or interrupted), `failure`,
            `preemption` (a signal preempts the run).
        every: send a progress report at this interval, such as `"1ep"` or `"6h"`, when the next metrics record is made; a whole
            number means batches.
        when: rules such as `"validation/loss < 1.5"`. A notification is sent when a record's metric makes the rule true, and again only
            after it was false in between. The rules' states survive a resume.
        timeout: seconds for each attempt.
        retries: the number of further attempts after errors that may be temporary.
        server: for mail: `smtp://host`, `smtp+starttls://user@host:587` or `smtps://user@host`.
        sender: for mail: the sender's address; if empty, that of the first recipient.
        password_env: for mail: the environment variable that holds the user's password.

    Raises:
        ConfigError: an argument is invalid.
    """

    phase = "report"
    ranks: RankGate = "zero"
    lane = "background"
    on_error = "isolate"

    def __init__(
        self,
        *,
        to: str = "",
        url_env: str = "",
        on: NotifiedEvent | Sequence[NotifiedEvent] = EVENTS,
        every: str | int | Time | None = None,
        when: str | Sequence[str] = (),
        timeout: float = 5.0,
        retries: int = 2,
        server: str = "smtp://localhost",
        sender: str = "",
        password_env: str = "",
    ) -> None:
        self._address = Address(to, url_env, server, sender, password_env)
        positional, named = self._arguments  # the arguments are written to the run's folder, so secrets in them are replaced
        self._arguments = (positional, {**named, "to": self._address.without_secrets} if to else named)
        if not (timeout > 0 and retries >= 0):
            raise ConfigError(f"timeout={timeout}, retries={retries}: give more than 0, and 0 or more")
        self._timeout, self._retries = timeout, retries
        self.lane_options = LaneOptions(overflow="drop_oldest", deadline=longest(timeout, retries) + 1)
        self._on = {one_of("event to notify of", word, EVENTS) for word in ([on] if isinstance(on, str) else on)}
        self._every = Interval.of("every", every) if every is not None else None
        self._rules = {rule: _read_rule(rule) for rule in ([when] if isinstance(when, str) else when)}
        self._destination: Destination | None = None  # where notifications are sent; None between runs
        self._begin()

    def _begin(self) -> None:
        self._crossed = dict.fromkeys(self._rules, False)
        self._seen: Timestamp | None = None  # the run's timestamp at the last metrics record
        self._values: dict[str, float] = {}
        self._is_training = self._has_started = False

    def on_run_start(self, ctx: Context) -> None:
        """Determine where to send notifications, reading secrets from the environment. Log a warning if no address is given."""
        try:
            self._destination = self._address.destination()
        except ConfigError as error:
            logger.warning("%s sends nothing: %s", label_of(self), error)
            return
        if self._destination is None:
            logger.warning("%s has no address to send to; give it to= or url_env=", label_of(self))

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self._begin()

    def on_train_start(self, ctx: Context) -> None:
        self._seen = self._seen or ctx.state.timestamp
        self._is_training = True
        if not self._has_started:
            how = f"resumes at step {ctx.step}" if ctx.step else "starts"
            ranks = f" on {ctx.run.world_size} ranks" if ctx.run.world_size > 1 else ""
            self._notify(ctx, "start", f"{how}, to {ctx.state.max_duration}{ranks} ({ctx.run.device})")
        self._has_started = True

    def on_log(self, ctx: Context) -> None:
        """Send a notification if a rule in `when` becomes true or the interval `every` has passed."""
        if not self._is_training:
            return
        self._values |= ctx.record.values
        for rule, (name, compare, bound) in self._rules.items():
            value = ctx.record.values.get(name)
            if value is None or math.isnan(value):
                continue
            was, self._crossed[rule] = self._crossed[rule], compare(value, bound)
            if self._crossed[rule] and not was:
                self._notify(ctx, "crossing", f"{name} is {value:.6g} ({rule}) at step {ctx.step}", rule=rule)
        state, before = ctx.state, self._seen or ctx.state.timestamp
        self._seen, elapsed = state.timestamp, elapsed_fraction(before, state.max_duration)
        if self._every is not None and self._every.is_due(before, state.timestamp, elapsed, state.elapsed):
            part = f", {state.elapsed:.0%} of {state.max_duration}" if state.elapsed is not None else ""
            self._notify(ctx, "progress", f"is at step {ctx.step}{part}", self._losses())

    def on_preempt(self, ctx: Context) -> None:
        self._notify(ctx, "preemption", f"is preempted by a signal at step {ctx.step}")

    def on_exception(self, ctx: Context) -> None:
        error = ctx.exception
        if error is None or isinstance(error, KeyboardInterrupt):  # after Ctrl-C, `on_run_end` sends the notification
            return
        kind, message = type(error).__name__, text_of(error)[:_MAX_MESSAGE_CHARACTERS]
        more = "\n".join((f"{kind}: {message}", *getattr(error, "__notes__", ())))[: 2 * _MAX_MESSAGE_CHARACTERS]
        facts = {"type": kind, "message": message, "span": ctx.span, "rank": ctx.run.rank}
        where = f"at step {ctx.step}, in {ctx.span}, on rank {ctx.run.rank}"
        self._notify(ctx, "failure", f"failed {where}: {kind}", more, exception=facts)

    def on_train_end(self, ctx: Context) -> None:
        """Warn about every metric that a rule in `when` names but that was in no metrics record of the run.

        Later metrics records are ignored, because they belong to evaluations after training.
        """
        self._is_training = False
        for name in {name for name, _, _ in self._rules.values()} - self._values.keys():
            logger.warning("%s: no record of the run had the metric %r of a rule", label_of(self), name)

    def on_run_end(self, ctx: Context) -> None:
        """Send a notification of how the run ended, unless it failed or was preempted."""
        if self._has_started and ctx.run.outcome not in (Outcome.FAILED, Outcome.PREEMPTED):
            seconds = ctx.state.timestamp.seconds
            self._notify(ctx, "end", f"{ctx.run.outcome} after {ctx.step} steps, {seconds:.0f} s of training", self._losses())
        self._destination = None

    def _notify(self, ctx: Context, event: str, title: str, more: str = "", **facts: Any) -> None:
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
        names = [name for name in self._values if name in wanted or name.endswith("/loss")]
        return "\n".join(f"{name}: {self._values[name]:.6g}" for name in names)

    def state_dict(self) -> Mapping[str, Any]:
        """Return which rules are true, and the run's timestamp at the last metrics record."""
        return {"crossed": dict(self._crossed), "seen": self._seen.to_dict() if self._seen is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._crossed |= {rule: was for rule, was in state["crossed"].items() if rule in self._rules}
        self._seen = Timestamp.from_dict(state["seen"]) if state["seen"] is not None else None


def _read_rule(text: str) -> tuple[str, Any, float]:
    """Parse a rule such as `loss < 1.5` into the metric, the comparison and the bound."""
    found = _RULE_PATTERN.fullmatch(text)
    try:
        name, sign, bound = found.groups() if found is not None else ("", "", "nan")
        number = float(bound)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ConfigError(f"when={text!r}: write a metric, one of <, <=, >, >=, and a number, as in 'validation/loss < 1.5'")
    return name, _COMPARISONS[sign], number
