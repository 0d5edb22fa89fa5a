"""Imports of runs that other tools have written."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

from callsheet.cli.main import main
from callsheet.errors import ConfigError, MissingPackage
from callsheet.report import Imported, RunFolder, data, image_bytes, import_runs, write_report
from callsheet.report.imports import sqlite_copy
from callsheet.report.imports.imported_run import Metrics
from callsheet.report.imports.plain_settings import plain_settings, yaml_settings
from callsheet.report.imports.write import folder_name
from callsheet.report.notes import change_notes, read_notes

from .compared_runs import write_run
from .test_browser import OpenedPage

pytestmark = pytest.mark.test_all  # real servers and the files of other packages take long


def imported(source: Path | str, to: Path, **options: Any) -> dict[str, RunFolder]:
    """Import runs, and return them by name, read from their new folders."""
    return {each.folder.name: RunFolder.read(each.folder) for each in import_runs(source, to, **options)}


def curve(run: RunFolder, name: str) -> list[tuple[int, float]]:
    return [(record.step, record.values[name]) for record in run.records if name in record.values]


def names(run: RunFolder) -> set[str]:
    return {name for record in run.records for name in record.values}


def content(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the digest and modification time of each file, to check that nothing has changed."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files
    }


def run_script(script: str, folder: Path, **environment: str) -> None:
    """Run a script in its own process, because the libraries keep state."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_", "MLFLOW_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- TensorBoard ---


def summary_writer(folder: Path) -> Any:
    return pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(folder))


def event_file(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if "tfevents" in path.name)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """Write a TensorBoard folder with one run: two scalars at steps 1 to 5."""
    with summary_writer(tmp_path / "logs" / "one") as writer:
        for step in range(1, 6):
            writer.add_scalar("train/loss", 1 / 2**step, step, walltime=1_700_000_000 + 2 * step)
            if step % 2 == 0:
                writer.add_scalar("validation/loss", step / 8, step, walltime=1_700_000_001 + 2 * step)
    return tmp_path / "logs"


def test_tensorboard_scalars_images_and_hyperparameters(tmp_path: Path) -> None:
    with summary_writer(tmp_path / "logs" / "one") as writer:
        for step in (0, 3, 6):
            writer.add_scalar("train/loss", 1 / (step + 1), step, walltime=1_700_000_000.5 + step)
        writer.add_scalar("odd", math.nan, 3)
        writer.add_scalar("odd", -math.inf, 6)
        writer.add_image("pictures/a", numpy.zeros((3, 4, 5), dtype=numpy.uint8), 3)
        writer.add_images("many", numpy.zeros((2, 3, 4, 5), dtype=numpy.uint8), 3)
        writer.add_text("note", "hello", 3)
        writer.add_histogram("weights", numpy.arange(10.0), 3)
        writer.add_scalars("both", {"low": 1.0, "high": 2.0}, 6)
        writer.add_hparams({"lr": 0.5, "layers": 2, "name": "x", "deep": True}, {"hparam/score": 0.25}, global_step=6)
    (result,) = import_runs(tmp_path / "logs", tmp_path / "runs")
    run = RunFolder.read(result.folder)
    assert result.folder == tmp_path / "runs" / "one"
    assert curve(run, "train/loss") == [(step, float(numpy.float32(1 / (step + 1)))) for step in (0, 3, 6)]
    assert curve(run, "odd")[1] == (6, -math.inf)
    assert math.isnan(curve(run, "odd")[0][1])
    assert (curve(run, "both/low"), curve(run, "both/high"), curve(run, "hparam/score")) == ([(6, 1.0)], [(6, 2.0)], [(6, 0.25)])
    assert run.hyperparameters == {"lr": 0.5, "layers": 2, "name": "x", "deep": True}
    assert result.left_out["texts"] == 1
    assert result.left_out["histograms"] == 1
    assert not result.warnings
    assert [(each["name"], each["step"]) for each in run.images] == [("pictures/a", 3), ("many", 3)]
    assert all(image_bytes(run.path, file) for each in run.images for file in each["files"])
    assert (run.outcome, run.started) == ("ended", 1_700_000_000.5)
    assert [record.elapsed_seconds for record in run.records] == [0.0, 3.0, 6.0]


