"""Logging to MLflow."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callsheet.core.context import Context
from callsheet.core.lane_options import LaneOptions
from callsheet.core.run_state import Outcome
from callsheet.errors import ConfigError
from callsheet.loggers.support.mlflow_runs import (
    MAX_NAME_CHARACTERS,
    MAX_PARAM_CHARACTERS,
    MAX_TAG_CHARACTERS,
    active_run,
    client_for,
    new_run,
    patience,
    run_of_before,
    sanitize_name,
)
from callsheet.loggers.support.pixels import as_pixels
from callsheet.loggers.support.retry_queue import RetryQueue
from callsheet.loggers.support.tracker import Opened, Tracker, check_no_secret, plain

_STATUS_OF_OUTCOME = {Outcome.PREEMPTED: "KILLED", Outcome.INTERRUPTED: "KILLED", Outcome.FAILED: "FAILED"}
# At the run's end, up to four requests are sent, two for the last records and two for the run's outcome, and each can take up to `timeout`.
_REQUESTS_AT_END = 4
_MAX_ENTRIES_PER_REQUEST = 100  # the most params or tags that MLflow accepts in one request


class MLflowLogger(Tracker):
    """Log metrics records, hyperparameters, images, tables and files to MLflow, on a server or in a local database.

    A resume continues the same MLflow run; steps that are trained again appear twice in a metric's history. If the program has an active
    run (`mlflow.start_run()`) that no logger opened, the logger uses that run and leaves it running. The logger does not make its
    run active: to log to it yourself, pass `run_id=logger.run_id` to `mlflow.log_metric`.

    The status of a run that has ended is FINISHED, FAILED, or KILLED (interrupted or preempted); the tags `callsheet.outcome` and
    `callsheet.exception` have details. NaN stays NaN; infinite values become the largest finite number. Characters that MLflow
    does not allow in names, such as parentheses, become `_`. MLflow does not allow params to change: if a hyperparameter changes,
    for example after a resume, its param keeps the first value, and the tag `changed.<name>` has the latest. A table is stored as
    the artifact `tables/<name>/<step>.csv`, a file as `files/<name>`.

    Everything is sent from a background thread (a lane), so training does not wait for it. Unless environment variables of MLflow
    set other limits, a request times out after `timeout` seconds and is tried once more. Records that could not be sent are kept
    and sent later, after a pause that is ten times as long as the failed attempt. So if a server is unavailable for a while, the
    thread spends at most a tenth of its time on attempts, and no record is lost. The end of the run waits at most four times
    `timeout` plus 5 seconds. MLflow itself reads credentials from `MLFLOW_TRACKING_USERNAME`, `..._PASSWORD` or `..._TOKEN`.

    Args:
        tracking_uri: a server, or a database such as `sqlite:///runs/mlflow.db`. None uses MLflow's own setting, or else `mlflow.db` next
            to the run's folder.
        experiment: the experiment's name; it is created if it does not exist. None uses `MLFLOW_EXPERIMENT_NAME`, or `callsheet`.
        run_name: the name in MLflow; None means the run's name.
        tags: tags of the run.
        timeout: the limit for one request, in whole seconds.

    Raises:
        ConfigError: the URI has a password, or the timeout is below one second.
        MissingPackage: mlflow-skinny is not installed.
    """

    package = "mlflow"
    extra = "mlflow"

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: int = 10,
    ) -> None:
        check_no_secret("tracking_uri", tracking_uri, "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment")
        if not timeout >= 1:
            raise ConfigError(f"timeout={timeout!r} must be at least 1 second")
        super().__init__()
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.run_name = run_name
        self.tags = dict(tags or {})
        self.timeout = timeout
        self.lane_options = LaneOptions(deadline=_REQUESTS_AT_END * timeout + 5.0)
        self._client: Any = None
        self._queue: RetryQueue
        self._params: dict[str, str] = {}  # params (MLflow's name for hyperparameters) that were already sent

    def on_run_end(self, ctx: Context) -> None:
        """Send the remaining metrics records to MLflow, and close the MLflow run."""
        try:
            if self.is_open:
                self._queue.flush()
        finally:  # close the MLflow run even if the last records cannot be sent
            super().on_run_end(ctx)

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log the table as a CSV file, which MLflow shows as a table."""
        if self.is_open:
            text = io.StringIO()
            csv.writer(text).writerows([columns, *([plain(cell) for cell in row] for row in rows)])
            with patience(self._module(), self.timeout):
                self._client.log_text(self.run_id, text.getvalue(), f"tables/{sanitize_name(name)}/{ctx.step:08d}.csv")

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Log images with their step. Several images are named `<name>/<number>`."""
        if self.is_open:
            with patience(self._module(), self.timeout):
                for i, image in enumerate(images):
                    key = sanitize_name(f"{name}/{i}" if len(images) > 1 else name).replace(":", "_")
                    self._client.log_image(self.run_id, as_pixels(image), key=key, step=ctx.step, synchronous=True)

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """Upload the file to MLflow as an artifact, and wait until that is done."""
        if self.is_open:
            with patience(self._module(), self.timeout):
                self._client.log_artifact(self.run_id, str(path), f"files/{sanitize_name(name)}".removesuffix(f"/{path.name}"))

    # --- methods of the base class `Tracker` that a logger must implement ---

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        mlflow = self._module()
        with patience(mlflow, self.timeout):
            self._client = client_for(mlflow, ctx.run, self.tracking_uri)
            active = None
            if self.tracking_uri in (None, mlflow.get_tracking_uri()):
                active = mlflow.active_run() if self.lane == "inline" else active_run(mlflow)
            if active is not None:
                self._client, run = mlflow.MlflowClient(), active
            else:
                run = run_of_before(mlflow, self._client, run_id) if run_id is not None else None
                run = run or new_run(mlflow, self._client, self.experiment, self.run_name or ctx.run.name, self.tags)
            self._params = dict(self._client.get_run(run.info.run_id).data.params)
        self._queue = RetryQueue(
            lambda metrics: self._send(metrics=metrics),
            at_once=1000,
            is_hopeless=lambda error: getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE",
        )
        return Opened(run.info.run_id, active is None)

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        metric, now = self._module().entities.Metric, int(time.time() * 1000)
        self._queue.put([metric(sanitize_name(name), value, now, ctx.record.step) for name, value in values.items()])

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        entities = self._module().entities
        latest = {sanitize_name(name): str(value)[:MAX_PARAM_CHARACTERS] for name, value in values.items()}
        new = [entities.Param(name, value) for name, value in latest.items() if name not in self._params]
        for start in range(0, len(new), _MAX_ENTRIES_PER_REQUEST):
            self._send(params=new[start : start + _MAX_ENTRIES_PER_REQUEST])
        self._params = latest | self._params
        changed = {f"changed.{name}": value for name, value in latest.items() if self._params[name] != value}
        tags = [entities.RunTag(name[:MAX_NAME_CHARACTERS], value[:MAX_TAG_CHARACTERS]) for name, value in changed.items()]
        for start in range(0, len(tags), _MAX_ENTRIES_PER_REQUEST):
            self._send(tags=tags[start : start + _MAX_ENTRIES_PER_REQUEST])

    def _fail(self, ctx: Context, error: str) -> None:
        self._send(tags=[self._module().entities.RunTag("callsheet.exception", error[:MAX_TAG_CHARACTERS])])

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        with patience(self._module(), self.timeout):
            self._client.set_terminated(self.run_id, _STATUS_OF_OUTCOME.get(outcome, "FINISHED"))
            self._client.set_tag(self.run_id, "callsheet.outcome", outcome.value)

    def _send(self, **entries: list[Any]) -> None:
        with patience(self._module(), self.timeout):
            self._client.log_batch(self.run_id, **entries, synchronous=True)
