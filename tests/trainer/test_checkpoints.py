"""Where the Trainer's checkpoints stand, how they are saved behind its back, and the weights alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from callsheet import Callback, CheckpointError, ConfigError, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.checkpoint import find_checkpoints, read_checkpoint, read_manifest
from callsheet.testing import Recorder, check_events, run_ranks

from .small_run import History, SavesAt, result, run_small, small_trainer


@pytest.fixture
def remote() -> Iterator[str]:
    """A folder of the memory's file system."""
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


def test_a_remote_run_is_not_begun_anew(remote: str, tmp_path: Path) -> None:
    run_small(tmp_path, SavesAt("epoch"), checkpoints_folder=remote)
    with pytest.raises(ConfigError, match=r"memory://bucket/runs/small/checkpoints holds a run already; resume='auto'"):
        small_trainer(tmp_path, checkpoints_folder=remote)


class Told(Callback):
    """The step in hand and the checkpoint's, where saving ends and where it is published."""

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
    told, recorder = Told(), Recorder()
    undisturbed = run_small(tmp_path / "undisturbed")
    saved = run_small(tmp_path, SavesAt("step"), told, recorder, save_in_background=True)
    assert saved == undisturbed
    check_events(recorder.events)
    assert [step for step, _ in told.saved] == [of for _, of in told.published] == list(range(1, 13))
    assert all(step >= of for step, of in told.published)
    for checkpoint in find_checkpoints(tmp_path / "small" / "checkpoints").checkpoints:
        resumed = run_small(tmp_path / f"from-{checkpoint.step}", seed=77, resume=checkpoint.path)
        assert resumed["losses"] == undisturbed["losses"], checkpoint.step


def test_fit_returns_when_what_it_saved_is_durable(tmp_path: Path) -> None:
    told = Told()
    with small_trainer(tmp_path, CheckpointSaver(), told, save_in_background=True) as trainer:
        trainer.fit()
        assert told.published[-1] == (12, 12)
        assert (tmp_path / "small" / "checkpoints" / "latest").read_text().strip() == "ep4-ba12"


def test_a_save_in_the_background_that_fails_ends_the_run(tmp_path: Path) -> None:
    class TakesThePlace(Callback):
        def on_checkpoint_save_start(self, ctx: Context) -> None:
            assert ctx.checkpoint is not None
            path = Path(ctx.checkpoint.path)
            path.mkdir(parents=True)
            (path / "thesis.tex").write_text("mine")

    history = History()
    trainer = small_trainer(tmp_path, SavesAt("step"), TakesThePlace(), history, save_in_background=True)
    with pytest.raises(CheckpointError, match="holds files that are no checkpoint's"):
        trainer.fit()
    assert (tmp_path / "small" / "checkpoints" / "ep0-ba1" / "thesis.tex").read_text() == "mine"
    assert trainer.run.outcome == "failed"


def test_weights_alone_are_exported(tmp_path: Path) -> None:
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