def test_tensorboard_tensor_scalars_and_a_restart(tmp_path: Path) -> None:
    """TensorFlow 2 writes scalars as tensors. A restart at a step makes the values from that step on invalid."""
    summaries = pytest.importorskip("tensorboard.plugins.scalar.summary_v2")
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "tf2"))
    for step in range(4):
        writer.add_event(event_pb2.Event(step=step, wall_time=1e9 + step, summary=summaries.scalar_pb("epoch_loss", 0.1 * step)))
    log = event_pb2.SessionLog
    writer.add_event(event_pb2.Event(step=2, wall_time=1e9 + 9, session_log=log(status=log.START)))
    writer.add_event(event_pb2.Event(step=2, wall_time=1e9 + 10, summary=summaries.scalar_pb("epoch_loss", 7.0)))
    huge = summaries.scalar_pb("huge", 1.0)
    huge.value[0].tensor.tensor_shape.dim.add(size=2**40)
    writer.add_event(event_pb2.Event(step=3, wall_time=1e9, summary=huge))
    writer.close()
    (result,) = import_runs(tmp_path / "tf2", tmp_path / "runs")
    run = RunFolder.read(result.folder)
    assert curve(run, "epoch_loss") == [(0, 0.0), (1, float(numpy.float32(0.1))), (2, 7.0)]
    assert names(run) == {"epoch_loss"}
    assert result.left_out == {"values that are not numbers": 1}


def test_tensorboard_folders_train_and_validation_are_one_run(tmp_path: Path) -> None:
    for part, value in (("train", 1.0), ("validation", 2.0)):
        for run in ("a", "b"):
            with summary_writer(tmp_path / "logs" / run / part) as writer:
                writer.add_scalar("epoch_loss", value, 0)
                writer.add_scalar("train/lr", 3.0, 1)
    runs = imported(tmp_path / "logs", tmp_path / "runs")
    assert set(runs) == {"a", "b"}
    assert names(runs["a"]) == {"train/epoch_loss", "validation/epoch_loss", "train/lr", "validation/train/lr"}
    assert runs["a"].evaluations[0]["results"] == {"validation": {"epoch_loss": 2.0}}
    assert set(imported(tmp_path / "logs" / "a" / "train", tmp_path / "alone")) == {"train"}


def test_values_that_were_logged_without_steps_get_their_positions(tmp_path: Path) -> None:
    with summary_writer(tmp_path / "logs") as writer:
        for value in (3.0, 2.0, 1.0):
            writer.add_scalar("loss", value)
        writer.add_scalar("once", 5.0)
    (run,) = imported(tmp_path / "logs", tmp_path / "runs").values()
    assert curve(run, "loss") == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert curve(run, "once") == [(0, 5.0)]


def test_a_truncated_event_file_yields_what_comes_before(board: Path, tmp_path: Path) -> None:
    path = event_file(board / "one")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    (result,) = import_runs(board, tmp_path / "runs")
    assert [step for step, _ in curve(RunFolder.read(result.folder), "train/loss")] == [1, 2, 3, 4]
    assert any("is cut off" in warning for warning in result.warnings)


def test_damaged_events_are_left_out_with_a_warning(board: Path, tmp_path: Path) -> None:
    path = event_file(board / "one")
    whole = bytearray(path.read_bytes())
    offset, starts = 0, []
    while offset < len(whole):
        starts.append(offset)
        offset += 16 + struct.unpack_from("<Q", whole, offset)[0]
    whole[starts[2] + 14] ^= 0xFF  # the content of an event
    path.write_bytes(whole)
    (result,) = import_runs(board, tmp_path / "runs")
    assert result.warnings == (f"{path} has damaged events, which are left out (1)",)
    assert result.records == 5
    whole[starts[4]] ^= 0xFF  # the length of an event
    path.write_bytes(whole)
    (result,) = import_runs(board, tmp_path / "runs")
    assert "is damaged" in result.warnings[0]
    assert 0 < result.records < 5


# --- W&B ---

WANDB = """
import math, os, wandb
run = wandb.init(project="p", name="a nice/run", id="one", config={"lr": 0.1, "model": {"depth": 3}})
for step in range(3):
    run.log({"train/loss": 1 / (step + 1), "n": {"b": step}, "odd": math.inf if step else math.nan, "text": "hi"}, step=2 * step)
run.log({"validation/loss": 0.25}, step=4)
run.config.update({"late": [1, 2]})
run.finish()
run = wandb.init(project="p", name="declared", id="two")
run.define_metric("train/global_step")
run.define_metric("*", step_metric="train/global_step", step_sync=True)
for step in range(3):
    run.log({"train/loss": step * 1.5, "train/global_step": 10 * step})
run.finish(exit_code=3)
"""


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    run_script(WANDB, folder, WANDB_MODE="offline", WANDB_SILENT="true")
    return folder / "wandb"


