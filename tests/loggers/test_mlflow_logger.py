"""MLflow on SQLite, read back with MLflow's client; and a server that cannot be reached."""

from __future__ import annotations

import base64
import csv
import http.server
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlflow
import numpy
import pytest
import torch
from PIL import Image
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.errors import ConfigError, MissingPackage
from callsheet.loggers.mlflow_logger import MLflowLogger
from callsheet.loggers.support.mlflow_runs import active_run, patience
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3


class Acts(Callback):
    """Calls the given functions at the ends of steps."""

    def __init__(self, **acts: Callable[[Context], Any]) -> None:
        self.acts = acts

    def on_train_step_end(self, ctx: Context) -> None:
        if act := self.acts.get(f"at_{ctx.step}"):
            act(ctx)


def save(ctx: Context) -> None:
    ctx.control.save("asked for", replicated=True)


def stop(ctx: Context) -> None:
    ctx.control.stop("asked for", replicated=True)


def raises(error: BaseException) -> Callable[[Context], None]:
    def act(ctx: Context) -> None:
        raise error

    return act


def fit(
    folder: Path, *callbacks: Callback, logger: MLflowLogger | None = None, in_step: bool = False, **options: Any
) -> MLflowLogger:
    """Train. With `in_step`, each step waits until the logger has received all events."""
    logger = logger or MLflowLogger()
    options = {"max_duration": "2ep", "log_interval": "1ba", "run_name": "run", **options}
    torch.manual_seed(1)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        loggers=[logger],
        runs_folder=folder,
        device="cpu",
        **options,
    ) as trainer:
        if in_step:
            trainer.callbacks.register("on_train_step_start", trainer.callbacks.drain)
        trainer.fit()
    return logger


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty database to copy, because MLflow takes seconds to create one."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(autouse=True)
def _isolated_environment(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    yield
    while mlflow.active_run() is not None:
        mlflow.end_run()


def client(folder: Path) -> Any:
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")


def run_of(folder: Path, logger: MLflowLogger) -> Any:
    return client(folder).get_run(logger.run_id)


def curve(folder: Path, logger: MLflowLogger, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client(folder).get_metric_history(logger.run_id, name)]


def runs(folder: Path) -> list[Any]:
    experiments = [experiment.experiment_id for experiment in client(folder).search_experiments()]
    return list(client(folder).search_runs(experiments))


# --- records ---


def test_every_record_is_in_the_history(tmp_path: Path) -> None:
    def odd(ctx: Context) -> None:
        ctx.log({"odd/nan": math.nan, "odd/inf": math.inf, "odd/name (x)/../y": 1.0}, across="same")

    kept: list[tuple[int, float]] = []

    class KeepsRecords(Callback):
        phase = "report"

        def on_log(self, ctx: Context) -> None:
            if "train/loss" in ctx.record.values:
                kept.append((ctx.record.step, ctx.record.values["train/loss"]))

    logger = fit(tmp_path, Acts(at_2=odd), KeepsRecords())
    assert curve(tmp_path, logger, "train/loss") == kept
    assert len(kept) == 6
    assert [step for step, _ in curve(tmp_path, logger, "validation/loss")] == [3, 6]
    ((step, nan),) = curve(tmp_path, logger, "odd/nan")
    assert step == 2
    assert math.isnan(nan)
    assert curve(tmp_path, logger, "odd/inf") == [(2, sys.float_info.max)]
    assert curve(tmp_path, logger, "odd/name _x_/__/y") == [(2, 1.0)]
    run = run_of(tmp_path, logger)
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert client(tmp_path).get_experiment(run.info.experiment_id).name == "callsheet"
    assert Path.cwd().joinpath("mlruns").exists() is False


def test_more_metrics_than_fit_into_one_request_are_logged(tmp_path: Path) -> None:
    many = {f"many/{i}": float(i) for i in range(2100)}
    logger = fit(tmp_path, Acts(at_1=lambda ctx: ctx.log(many, across="same")), max_duration="1ep")
    found = run_of(tmp_path, logger).data.metrics
    assert {name: value for name, value in found.items() if name.startswith("many/")} == many


def test_a_resume_continues_the_same_run(tmp_path: Path) -> None:
    seen: list[str] = []
    first = MLflowLogger(tags={"team": "us"})
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_2=save, at_5=raises(ValueError("a bad step"))), logger=first, config={"limit": "2ep", "lr": 0.1})
    failed = run_of(tmp_path, first)
    assert (failed.info.status, failed.data.tags["callsheet.outcome"]) == ("FAILED", "failed")
    assert failed.data.tags["callsheet.exception"] == "ValueError: a bad step"
    watch = Acts(at_4=lambda ctx: seen.append(run_of(tmp_path, first).info.status))
    second = fit(tmp_path, watch, in_step=True, resume="auto", max_duration="3ep", config={"limit": "3ep", "lr": 0.1, "new": 1})
    assert second.run_id == first.run_id
    assert seen == ["RUNNING"]
    run = run_of(tmp_path, second)
    assert (run.info.status, run.data.tags["callsheet.outcome"], run.data.tags["team"]) == ("FINISHED", "finished", "us")
    assert run.info.end_time > failed.info.end_time
    assert [step for step, _ in curve(tmp_path, second, "train/loss")] == [1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9]
    assert run.data.params == {"limit": "2ep", "lr": "0.1", "new": "1"}
    assert run.data.tags["changed.limit"] == "3ep"
    assert [name for name in run.data.tags if name.startswith("changed.")] == ["changed.limit"]
    assert len(runs(tmp_path)) == 1


