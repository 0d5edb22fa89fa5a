"""Logging to Trackio."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callsheet.core.context import Context
from callsheet.core.run_state import Outcome
from callsheet.errors import ConfigError
from callsheet.loggers.support.pixels import as_pixels
from callsheet.loggers.support.tracker import Opened, Tracker, check_no_secret, plain

logger = logging.getLogger("callsheet")

_LEVEL_OF_OUTCOME = {Outcome.FAILED: "ERROR", Outcome.INTERRUPTED: "WARN", Outcome.PREEMPTED: "WARN"}


class TrackioLogger(Tracker):
    """Log metrics, hyperparameters, images, tables and files to Trackio: a local database, a server, or a Hugging Face Space.

    Without `space_id` and `server_url`, data is stored in an SQLite database in `TRACKIO_DIR`, or in Trackio's cache folder;
    `trackio show` shows it. Trackio writes the data from its own thread, twice a second; the end of the run waits up to 30
    seconds for this thread.

    A resume continues the latest Trackio run of the same name, with a warning if it is not the run of the checkpoint. Steps that are
    trained again appear twice. If a Trackio run is open that no logger opened, the logger uses it and leaves it open. The outcome
    and an exception are logged as alerts of Trackio, such as `run finished` and `exception`. NaN and infinite values are kept. A
    file becomes an artifact of the run.

    Args:
        project: the project of the runs.
        run_name: the name in Trackio; None means the run's name.
        group: the group to which the run belongs.
        space_id: a Hugging Face Space, such as `user/space`, which is created if it does not exist.
        private: whether a newly created Space is private.
        server_url: your own Trackio server; its token is read from `TRACKIO_WRITE_TOKEN`.
        system_metrics: let Trackio log the machine's metrics as well, from its own threads.

    Raises:
        ConfigError: the project is empty, or the URL has a token.
        MissingPackage: trackio is not installed.
    """

    # Run on the training thread: Trackio has one current run per thread, and has its own queue for logged values.
    lane = "inline"
    package = "trackio"
    extra = "trackio"

    def __init__(
        self,
        *,
        project: str = "callsheet",
        run_name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        private: bool = True,
        server_url: str | None = None,
        system_metrics: bool = False,
    ) -> None:
        check_no_secret("server_url", server_url, "TRACKIO_WRITE_TOKEN in the environment")
        if not project.strip():
            raise ConfigError("project='' is empty; give it a name")
        super().__init__()
        self.project = project
        self.run_name = run_name
        self.run: Any = None  # the open Trackio run; None if there is none
        self._where = {"group": group, "space_id": space_id, "private": private, "server_url": server_url}
        self._system_metrics = system_metrics
        # Whether some hyperparameters are not sent yet, and the earliest time at which to send them.
        self._has_unsent, self._send_at = False, 0.0

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        if self.is_open:
            cells = [[plain(cell) for cell in row] for row in rows]
            self._log({name: self._module().Table(columns=list(columns), data=cells)}, ctx.step)

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Log images. Several images are named `<name>/<number>`."""
        if self.is_open:
            image = self._module().Image
            named = {f"{name}/{i}" if len(images) > 1 else name: image(as_pixels(each)) for i, each in enumerate(images)}
            self._log(named, ctx.step)

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """Log a file as a Trackio artifact."""
        if self.is_open:
            self.run.log_artifact(path, name=re.sub(r"[^A-Za-z0-9._-]", "_", name), type="file")

    # --- methods of the base class `Tracker` that a logger must implement ---

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        trackio = self._module()
        current = trackio.context_vars.current_run
        there = current.get()
        if there is not None and there.id not in self._opened:
            self.run = there
            return Opened(there.id, is_ours=False)
        # `init` ends the current run, which may belong to another logger. Hide the current run from `init`.
        current.set(None)
        try:
            self.run = trackio.init(
                self.project,
                name=self.run_name or ctx.run.name,
                resume="allow" if run_id is not None else "never",
                embed=False,
                auto_log_cpu=self._system_metrics,
                auto_log_gpu=self._system_metrics,
                **self._where,
            )
        finally:
            if there is not None:
                current.set(there)
        # Trackio finds a run only by its name, so it may have opened a different run that has the same name.
        if run_id not in (None, self.run.id):
            logger.warning(
                "Trackio's latest run %r does not have the id %s of the checkpoint; the logger continues it anyway",
                self.run.name,
                run_id,
            )
        return Opened(self.run.id)

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        self._log(dict(values), ctx.record.step)

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        # Trackio reserves names that begin with an underscore, so remove leading underscores.
        self.run.config.update({name.lstrip("_"): value for name, value in values.items()})
        self._has_unsent = True

    def _log(self, values: dict[str, Any], step: int) -> None:
        """Log values to Trackio, together with any hyperparameters that were not sent yet.

        Trackio sends hyperparameters only once, unless `_config_logged` is reset. Of several versions that are stored together,
        it uses the first.
        """
        if self._has_unsent and time.monotonic() >= self._send_at:
            self.run._config_logged = False
            self._has_unsent, self._send_at = False, time.monotonic() + 1.0
        self.run.log(values, step=step)

    def _fail(self, ctx: Context, error: str) -> None:
        self.run.alert("exception", error, level=self._module().AlertLevel.ERROR, step=ctx.step)

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        if self._has_unsent:
            time.sleep(max(0.0, self._send_at - time.monotonic()))
            self._log({}, ctx.step)
        run, self.run = self.run, None
        current = self._module().context_vars.current_run
        if current.get() is run:
            current.set(None)
        run.alert(f"run {outcome.value}", level=self._module().AlertLevel[_LEVEL_OF_OUTCOME.get(outcome, "INFO")], step=ctx.step)
        run.finish()
