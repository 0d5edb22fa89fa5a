"""Where the Trainer's checkpoints are, saves in the background, and the export of weights."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import callsheet
from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.checkpoint import find_checkpoints, read_checkpoint, read_manifest
from callsheet.errors import CheckpointError, ConfigError
from callsheet.testing import Recorder, check_events, run_ranks
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

from .small_run import History, SavesAt, result, run_small, small_trainer


@pytest.fixture
def remote() -> Iterator[str]:
    """Return a folder in fsspec's memory file system."""
    yield "memory://bucket/runs"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_a_remote_run_is_kept_rotated_and_resumed(remote: str, tmp_path: Path) -> None:
    undisturbed = run_small(tmp_path / "undisturbed")
    options: dict[str, Any] = {"checkpoints_folder": remote, "seed": 0}
    run_small(tmp_path, CheckpointSaver(save_interval="1ba", keep=2), max_duration="7ba", epochs_per_round=None, **options)
    found = find_checkpoints(f"{remote}/small/checkpoints")
    assert [checkpoint.step for checkpoint in found.checkpoints] == [7, 6]
    assert not found.skipped
    assert not (tmp_path / "small").exists()
    saver = CheckpointSaver(save_interval="1ba", keep=2)
    resumed = run_small(tmp_path, saver, resume="auto", **options)
    assert resumed["losses"] == undisturbed["losses"]
    assert resumed["weights"] == undisturbed["weights"]
    assert [checkpoint.step for checkpoint in find_checkpoints(f"{remote}/small/checkpoints").checkpoints] == [12, 11]


def test_a_remote_run_is_not_started_again(remote: str, tmp_path: Path) -> None:
    run_small(tmp_path, SavesAt("epoch"), checkpoints_folder=remote)
    with pytest.raises(
        ConfigError, match=r"memory://bucket/runs/small/checkpoints already holds a run; resume it with resume='auto'"
    ):
        small_trainer(tmp_path, checkpoints_folder=remote)


class Recorded(Callback):
    """Records the current step and the checkpoint's step when a save ends and when it is published."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []
        self.published: list[tuple[int, int]] = []

    def on_checkpoint_save_end(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        self.saved.append((ctx.step, ctx.checkpoint.step))

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        assert read_manifest(ctx.checkpoint.path).info["step"] == ctx.checkpoint.step  # it is durable
        assert ctx.checkpoint.size_bytes == read_manifest(ctx.checkpoint.path).size_bytes
        self.published.append((ctx.step, ctx.checkpoint.step))


def test_saving_in_the_background_changes_nothing_and_publishes_everything(tmp_path: Path) -> None:
    recorded, recorder = Recorded(), Recorder()
    undisturbed = run_small(tmp_path / "undisturbed")
    saved = run_small(tmp_path, SavesAt("step"), recorded, recorder, save_in_background=True)
    assert saved == undisturbed
    check_events(recorder.events)
    assert [step for step, _ in recorded.saved] == [of for _, of in recorded.published] == list(range(1, 13))
    assert all(step >= of for step, of in recorded.published)
    for checkpoint in find_checkpoints(tmp_path / "small" / "checkpoints").checkpoints:
        resumed = run_small(tmp_path / f"from-{checkpoint.step}", seed=77, resume=checkpoint.path)
        assert resumed["losses"] == undisturbed["losses"], checkpoint.step


def test_fit_returns_when_what_it_saved_is_durable(tmp_path: Path) -> None:
    recorded = Recorded()
    with small_trainer(tmp_path, CheckpointSaver(), recorded, save_in_background=True) as trainer:
        trainer.fit()
        assert recorded.published[-1] == (12, 12)
        assert (tmp_path / "small" / "checkpoints" / "latest").read_text().strip() == "ep4-ba12"


@pytest.mark.parametrize("attached", [False, True])
def test_background_saves_are_published_before_training_ends(attached: bool, tmp_path: Path) -> None:
    recorder = Recorder()
    if attached:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        callbacks = [SavesAt("step"), recorder]
        with callsheet.attach(
            model=model, optimizer=optimizer, callbacks=callbacks, runs_folder=tmp_path, save_in_background=True
        ) as run:
            for batch in run.steps([torch.ones(3, 2)] * 4):
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    else:
        run_small(tmp_path, SavesAt("step"), recorder, save_in_background=True)
    check_events(recorder.events)
    saves, published = recorder.events.count("on_checkpoint_save_end"), "on_checkpoint_published"
    end = recorder.events.index("on_train_end")
    assert saves == recorder.events[:end].count(published) == recorder.events.count(published) > 0


def test_a_save_in_the_background_that_fails_ends_the_run(tmp_path: Path) -> None:
    class OccupiesThePath(Callback):
        def on_checkpoint_save_start(self, ctx: Context) -> None:
            assert ctx.checkpoint is not None
            path = Path(ctx.checkpoint.path)
            path.mkdir(parents=True)
            (path / "thesis.tex").write_text("mine")

    history = History()
    trainer = small_trainer(tmp_path, SavesAt("step"), OccupiesThePath(), history, save_in_background=True)
    with pytest.raises(CheckpointError, match="holds files that do not belong to a checkpoint"):
        trainer.fit()
    assert (tmp_path / "small" / "checkpoints" / "ep0-ba1" / "thesis.tex").read_text() == "mine"
    assert trainer.run.outcome == "failed"


class Allocations(TorchDispatchMode):
    """Counts the bytes of new tensors that this thread makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {
            tensor.data_ptr()
            for arg in args
            for tensor in (arg if isinstance(arg, list | tuple) else [arg])
            if isinstance(tensor, Tensor)
        }
        if isinstance(result, Tensor) and result.data_ptr() not in known:
            self.bytes += result.untyped_storage().nbytes()
        return result