def test_a_fork_has_its_own_run(tmp_path: Path) -> None:
    first = fit(tmp_path, Acts(at_2=save))
    fork = fit(tmp_path, run_name="fork", resume=tmp_path / "run" / "checkpoints" / "ep0-ba2")
    assert sorted(run.info.run_id for run in runs(tmp_path)) == sorted(filter(None, [first.run_id, fork.run_id]))


def test_a_deleted_run_is_created_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = fit(tmp_path, Acts(at_2=save, at_3=stop))
    client(tmp_path).delete_run(first.run_id)
    second = fit(tmp_path, Acts(at_4=save, at_5=stop), resume="auto")
    assert second.run_id != first.run_id
    assert f"no longer has the run {first.run_id}" in caplog.text
    assert fit(tmp_path, resume="auto").run_id == second.run_id


# --- the outcome ---


@pytest.mark.parametrize(
    ("act", "outcome", "status"),
    [
        (stop, "stopped", "FINISHED"),
        (raises(KeyboardInterrupt()), "interrupted", "KILLED"),
        (lambda ctx: os.kill(os.getpid(), 15), "preempted", "KILLED"),
    ],
)
def test_the_outcome_is_reported(tmp_path: Path, act: Callable[[Context], None], outcome: str, status: str) -> None:
    logger = MLflowLogger()
    try:
        fit(tmp_path, Acts(at_2=act), logger=logger, max_duration="100ep")
    except KeyboardInterrupt:
        pass
    run = run_of(tmp_path, logger)
    assert (run.data.tags["callsheet.outcome"], run.info.status) == (outcome, status)


# --- runs that the user opened, and several loggers ---


def test_a_run_that_was_active_is_used_and_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with mlflow.start_run(run_name="theirs") as user_run:
        mlflow.log_param("lr", 1)
        logger = fit(tmp_path, config={"lr": 2})
        assert logger.run_id == user_run.info.run_id
        run = run_of(tmp_path, logger)
        assert run.info.status == "RUNNING"
        assert "callsheet.outcome" not in run.data.tags
        assert (run.data.params["lr"], run.data.tags["changed.lr"]) == ("1", "2")
    assert len(curve(tmp_path, logger, "train/loss")) == 6
    assert len(runs(tmp_path)) == 1


def test_only_the_main_thread_s_active_run_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    ends = threading.Event()
    threads: list[threading.Thread] = []

    def has_a_run(begun: threading.Event) -> None:
        with mlflow.start_run():
            begun.set()
            ends.wait(60)

    try:
        for is_only_one in (True, False):
            begun = threading.Event()
            threads.append(threading.Thread(target=has_a_run, args=(begun,), daemon=True))
            threads[-1].start()
            assert begun.wait(60)
            assert (active_run(mlflow) is not None) == is_only_one
        assert "several threads have an active MLflow run" in caplog.text
        with mlflow.start_run() as own, ThreadPoolExecutor() as elsewhere:
            assert elsewhere.submit(active_run, mlflow).result(60).info.run_id == own.info.run_id
    finally:
        ends.set()
        for thread in threads:
            thread.join(60)
    assert active_run(mlflow) is None


def test_the_global_state_of_mlflow_is_not_touched(tmp_path: Path) -> None:
    active: list[Any] = []
    fit(tmp_path, Acts(at_2=lambda ctx: active.append(mlflow.active_run())))
    assert active == [None]
    assert not mlflow.is_tracking_uri_set()


