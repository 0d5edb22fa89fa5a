"""How MLflow is asked: with little patience, for a run of before or a new one, in names that it takes."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from callsheet.context import RunInfo

logger = logging.getLogger("callsheet")

LONGEST_NAME, LONGEST_PARAM, LONGEST_TAG = 250, 6000, 5000
"""What MLflow takes, in characters."""


_lock = threading.Lock()
_talking: list[int] = []  # the timeouts of those who talk to MLflow just now, each on a thread of its own
_before: dict[Any, Any] = {}  # MLflow's own defaults, meanwhile


@contextmanager
def patience(mlflow: Any, timeout: int) -> Iterator[None]:
    """MLflow's own would wait for minutes. It looks at its defaults at every request; what the user set in the environment counts more.

    The environment itself stays as it is: writing it on one thread while a library reads it on another may crash the program.
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
    """The run that the program has active, or None. MLflow shows a thread its own runs alone, and a logger may be on another one.

    The main thread's comes first, then one that is the only one. Where several other threads have one, none is taken: whose the logger's
    is, is not known.
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
            "several threads have an active MLflow run, and the logger takes none of them; logger.lane = 'inline' has it take its thread's"
        )
    return next(iter(runs.values())) if len(runs) == 1 else None


def client_for(mlflow: Any, run: RunInfo, uri: str | None) -> Any:
    """A client of `uri`; of what MLflow is set to where it is None; of `mlflow.db` beside the run's folder where that is nothing either."""
    if uri is None and not mlflow.is_tracking_uri_set() and run.folder is not None:
        folder = run.folder.absolute().parent
        folder.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{folder / 'mlflow.db'}"
    return mlflow.MlflowClient(tracking_uri=uri or mlflow.get_tracking_uri())


def run_of_before(mlflow: Any, client: Any, run_id: str) -> Any:
    """The run of that id, running again; None, and a warning, where it is no more."""
    try:
        run = client.get_run(run_id)
    except mlflow.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        run = None
    if run is None or run.info.lifecycle_stage == "deleted":
        logger.warning("MLflow no longer has the run %s that the checkpoint names; a new one is begun", run_id)
        return None
    client.update_run(run_id, status="RUNNING")
    return run


def new_run(mlflow: Any, client: Any, experiment: str | None, name: str, tags: Mapping[str, str]) -> Any:
    """A run in `experiment`, which is made where there is none; None is what the environment names, or `callsheet`."""
    if experiment is None and (number := os.environ.get("MLFLOW_EXPERIMENT_ID")):
        return client.create_run(number, run_name=name, tags=tags)
    title = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "callsheet"
    found = client.get_experiment_by_name(title)
    if found is None:
        try:
            client.create_experiment(title, artifact_location=_beside(client.tracking_uri))
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run made it just now
                raise
        found = client.get_experiment_by_name(title)
    return client.create_run(found.experiment_id, run_name=name, tags=tags)


def allowed(name: str) -> str:
    """`name` as MLflow takes it: no other characters, and nothing that would be another path."""
    parts = re.sub(r"[^\w.\- :/]", "_", name, flags=re.ASCII).split("/")
    return "/".join(part if part.strip(".") else part.replace(".", "_") for part in parts if part)[:LONGEST_NAME] or "_"


def _beside(uri: str) -> str | None:
    """Where artifacts go: beside an SQLite file rather than where the program happens to run; elsewhere it is the server's business."""
    path = uri.partition("sqlite:///")[2]
    return (Path(path).absolute().parent / "mlartifacts").as_uri() if path else None
