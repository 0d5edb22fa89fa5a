"""TensorBoard's event files, read back with TensorBoard's reader."""

from __future__ import annotations

import io
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.errors import ConfigError, MissingPackage
from callsheet.loggers.tensorboard_logger import TensorboardLogger
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3


class Acts(Callback):
    """Calls the given functions at the ends of steps."""

    def __init__(self, **acts: Callable[[Context], Any]) -> None:
        self.acts = acts

    def on_train_step_end(self, ctx: Context) -> None:
        if act := self.acts.get(f"at_{ctx.step}"):
            act(ctx)


class KeepsRecords(Callback):
    """Records the metrics records."""

    phase = "report"

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []

    def on_log(self, ctx: Context) -> None:
        if "train/loss" in ctx.record.values:
            self.losses.append((ctx.record.step, ctx.record.values["train/loss"]))


def save(ctx: Context) -> None:
    ctx.control.save("asked for", replicated=True)


def stop(ctx: Context) -> None:
    ctx.control.stop("asked for", replicated=True)


def raises(error: BaseException) -> Callable[[Context], None]:
    def act(ctx: Context) -> None:
        raise error

    return act


def fit(folder: Path, *callbacks: Callback, logger: TensorboardLogger | None = None, **options: Any) -> None:
    options = {"max_duration": "2ep", "log_interval": "1ba", "run_name": "run", **options}
    torch.manual_seed(1)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        loggers=[logger or TensorboardLogger()],
        runs_folder=folder,
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()


def read(folder: Path) -> Any:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    found.Reload()
    return found


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in read(folder).Scalars(name)]


def texts(folder: Path, name: str) -> list[tuple[int, str]]:
    """Return the texts as TensorBoard's server reads them: only the server hides outdated ones."""
    found = plugin_event_accumulator.EventAccumulator(str(folder), tensor_size_guidance={"text": 0})
    found.Reload()
    return [(each.step, each.tensor_proto.string_val[0].decode()) for each in found.Tensors(name)]


# --- records ---


def test_every_record_can_be_read_back(tmp_path: Path) -> None:
    def odd(ctx: Context) -> None:
        ctx.log({"odd/nan": math.nan, "odd/inf": -math.inf}, across="same")

    keeps = KeepsRecords()
    fit(tmp_path, Acts(at_2=odd), keeps)
    folder = tmp_path / "run" / "tensorboard"
    losses = curve(folder, "train/loss")
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in losses] == pytest.approx([value for _, value in keeps.losses], rel=1e-6)
    assert [step for step, _ in curve(folder, "validation/loss")] == [3, 6]
    ((step, nan),) = curve(folder, "odd/nan")
    assert step == 2
    assert math.isnan(nan)
    assert curve(folder, "odd/inf") == [(2, -math.inf)]
    assert texts(folder, "outcome") == [(6, "finished")]


def test_a_resume_hides_the_records_after_its_checkpoint(tmp_path: Path) -> None:
    keeps = KeepsRecords()
    odd = Acts(at_2=save, at_4=lambda ctx: ctx.log({"odd/once": 1.0}, across="same"), at_5=raises(ValueError("a bad step")))
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, odd)
    folder = tmp_path / "run" / "tensorboard"
    assert curve(folder, "odd/once") == [(4, 1.0)]
    assert texts(folder, "exception") == [(5, "    ValueError: a bad step")]
    fit(tmp_path, keeps, resume="auto", max_duration="3ep")
    losses = curve(folder, "train/loss")
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [value for _, value in losses[2:]] == pytest.approx([value for _, value in keeps.losses], rel=1e-6)
    assert len(list(folder.iterdir())) == 2
    assert curve(folder, "odd/once") == []
    assert texts(folder, "outcome") == [(9, "finished")]
    fit(tmp_path, run_name="unbroken", max_duration="3ep")
    assert curve(tmp_path / "unbroken" / "tensorboard", "train/loss") == losses


