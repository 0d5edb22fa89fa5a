"""Records, settings, images, tables and files in Trackio."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callsheet.context import Context, Outcome
from callsheet.errors import ConfigError
from callsheet.loggers.pixels import as_pixels
from callsheet.loggers.tracker import Opened, Tracker, check_no_secret, plain

logger = logging.getLogger("callsheet")

_LEVELS = {Outcome.FAILED: "ERROR", Outcome.INTERRUPTED: "WARN", Outcome.PREEMPTED: "WARN"}


class TrackioLogger(Tracker):
    """Log to Trackio: a database on this machine, a server, or a Space on the Hugging Face Hub.

    Without `space_id` and `server_url` it is SQLite in `TRACKIO_DIR`, or Trackio's cache folder; `trackio show` draws it. A thread of
    Trackio's writes twice a second, and its end is waited for by at most 30 seconds.

    A resume goes on in the run of the same name and id; steps that are done a second time stand twice. Where a Trackio run is open that
    no logger opened, that one is used, and left open. How the run ended, and an exception, are alerts of Trackio: `run finished`,
    `run failed`. NaN and infinite values are kept. A file becomes an artifact of the run.

    Args:
        project: of the runs.
        run_name: what it is called there; the run's name where it is None.
        group: of runs that belong together.
        space_id: a Space, such as `user/space`, made where there is none.
        private: of a Space that is made.
        server_url: a Trackio server of your own; its token is read from `TRACKIO_WRITE_TOKEN`.
        system_metrics: have Trackio log the machine's figures as well, from threads of its own.

    Raises:
        ConfigError: an empty project, or a token in the URL.
        MissingPackage: trackio is not installed.
    """

    lane = "inline"  # Trackio's current run is a thread's own; and what is logged goes into a queue of Trackio's as it is
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
            raise ConfigError("project must have a name")
        super().__init__()
        self.project = project
        self.run_name = run_name
        self.run: Any = None  # Trackio's, while it is open
        self._where = {"group": group, "space_id": space_id, "private": private, "server_url": server_url}
        self._system_metrics = system_metrics
        self._has_news, self._news_at = False, 0.0  # settings that Trackio has not been told, and when it may be

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of Trackio."""
        if self.is_open:
            cells = [[plain(cell) for cell in row] for row in rows]
            self._log({name: self._module().Table(columns=list(columns), data=cells)}, ctx.step)

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Images; where there are several, as `<name>/<number>`."""
        if self.is_open:
            image = self._module().Image
            named = {f"{name}/{i}" if len(images) > 1 else name: image(as_pixels(each)) for i, each in enumerate(images)}
            self._log(named, ctx.step)

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """A file, as an artifact."""
        if self.is_open:
            self.run.log_artifact(path, name=re.sub(r"[^A-Za-z0-9._-]", "_", name), type="file")

    # --- what a tracker is asked for ---

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        trackio = self._module()
        current = trackio.context_vars.current_run
        there = current.get()
        if there is not None and there.id not in self._opened:
            self.run = there
            return Opened(there.id, is_ours=False)
        current.set(None)  # `init` would end the other logger's
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
        if run_id not in (None, self.run.id):  # Trackio finds runs by their names alone
            logger.warning("Trackio's latest run %r is not %s, with which the checkpoint was saved", self.run.name, run_id)
        return Opened(self.run.id)

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        self._log(dict(values), ctx.record.step)

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        self.run.config.update({name.lstrip("_"): value for name, value in values.items()})  # others are Trackio's own
        self._has_news = True

    def _log(self, values: dict[str, Any], step: int) -> None:
        """Settings go with a record. Trackio sends them once, unless asked again; of those that it stores together it takes the first."""
        if self._has_news and time.monotonic() >= self._news_at:
            self.run._config_logged = False
            self._has_news, self._news_at = False, time.monotonic() + 1.0
        self.run.log(values, step=step)

    def _fail(self, ctx: Context, error: str) -> None:
        self.run.alert("exception", error, level=self._module().AlertLevel.ERROR, step=ctx.step)

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        if self._has_news:
            time.sleep(max(0.0, self._news_at - time.monotonic()))
            self._log({}, ctx.step)
        run, self.run = self.run, None
        current = self._module().context_vars.current_run
        if current.get() is run:
            current.set(None)
        run.alert(f"run {outcome.value}", level=self._module().AlertLevel[_LEVELS.get(outcome, "INFO")], step=ctx.step)
        run.finish()
