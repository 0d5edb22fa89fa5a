"""The base class of loggers for experiment trackers, such as W&B and MLflow.

Each logger has one run of the tracker, which is opened before training and closed with the run's outcome.

A logger derives from `Tracker`, sets `package` and `extra`, and implements:

    _open(ctx, run_id)      create a run of the tracker, or resume the one with that id; return `Opened(run_id, is_ours)`
    _write(ctx, values)     log a record's values, by name
    _settings(ctx, values)  log hyperparameters, by dotted name (`flatten`)
    _fail(ctx, error)       log an exception, on one line (optional)
    _close(ctx, outcome)    end the run; only called if `is_ours`

These methods run on one background thread (a lane) while training continues, so `ctx` is a snapshot (a copy of fields), and the
`deadline` of `lane_options` should allow for the time that `_close` may take. All except `_open` are called only while a run is
open. If the logger overrides methods of `Logger`, such as `log_images`, they must check `self.is_open`. If the logger overrides
`state_dict`, it must extend the result of `Tracker.state_dict`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from callsheet.core.callback import Lane
from callsheet.core.context import Context
from callsheet.core.optional import load
from callsheet.core.run_state import Outcome
from callsheet.errors import ConfigError, text_of
from callsheet.loggers.logger import Logger

_SECRET_WORDS = ("password", "secret", "token", "key")


class Opened(NamedTuple):
    """A run in the experiment tracker. `is_ours` says whether the logger opened the run itself, and must therefore close it."""

    run_id: str
    is_ours: bool = True


class Tracker(Logger):
    """The base class of loggers that write to a run of an experiment tracker, such as W&B.

    The docstring of the module lists the methods that a subclass implements.

    The run is opened at `on_checkpoint_load_end`. A resume under the same run name continues the tracker's run whose id is in the
    checkpoint. A resume under another name is a fork, and gets a run of its own.

    Raises:
        MissingPackage: the tracker's package is not installed.
    """

    lane: Lane = "background"
    """A tracker may be slow or unavailable, so its logger runs on a background thread (a lane), and training does not wait.

    A subclass can choose `inline` if that is necessary.
    """

    package: ClassVar[str]
    """The name of the tracker's Python package, such as `wandb`."""
    extra: ClassVar[str]
    """The name of the extra that installs the tracker's package: `pip install 'callsheet[<extra>]'`."""

    _opened: ClassVar[set[str]] = set()
    """The ids of runs that loggers of this process have opened. Another logger that finds such a run active must not use it."""
    _opening: ClassVar[dict[str, threading.Lock]] = {}
    """For each tracker's package, the lock that a logger holds while it opens a run.

    With this lock, two loggers of one tracker, each in its own lane, open their runs one after the other, so that the second
    logger knows the first logger's run.
    """

    def __init__(self) -> None:
        self.run_id: str | None = None  # id of the run in the tracker; kept after that run is closed
        self.is_open = False
        self._is_ours = False
        self._saved: dict[str, Any] = {}
        if find_spec(self.package) is None:  # raise MissingPackage now, rather than later when a run is opened
            self._module()

    @property
    def state_is_ready(self) -> bool:
        """Whether a checkpoint can call `state_dict` before the logger's thread has handled all earlier events.

        It can if the tracker's run is open and the subclass adds no state.
        """
        return self.is_open and type(self).state_dict is Tracker.state_dict

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Open a new run in the tracker, or continue the run whose id is in the loaded checkpoint."""
        is_resumed = ctx.checkpoint is not None and self._saved.get("run") == ctx.run.name
        self._saved = {"run": ctx.run.name, "run_id": self._saved["run_id"] if is_resumed else None}
        with self._opening.setdefault(self.package, threading.Lock()):
            self.run_id, self._is_ours = self._open(ctx, self._saved["run_id"])
            if self._is_ours:
                self._opened.add(self.run_id)
        self._saved["run_id"], self.is_open = self.run_id, True

    def on_log(self, ctx: Context) -> None:
        if self.is_open:
            self._write(ctx, ctx.record.values)

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Log hyperparameters under dotted names such as `optimizer.lr`."""
        if self.is_open:
            self._settings(ctx, flatten(values))

    def on_exception(self, ctx: Context) -> None:
        if self.is_open and (error := ctx.exception) is not None:
            self._fail(ctx, f"{type(error).__name__}: {text_of(error)}"[:5000])

    def on_run_end(self, ctx: Context) -> None:
        """Close the tracker's run if the logger opened it."""
        if self.is_open:
            self.is_open = False
            if self._is_ours:
                self._opened.discard(self.run_id or "")
                self._close(ctx, ctx.run.outcome or Outcome.FINISHED)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the tracker's run id and the training run's name. A run with another name opens a new run in the tracker."""
        return dict(self._saved) if self._saved.get("run_id") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved = dict(state)

    # --- methods that a subclass must implement ---

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        raise NotImplementedError

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _fail(self, ctx: Context, error: str) -> None:
        """Log the exception that ended the run. A logger whose tracker can store exceptions overrides this method."""

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        raise NotImplementedError

    def _module(self) -> Any:
        """Import and return the tracker's package. No attribute stores the package, because modules cannot be copied."""
        return load(self.package, extra=self.extra, wanted_by=type(self).__name__)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values to a dictionary with dotted names, such as `optimizer.lr` or `callbacks.0.keep`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, (set, frozenset)):
            value = sorted(value, key=str)
        if isinstance(value, (list, tuple)) and any(isinstance(each, (Mapping, list, tuple)) for each in value):
            value = {str(place): each for place, each in enumerate(value)}
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{path}.")
        elif isinstance(value, (list, tuple)):
            found[path] = [plain(each) for each in value]
        else:
            found[path] = plain(value)
    return found


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted names to nested dictionaries, one level for each dot. This is the reverse of `flatten`."""
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
    """Raise ConfigError if a URL contains a password or a token, because a logger's options are written to the run's folder.

    `environment` names the environment variables to use instead.
    """
    parts = urlsplit(url or "")
    asked = any(secret in name for name, _ in parse_qsl(parts.query) for secret in _SECRET_WORDS)
    if asked or parts.password is not None or (parts.scheme.startswith("http") and parts.username is not None):
        raise ConfigError(
            f"{what} contains a secret, and options are written to the run's folder; give it as {environment} instead"
        )


def plain(value: Any) -> Any:
    """Return `value` as a number, a string or None, which trackers can show in a table cell."""
    if hasattr(value, "item") and getattr(value, "size", None) is not None:  # a numpy scalar or array, or a tensor
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # `value` has more than one element
            return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
