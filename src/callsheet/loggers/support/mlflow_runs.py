"""Access to MLflow: sets short timeouts for requests, finds or creates runs, and makes names that MLflow allows."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from callsheet.core.run_state import RunInfo

logger = logging.getLogger("callsheet")

MAX_NAME_CHARACTERS, MAX_PARAM_CHARACTERS, MAX_TAG_CHARACTERS = 250, 6000, 5000
"""The most characters that MLflow allows in a name, in the value of a param, and in the value of a tag."""


_lock = threading.Lock()
_talking: list[int] = []  # the timeouts of all `with patience(...)` blocks that are running, in any thread
# The original default of each changed MLflow variable, to restore when the last `with patience(...)` block ends.
_before: dict[Any, Any] = {}


@contextmanager
def patience(mlflow: Any, timeout: int) -> Iterator[None]:
    """While the `with` block runs, use a short timeout for requests to MLflow. With MLflow's defaults, a request may take minutes.

    MLflow reads its defaults at every request, and environment variables of the user override them. This function changes the
    defaults and not the environment, because a program may crash if one thread writes the environment while a library in another
    thread reads it.
    """
    known = mlflow.environment_variables
    with _lock:
        _talking.append(timeout)
        for variable, value in ((known.MLFLOW_HTTP_REQUEST_TIMEOUT, timeout), (known.MLFLOW_HTTP_REQUEST_MAX_RETRIES, 1)):
            _before.setdefault(variable, variable.default)
            variable.default = value
    try:
        yield
    finally:
        with _lock:
            _talking.remove(timeout)
            if not _talking:
                for variable, value in _before.items():
                    variable.default = value
                _before.clear()


def active_run(mlflow: Any) -> Any:
    """Return the MLflow run that the program has started in any thread, or None.

    MLflow shows a thread only the runs of that thread, and the logger may be in another thread.

    The run of the main thread is preferred, then the only run of another thread. If several other threads have runs, the result
    is None, because it is not known which one the logger should use.
    """
    if (own := mlflow.active_run()) is not None:
        return own
    living = {thread.ident for thread in threading.enumerate()}
    stacks = mlflow.tracking.fluent._active_run_stack.get_all_thread_values()
    runs = {thread: stack[-1] for thread, stack in stacks.items() if stack and thread in living}
    if (main := threading.main_thread().ident) in runs:
        return runs[main]
    if len(runs) > 1:
        logger.warning(
            "several threads have an active MLflow run, so the logger uses none of them; to use the run of its own thread, set logger.lane = 'inline'"
        )
    return next(iter(runs.values())) if len(runs) == 1 else None


def client_for(mlflow: Any, run: RunInfo, uri: str | None) -> Any:
    """Return an MLflow client for the tracking URI `uri`.

    If `uri` is None, use MLflow's own setting, or else the database `mlflow.db` next to the run's folder.
    """
    if uri is None and not mlflow.is_tracking_uri_set() and run.folder is not None:
        folder = run.folder.absolute().parent
        folder.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{folder / 'mlflow.db'}"
    return mlflow.MlflowClient(tracking_uri=uri or mlflow.get_tracking_uri())


def run_of_before(mlflow: Any, client: Any, run_id: str) -> Any:
    """Return the MLflow run that an earlier process of this training run created, after setting the MLflow run's status to RUNNING.

    If the run no longer exists, log a warning and return None.
    """
    try:
        run = client.get_run(run_id)
    except mlflow.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        run = None
    if run is None or run.info.lifecycle_stage == "deleted":
        logger.warning("MLflow no longer has the run %s of the checkpoint; a new run is created", run_id)
        return None
    client.update_run(run_id, status="RUNNING")
    return run


def new_run(mlflow: Any, client: Any, experiment: str | None, name: str, tags: Mapping[str, str]) -> Any:
    """Create an MLflow run, and its experiment if necessary.

    If `experiment` is None, use the experiment of `MLFLOW_EXPERIMENT_ID`, else of `MLFLOW_EXPERIMENT_NAME`, else `callsheet`.
    `mlflow.set_experiment` sets `MLFLOW_EXPERIMENT_ID`. If the client's store has no experiment with this ID, log a warning and ignore the ID.
    """
    title = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "callsheet"
    if experiment is None and (number := os.environ.get("MLFLOW_EXPERIMENT_ID")):
        try:
            return client.create_run(number, run_name=name, tags=tags)
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning(
                "MLFLOW_EXPERIMENT_ID is %s, but MLflowLogger's store has no such experiment, so the run is logged to the experiment %r. Give "
                "MLflowLogger the tracking_uri of the other store, or call mlflow.set_tracking_uri before mlflow.set_experiment",
                number,
                title,
            )
    found = client.get_experiment_by_name(title)
    if found is None:
        try:
            client.create_experiment(title, artifact_location=_artifacts_beside(client.tracking_uri))
        except mlflow.MlflowException as error:
            # The code RESOURCE_ALREADY_EXISTS means that another process has just created the experiment.
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(title)
    return client.create_run(found.experiment_id, run_name=name, tags=tags)


def sanitize_name(name: str) -> str:
    """Convert `name` to a name that MLflow allows: replace invalid characters by `_`, and remove empty path parts."""
    parts = re.sub(r"[^\w.\- :/]", "_", name, flags=re.ASCII).split("/")
    return "/".join(part if part.strip(".") else part.replace(".", "_") for part in parts if part)[:MAX_NAME_CHARACTERS] or "_"


def _artifacts_beside(uri: str) -> str | None:
    """Return a folder for artifacts next to the SQLite database `uri`. MLflow's default would be the working directory.

    Return None for any other URI, so that the server chooses.
    """
    path = uri.partition("sqlite:///")[2]
    return (Path(path).absolute().parent / "mlartifacts").as_uri() if path else None
