"""Weights & Biases in offline mode, read back from its files."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import wandb
from PIL import Image
from torch import nn
from wandb.proto import wandb_internal_pb2

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.errors import ConfigError, MissingPackage
from callsheet.loggers.wandb_logger import WandBLogger
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
QUIET = {"console": "off", "silent": True, "x_disable_stats": True, "disable_git": True}
DOWN = {**QUIET, "base_url": "http://127.0.0.1:9"}  # no server listens there


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


def fit(folder: Path, *callbacks: Callback, logger: WandBLogger | None = None, **options: Any) -> WandBLogger:
    logger = logger or WandBLogger(mode="offline", project="tests", settings=QUIET)
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
def _isolated_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield
    if wandb.run is not None:
        wandb.run.finish()


@pytest.fixture(scope="module", autouse=True)
def _tear_down() -> Iterator[None]:
    yield
    wandb.teardown()


# --- what W&B wrote ---


class Written:
    """The records in one transaction file of a W&B run."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        deadline = time.monotonic() + 30
        while True:  # W&B's helper process may write the end shortly after `finish` returns
            self.records = list(scan(path))
            if self.of("exit") or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        (self.run,) = self.of("run")
        (self.exit,) = self.of("exit")
        self.history = [nested(row.item) for row in self.of("history")]
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        for update in self.of("summary"):
            self.summary |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in update.update}
        for update in self.of("config"):
            self.config |= {item.key: json.loads(item.value_json) for item in update.update}

    def of(self, kind: str) -> list[Any]:
        return [getattr(record, kind) for record in self.records if record.WhichOneof("record_type") == kind]

    def curve(self, name: str) -> list[tuple[int, Any]]:
        return [(row["step"], row[name]) for row in self.history if name in row]


def nested(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        value = json.loads(item.value_json)
        if len(item.nested_key) == 2:
            found.setdefault(item.nested_key[0], {})[item.nested_key[1]] = value
        else:
            (name,) = item.nested_key
            found[name] = value
    return found


def scan(path: Path) -> Iterator[Any]:
    """Yield the records of a transaction file.

    It has a header of 7 bytes, then blocks of 32 KiB with pieces of records. Each piece has a checksum, a length and a kind.
    """
    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def written(folder: Path) -> list[Written]:
    """Return the parts of the run in the order in which they started."""
    parts = [Written(path) for path in folder.glob("**/offline-run-*/*.wandb")]
    return sorted(parts, key=lambda part: part.run.start_time.ToNanoseconds())


# --- records ---


def test_every_record_is_a_row_over_the_step(tmp_path: Path) -> None:
    def odd(ctx: Context) -> None:
        ctx.log({"odd/nan": math.nan, "odd/inf": math.inf}, across="same")

    kept: list[tuple[int, float]] = []

    class KeepsRecords(Callback):
        phase = "report"

        def on_log(self, ctx: Context) -> None:
            if "train/loss" in ctx.record.values:
                kept.append((ctx.record.step, ctx.record.values["train/loss"]))

    logger = fit(tmp_path, Acts(at_2=odd), KeepsRecords())
    (run,) = written(tmp_path / "run")
    assert run.curve("train/loss") == kept
    assert len(kept) == 6
    assert [step for step, _ in run.curve("validation/loss")] == [3, 6]
    ((step, nan),) = run.curve("odd/nan")
    assert step == 2
    assert math.isnan(nan)
    assert run.curve("odd/inf") == [(2, math.inf)]
    assert [(metric.glob_name, metric.step_metric) for metric in run.of("metric")] == [("*", "step")]
    assert (run.run.run_id, run.run.project, run.run.display_name) == (logger.run_id, "tests", "run")
    assert (run.exit.exit_code, run.summary["outcome"]) == (0, "finished")
    assert wandb.run is None


def test_a_resume_continues_the_same_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_2=save, at_5=raises(ValueError("a bad step"))))
    logger = fit(tmp_path, resume="auto", max_duration="3ep", config={"limit": "3ep"})
    first, second = written(tmp_path / "run")
    assert first.run.run_id == second.run.run_id == logger.run_id
    assert [step for step, _ in first.curve("train/loss")] == [1, 2, 3, 4]
    assert [step for step, _ in second.curve("train/loss")] == [3, 4, 5, 6, 7, 8, 9]  # no row is dropped for its step
    assert (first.exit.exit_code, first.summary["outcome"]) == (1, "failed")
    assert first.summary["exception"] == "ValueError: a bad step"
    assert (second.exit.exit_code, second.summary["outcome"]) == (0, "finished")
    assert second.config["limit"] == "3ep"