class AllocatedWhileSaving(Callback):
    """Measures how much memory the training thread allocates in each save."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        self.mode = Allocations()
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def on_checkpoint_save_end(self, ctx: Context) -> None:
        self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.bytes.append(self.mode.bytes)


def wide_trainer(folder: Path, *callbacks: Callback, **changes: Any) -> Trainer:
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 1))
    data = [(torch.randn(4, 256), torch.randn(4, 1)) for _ in range(6)]
    arguments: dict[str, Any] = {
        "optimizer": torch.optim.AdamW,
        "run_name": "wide",
        "runs_folder": folder,
        "save_in_background": True,
    }
    return Trainer(model, nn.functional.mse_loss, data, callbacks=callbacks, **(arguments | changes))


def test_no_save_allocates_or_checks_the_state_on_the_training_thread(tmp_path: Path) -> None:
    allocated = AllocatedWhileSaving()
    with wide_trainer(tmp_path, CheckpointSaver(save_interval="2ba"), allocated) as trainer:
        trainer.fit()
    assert len(allocated.bytes) == 3
    assert max(allocated.bytes) < 64 * 256 * 4  # a quarter of the larger weight; the random states are some kilobytes


def test_no_buffers_are_allocated_if_no_callback_saves(tmp_path: Path) -> None:
    class Last(Callback):
        def on_train_end(self, ctx: Context) -> None:
            ctx.control.save("by hand")

    allocated = AllocatedWhileSaving()
    with wide_trainer(tmp_path, Last(), allocated) as trainer:
        trainer.fit()
    assert min(allocated.bytes) > 256 * 256 * 4 * 3


class Spoils(Callback):
    """Writes a value into the last parameter or buffer at step 2."""

    phase = "change"

    def __init__(self, name: str, value: float) -> None:
        self.name = name
        self.value = value

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            ctx.model.state_dict()[self.name].view(-1)[-1] = self.value


@pytest.mark.parametrize("in_background", [True, False], ids=["background", "line"])
@pytest.mark.parametrize(
    ("name", "value", "is_finite"),
    [
        ("2.weight", math.nan, False),
        ("0.weight", -math.inf, False),
        ("1.running_mean", math.nan, False),
        ("1.running_var", math.inf, True),  # a buffer that is a mask may hold infinities
        ("0.weight", 3e38, True),
    ],
)
def test_a_checkpoint_with_values_that_are_not_finite_is_marked_when_it_is_published(
    name: str, value: float, is_finite: bool, in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published: list[bool] = []

    class Published(Callback):
        def on_checkpoint_published(self, ctx: Context) -> None:
            assert ctx.checkpoint is not None
            assert read_manifest(ctx.checkpoint.path).info["is_finite"] is ctx.checkpoint.is_finite
            published.append(ctx.checkpoint.is_finite)

    callbacks = (Spoils(name, value), SavesAt("step"), Published())
    with wide_trainer(tmp_path, *callbacks, max_duration="2ba", save_in_background=in_background) as trainer:
        trainer.fit()
    assert published == [True, is_finite]
    assert ("not finite" in caplog.text) is not is_finite
    latest = (tmp_path / "wide" / "checkpoints" / "latest").read_text().strip()
    assert latest == ("ep0-ba2" if is_finite else "ep0-ba1")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "callsheet-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs more rights than these tests have")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("in_background", [True, False], ids=["background", "line"])
def test_a_disk_that_is_full_after_a_save_does_not_end_the_run(
    in_background: bool, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filler = small_disk / "filler"

    class FreesTheDisk(Callback):
        def on_checkpoint_published(self, ctx: Context) -> None:
            filler.unlink(missing_ok=True)

    def fill(event: str, args: tuple[Any, ...]) -> None:  # once the checkpoint is committed, no byte is free
        if is_on and event == "open" and str(args[0]).endswith("latest.new"):
            is_on.clear()
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

    is_on = ["yes"]
    sys.addaudithook(fill)
    saver = CheckpointSaver(save_interval="1ba", keep=1)
    try:
        with small_trainer(small_disk, saver, FreesTheDisk(), save_in_background=in_background, max_duration="3ba") as trainer:
            trainer.fit()
    finally:
        is_on.clear()
    assert trainer.run.outcome == "finished"
    assert "does not name the newest checkpoint: cannot write" in caplog.text
    assert "No space left on device" in caplog.text
    [left] = find_checkpoints(small_disk / "small" / "checkpoints").checkpoints
    assert left.step == 3


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.trainer.small_run import SavesAt, run_small

def kill(event, args):
    if event == "open" and str(args[0]).endswith(sys.argv[2]) and "ba2" in str(args[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
run_small(Path(sys.argv[1]), SavesAt("step"))
"""


