"""Trackio with local storage, read back from its database."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import trackio
from PIL import Image
from torch import nn
from trackio.sqlite_storage import SQLiteStorage

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.errors import ConfigError, MissingPackage
from callsheet.loggers.trackio_logger import TrackioLogger
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


def fit(folder: Path, *callbacks: Callback, logger: TrackioLogger | None = None, **options: Any) -> TrackioLogger:
    logger = logger or TrackioLogger(project="tests")
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
        trainer.fit()
    return logger


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("TRACKIO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    set_trackio_folder(tmp_path / "trackio", monkeypatch.setattr)
    yield
    if trackio.context_vars.current_run.get() is not None:
        trackio.finish()


def set_trackio_folder(folder: Path, put: Callable[[Any, str, Any], None]) -> None:
    """Set Trackio's folder in all modules that have read `TRACKIO_DIR` at import."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "trackio"]:
        for variable, subfolder in {"TRACKIO_DIR": "", "MEDIA_DIR": "media", "ARTIFACTS_DIR": "artifacts"}.items():
            if isinstance(vars(module).get(variable), Path):
                put(module, variable, folder / subfolder)


def rows(logger: TrackioLogger, project: str = "tests") -> list[dict[str, Any]]:
    """Return the logged rows in order, from the database: `trackio.Api` does not provide them."""
    found: list[dict[str, Any]] = SQLiteStorage.get_logs(project, None, run_id=logger.run_id)
    return found


def curve(logger: TrackioLogger, name: str, project: str = "tests") -> list[tuple[int, Any]]:
    return [(row["step"], row[name]) for row in rows(logger, project) if name in row]


def runs(project: str = "tests") -> list[Any]:
    return list(trackio.Api().runs(project))


def alerts(logger: TrackioLogger) -> list[tuple[str, str, str | None]]:
    (run,) = [run for run in runs() if run.id == logger.run_id]
    return [(alert["level"], alert["title"], alert["text"]) for alert in reversed(run.alerts())]


# --- records ---


def test_every_record_is_a_row_at_its_step(tmp_path: Path) -> None:
    def odd(ctx: Context) -> None:
        ctx.log({"odd/nan": math.nan, "odd/inf": -math.inf}, across="same")

    kept: list[tuple[int, float]] = []

    class KeepsRecords(Callback):
        phase = "report"

        def on_log(self, ctx: Context) -> None:
            if "train/loss" in ctx.record.values:
                kept.append((ctx.record.step, ctx.record.values["train/loss"]))

    logger = fit(tmp_path, Acts(at_2=odd), KeepsRecords())
    assert curve(logger, "train/loss") == kept
    assert len(kept) == 6
    assert [step for step, _ in curve(logger, "validation/loss")] == [3, 6]
    ((step, nan),) = curve(logger, "odd/nan")
    assert step == 2
    assert math.isnan(float(nan))
    assert [(step, float(value)) for step, value in curve(logger, "odd/inf")] == [(2, -math.inf)]
    assert [(run.name, run.id) for run in runs()] == [("run", logger.run_id)]
    assert alerts(logger) == [("info", "run finished", None)]
    assert trackio.context_vars.current_run.get() is None
    assert (tmp_path / "trackio" / "tests.db").exists()


def test_a_resume_continues_the_same_run(tmp_path: Path) -> None:
    first = TrackioLogger(project="tests")
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_2=save, at_5=raises(ValueError("a bad step"))), logger=first, config={"limit": "2ep"})
    second = fit(tmp_path, resume="auto", max_duration="3ep", config={"limit": "3ep"})
    assert second.run_id == first.run_id
    (run,) = runs()
    assert sorted(step for step, _ in curve(second, "train/loss")) == [1, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9]
    assert run.config["limit"] == "3ep"
    assert alerts(second) == [
        ("error", "exception", "ValueError: a bad step"),
        ("error", "run failed", None),
        ("info", "run finished", None),
    ]


def test_a_fork_has_its_own_run(tmp_path: Path) -> None:
    first = fit(tmp_path, Acts(at_2=save))
    fork = fit(tmp_path, run_name="fork", resume=tmp_path / "run" / "checkpoints" / "ep0-ba2")
    assert {run.name: run.id for run in runs()} == {"run": first.run_id, "fork": fork.run_id}


def test_another_run_of_the_same_name_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = fit(tmp_path / "a", Acts(at_2=save))
    other = fit(tmp_path / "b")
    again = fit(tmp_path / "a", resume=tmp_path / "a" / "run" / "checkpoints" / "ep0-ba2")
    assert first.run_id != other.run_id == again.run_id
    assert f"does not have the id {first.run_id}" in caplog.text


# --- the outcome ---


@pytest.mark.parametrize(
    ("act", "recorded"),
    [
        (stop, ("info", "run stopped", None)),
        (raises(KeyboardInterrupt()), ("warn", "run interrupted", None)),
        (lambda ctx: os.kill(os.getpid(), 15), ("warn", "run preempted", None)),
    ],
)
def test_the_outcome_is_reported(tmp_path: Path, act: Callable[[Context], None], recorded: tuple[str, str, str | None]) -> None:
    logger = TrackioLogger(project="tests")
    try:
        fit(tmp_path, Acts(at_2=act), logger=logger, max_duration="100ep")
    except KeyboardInterrupt:
        pass
    assert alerts(logger)[-1] == recorded


# --- runs that the user opened, and several loggers ---


