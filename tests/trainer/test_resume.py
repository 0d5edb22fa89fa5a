"""A run that is interrupted anywhere resumes with the losses, records and weights of an uninterrupted run, bit by bit."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from callsheet import Callback, Context, Outcome, Trainer
from callsheet.checkpoint import read_checkpoint, read_manifest, write_checkpoint
from callsheet.errors import CheckpointError, ConfigError
from callsheet.testing import Recorder, check_events
from forked import started  # type: ignore[import-not-found]  # pytest has its folder on the path

from .small_run import (
    LOADERS,
    STEPS,
    STEPS_PER_EPOCH,
    History,
    Noisy,
    SavesAt,
    checkpoints,
    made_loader,
    result,
    run_small,
    seed_for,
    small_trainer,
)

SCRIPT = Path(__file__).with_name("small_run.py")
NO_EVALUATION: dict[str, Any] = {"eval_interval": None}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of uninterrupted runs, by loader."""
    return {loader: run_small(tmp_path_factory.mktemp("undisturbed"), loader=loader, seed=0) for loader in LOADERS}


@pytest.mark.test_all
@pytest.mark.parametrize(
    ("loader", "boundaries", "count"),
    [
        *[(loader, ("step",), STEPS) for loader in LOADERS],
        *[(loader, ("epoch", "round"), 6) for loader in LOADERS],
    ],
)
def test_resuming_from_every_boundary_gives_the_undisturbed_run(
    loader: str, boundaries: tuple[str, ...], count: int, undisturbed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """The resumed processes start with other weights and other random states, and save nothing."""
    saved = run_small(tmp_path, SavesAt(*boundaries), loader=loader, seed=0)
    assert saved == undisturbed[loader]  # saving changes nothing
    paths = checkpoints(tmp_path)
    assert len(paths) == count
    wrong = [
        path.name
        for i, path in enumerate(paths)
        if run_small(tmp_path / "resumed" / str(i), loader=loader, seed=100 + i, resume=path) != undisturbed[loader]
    ]
    assert wrong == []


def test_the_undisturbed_runs_can_differ(undisturbed: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The comparison detects another seed, and all records exist."""
    assert run_small(tmp_path, seed=1)["losses"] != undisturbed["dataloader"]["losses"]
    assert len(undisturbed["dataloader"]["losses"]) == STEPS
    trained = [step for step, values in undisturbed["dataloader"]["records"] if "train/loss" in values]
    assert trained == [4, 5, 8, 10, 12]  # every fifth step, and before each evaluation
    assert [step for step, values in undisturbed["dataloader"]["records"] if "noisy/loss" in values] == [4, 8, 12]


@pytest.mark.test_all
@pytest.mark.parametrize("loader", LOADERS)
def test_a_chain_of_processes_of_one_boundary_each_gives_the_undisturbed_run(
    loader: str, undisturbed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for link in range(3 * STEPS):
        history = History()
        saves = SavesAt("step", "epoch", stops=True)
        with small_trainer(tmp_path, history, saves, loader=loader, seed=link, resume="auto") as trainer:
            trainer.fit()
        if trainer.run.outcome is Outcome.FINISHED:
            break
    assert trainer.state.elapsed == 1.0
    final = result(trainer, history)
    assert final["losses"] == undisturbed[loader]["losses"]
    assert final["weights"] == undisturbed[loader]["weights"]


def test_a_resumed_run_can_begin_with_a_checkpoint_at_a_round_s_end(
    undisturbed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """If a run is killed between an epoch's end and its round's end, the resumed run begins with the round's end."""
    run_small(tmp_path, SavesAt("epoch"))
    end_of_epoch = next(path for path in checkpoints(tmp_path) if path.name.startswith("ep2"))
    run_small(tmp_path / "second", SavesAt("round"), seed=5, resume=end_of_epoch)
    end_of_round = next(path for path in checkpoints(tmp_path / "second") if path.name.startswith("ep2"))
    assert run_small(tmp_path / "third", seed=6, resume=end_of_round) == undisturbed["dataloader"]


@pytest.mark.parametrize("loader", ["dataloader", "stateful"])
@pytest.mark.parametrize("step", [STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1])
def test_a_checkpoint_saved_again_before_training_continues_gives_the_same_run(
    step: int, loader: str, undisturbed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with small_trainer(tmp_path, History(), loader=loader, max_duration=f"{step}ba") as first:
        first.fit()
        path = first.save_checkpoint().path
    with small_trainer(tmp_path / "again", History(), loader=loader, seed=5, resume=path) as second:
        path = second.save_checkpoint().path
    resumed = run_small(tmp_path / "third", loader=loader, seed=6, resume=path)
    assert resumed["weights"] == undisturbed[loader]["weights"]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("first", [2, STEPS_PER_EPOCH])
def test_fit_called_again_continues_where_it_was(
    first: int, loader: str, undisturbed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    history = History()
    with small_trainer(tmp_path, history, loader=loader) as trainer:
        trainer.fit(f"{first}ba")
        trainer.fit(f"{STEPS}ba")
    assert history.losses == undisturbed[loader]["losses"]


def test_a_checkpoint_of_a_second_fit_can_be_resumed_from(undisturbed: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with small_trainer(tmp_path, History()) as trainer:
        trainer.fit("2ba")
        trainer.fit("5ba")
        path = trainer.save_checkpoint().path
    assert run_small(tmp_path / "resumed", seed=8, resume=path)["weights"] == undisturbed["dataloader"]["weights"]


@pytest.mark.parametrize(
    ("interval", "which", "found"),
    [("4ba", 0, [4, 8, 12]), ("4ba", -1, [4, 8, 12]), ("1ep", 0, [3, 6, 9, 12]), ("1ep", -1, [3, 6, 9, 12])],
)
def test_resuming_from_before_an_evaluation_runs_it(interval: str, which: int, found: list[int], tmp_path: Path) -> None:
    """The evaluation runs right after the resume, with the weights for which it was due."""
    straight = run_small(tmp_path, SavesAt("before_eval"), eval_interval=interval)
    resumed = run_small(tmp_path / "resumed", seed=3, resume=checkpoints(tmp_path)[which], eval_interval=interval)
    assert resumed["losses"] == straight["losses"]
    assert [step for step, values in resumed["records"] if "noisy/loss" in values] == found


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluations_are_resumed_exactly(workers: int, tmp_path: Path) -> None:
    """Random numbers from the loader's generator or in persistent workers continue as in an uninterrupted run."""

    def evaluation() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(4)
        return DataLoader(
            Noisy(), batch_size=5, shuffle=True, generator=generator, num_workers=workers, persistent_workers=workers > 0
        )

    straight = run_small(tmp_path, SavesAt("step"), eval_dataloader=evaluation)
    middle = checkpoints(tmp_path)[6]  # after one evaluation
    assert run_small(tmp_path / "resumed", seed=3, resume=middle, eval_dataloader=evaluation) == straight


class Crashes(Callback):
    def __init__(self, nth: int) -> None:
        self.left = nth

    def on_eval_step_start(self, ctx: Context) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("a risky evaluation")


@pytest.mark.parametrize(("nth", "found"), [(1, [4, 8, 12]), (2, [4, 8, 12]), (3, [4, 8, 12])])
def test_an_evaluation_that_a_crash_prevented_runs_on_resume(nth: int, found: list[int], tmp_path: Path) -> None:
    """It runs before the next step, or immediately if training was complete. Event order and training do not change."""
    changes: dict[str, Any] = {"eval_interval": "4ba", "log_interval": "100ba", "epochs_per_round": None, "max_duration": "12ba"}
    data = [made_loader("list")[0]]
    straight, crashed, resumed = History(), History(), History()
    recorder = Recorder()
    with small_trainer(tmp_path / "straight", straight, eval_dataloader=data, **changes) as trainer:
        trainer.fit()
    with pytest.raises(MemoryError, match="a risky evaluation"):
        small_trainer(tmp_path, crashed, SavesAt("before_eval"), Crashes(nth), eval_dataloader=data, **changes).fit()
    assert [step for step, values in crashed.records if "validation/loss" in values] == [4, 8, 12][: nth - 1]
    with small_trainer(tmp_path, resumed, recorder, seed=9, resume="auto", eval_dataloader=data, **changes) as again:
        again.fit()
        last = again.eval_results["validation"]["loss"]
    check_events(recorder.events)
    assert resumed.losses == straight.losses
    assert [step for step, values in resumed.records if "validation/loss" in values] == found
    assert last.hex() == straight.records[-1][1]["validation/loss"]


def test_a_checkpoint_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    """The state uses the field names of version 0.1.0."""
    changes: dict[str, Any] = {"eval_interval": "4ba", "log_interval": "3ba", "epochs_per_round": None, "max_duration": "8ba"}
    data = [made_loader("list")[0]]
    straight, resumed, recorder = History(), History(), Recorder()
    with small_trainer(tmp_path / "straight", straight, eval_dataloader=data, **changes) as trainer:
        trainer.fit()
    with pytest.raises(MemoryError, match="a risky evaluation"):
        small_trainer(tmp_path, History(), SavesAt("before_eval"), Crashes(1), eval_dataloader=data, **changes).fit()
    (path,) = checkpoints(tmp_path)
    saved = read_checkpoint(path)
    due, records = saved.shared["evaluation"]["undone"], saved.local["records"]
    due["is_told"] = due.pop("is_checkpoint_due_fired")
    records["told_at"] = records.pop("recorded_step")
    write_checkpoint(tmp_path / "earlier", saved.shared, saved.local, read_manifest(path).info)
    with small_trainer(
        tmp_path / "resumed", resumed, recorder, resume=tmp_path / "earlier", eval_dataloader=data, **changes
    ) as again:
        again.fit()
    assert resumed.losses == straight.losses
    assert resumed.records == straight.records
    due_at = [event for event in recorder.events if event in ("on_checkpoint_due", "on_eval_all_start", "on_train_step_start")]
    assert due_at[0] == "on_eval_all_start"  # on_checkpoint_due was fired before the crash


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS),
    "warmup_then": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "multi_step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_continue_where_they_were(name: str, tmp_path: Path) -> None:
    """The records, which contain the learning rates, are equal."""
    changes: dict[str, Any] = {"scheduler": SCHEDULERS[name], "log_interval": "1ba", **NO_EVALUATION}
    straight = run_small(tmp_path / "straight", **changes)
    with small_trainer(tmp_path, History(), max_duration="4ba", **changes | {"log_interval": "1ba"}) as first:
        first.fit()
        path = first.save_checkpoint().path
    resumed = run_small(tmp_path / "resumed", seed=4, resume=path, **changes)
    assert resumed["records"] == straight["records"]


def test_a_record_at_the_last_round_s_end_has_the_rate_of_the_last_step(tmp_path: Path) -> None:
    """Metrics from before the interruption are in a record after it, with the learning rate of the step that logged them."""
    changes: dict[str, Any] = {"max_duration": "2iter", **NO_EVALUATION}
    straight = run_small(tmp_path, SavesAt("epoch"), **changes)
    resumed = run_small(tmp_path / "resumed", seed=3, resume=checkpoints(tmp_path)[-1], **changes)
    assert straight["records"][-1][0] == STEPS
    assert resumed == straight


class Meter(Callback):
    """Keeps a number and a tensor in its own state, and an entry in `user_state`."""

    def __init__(self, weight: float) -> None:
        self.count = 0
        self.total = torch.zeros(())
        self.weight = weight
        self.loaded: list[dict[str, Any]] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.count += 1
        self.total = self.total + self.weight * ctx.loss
        ctx.user_state["steps"] = ctx.user_state.get("steps", 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded.append(dict(state))
        self.count, self.total = state["count"], state["total"]


@pytest.mark.test_all
def test_callbacks_and_user_state_are_restored(tmp_path: Path) -> None:
    straight = Meter(1.5)
    with small_trainer(tmp_path, straight) as first:
        first.fit("4ba")
        path = first.save_checkpoint().path
        first.fit("6ep")
    resumed = Meter(1.5)
    with small_trainer(tmp_path / "resumed", resumed, resume=path) as second:
        assert resumed.count == 4
        assert second.ctx.user_state == {"steps": 4}
        second.fit("4ep")
    assert len(resumed.loaded) == 1
    assert resumed.count == STEPS
    assert second.ctx.user_state == {"steps": STEPS}


def test_user_state_that_is_not_plain_data_is_left_out_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain: dict[str, Any] = {"best": 0.5, "names": ["a", "b"], "seen": {"step": 1}, "mean": torch.arange(3.0)}
    with caplog.at_level(logging.WARNING, "callsheet"), small_trainer(tmp_path) as first:
        handle = object()
        first.ctx.user_state.update(plain, handle=handle, nested=[{"lock": handle}])
        first.fit("1ba")
        first.save_checkpoint()
        path = first.save_checkpoint().path
        assert first.ctx.user_state["handle"] is handle  # it is left out of the checkpoint only
    messages = [record.getMessage() for record in caplog.records if "user_state" in record.getMessage()]
    assert [message.partition("ctx.user_state['")[2].partition("']")[0] for message in messages] == ["handle", "nested"]
    with small_trainer(tmp_path / "resumed", resume=path) as second:
        found = second.ctx.user_state
    assert found.keys() == plain.keys()
    assert torch.equal(found.pop("mean"), plain.pop("mean"))
    assert found == plain


def test_unclaimed_state_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_trainer(tmp_path, Meter(1.0)) as first:
        first.fit("1ba")
        path = first.save_checkpoint().path
    with caplog.at_level(logging.WARNING, "callsheet"):
        small_trainer(tmp_path / "resumed", resume=path).close()
    assert "Meter" in caplog.text


def test_the_timestamp_and_intervals_are_restored(tmp_path: Path) -> None:
    with small_trainer(tmp_path) as first:
        first.fit("4ba")
        info = first.save_checkpoint()
    saved = first.state.timestamp
    with small_trainer(tmp_path / "resumed", resume=info.path) as second:
        assert second.state.timestamp == second.state.baseline == saved
        assert (second.ctx.step, second.ctx.epoch) == (4, saved.epoch)
    assert (saved.batch, saved.epoch, saved.batch_in_epoch, saved.sample) == (4, 1, 1, 15)
    assert (info.step, info.epoch, info.kind) == (4, 1, "requested")


def test_a_loaded_checkpoint_has_the_info_of_the_saved_one(tmp_path: Path) -> None:
    with small_trainer(tmp_path, History()) as first:
        first.fit("4ba")
        info = first.save_checkpoint()
    recorder = Recorder(fields=("checkpoint",))
    small_trainer(tmp_path / "resumed", recorder, History(), resume=info.path).close()
    assert recorder.values["checkpoint"] == [("on_checkpoint_load_end", info)]


def test_loading_is_fired_with_the_checkpoint_or_none(tmp_path: Path) -> None:
    first_recorder, second_recorder = Recorder(fields=("checkpoint",)), Recorder(fields=("checkpoint",))
    with small_trainer(tmp_path, first_recorder, resume="auto") as first:
        first.fit("2ba")
        first.save_checkpoint()
    small_trainer(tmp_path, second_recorder, resume="auto").close()
    assert first_recorder.values["checkpoint"][0] == ("on_checkpoint_load_end", None)
    [(event, info)] = second_recorder.values["checkpoint"]
    assert (event, info.step, info.kind) == ("on_checkpoint_load_end", 2, "requested")
    assert second_recorder.events == [
        "on_run_start",
        "on_checkpoint_load_start",
        "on_checkpoint_load_end",
        "on_data_init_start",
        "on_data_init_end",
        "on_run_end",
    ]


def test_a_callback_may_name_the_checkpoint(tmp_path: Path) -> None:
    class Chooser(Callback):
        def __init__(self, path: str) -> None:
            self.path = path

        def on_checkpoint_load_start(self, ctx: Context) -> None:
            ctx.control.load(self.path)

    with small_trainer(tmp_path) as first:
        first.fit("2ba")
        early = first.save_checkpoint().path
        first.fit("5ba")
        first.save_checkpoint()
    with small_trainer(tmp_path, Chooser(early), resume="auto") as second:
        assert second.state.timestamp.batch == 2


# --- which checkpoint ---


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("three")
    run_small(folder, SavesAt("step"), max_duration="3ba", epochs_per_round=None, **NO_EVALUATION)
    assert [path.name for path in checkpoints(folder)] == ["ep0-ba1", "ep0-ba2", "ep0-ba3"]
    return folder


@pytest.fixture
def run_of_three(three: Path, tmp_path: Path) -> Path:
    shutil.copytree(three / "small", tmp_path / "small")
    return tmp_path / "small" / "checkpoints"


def resumed_at(run: Path) -> int:
    with small_trainer(run.parent.parent, History(), resume="auto") as trainer:
        return trainer.state.timestamp.batch


def test_auto_resumes_from_the_newest_checkpoint(run_of_three: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        assert resumed_at(run_of_three) == 3
    assert not caplog.records


def test_auto_skips_an_unsealed_checkpoint(run_of_three: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run_of_three / "ep0-ba3" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING, "callsheet"):
        assert resumed_at(run_of_three) == 2
    assert not caplog.records  # a killed process leaves such a folder, which is no reason for a warning


def test_auto_skips_a_checkpoint_with_a_missing_file(run_of_three: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run_of_three / "ep0-ba3" / "state.json").unlink()
    with caplog.at_level(logging.WARNING, "callsheet"):
        assert resumed_at(run_of_three) == 2
    assert "state.json is missing" in caplog.text


@pytest.mark.test_all
@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["state.json", "index.json", "local-00000.json", "shard-00000.safetensors", "manifest.json"]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_auto_skips_a_checkpoint_with_a_flipped_bit(
    name: str, place: float, bit: int, three: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    shutil.copytree(three / "small", folder / "small")
    path = folder / "small" / "checkpoints" / "ep0-ba3" / name
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    recorded: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: recorded.append(record.getMessage())  # type: ignore[method-assign]  # a handler of one line
    logging.getLogger("callsheet").addHandler(handler)
    try:
        assert resumed_at(path.parent.parent) == 2
    finally:
        logging.getLogger("callsheet").removeHandler(handler)
        shutil.rmtree(folder)
    [message] = recorded
    assert str(path.parent) in message


def test_a_path_to_a_damaged_checkpoint_is_an_error(run_of_three: Path) -> None:
    path = run_of_three / "ep0-ba3" / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    recorder = Recorder(fields=("exception", "span"))
    with pytest.raises(CheckpointError, match=r"ep0-ba3.*shard-00000\.safetensors"):
        small_trainer(run_of_three.parent.parent, recorder, resume=path.parent)
    check_events(recorder.events)
    assert recorder.values["span"] == [("on_exception", "checkpoint_load")]


class Poison(Callback):
    """Makes the weights or the loss infinite or NaN at a step."""

    phase = "change"

    def __init__(self, step: int, what: str) -> None:
        self.step = step
        self.what = what

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step and self.what == "weights":
            with torch.no_grad():
                next(iter(ctx.model.parameters())).view(-1)[0] = math.nan

    def on_loss_end(self, ctx: Context) -> None:
        if ctx.step == self.step and self.what == "loss":
            ctx.loss = ctx.loss + math.inf


@pytest.mark.parametrize("what", ["weights", "loss"])
def test_auto_skips_a_checkpoint_with_values_that_are_not_finite(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        run_small(tmp_path, SavesAt("step"), Poison(3, what), max_duration="3ba", epochs_per_round=None, **NO_EVALUATION)
        assert "ep0-ba3" in caplog.text
        caplog.clear()
        assert resumed_at(tmp_path / "small" / "checkpoints") == 2
    [record] = caplog.records
    assert "ep0-ba3" in record.getMessage()
    assert "not finite" in record.getMessage()
    assert (tmp_path / "small" / "checkpoints" / "latest").read_text().strip() == "ep0-ba2"


def test_auto_starts_from_scratch_if_nothing_was_saved(tmp_path: Path) -> None:
    with small_trainer(tmp_path, resume="auto") as trainer:
        assert trainer.state.timestamp.batch == 0
        trainer.fit("1ba")
    assert not (tmp_path / "small").exists()  # no callback wrote a file


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "foreign"])
def test_a_path_that_is_not_a_checkpoint_of_a_trainer_is_an_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "given"
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("weights")
    elif kind == "foreign":
        write_checkpoint(path, {"model": {}}, {}, {"step": 3})
    with pytest.raises(CheckpointError, match="given"):
        small_trainer(tmp_path / "runs", resume=path)


def other(folder: Path, **changes: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        "scheduler": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "runs_folder": folder,
        "run_name": "other",
    }
    model = changes.pop("model", None) or nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1))
    data = [(torch.ones(2, 3), torch.ones(2, 1))]
    return Trainer(model, nn.functional.mse_loss, data, **(arguments | changes))


def test_a_checkpoint_of_another_model_is_an_error(run_of_three: Path, tmp_path: Path) -> None:
    for model in (nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 1))):
        with pytest.raises(CheckpointError, match=r"ep0-ba3.*model"):
            other(tmp_path, model=model, resume=run_of_three / "ep0-ba3")


def test_a_checkpoint_of_another_kind_of_optimizer_is_an_error(run_of_three: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ep0-ba3.*optimizer"):
        other(tmp_path, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), resume=run_of_three / "ep0-ba3").fit()


def test_a_folder_that_holds_a_run_is_not_started_again(run_of_three: Path) -> None:
    before = sorted(run_of_three.rglob("*"))
    with pytest.raises(ConfigError, match=r"small already holds a run; resume it with resume='auto', .* another run_name"):
        small_trainer(run_of_three.parent.parent)
    assert sorted(run_of_three.rglob("*")) == before


def test_loading_restores_the_whole_state_of_the_optimizer(run_of_three: Path) -> None:
    path = run_of_three / "ep0-ba3"
    saved = read_checkpoint(path).shared
    with small_trainer(run_of_three.parent.parent, seed=8, resume=path) as trainer:
        assert trainer.optimizer is not None
        now = trainer.optimizer.state_dict()
    assert saved["optimizer"]["class"] == "AdamW"
    assert now["param_groups"] == saved["optimizer"]["state"]["param_groups"]
    assert now["state"].keys() == saved["optimizer"]["state"]["state"].keys() == {0, 1, 2, 3}
    for index, moments in saved["optimizer"]["state"]["state"].items():
        assert moments["step"] == 3
        assert all(torch.equal(moments[name], now["state"][index][name]) for name in ("exp_avg", "exp_avg_sq", "step"))


# --- signals and kills ---


def start_script(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process: subprocess.Popen[str] = started(str(SCRIPT), str(folder), str(folder / "report.json"), *arguments, **pipes)
    return process


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Wait until the process has completed this many steps."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (folder / "steps.txt").exists() and len((folder / "steps.txt").read_text().splitlines()) >= step:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.001)
    raise AssertionError(f"step {step} never came")


@pytest.mark.test_all
def test_a_run_killed_at_any_time_resumes_with_the_same_curve(undisturbed: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    seen = 0
    for _ in range(2):
        process = start_script(tmp_path)
        wait_for_step(process, tmp_path, seen + random.randint(1, 5))
        moment = time.monotonic() + random.random() * 0.02
        while time.monotonic() < moment:
            pass
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        seen = len((tmp_path / "steps.txt").read_text().splitlines())
    assert run_small(tmp_path, seed=seed_for(tmp_path), resume="auto") == undisturbed["dataloader"]


@pytest.mark.test_all
def test_sigterm_saves_and_preempts_the_run(undisturbed: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    process = start_script(tmp_path, "--until-sigterm", "4")
    wait_for_step(process, tmp_path, 4)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == {"outcome": "preempted", "events": ["on_preempt", "on_train_end", "on_run_end"], "step": 4}
    [path] = checkpoints(tmp_path)
    recorded = read_manifest(path).info
    assert (recorded["kind"], recorded["step"]) == ("preempt", 4)
    assert run_small(tmp_path, seed=9, resume="auto")["losses"] == undisturbed["dataloader"]["losses"]


@pytest.mark.test_all
def test_sigterm_with_persistent_workers_in_the_second_epoch(tmp_path: Path) -> None:
    """The order of samples, augmentation, dropout, losses and weights are those of an uninterrupted run."""
    straight = run_small(tmp_path / "straight", loader="workers")
    process = start_script(tmp_path, "--until-sigterm", str(STEPS_PER_EPOCH + 2), "--loader", "workers")
    wait_for_step(process, tmp_path, STEPS_PER_EPOCH + 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    resumed = run_small(tmp_path, seed=9, resume="auto", loader="workers")
    assert resumed["losses"] == straight["losses"]
    assert resumed["weights"] == straight["weights"]


class Signals(Callback):
    """Sends this process a signal the nth time that an event is fired."""

    def __init__(self, event: str, nth: int, number: int = signal.SIGTERM) -> None:
        self.event = event
        self.left = nth
        self.number = number

    def on_event(self, ctx: Context) -> None:
        if ctx.event == self.event:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("event", "nth", "step"),
    [
        ("on_epoch_start", 2, 4),
        ("on_fetch_start", 3, 3),
        ("on_fetch_end", 4, 3),  # the data of the first epoch is exhausted
        ("on_backward_end", 3, 2),
        ("on_train_step_end", 5, 5),
        ("on_log", 1, 4),
        ("on_eval_step_start", 1, 4),
        ("on_eval_all_end", 1, 4),
        ("on_checkpoint_due", 2, 2),
    ],
)
def test_a_preemption_at_any_event_saves_and_ends_the_run(
    event: str, nth: int, step: int, undisturbed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    recorder, history = Recorder(), History()
    with small_trainer(tmp_path, history, Signals(event, nth), recorder) as trainer:
        trainer.fit()
    check_events(recorder.events)
    assert step <= trainer.state.timestamp.batch <= step + 1  # a signal that arrives during a boundary may act at the next one
    assert trainer.run.outcome is Outcome.PREEMPTED
    assert trainer.preempted
    assert recorder.events.count("on_preempt") == 1
    assert [read_manifest(path).info["kind"] for path in checkpoints(tmp_path)] == ["preempt"]
    assert run_small(tmp_path, seed=3, resume="auto")["losses"] == undisturbed["dataloader"]["losses"]


@pytest.mark.parametrize("event", ["on_train_start", "on_round_start"])
def test_a_preemption_before_the_first_step_is_reported(event: str, tmp_path: Path) -> None:
    recorder = Recorder()
    with small_trainer(tmp_path, Signals(event, 1), recorder) as trainer:
        trainer.fit()
    assert trainer.run.outcome is Outcome.PREEMPTED
    assert recorder.events.count("on_preempt") == 1


def test_the_previous_signal_handler_is_called_and_restored(tmp_path: Path) -> None:
    came: list[int] = []

    def handler(number: int, frame: object) -> None:
        came.append(number)

    earlier = signal.signal(signal.SIGTERM, handler)
    try:
        with small_trainer(tmp_path, Signals("on_train_step_end", 2)) as trainer:
            trainer.fit()
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert came == [signal.SIGTERM]
    assert trainer.run.outcome is Outcome.PREEMPTED


# --- Ctrl-C ---


@pytest.mark.parametrize("event", ["on_fetch_end", "on_train_step_end", "on_eval_step_start", "on_log"])
def test_the_first_ctrl_c_saves_and_is_raised_then(event: str, undisturbed: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    recorder, history = Recorder(), History()
    trainer = small_trainer(tmp_path, history, Signals(event, 2, signal.SIGINT), recorder)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    check_events(recorder.events)
    assert trainer.run.outcome is Outcome.INTERRUPTED
    assert [recorder.events.count(name) for name in ("on_preempt", "on_train_end", "on_exception", "on_run_end")] == [1, 1, 1, 1]
    assert [read_manifest(path).info["kind"] for path in checkpoints(tmp_path)] == ["preempt"]
    assert run_small(tmp_path, seed=3, resume="auto")["losses"] == undisturbed["dataloader"]["losses"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    class Impatient(Callback):
        def on_backward_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)

    recorder = Recorder()
    trainer = small_trainer(tmp_path, Impatient(), recorder)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    check_events(recorder.events)
    assert recorder.events[-2:] == ["on_exception", "on_run_end"]
    assert trainer.state.timestamp.batch == 1
    assert not (tmp_path / "small").exists()


def test_the_handler_of_ctrl_c_is_not_changed_if_it_is_ignored(tmp_path: Path) -> None:
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with small_trainer(tmp_path, Signals("on_train_step_end", 2, signal.SIGINT), max_duration="4ba") as trainer:
            trainer.fit()
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert trainer.run.outcome is Outcome.FINISHED


@pytest.mark.parametrize("behind", [False, True])
def test_a_save_that_takes_longer_than_the_grace_is_reported(
    behind: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        run_small(
            tmp_path,
            SavesAt("step"),
            max_duration="6ba",
            epochs_per_round=None,
            grace_seconds=1e-4,
            save_in_background=behind,
            **NO_EVALUATION,
        )
    [record] = caplog.records
    assert "saving took" in record.getMessage()
    assert "grace_seconds" in record.getMessage()


# --- checkpoints that cannot be used ---


@pytest.mark.parametrize("hidden", [5, 7])
def test_auto_does_not_start_again_over_checkpoints_that_do_not_fit(hidden: int, run_of_three: Path) -> None:
    before = {path: path.read_bytes() for path in run_of_three.rglob("*") if path.is_file()}
    model = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Dropout(0.3), nn.Linear(hidden, 1))
    with pytest.raises(
        CheckpointError, match=r"none of the 3 sealed checkpoint.*could be resumed from.*model.*another name or folder"
    ):
        other(run_of_three.parent.parent, model=model, run_name="small", resume="auto")
    assert {path: path.read_bytes() for path in run_of_three.rglob("*") if path.is_file()} == before


def test_auto_does_not_start_again_if_all_are_damaged(run_of_three: Path) -> None:
    for path in run_of_three.glob("*/shard-00000.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"none of .*could be resumed from.*shard-00000"):
        small_trainer(run_of_three.parent.parent, resume="auto")


def test_parts_of_a_checkpoint_that_the_run_does_not_have_are_named(
    run_of_three: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        other(tmp_path, scheduler=None, resume=run_of_three / "ep0-ba3").close()
    assert "parts that this run does not have: scheduler" in caplog.text


def test_a_model_with_a_nan_in_a_buffer_is_not_finite(tmp_path: Path) -> None:
    """An infinity in a buffer is allowed, as the buffer may be a mask."""

    class Normed(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, inputs: Any) -> Any:
            return self.linear(inputs)

    model = Normed()
    with other(tmp_path, model=model, scheduler=None) as trainer:
        assert trainer.save_checkpoint().is_finite
        model.mean[1] = math.nan
        assert not trainer.save_checkpoint().is_finite


def test_a_signal_between_the_fetches_of_a_step_acts_immediately(tmp_path: Path) -> None:
    """The resumed run fetches the batches of the interrupted step again."""
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "microbatch_size": None,
        "log_interval": "1ba",
        "epochs_per_round": None,
        **NO_EVALUATION,
    }
    straight = run_small(tmp_path / "straight", **options)
    recorder, history = Recorder(), History()
    with small_trainer(
        tmp_path, history, Signals("on_fetch_end", 4), recorder, **options
    ) as trainer:  # the first of the step's two batches
        trainer.fit()
    check_events(recorder.events)
    assert trainer.run.outcome is Outcome.PREEMPTED
    assert len(history.losses) == 2
    assert recorder.events.count("on_fetch_end") == 4
    assert run_small(tmp_path, seed=3, resume="auto", **options)["losses"] == straight["losses"]