@pytest.mark.test_all
@pytest.mark.parametrize("file", ["checkpoint.txt", "shard-00000.safetensors"])
def test_leftovers_of_a_killed_save_are_ignored_without_a_warning_and_deleted(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = os.pathsep.join([str(Path(callsheet.__file__).parents[1]), str(Path(__file__).parents[2])])
    done = subprocess.run([python(), "-c", KILLED, str(tmp_path), file], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == -signal.SIGKILL
    left = tmp_path / "small" / "checkpoints" / "ep0-ba2"
    assert left.is_dir()
    foreign = left.with_name("mine")
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    with caplog.at_level(logging.WARNING, "callsheet"):
        with small_trainer(tmp_path, resume="auto") as trainer:  # a run that saves nothing deletes nothing
            assert trainer.state.timestamp.batch == 1
        assert left.is_dir()
        with small_trainer(tmp_path, SavesAt("epoch"), resume="auto", max_duration="1ep") as trainer:
            trainer.fit()
    assert {record.getMessage() for record in caplog.records if str(left) in record.getMessage()} == set()
    assert not left.exists()
    assert (foreign / "thesis.tex").read_text() == "mine"


def test_exporting_writes_only_the_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with small_trainer(tmp_path, max_duration="2ba", epochs_per_round=None) as trainer:
        trainer.fit()
        trainer.export(tmp_path / "weights.safetensors")
        weights = result(trainer, History())["weights"]
    read = load_file(tmp_path / "weights.safetensors")
    assert {name: [value.hex() for value in tensor.flatten().tolist()] for name, tensor in read.items()} == weights


def exported_of_shards(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, tie_word_embeddings=True
    )
    ids = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": part, "labels": part} for part in ids.split(2)]
    with Trainer(
        LlamaForCausalLM(config),
        None,
        data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        parallel="fsdp",
        run_name="llama",
        runs_folder=folder,
    ) as trainer:
        trainer.fit()
        logits = trainer.predict([{"input_ids": ids}] * 2)[0].logits
        trainer.export(f"{folder}/exported")
    if os.environ["RANK"] == "0":
        read = LlamaForCausalLM.from_pretrained(f"{folder}/exported").eval()
        with torch.no_grad():
            torch.testing.assert_close(read(input_ids=ids).logits, logits, rtol=0, atol=0)


@pytest.mark.test_all
def test_a_sharded_hugging_face_model_is_exported_whole(tmp_path: Path) -> None:
    run_ranks(exported_of_shards, 2, str(tmp_path))
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "exported").iterdir()}


def test_a_checkpoint_of_more_ranks_is_read_by_one(tmp_path: Path) -> None:
    run_ranks(exported_of_shards_saved, 2, str(tmp_path))
    loaded = read_checkpoint(tmp_path / "given")
    assert loaded.world_size == 2
    assert set(loaded.shared["model"]) == {"weight", "bias"}
    assert loaded.shared["state"]["timestamp"]["batch"] == 4


def exported_of_shards_saved(folder: str) -> None:
    data = [(torch.ones(2, 3), torch.ones(2, 1))] * 8
    with Trainer(
        nn.Linear(3, 1), nn.functional.mse_loss, data, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), parallel="fsdp"
    ) as trainer:
        trainer.fit()
        trainer.save_checkpoint(f"{folder}/given")


def test_an_optimizer_with_other_options_is_named_with_both_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(rate: float, duration: str, *, scheduled: bool = False) -> float:
        with Trainer(
            torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, [(torch.ones(2, 2), torch.ones(2, 1))] * 4,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
            scheduler=(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)) if scheduled else None,
            max_duration=duration, callbacks=[CheckpointSaver()], resume="auto", run_name=f"rates-{scheduled}", runs_folder=tmp_path,
        ) as trainer:  # fmt: skip
            trainer.fit()
            return float(trainer.ctx.optimizer.param_groups[0]["lr"])

    for scheduled in (False, True):
        trained(0.1, "1ep", scheduled=scheduled)
        trained(0.1, "2ep", scheduled=scheduled)
        assert "was given" not in caplog.text
        rate = trained(0.5, "3ep", scheduled=scheduled)
        assert rate < 0.5
        assert "SGD: lr is 0.1 in the checkpoint, and 0.5 was given. Training continues with the checkpoint's" in caplog.text
        caplog.clear()