def test_wandb_history_configuration_and_outcome(wandb_folder: Path, tmp_path: Path) -> None:
    before = content(wandb_folder)
    runs = imported(wandb_folder, tmp_path)
    assert content(wandb_folder) == before
    assert set(runs) == {"a_nice-run", "declared"}
    run = runs["a_nice-run"]
    assert curve(run, "train/loss") == [(0, 1.0), (2, 0.5), (4, 1 / 3)]
    assert curve(run, "n.b") == [(0, 0.0), (2, 1.0), (4, 2.0)]
    assert curve(run, "odd")[1:] == [(2, math.inf), (4, math.inf)]
    assert math.isnan(curve(run, "odd")[0][1])
    assert curve(run, "validation/loss") == [(4, 0.25)]
    assert run.hyperparameters == {"lr": 0.1, "model": {"depth": 3}, "late": [1, 2]}
    assert (run.outcome, run.reason) == ("finished", "")
    assert all(math.isfinite(time) for time in [*run.times, run.started, run.ended, run.seconds])


def test_wandb_uses_the_step_that_the_run_declared(wandb_folder: Path, tmp_path: Path) -> None:
    """Hugging Face and Lightning declare their step. W&B's `_step` only counts the calls."""
    run = imported(wandb_folder, tmp_path)["declared"]
    assert curve(run, "train/loss") == [(0, 0.0), (10, 1.5), (20, 3.0)]
    assert names(run) == {"train/loss"}
    assert (run.outcome, run.reason) == ("failed", "exit code 3")


def test_a_single_or_truncated_log_of_wandb_is_imported_and_other_files_are_rejected(wandb_folder: Path, tmp_path: Path) -> None:
    (log,) = wandb_folder.glob("*-one/run-one.wandb")
    assert set(imported(log, tmp_path / "alone")) == {"a_nice-run"}
    copy = tmp_path / "offline-run-1-one" / "run-one.wandb"
    copy.parent.mkdir()
    copy.write_bytes(log.read_bytes()[:-12])  # without the end of its exit record
    (result,) = import_runs(copy, tmp_path / "runs")
    run = RunFolder.read(result.folder)
    assert (run.outcome, len(run.records), len(result.warnings)) == ("ended", 3, 1)
    assert "no exit record" in run.reason
    copy.write_bytes(b"not a log")
    with pytest.raises(ConfigError, match=r"nothing to import; .* cannot be read: it is not a log of W&B"):
        import_runs(copy, tmp_path / "runs")


# --- MLflow ---

MLFLOW = """
import math, os, mlflow
client = mlflow.MlflowClient(tracking_uri=os.environ["STORE"])
experiment = client.create_experiment("an experiment")
for name, status in (("first", "FINISHED"), ("second", "FAILED"), ("third", "KILLED"), ("open", None)):
    run = client.create_run(experiment, run_name=name, start_time=1_700_000_000_000)
    for step in range(3):
        client.log_metric(run.info.run_id, "train/loss", 1 / (step + 1), timestamp=1_700_000_001_000 + 500 * step, step=10 * step)
        client.log_metric(run.info.run_id, "no step", 5.0 - step, timestamp=1_700_000_001_000 + 500 * step)
    client.log_metric(run.info.run_id, "odd", math.nan, step=10)
    client.log_metric(run.info.run_id, "odd", math.inf, step=20)
    client.log_param(run.info.run_id, "lr", 0.001)
    client.log_param(run.info.run_id, "model/name", "big")
    client.set_tag(run.info.run_id, "team", "red")
    if status:
        client.set_terminated(run.info.run_id, status=status, end_time=1_700_000_009_000)
run = client.create_run(experiment, run_name="deleted")
client.log_metric(run.info.run_id, "train/loss", 1.0)
client.delete_run(run.info.run_id)
"""