def test_a_restarted_run_hides_all_earlier_records(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    fit(tmp_path / "first", logger=TensorboardLogger(folder=logs))
    fit(tmp_path / "second", logger=TensorboardLogger(folder=logs), max_duration="1ep")
    assert [step for step, _ in curve(logs / "run", "train/loss")] == [1, 2, 3]


def test_a_fork_has_its_own_folder(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_2=save))
    fit(tmp_path, run_name="fork", resume=tmp_path / "run" / "checkpoints" / "ep0-ba2")
    assert [step for step, _ in curve(tmp_path / "run" / "tensorboard", "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in curve(tmp_path / "fork" / "tensorboard", "train/loss")] == [3, 4, 5, 6]


def test_two_loggers_write_to_two_folders(tmp_path: Path) -> None:
    other = TensorboardLogger()
    other.name = "other"
    third = TensorboardLogger(folder=tmp_path / "logs")
    third.name = "third"
    fit(tmp_path, other, third)
    for folder in ("run/tensorboard", "run/other/tensorboard", "logs/run/third"):
        assert len(curve(tmp_path / folder, "train/loss")) == 6


@pytest.mark.parametrize(
    ("act", "outcome"),
    [(stop, "stopped"), (raises(KeyboardInterrupt()), "interrupted"), (lambda ctx: os.kill(os.getpid(), 15), "preempted")],
)
def test_the_outcome_is_reported(tmp_path: Path, act: Callable[[Context], None], outcome: str) -> None:
    try:
        fit(tmp_path, Acts(at_2=act), max_duration="100ep")
    except KeyboardInterrupt:
        pass
    assert [text for _, text in texts(tmp_path / "run" / "tensorboard", "outcome")] == [outcome]


def test_records_before_a_checkpoint_are_on_disk(tmp_path: Path) -> None:
    seen: list[int] = []

    class Looks(Callback):
        phase = "report"

        def on_checkpoint_save_end(self, ctx: Context) -> None:
            seen.extend(step for step, _ in curve(tmp_path / "run" / "tensorboard", "train/loss"))

    fit(tmp_path, Acts(at_4=save, at_5=stop), Looks(), logger=TensorboardLogger(flush_seconds=1000))
    assert seen[:4] == [1, 2, 3, 4]


# --- what is logged ---


def test_settings_are_logged_as_text_and_as_hparams(tmp_path: Path) -> None:
    config = {"lr": 0.1, "model": {"depth": 2, "sizes": [1, 2], "name": None}, "flag": True}
    fit(tmp_path, Acts(at_2=lambda ctx: ctx.log_hyperparameters({"late": "a|b\nc"})), config=config)
    folder = tmp_path / "run" / "tensorboard"
    (_, first), (step, second) = texts(folder, "hyperparameters")
    assert first.splitlines()[:3] == ["| name | value |", "| --- | --- |", "| flag | True |"]
    assert "| model.depth | 2 |" in first
    assert step == 2
    assert "| late | a\\|b<br>c |" in second
    assert "| lr | 0.1 |" in second
    content = read(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    recorded = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert (recorded["lr"].number_value, recorded["model.depth"].number_value, recorded["flag"].bool_value) == (0.1, 2, True)
    assert (recorded["model.sizes"].string_value, recorded["model.name"].string_value) == ("[1, 2]", "None")


def test_images_and_tables_are_logged(tmp_path: Path) -> None:
    def log_everything(ctx: Context) -> None:
        ctx.log_images("eval/two", [torch.zeros(3, 4, 5), numpy.full((4, 5), 255, dtype=numpy.uint8)])
        ctx.log_images("eval/one", [torch.ones(3, 4, 5)])
        ctx.log_table("eval/texts", ["prompt", "score"], [["why | how?", torch.tensor(2)], [None, 0.5]])

    fit(tmp_path, Acts(at_2=log_everything), max_duration="1ep")
    found = read(tmp_path / "run" / "tensorboard")
    for name, level in (("eval/two/0", 0), ("eval/two/1", 255), ("eval/one", 255)):
        (image,) = found.Images(name)
        pixels = numpy.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
        assert (image.step, image.height, image.width, pixels.shape) == (2, 4, 5, (4, 5, 3))
        assert (pixels == level).all()
    table = "| prompt | score |\n| --- | --- |\n| why \\| how? | 2 |\n|  | 0.5 |"
    assert texts(tmp_path / "run" / "tensorboard", "eval/texts") == [(2, table)]


# --- failures ---


def test_an_image_that_cannot_be_logged_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Acts(at_1=lambda ctx: ctx.log_images("bad", [torch.zeros(7)])))
    assert "an image has the shape (7,)" in caplog.text
    assert len(curve(tmp_path / "run" / "tensorboard", "train/loss")) == 6


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    steps: list[int] = []
    fit(tmp_path, Acts(at_6=lambda ctx: steps.append(ctx.step)), logger=TensorboardLogger(folder=tmp_path / "file"))
    assert steps == [6]
    assert "Callback TensorboardLogger" in caplog.text


def test_a_missing_package_is_reported_when_the_logger_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackage, match=r"TensorboardLogger needs tensorboard.*pip install 'callsheet\[tensorboard\]'"):
        TensorboardLogger()


def test_nothing_is_imported_before_a_run_is_opened() -> None:
    program = (
        "import sys, callsheet.loggers.tensorboard_logger as it; it.TensorboardLogger(); assert 'tensorboard' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_bad_options_are_rejected() -> None:
    with pytest.raises(ConfigError, match="give more than 0"):
        TensorboardLogger(flush_seconds=0)


# --- ranks and neutrality ---


def rank_fits(folder: str) -> None:
    fit(Path(folder), Acts(at_2=save), max_duration="1ep")


def test_two_ranks_write_one_file(tmp_path: Path) -> None:
    run_ranks(rank_fits, 2, str(tmp_path))
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1


def test_training_is_not_affected(tmp_path: Path) -> None:
    def weights(*loggers: TensorboardLogger) -> tuple[list[torch.Tensor], object]:
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
            run_name=f"with-{len(loggers)}",
            device="cpu",
            max_duration="2ep",
            log_interval="1ba",
        ) as trainer:
            trainer.fit()
        return list(model.parameters()), (random.getstate(), str(numpy.random.get_state()))

    (bare, before), (watched, after) = weights(), weights(TensorboardLogger())
    assert len(curve(tmp_path / "with-1" / "tensorboard", "train/loss")) == 6
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert before == after