def test_a_run_that_was_open_is_used_and_left_open(tmp_path: Path) -> None:
    user_run = trackio.init("tests", name="theirs", auto_log_cpu=False, auto_log_gpu=False)
    logger = fit(tmp_path)
    assert logger.run_id == user_run.id
    assert trackio.context_vars.current_run.get() is user_run
    trackio.log({"their/own": 1})
    trackio.finish()
    assert len(curve(logger, "train/loss")) == 6
    assert len(curve(logger, "their/own")) == 1
    assert alerts(logger) == []


def test_two_loggers_have_a_run_each(tmp_path: Path) -> None:
    first, second = TrackioLogger(project="first"), TrackioLogger(project="second")
    second.name = "second"
    current: list[Any] = []
    look = Acts(at_2=lambda ctx: current.append(trackio.context_vars.current_run.get().id))
    fit(tmp_path, second, look, logger=first)
    assert current[0] in (first.run_id, second.run_id)
    for logger, project in ((first, "first"), (second, "second")):
        assert len(curve(logger, "train/loss", project)) == 6
        assert [run.id for run in runs(project)] == [logger.run_id]


# --- what is logged ---


def test_settings_images_tables_and_files_are_logged(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("{}")

    def log_everything(ctx: Context) -> None:
        ctx.log_hyperparameters({"lr": 0.1, "model": {"depth": 2, "path": Path("x")}, "_own": 3})
        ctx.log_images("eval/samples", [torch.zeros(3, 4, 5), numpy.full((4, 5), 255, dtype=numpy.uint8)])
        ctx.log_images("eval/one", [torch.zeros(3, 4, 5)])
        ctx.log_table("eval/texts", ["prompt", "score"], [["why?", 0.5], [Path("y"), torch.tensor(2)], [None, "none"]])
        ctx.log_file("traces/trace.json", trace)

    logger = fit(tmp_path, Acts(at_2=log_everything), config={"lr": 0.5, "seed": 1}, max_duration="1ep")
    (run,) = runs()
    recorded = {"lr": 0.1, "seed": 1, "model.depth": 2, "model.path": "x", "own": 3}
    assert {name: run.config[name] for name in recorded} == recorded
    pixels = []
    for name in ("eval/samples/0", "eval/samples/1", "eval/one"):
        ((step, image),) = curve(logger, name)
        assert step == 2
        pixels.append(numpy.asarray(Image.open(tmp_path / "trackio" / "media" / image["file_path"]).convert("RGB")))
    assert (pixels[0].max(), pixels[1].min(), pixels[0].shape) == (0, 255, (4, 5, 3))
    ((step, table),) = curve(logger, "eval/texts")
    assert step == 2
    assert table["_value"] == [
        {"prompt": "why?", "score": 0.5},
        {"prompt": "y", "score": 2},
        {"prompt": None, "score": "none"},
    ]
    (artifact,) = SQLiteStorage.get_artifacts("tests")
    assert artifact["name"] == "traces_trace.json"


# --- failures ---


@pytest.mark.filterwarnings("ignore:.*trackio.init:UserWarning")
def test_a_server_that_cannot_be_reached_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "hunter2-hunter2")
    steps: list[int] = []
    logger = TrackioLogger(project="tests", server_url="http://127.0.0.1:9")
    fit(tmp_path, Acts(at_6=lambda ctx: steps.append(ctx.step)), logger=logger, max_duration="2ep")
    assert steps == [6]
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes()


def test_a_run_that_cannot_be_opened_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = TrackioLogger(project="tests", server_url="http://127.0.0.1:9")  # without a token
    steps: list[int] = []
    fit(tmp_path, Acts(at_6=lambda ctx: steps.append(ctx.step)), logger=logger)
    assert steps == [6]
    assert "requires a write token" in caplog.text
    assert logger.state_dict() == {}


def test_an_image_that_cannot_be_logged_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = fit(tmp_path, Acts(at_1=lambda ctx: ctx.log_images("bad", [torch.zeros(7)])))
    assert "an image has the shape (7,)" in caplog.text
    assert len(curve(logger, "train/loss")) == 6


def test_a_missing_package_is_reported_when_the_logger_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingPackage, match=r"TrackioLogger needs trackio.*pip install 'callsheet\[trackio\]'"):
        TrackioLogger()


def test_nothing_is_imported_before_a_run_is_opened() -> None:
    program = "import sys, callsheet.loggers.trackio_logger as it; it.TrackioLogger(); assert 'trackio' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"project": " "}, "give it a name"),
        ({"server_url": "https://host?write_token=word"}, "TRACKIO_WRITE_TOKEN"),
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as found:
        TrackioLogger(**options)
    assert "=word" not in str(found.value)


# --- ranks and neutrality ---


def rank_fits(folder: str) -> str | None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    set_trackio_folder(Path(folder) / "trackio", setattr)
    return fit(Path(folder), Acts(at_2=save), max_duration="1ep").run_id


@pytest.mark.test_all
def test_two_ranks_log_to_one_run(tmp_path: Path) -> None:
    first, second = run_ranks(rank_fits, 2, str(tmp_path))
    assert [run.id for run in runs()] == [first]
    assert second is None


def test_training_is_not_affected(tmp_path: Path) -> None:
    def weights(*loggers: TrackioLogger) -> tuple[list[torch.Tensor], object]:
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

    logger = TrackioLogger(project="tests")
    (bare, before), (watched, after) = weights(), weights(logger)
    assert len(curve(logger, "train/loss")) == 6
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert before == after