def test_a_fork_has_its_own_run(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_2=save))
    fit(tmp_path, run_name="fork", resume=tmp_path / "run" / "checkpoints" / "ep0-ba2")
    (run,), (fork,) = written(tmp_path / "run"), written(tmp_path / "fork")
    assert run.run.run_id != fork.run.run_id


# --- the outcome ---


@pytest.mark.test_all
@pytest.mark.parametrize(
    ("act", "outcome", "exit_code"),
    [(stop, "stopped", 0), (raises(KeyboardInterrupt()), "interrupted", 255), (raises(MemoryError("full")), "failed", 1)],
)
def test_the_outcome_is_reported(tmp_path: Path, act: Callable[[Context], None], outcome: str, exit_code: int) -> None:
    try:
        fit(tmp_path, Acts(at_2=act))
    except (KeyboardInterrupt, MemoryError):
        pass
    (run,) = written(tmp_path)
    assert (run.summary["outcome"], run.exit.exit_code) == (outcome, exit_code)
    assert not run.of("preempting")


def test_preemption_is_reported_at_once(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_2=lambda ctx: os.kill(os.getpid(), 15)), max_duration="100ep")
    (run,) = written(tmp_path)
    assert (run.summary["outcome"], run.exit.exit_code) == ("preempted", 143)
    assert len(run.of("preempting")) == 1


# --- runs that the user opened, and several loggers ---