def test_mlflow_writes_to_the_given_store_and_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "mlflow.db", tmp_path / "elsewhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere' / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    fit(tmp_path)
    (run,) = runs(tmp_path / "elsewhere")
    assert client(tmp_path / "elsewhere").get_experiment(run.info.experiment_id).name == "mine"
    fit(tmp_path, logger=MLflowLogger(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}", experiment="own"), run_name="other")
    assert [run.info.run_name for run in runs(tmp_path)] == ["other"]


def test_an_experiment_of_another_store_is_ignored_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The variable is that of `mlflow.set_experiment`, which the script may have called for its own store."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "367248113735237878")
    fit(tmp_path)
    (run,) = runs(tmp_path)
    assert client(tmp_path).get_experiment(run.info.experiment_id).name == "callsheet"
    assert "MLFLOW_EXPERIMENT_ID is 367248113735237878" in caplog.text


# --- what is logged ---


def artifacts(folder: Path, logger: MLflowLogger) -> Path:
    uri: str = run_of(folder, logger).info.artifact_uri
    return Path(uri.removeprefix("file://"))


def test_settings_images_tables_and_files_are_logged(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("{}")

    def log_everything(ctx: Context) -> None:
        ctx.log_hyperparameters(
            {"model": {"depth": 2, "path": Path("x"), "sizes": (1, 2)}, "parts": [{"name": "a"}], "long": "x" * 9000}
        )
        ctx.log_hyperparameters({f"many.{i}": i for i in range(250)})
        ctx.log_images("eval/samples: (a)", [torch.zeros(3, 4, 5), numpy.full((4, 5), 255, dtype=numpy.uint8)])
        ctx.log_table("eval/texts", ["prompt", "score"], [["why, how?", 0.5], [Path("y"), torch.tensor(2)], [None, "none"]])
        ctx.log_file("traces/trace.json", trace)
        ctx.log_file("other", trace)

    logger = fit(tmp_path, Acts(at_2=log_everything), max_duration="1ep")
    params = run_of(tmp_path, logger).data.params
    recorded = {
        "model.depth": "2",
        "model.path": "x",
        "model.sizes": "[1, 2]",
        "parts.0.name": "a",
        "long": "x" * 6000,
        "many.249": "249",
    }
    assert {name: params[name] for name in recorded} == recorded
    folder = artifacts(tmp_path, logger)
    assert folder.is_relative_to(tmp_path / "mlartifacts")
    black, white = (numpy.asarray(Image.open(path)) for path in sorted((folder / "images").glob("*.png")))
    assert (black.max(), white.min(), black.shape) == (0, 255, (4, 5, 3))
    assert all("+step+2+" in path.name for path in (folder / "images").iterdir())
    with open(folder / "tables" / "eval" / "texts" / "00000002.csv", newline="") as file:
        assert list(csv.reader(file)) == [["prompt", "score"], ["why, how?", "0.5"], ["y", "2"], ["", "none"]]
    assert (folder / "files" / "traces" / "trace.json").read_text() == "{}"
    assert (folder / "files" / "other" / "trace.json").read_text() == "{}"


# --- failures ---


class Server:
    """A minimal MLflow server. If `down`, it answers with 503; if `silent`, it does not answer."""

    def __init__(self) -> None:
        self.state = "up"
        self.metrics: list[tuple[str, int, float]] = []
        self.tags: dict[str, str] = {}
        self.status = ""
        self.credentials: set[str | None] = set()
        self.awake = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: dict[str, Any]) -> None:
                server.credentials.add(self.headers["Authorization"])
                if server.state == "silent":
                    server.awake.wait()
                    return
                content = json.dumps(server.do(urlsplit(self.path).path.rpartition("mlflow/")[2], body)).encode()
                self.send_response(503 if server.state == "down" else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def do(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.state == "down":
            return {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "come back later"}
        if method == "runs/log-batch":
            self.metrics += [(each["key"], int(each["step"]), each["value"]) for each in body.get("metrics", [])]
        elif method == "runs/set-tag":
            self.tags[body["key"]] = body["value"]
        elif method == "runs/update":
            self.status = body.get("status", self.status)
        info = {
            "run_id": "r" * 32,
            "run_uuid": "r" * 32,
            "experiment_id": "1",
            "status": "RUNNING",
            "artifact_uri": "file:///nowhere",
        }
        return {
            "experiment": {"experiment_id": "1", "name": "callsheet"},
            "run": {"info": info, "data": {}},
            "run_info": info,
        }

    def close(self) -> None:
        self.awake.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.mark.test_all
@pytest.mark.parametrize("state", ["down", "silent"])
def test_nothing_is_lost_if_a_server_is_down_for_a_while(
    tmp_path: Path, server: Server, state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2-hunter2")

    def becomes(state: str) -> Callable[[Context], None]:
        return lambda ctx: setattr(server, "state", state)

    fit(
        tmp_path,
        Acts(at_2=becomes(state), at_8=becomes("up")),
        logger=MLflowLogger(tracking_uri=server.uri, timeout=1),
        in_step=True,
        max_duration="3ep",
    )
    assert "Callback MLflowLogger" in caplog.text
    assert [step for name, step, _ in server.metrics if name == "train/loss"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (server.status, server.tags["callsheet.outcome"]) == ("FINISHED", "finished")
    assert server.credentials == {f"Basic {base64.b64encode(b'me:hunter2-hunter2').decode()}"}
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes()


@pytest.mark.test_all
@pytest.mark.parametrize("state", ["unreachable", "down", "silent"])
def test_a_server_that_is_always_down_does_not_end_the_run(
    tmp_path: Path, server: Server, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[int] = []
    server.state = state
    logger = MLflowLogger(tracking_uri="http://127.0.0.1:9" if state == "unreachable" else server.uri, timeout=1)
    start = time.monotonic()
    fit(tmp_path, Acts(at_6=lambda ctx: steps.append(ctx.step)), logger=logger)
    assert time.monotonic() - start < 60  # MLflow's own retries take minutes
    assert steps == [6]
    assert "Callback MLflowLogger" in caplog.text
    assert logger.state_dict() == {}


def test_a_run_that_could_not_be_opened_keeps_its_id(tmp_path: Path) -> None:
    run_id = fit(tmp_path, Acts(at_2=save, at_3=stop)).run_id
    down = MLflowLogger(tracking_uri="http://127.0.0.1:9", timeout=1)
    fit(tmp_path, Acts(at_4=save, at_5=stop), logger=down, resume="auto")
    assert down.run_id is None
    assert fit(tmp_path, resume="auto").run_id == run_id


def waits() -> tuple[int, int]:
    known = mlflow.environment_variables
    return known.MLFLOW_HTTP_REQUEST_TIMEOUT.get(), known.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get()


def test_retry_settings_are_restored_and_the_environment_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, environment = waits(), dict(os.environ)
    with patience(mlflow, 3):
        assert waits() == (3, 1)
        assert dict(os.environ) == environment
        with patience(mlflow, 5):
            pass
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
        assert waits() == (7, 1)
        monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    assert waits() == usual


def test_the_last_of_two_patience_blocks_restores_the_setting() -> None:
    usual = waits()
    first, second = patience(mlflow, 3), patience(mlflow, 5)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert waits() == (5, 1)
    second.__exit__(None, None, None)
    assert waits() == usual


def test_an_image_that_cannot_be_logged_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = fit(tmp_path, Acts(at_1=lambda ctx: ctx.log_images("bad", [torch.zeros(7)])))
    assert "an image has the shape (7,)" in caplog.text
    assert len(curve(tmp_path, logger, "train/loss")) == 6


def test_a_missing_package_is_reported_when_the_logger_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingPackage, match=r"MLflowLogger needs mlflow.*pip install 'callsheet\[mlflow\]'"):
        MLflowLogger()


def test_nothing_is_imported_before_a_run_is_opened() -> None:
    program = "import sys, callsheet.loggers.mlflow_logger as it; it.MLflowLogger(); assert 'mlflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"timeout": 0}, "at least 1 second"),
        ({"tracking_uri": "https://me:word@host"}, "MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as found:
        MLflowLogger(**options)
    assert "word@" not in str(found.value)


# --- ranks and neutrality ---


def rank_fits(folder: str) -> str | None:
    return fit(Path(folder), Acts(at_2=save), max_duration="1ep").run_id


@pytest.mark.slow
def test_two_ranks_log_to_one_run(tmp_path: Path) -> None:
    first, second = run_ranks(rank_fits, 2, str(tmp_path))
    assert [run.info.run_id for run in runs(tmp_path)] == [first]
    assert second is None


def test_training_is_not_affected(tmp_path: Path) -> None:
    def weights(*loggers: MLflowLogger) -> tuple[list[torch.Tensor], object]:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(), nn.Linear(4, 1))
        with Trainer(
            model,
            nn.functional.mse_loss,
            DATA,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            callbacks=CallbackManager(loggers, checking=True),
            runs_folder=tmp_path,
            device="cpu",
            max_duration="2ep",
            log_interval="1ba",
        ) as trainer:
            trainer.fit()
        return list(model.parameters()), (random.getstate(), str(numpy.random.get_state()))

    logger = MLflowLogger()
    (bare, before), (watched, after) = weights(), weights(logger)
    assert len(curve(tmp_path, logger, "train/loss")) == 6
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert before == after