@pytest.fixture(scope="module")
def mlflow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the store `mlruns`."""
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    run_script(MLFLOW, folder, STORE=f"file://{folder / 'mlruns'}", MLFLOW_ALLOW_FILE_STORE="true")
    return folder


@pytest.mark.parametrize("location", ["mlruns", "file:mlruns", "."])
def test_mlflow_runs_are_imported_from_a_folder(
    mlflow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    monkeypatch.chdir(mlflow_folder)
    before = content(mlflow_folder)
    check_mlflow_runs(imported(location, tmp_path))
    assert content(mlflow_folder) == before


@pytest.mark.test_all  # MLflow takes long to create a database
def test_mlflow_runs_are_imported_from_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    run_script(MLFLOW, tmp_path, STORE="sqlite:///mlflow.db")
    before = content(tmp_path)
    for number, location in enumerate(("mlflow.db", "sqlite:///mlflow.db", f"sqlite:///{tmp_path}/mlflow.db")):
        check_mlflow_runs(imported(location, tmp_path / f"runs-{number}"))
    assert {name: known for name, known in content(tmp_path).items() if not name.startswith("runs-")} == before


def check_mlflow_runs(runs: dict[str, RunFolder]) -> None:
    assert {name: run.outcome for name, run in runs.items()} == {
        "first": "finished",
        "second": "failed",
        "third": "interrupted",
        "open": "ended",
    }
    assert runs["open"].reason == "MLflow's status is RUNNING"
    run = runs["first"]
    assert curve(run, "train/loss") == [(0, 1.0), (10, 0.5), (20, 1 / 3)]
    assert curve(run, "no step") == [(0, 5.0), (1, 4.0), (2, 3.0)]
    assert curve(run, "odd")[1] == (20, math.inf)
    assert math.isnan(curve(run, "odd")[0][1])
    assert run.hyperparameters == {"lr": 0.001, "model/name": "big", "tags": {"team": "red"}}
    assert (run.started, run.ended) == (1_700_000_000.0, 1_700_000_009.0)
    dated = {record.step: time for record, time in zip(run.records, run.times, strict=True) if "train/loss" in record.values}
    assert dated[0] == 1_700_000_001.0


def test_damaged_runs_of_mlflow_are_left_out_with_a_warning(mlflow_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(mlflow_folder / "mlruns", tmp_path / "mlruns"))
    metas = [path for path in copy.rglob("meta.yaml") if (path.parent / "metrics").is_dir()]
    by_name = {line.split(": ")[1]: path.parent for path in metas for line in path.read_text().splitlines() if "run_name" in line}
    with open(by_name["first"] / "metrics" / "train" / "loss", "a") as file:
        file.write("1700000003000 oops 30\n1700000004000 0.2 4")
    (by_name["second"] / "meta.yaml").write_text("a: [")
    (by_name["third"] / "params" / "secret").symlink_to("/etc/passwd")
    results = {each.folder.name: each for each in import_runs(copy, tmp_path / "runs")}
    assert set(results) == {"first", "third", "open"}
    assert results["first"].warnings[0].endswith("has damaged lines, which are left out (2)")
    assert "secret" not in RunFolder.read(results["third"].folder).hyperparameters


# --- Trackio ---

TRACKIO = """
import math, trackio
for name in ("run a", "run b"):
    trackio.init("proj", name=name, config={"lr": 0.1, "n": {"x": 1}}, embed=False, auto_log_cpu=False, auto_log_gpu=False)
    for step in range(3):
        trackio.log({"train/loss": 1 / (step + 1), "odd": math.nan if step else -math.inf, "n": {"b": step}}, step=5 * step)
    trackio.log({"table": trackio.Table(columns=["a"], data=[[1]])}, step=20)
    trackio.finish()