def test_a_run_that_was_open_is_used_and_left_open(tmp_path: Path) -> None:
    user_run: Any = wandb.init(project="theirs", mode="offline", dir=tmp_path, settings=wandb.Settings(**QUIET))
    logger = fit(tmp_path)
    assert getattr(wandb.run, "id", None) == user_run.id
    assert logger.run_id == user_run.id
    user_run.log({"their/own": 1})
    user_run.finish()
    (run,) = written(tmp_path)
    assert [step for step, _ in run.curve("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert "outcome" not in run.summary
    drawn = {metric.name: metric.step_metric for metric in run.of("metric") if metric.name != "step"}
    assert drawn["train/loss"] == "step"
    assert "their/own" not in drawn
    assert not [metric for metric in run.of("metric") if metric.glob_name]


def test_two_loggers_have_a_run_each(tmp_path: Path) -> None:
    first, second = (WandBLogger(mode="offline", project=name, settings=QUIET) for name in ("first", "second"))
    second.name = "second"
    fit(tmp_path, second, logger=first, max_duration="1ep")
    runs = {part.run.project: part for part in written(tmp_path)}
    assert {name: part.run.run_id for name, part in runs.items()} == {"first": first.run_id, "second": second.run_id}
    assert all(len(part.curve("train/loss")) == 3 and part.summary["outcome"] == "finished" for part in runs.values())


# --- what is logged ---


def test_settings_images_tables_and_files_are_logged(tmp_path: Path) -> None:
    note = tmp_path / "notes" / "note[1].txt"

    def log_everything(ctx: Context) -> None:
        ctx.log_hyperparameters({"model": {"width": 3}})
        ctx.log_hyperparameters({"lr": 0.1, "model": {"depth": 2, "path": Path("x"), "sizes": (1, 2)}, "parts": [{"name": "a"}]})
        ctx.log_images("eval/samples", [torch.zeros(3, 4, 5), numpy.full((4, 5), 255, dtype=numpy.uint8)])
        ctx.log_table("eval/texts", ["prompt", "score"], [["why?", 0.5], [Path("y"), torch.tensor(2)], [None, "none"]])
        note.parent.mkdir()
        note.write_text("a note")
        ctx.log_file("notes/note[1].txt", note)
        ctx.log_file("other", note)

    fit(tmp_path, Acts(at_2=log_everything), config={"lr": 0.5, "seed": 1}, max_duration="1ep")
    (run,) = written(tmp_path)
    model = {"width": 3, "depth": 2, "path": "x", "sizes": [1, 2]}
    recorded = {"lr": 0.1, "seed": 1, "model": model, "parts": {"0": {"name": "a"}}}
    assert {name: run.config[name] for name in recorded} == recorded
    files = run.folder / "files"
    ((step, images),) = run.curve("eval/samples")
    assert (step, images["count"], images["width"], images["height"]) == (2, 2, 5, 4)
    black, white = (numpy.asarray(Image.open(files / name)) for name in images["filenames"])
    assert (black.max(), white.min(), black.shape) == (0, 255, (4, 5, 3))
    ((step, table),) = run.curve("eval/texts")
    assert step == 2
    content = json.loads((files / table["path"]).read_text())
    assert (content["columns"], content["data"]) == (["prompt", "score"], [["why?", 0.5], ["y", 2], [None, "none"]])
    assert (files / "notes" / "note[1].txt").read_text() == "a note"
    assert (files / "note[1].txt").read_text() == "a note"


def test_nothing_of_the_environment_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("SOME_PASSWORD", "hunter2-hunter2")
    fit(tmp_path, max_duration="1ep")
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"k" * 40 not in content
    assert b"hunter2-hunter2" not in content


# --- failures ---


def test_in_mode_disabled_nothing_is_logged(tmp_path: Path) -> None:
    fit(tmp_path, logger=WandBLogger(mode="disabled", settings=QUIET), max_duration="1ep", config={"lr": 1})
    assert not list(tmp_path.rglob("*.wandb"))


def test_a_server_that_is_down_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    steps: list[int] = []
    logger = WandBLogger(mode="online", timeout=1, settings=DOWN)
    fit(tmp_path, Acts(at_6=lambda ctx: steps.append(ctx.step)), logger=logger)
    assert steps == [6]
    assert "Callback WandBLogger" in caplog.text
    assert not logger.is_open
    assert logger.state_dict() == {}


@pytest.mark.test_all
def test_a_run_that_could_not_be_opened_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = fit(tmp_path, Acts(at_2=save, at_3=stop)).run_id
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    logger = WandBLogger(mode="online", timeout=1, settings=DOWN)
    fit(tmp_path, Acts(at_4=save, at_5=stop), logger=logger, resume="auto")
    assert logger.run_id is None
    wandb.teardown()  # as in another process; in this one, W&B considers the id used
    assert fit(tmp_path, resume="auto").run_id == run_id


def test_an_image_that_cannot_be_logged_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Acts(at_1=lambda ctx: ctx.log_images("bad", [torch.zeros(7)])))
    assert "an image has the shape (7,)" in caplog.text
    (run,) = written(tmp_path)
    assert len(run.curve("train/loss")) == 6


def test_a_missing_package_is_reported_when_the_logger_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackage, match=r"WandBLogger needs wandb.*pip install 'callsheet\[wandb\]'"):
        WandBLogger()


def test_nothing_is_imported_before_a_run_is_opened() -> None:
    program = "import sys, callsheet.loggers.wandb_logger as it; it.WandBLogger(); assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "ofline"}, "did you mean 'offline'"),
        ({"timeout": 0}, "above zero"),
        ({"settings": {"api_key": "k"}}, "api_key is a secret"),
        ({"settings": {"base_url": "https://me:word@host"}}, "WANDB_BASE_URL"),
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        WandBLogger(**options)


# --- ranks and neutrality ---


def rank_fits(folder: str) -> str | None:
    return fit(Path(folder), Acts(at_2=save), max_duration="1ep").run_id


@pytest.mark.test_all
def test_two_ranks_log_to_one_run(tmp_path: Path) -> None:
    first, second = run_ranks(rank_fits, 2, str(tmp_path))
    (run,) = written(tmp_path)
    assert (first, second) == (run.run.run_id, None)


def test_training_is_not_affected(tmp_path: Path) -> None:
    def weights(*loggers: WandBLogger) -> tuple[list[torch.Tensor], object]:
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

    (bare, before), (watched, after) = weights(), weights(WandBLogger(mode="offline", settings=QUIET))
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert before == after
