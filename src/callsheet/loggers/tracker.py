"""What the loggers of trackers share: one run of the tracker, opened when training may begin and closed with the run's outcome.

A logger derives from `Tracker`, names its `package` and `extra`, and writes:

    _open(ctx, run_id)      begin a run of the tracker, or go on with the one of that id; returns `Opened(run_id, is_ours)`
    _write(ctx, values)     a record's values, by name
    _settings(ctx, values)  hyperparameters, by dotted name (`flat`)
    _fail(ctx, error)       an exception, in a line (may be left out)
    _close(ctx, outcome)    end the run; only told where `is_ours`

They run in a lane, on one thread, while training goes on: what they read is a snapshot, and `deadline` of `lane_options` should leave
`_close` the time that it may take. None of them is called where no run is open, so nothing has to ask; methods of `Logger` that the
logger overrides itself, such as `log_images`, look at `self.is_open`. A `state_dict` of the logger's own adds to this one's.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from callsheet.context import Context, Outcome
from callsheet.errors import ConfigError
from callsheet.extras import load
from callsheet.loggers.logger import Logger

_SECRETS = ("password", "secret", "token", "key")


class Opened(NamedTuple):
    """A run of the tracker; `is_ours` where the logger opened it, and so closes it."""

    run_id: str
    is_ours: bool = True


class Tracker(Logger):
    """The base of loggers that write to a run of a tracker; see the module.

    The run is opened at `on_checkpoint_load_end`. A resume under the same run name goes on in the tracker's run whose id the checkpoint
    holds; under another name it is a fork, with a run of its own.

    Raises:
        MissingPackage: the tracker's package is not installed.
    """

    lane = "background"
    """A tracker may be slow, or away, and training does not wait for it. Where a tracker has to be told at once, its class says `inline`."""

    package: ClassVar[str]
    """What is imported."""
    extra: ClassVar[str]
    """What `pip install 'callsheet[...]'` takes."""

    _opened: ClassVar[set[str]] = set()
    """The ids of runs that loggers of this process have open: another logger finds them active, and they are not its own to join."""
    _opening: ClassVar[dict[str, threading.Lock]] = {}
    """By package: two loggers of one tracker, each in its lane, open one after the other, so that the second knows the first's run."""

    def __init__(self) -> None:
        self.run_id: str | None = None  # of the tracker's run; stays when it is closed
        self.is_open = False
        self._is_ours = False
        self._saved: dict[str, Any] = {}
        if find_spec(self.package) is None:  # to be known now; it is imported where a run is opened
            self._module()

    @property
    def state_is_ready(self) -> bool:
        """The tracker's run is known, and is all of the state: no checkpoint has to wait for the lane. One with more state waits."""
        return self.is_open and type(self).state_dict is Tracker.state_dict

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Begin, or go on where the checkpoint says."""
        goes_on = ctx.checkpoint is not None and self._saved.get("run") == ctx.run.name
        self._saved = {"run": ctx.run.name, "run_id": self._saved["run_id"] if goes_on else None}
        with self._opening.setdefault(self.package, threading.Lock()):
            self.run_id, self._is_ours = self._open(ctx, self._saved["run_id"])
            if self._is_ours:
                self._opened.add(self.run_id)
        self._saved["run_id"], self.is_open = self.run_id, True
        if ctx.run.config:
            self.log_hyperparameters(ctx, ctx.run.config)

    def on_log(self, ctx: Context) -> None:
        """Write the record."""
        if self.is_open:
            self._write(ctx, ctx.record.values)

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Write settings under dotted names."""
        if self.is_open:
            self._settings(ctx, flat(values))

    def on_exception(self, ctx: Context) -> None:
        """Say what was raised."""
        if self.is_open:
            self._fail(ctx, f"{type(ctx.exception).__name__}: {ctx.exception}"[:5000])

    def on_run_end(self, ctx: Context) -> None:
        """Close the run, if it was opened here."""
        if self.is_open:
            self.is_open = False
            if self._is_ours:
                self._opened.discard(self.run_id or "")
                self._close(ctx, ctx.run.outcome or Outcome.FINISHED)

    def state_dict(self) -> Mapping[str, Any]:
        """The id of the tracker's run, and the name of ours."""
        return dict(self._saved) if self._saved.get("run_id") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._saved = dict(state)

    # --- for the logger to write ---

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        raise NotImplementedError

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _fail(self, ctx: Context, error: str) -> None:
        """An exception leaves the trainer."""

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        raise NotImplementedError

    def _module(self) -> Any:
        """The tracker's package; not kept, so that a logger can be copied."""
        return load(self.package, extra=self.extra, wanted_by=type(self).__name__)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names (`optimizer.lr`, `callbacks.0.keep`); leaves are numbers, strings, None, or lists of these."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, (set, frozenset)):
            value = sorted(value, key=str)
        if isinstance(value, (list, tuple)) and any(isinstance(each, (Mapping, list, tuple)) for each in value):
            value = {str(place): each for place, each in enumerate(value)}
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{path}.")
        elif isinstance(value, (list, tuple)):
            found[path] = [plain(each) for each in value]
        else:
            found[path] = plain(value)
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `flat` made flat: a dictionary in a dictionary for each dot."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        inside = found
        for part in outer:
            if not isinstance(inside.get(part), dict):
                inside[part] = {}
            inside = inside[part]
        inside[last] = value
    return found


def check_no_secret(what: str, url: str | None, environment: str) -> None:
    """Refuse a URL that holds a password or a token: options are written to the run's folder; `environment` says what is not."""
    parts = urlsplit(url or "")
    asked = any(secret in name for name, _ in parse_qsl(parts.query) for secret in _SECRETS)
    if asked or parts.password is not None or (parts.scheme.startswith("http") and parts.username is not None):
        raise ConfigError(f"{what} holds a secret, and options are written to the run's folder; give it as {environment} instead")


def plain(value: Any) -> Any:
    """`value` as a number, a string or None: what trackers can show in a cell."""
    if hasattr(value, "item") and getattr(value, "size", None) is not None:  # numpy's numbers, and tensors
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # several
            return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