"""


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trackio")
    folder = tmp_path_factory.mktemp("trackio")
    run_script(TRACKIO, folder, TRACKIO_DIR=str(folder / "dir"), HF_HUB_OFFLINE="1")
    return folder / "dir"


def test_trackio_runs_are_imported(trackio_folder: Path, tmp_path: Path) -> None:
    before = content(trackio_folder)
    results = import_runs(trackio_folder, tmp_path)
    assert content(trackio_folder) == before
    assert [each.folder.name for each in results] == ["run_a", "run_b"]
    assert results[0].left_out == {"images, tables and other media": 1}
    run = RunFolder.read(results[0].folder)
    assert curve(run, "train/loss") == [(0, 1.0), (5, 0.5), (10, 1 / 3)]
    assert curve(run, "n.b") == [(0, 0.0), (5, 1.0), (10, 2.0)]
    assert curve(run, "odd")[0] == (0, -math.inf)
    assert all(math.isnan(value) for _, value in curve(run, "odd")[1:])
    assert run.hyperparameters == {"lr": 0.1, "n": {"x": 1}}
    assert run.outcome == "ended"
    assert all(math.isfinite(time) for time in run.times)


def test_trackio_runs_from_before_runs_had_ids_are_imported(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "old.db") as database:
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        database.execute("CREATE TABLE configs (id INTEGER PRIMARY KEY, run_name TEXT, config TEXT)")
        rows = [
            ("2024-01-01T00:00:00+00:00", "r", 1, '{"loss": 2.5}'),
            ("no time", "r", 2, '{"loss": "NaN"}'),
            (None, "r", 3, "{"),
        ]
        database.executemany("INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?)", rows)
    (result,) = import_runs(tmp_path / "old.db", tmp_path / "runs")
    run = RunFolder.read(result.folder)
    assert curve(run, "loss")[0] == (1, 2.5)
    assert len(run.records) == 2
    assert result.warnings == ("run r has damaged records, which are left out (1)",)


# --- Lightning ---


def csv_log(folder: Path, text: str, hyperparameters: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)
    if hyperparameters:
        (folder / "hparams.yaml").write_text(hyperparameters)
    return folder


def test_metric_names_and_hyperparameters_of_lightning_are_converted(tmp_path: Path) -> None:
    csv_log(
        tmp_path / "lightning_logs" / "version_0",
        "epoch,lr-SGD,step,train_acc,train_loss_epoch,train_loss_step,val/acc,val_loss_epoch,val_loss_step\n"
        "0,0.1,4,,,0.5,,,\n0,,9,0.25,,nan,,,\n0,,9,,0.75,,0.5,0.125,\n,,,,,0.1,,,7.0\n",
        "lr: 0.1\nsizes: !!python/tuple [1, 2]\nwhat: !!python/object/apply:os.system ['touch hacked']\n",
    )
    (result,) = import_runs(tmp_path / "lightning_logs", tmp_path / "runs")
    run = RunFolder.read(result.folder)
    assert result.folder.name == "lightning_logs-version_0"
    assert curve(run, "train/loss")[:2] == [(3, 0.1), (4, 0.5)]  # a record without a step has its position
    assert curve(run, "train/loss_epoch") == [(9, 0.75)]
    assert curve(run, "train/acc") == [(9, 0.25)]
    assert curve(run, "validation/loss") == [(9, 0.125)]
    assert curve(run, "validation/loss_step") == [(3, 7.0)]
    assert curve(run, "validation/acc") == [(9, 0.5)]
    assert curve(run, "lr-SGD") == [(4, 0.1)]
    assert run.hyperparameters == {"lr": 0.1, "sizes": [1, 2], "what": ["touch hacked"]}
    assert (run.outcome, math.isnan(run.seconds), math.isnan(run.started)) == ("ended", True, True)
    assert not list(tmp_path.rglob("hacked"))


def test_damaged_lines_of_a_csv_file_are_left_out(tmp_path: Path) -> None:
    csv_log(tmp_path / "logs", "step,train_loss\n1,0.5\n2,oops\n3,0.2", "a: [")
    (result,) = import_runs(tmp_path / "logs", tmp_path / "runs")
    assert result.records == 1
    assert result.left_out == {"values that are not numbers": 1}
    assert ["hparams.yaml is left out" in result.warnings[0], "its last line is cut off" in result.warnings[1]] == [True, True]


@pytest.mark.test_all
def test_a_real_run_of_lightning_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    losses: list[float] = []

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self, lr: float = 0.5) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.layer(batch).square().mean()
            losses.append(float(loss.detach()))
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.layer(batch).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data: Any = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2)  # type: ignore[arg-type]
    trainer = Trainer(
        max_epochs=2,
        logger=CSVLogger(str(tmp_path)),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    trainer.fit(Module(), data, data)
    run = imported(tmp_path / "lightning_logs", tmp_path / "runs")["lightning_logs-version_0"]
    assert curve(run, "train/loss") == list(enumerate(losses))
    assert [step for step, _ in curve(run, "validation/loss")] == [2, 5]
    assert [step for step, _ in curve(run, "train/loss_epoch")] == [2, 5]
    assert run.hyperparameters == {"lr": 0.5}


# --- Hugging Face ---


def trainer_state(path: Path, history: list[dict[str, Any]], **fields: Any) -> Path:
    """Write a trainer state with transformers."""
    state = pytest.importorskip("transformers").TrainerState(log_history=history, **fields)
    path.parent.mkdir(parents=True, exist_ok=True)
    state.save_to_json(str(path))
    return path


def test_hugging_face_uses_the_newest_state(tmp_path: Path) -> None:
    history: list[dict[str, Any]] = [
        {"loss": 2.5, "grad_norm": 1.25, "learning_rate": 1e-4, "epoch": 0.5, "step": 5},
        {"eval_loss": 0.75, "eval_accuracy": 0.5, "epoch": 0.5, "step": 5},
        {"loss": math.nan, "epoch": 1.0, "step": 10, "rewards/mean": 3.0},
    ]
    out = tmp_path / "out" / "model"
    trainer_state(out / "checkpoint-9" / "trainer_state.json", history[:2], global_step=9, max_steps=20)
    trainer_state(out / "checkpoint-10" / "trainer_state.json", history, global_step=10, max_steps=20, logging_steps=5)
    trainer_state(out / "trainer_state.json", history[:1], global_step=5, max_steps=20)
    (out / "checkpoint-10" / "training_args.bin").write_bytes(b"never read")
    run = imported(tmp_path / "out", tmp_path / "runs")["model"]
    assert curve(run, "train/loss")[0] == (5, 2.5)
    assert math.isnan(curve(run, "train/loss")[1][1])
    assert curve(run, "validation/accuracy") == [(5, 0.5)]
    assert curve(run, "train/rewards/mean") == [(10, 3.0)]
    assert names(run) == {
        *("train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "train/rewards/mean"),
        *("validation/loss", "validation/accuracy"),
    }
    assert [(each["step"], each["results"]) for each in run.evaluations] == [(5, {"validation": {"loss": 0.75, "accuracy": 0.5}})]
    assert (run.outcome, run.hyperparameters["logging_steps"]) == ("ended", 5)
    assert len(run.records) == 2
    at_9 = imported(out / "checkpoint-9", tmp_path / "runs", name="at-9")["at-9"]
    assert at_9.last_step == 5


def test_a_finished_hugging_face_run_is_imported_although_a_checkpoint_is_damaged(tmp_path: Path) -> None:
    history: list[dict[str, Any]] = [
        {"loss": 0.5, "step": 4},
        {"train_runtime": 12.5, "train_loss": 0.75, "train_samples_per_second": 8.0, "step": 4},
    ]
    trainer_state(tmp_path / "out" / "trainer_state.json", history, global_step=4, max_steps=8)
    (tmp_path / "out" / "checkpoint-8").mkdir()
    (tmp_path / "out" / "checkpoint-8" / "trainer_state.json").write_text('{"log_history": [' * 20_000)
    (result,) = import_runs(tmp_path / "out", tmp_path / "runs")
    run = RunFolder.read(result.folder)
    assert (run.outcome, run.seconds) == ("finished", 12.5)
    assert (curve(run, "train/loss"), curve(run, "train/mean_loss")) == ([(4, 0.5)], [(4, 0.75)])
    assert len(result.warnings) == 1


@pytest.mark.test_all
def test_a_real_run_of_the_hugging_face_trainer_is_imported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"loss": (self.layer(x) - labels).square().mean()}

    rows = [{"x": torch.ones(2), "labels": torch.zeros(1)}] * 8
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.save_state()
    history = trainer.state.log_history
    run = imported(tmp_path / "out", tmp_path / "runs")["out"]
    assert curve(run, "train/loss") == [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    assert curve(run, "validation/loss") == [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    assert (run.outcome, run.last_step) == ("finished", 4)


# --- the folders that are written ---


def test_importing_again_replaces_the_import(board: Path, tmp_path: Path) -> None:
    (first,) = import_runs(board, tmp_path / "runs")
    write_report(first.folder)
    with summary_writer(board / "one") as writer:
        writer.add_scalar("train/loss", 0.125, 6)
    change_notes(first.folder, add=["baseline"])
    (again,) = import_runs(board / "one", tmp_path / "runs")  # the same run, given by another path
    assert again.folder == first.folder
    assert read_notes(again.folder).tags == ("baseline",)
    assert curve(RunFolder.read(again.folder), "train/loss")[-1] == (6, 0.125)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["one"]
    marker = json.loads((again.folder / "run.json").read_text())
    assert marker["imported"] == {"from": "tensorboard", "source": str(board / "one"), "run": str(board / "one")}


def test_two_runs_of_one_name_have_two_folders(tmp_path: Path) -> None:
    for location in ("a", "b"):
        csv_log(tmp_path / location / "logs", f"step,train_loss\n1,{ord(location)}\n")
    for _ in range(2):
        found = imported(tmp_path / "a", tmp_path / "runs") | imported(tmp_path / "b", tmp_path / "runs")
        assert {name: curve(run, "train/loss") for name, run in found.items()} == {"logs": [(1, 97.0)], "logs-2": [(1, 98.0)]}
    with pytest.raises(ConfigError, match=r"holds the run imported from .*; give another --name"):
        import_runs(tmp_path / "b", tmp_path / "runs", name="logs")


@pytest.mark.parametrize("kind", ["a run", "a file", "a link", "an import that was trained on"])
def test_what_is_not_an_import_is_never_touched(tmp_path: Path, kind: str) -> None:
    logs, runs = csv_log(tmp_path / "one", "step,train_loss\n1,0.5\n"), tmp_path / "runs"
    if kind == "a run":
        write_run(runs, "one", {1: 0.5})
    elif kind == "a file":
        runs.mkdir()
        (runs / "one").write_text("mine")
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        runs.mkdir()
        (runs / "one").symlink_to(tmp_path / "elsewhere")
    else:
        import_runs(logs, runs)
        (runs / "one" / "environment.json").write_text("{}")
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=r"stays as it is; give another --name, or another folder with --to"):
        import_runs(logs, runs)
    assert content(tmp_path) == before
    assert set(imported(logs, runs, name="two")) == {"two"}


def test_metrics_can_be_renamed(board: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = imported(board, tmp_path / "runs", rename={"train/loss": "a", "validation/": "test/"})["one"]
    assert names(run) == {"a", "test/loss"}
    with pytest.raises(ConfigError, match="the same name 'train/loss'; give them different names"):
        import_runs(board, tmp_path / "other", rename={"validation/loss": "train/loss"})
    import_runs(board, tmp_path / "other", rename={"train/los": "a"})  # no error, because the runs are imported
    assert "--rename train/los: no imported run has this metric; did you mean 'train/loss'" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "tensorbord"}, "--from tensorbord is not a kind of source; did you mean 'tensorboard'"),
        ({"kind": "wandb"}, r"has nothing of wandb: there is no files run-\*.wandb"),
        ({"name": "a/b"}, "--name 'a/b' must be a plain name"),
        ({"name": ".hidden"}, "must be a plain name"),
        ({"rename": {"": "x"}}, "--rename needs a name on both sides"),
    ],
)
def test_wrong_arguments_are_rejected(board: Path, tmp_path: Path, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_runs(board, tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_ambiguous_sources_are_rejected(board: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file or folder .*nowhere"):
        import_runs(tmp_path / "nowhere", tmp_path / "runs")
    with pytest.raises(ConfigError, match="is on a server"):
        import_runs("http://localhost:5000", tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"has nothing that import recognizes. It looks for tensorboard: .* Name the kind with --from"
    ):
        import_runs(tmp_path / "empty", tmp_path / "runs")
    csv_log(board / "csv", "step,train_loss\n1,0.5\n")
    with pytest.raises(ConfigError, match="has runs of tensorboard and lightning; choose with --from tensorboard"):
        import_runs(board, tmp_path / "runs")
    assert set(imported(board, tmp_path / "runs", kind="lightning")) == {"csv"}
    with pytest.raises(ConfigError, match="there are 2 sources"):
        import_runs([board / "one", board / "csv"], tmp_path / "runs", name="x")
    csv_log(board / "csv2", "step,train_loss\n1,0.5\n")
    with pytest.raises(ConfigError, match="has several; leave it out"):
        import_runs(board, tmp_path / "runs", kind="lightning", name="x")


# --- hostile input ---


def test_hostile_names_stay_inside_the_folder(tmp_path: Path) -> None:
    with summary_writer(tmp_path / "logs") as writer:
        for name in ("../../out", "<script>alert(1)</script>", "a\x1b[2J", "x" * 5000):
            writer.add_scalar(name, 1.0, 1)
            writer.add_image(name, numpy.zeros((3, 2, 2), dtype=numpy.uint8), 1)
    (result,) = import_runs(tmp_path / "logs", tmp_path / "deep" / "er" / "runs")
    assert (result.metrics, result.images) == (4, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "logs"]
    assert all(image_bytes(result.folder, file) for each in RunFolder.read(result.folder).images for file in each["files"])
    assert [folder_name(name) for name in ("../..", "..", "", "-rf", "a/b c", "\0", "x" * 500)] == [
        *("run", "run", "run", "rf", "a-b_c", "_"),
        "x" * 120,
    ]


def test_links_out_of_the_source_are_not_followed(board: Path, tmp_path: Path) -> None:
    inside = tmp_path / "given"
    inside.mkdir()
    (inside / "folder").symlink_to(board)
    (inside / event_file(board / "one").name).symlink_to(event_file(board / "one"))
    with pytest.raises(ConfigError, match="nothing that import recognizes"):
        import_runs(inside, tmp_path / "runs")


def test_times_that_are_not_dates_are_unknown(tmp_path: Path) -> None:
    run = tmp_path / "mlruns" / "0" / "abc"
    (run / "metrics").mkdir(parents=True)
    (run / "meta.yaml").write_text("run_id: abc\nstatus: 3\nstart_time: 1.0e+300\nend_time: -9.0e+99\nlifecycle_stage: active\n")
    (run / "metrics" / "loss").write_text(f"{10**40} 0.5 1\n")
    (found,) = imported(tmp_path / "mlruns", tmp_path / "runs").values()
    assert (found.outcome, curve(found, "loss")) == ("finished", [(1, 0.5)])
    assert all(math.isnan(time) for time in (found.started, found.ended, found.seconds, *found.times))


def test_settings_are_bounded(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1, y: 2}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    assert yaml_settings(tmp_path, "bomb.yaml", extra="train")["a0"] == {"x": 1, "y": 2}
    bomb: Any = "x"
    for _ in range(40):
        bomb = [bomb] * 10
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    found = plain_settings({"bomb": bomb, "deep": deep, "text": "x" * 10**6, "large": 10**5000})
    assert len(json.dumps(found)) < 500_000


def test_steps_that_no_reader_accepts_are_left_out() -> None:
    metrics = Metrics()
    for step in (1, 2.0, 2.5, 2**60, "3", None, math.nan, True):
        metrics.add("a", step, 1.0)
    assert [record.step for record in metrics.records()] == [1, 2]
    assert metrics.left_out == {"values with a step that is not a whole number": 6}


def test_values_of_one_step_are_one_record_and_the_last_one_counts() -> None:
    metrics = Metrics()
    for name, step, value, time in (("a", 5, 1.0, 9.0), ("b", 5, 2.0, 8.0), ("a", 3, 0.5, math.nan), ("a", 5, 4.0, 10.0)):
        metrics.add(name, step, value, time)
    first, second = metrics.records()
    assert (first.step, first.values, math.isnan(first.time)) == (3, {"a": 0.5}, True)
    assert (second.step, second.values, second.time) == (5, {"a": 4.0, "b": 2.0}, 8.0)
    assert metrics.left_out == {"values that were logged again at the same step": 1}


def test_a_file_that_only_looks_like_a_database_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"SQLite format 3\x00" + os.urandom(4000))
    assert sqlite_copy.tables(tmp_path / "x.db") == {}
    with pytest.raises(ConfigError, match="nothing that import recognizes"):
        import_runs(tmp_path, tmp_path / "runs")


def test_a_missing_package_is_named(board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackage, match=r"callsheet import needs tensorboard, .*: pip install 'callsheet\[tensorboard\]'"):
        import_runs(board, tmp_path / "runs")


# --- the command ---


def test_the_command_prints_a_line_for_each_run(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with summary_writer(board / "two\x1b") as writer:
        writer.add_scalar("loss", 1.0, 1)
        writer.add_text("note", "hello")
    event = event_file(board / "one")
    event.write_bytes(event.read_bytes()[:-1])
    assert main(["import", "logs", "--rename", "loss=train/loss"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "runs/one: 4 records, 2 metrics, from tensorboard",
        "runs/two_: 1 record, 1 metric, from tensorboard; left out: texts (1)",
    ]
    assert printed.err == f"callsheet: {event} is cut off; what comes before is imported\n"
    assert main(["import", "logs", "--rename", "loss"]) == 2
    assert "--rename loss has no '='" in capsys.readouterr().err


def test_an_imported_run_can_be_compared_with_a_run_of_callsheet(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), "ours", {1: 1.5, 2: 1.0}, more={"validation/loss": 0.5})
    assert main(["import", "logs/one", "--name", "theirs"]) == 0
    capsys.readouterr()
    assert main(["runs"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("theirs"))
    assert row.split()[1:5] == ["ended", "5", "8.0s", "0.03125"]
    assert main(["compare", "ours", "theirs", "--json"]) == 0
    ours, theirs = json.loads(capsys.readouterr().out)["runs"]
    assert (ours["values"]["validation/loss"]["last"], theirs["values"]["validation/loss"]["last"]) == (0.5, 0.5)
    assert theirs["values"]["train/loss"] == {"last": 0.03125, "best": 0.03125}
    assert main(["compare", "ours", "theirs", "-o", "compare.html"]) == 0
    assert main(["report", "theirs"]) == 0
    assert Path("runs/theirs/report.html").stat().st_size > 1_000_000


def test_the_page_of_a_run_without_times(tmp_path: Path, chromium: Any) -> None:
    logs = csv_log(tmp_path / "logs", "step,train_loss,val_loss\n1,0.5,\n2,0.25,0.75\n")
    (result,) = import_runs(logs, tmp_path / "runs")
    shown = data(RunFolder.read(result.folder))
    assert (shown["axis"]["seconds"], shown["run"]["started"], shown["run"]["seconds"]) == ([], None, None)
    seen = OpenedPage(chromium, offline=True)
    page = seen.open(write_report(result.folder).as_uri())
    assert "in total" not in page.locator("header").inner_text()
    axes = page.get_by_role("group", name="Horizontal axis").get_by_role("button")
    assert axes.all_inner_texts() == ["Step"]
    assert [len(line["y"]) for line in seen.drawn("loss")][:2] == [2, 1]
    assert not seen.faults


def test_the_result_says_what_was_written(board: Path, tmp_path: Path) -> None:
    assert import_runs([board / "one"], tmp_path) == [Imported(tmp_path / "one", "tensorboard", 5, 2, 0, {}, ())]
