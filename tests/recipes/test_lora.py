"""Adapters: the export of a merged model on several ranks, and the hidden warnings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from callsheet.cli.export import export
from callsheet.cli.main import main
from callsheet.errors import CheckpointError
from callsheet.recipes.models.lora import Lora
from callsheet.testing import run_ranks

from .tiny import sums

SHARDED = ["--parallel", "fsdp"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one process, with its checkpoint and its export."""
    folder = tmp_path_factory.mktemp("run")
    rows = sums(folder)
    job: dict[str, Any] = {
        "recipe": "finetune",
        "run_name": "tiny",
        "runs_folder": str(folder),
        "max_duration": "2ba",
        "batch_size": 4,
        "threads": 1,
        "device": "cpu",
        "export": True,
        "evaluate_first": False,
        "samples": 0,
        "sequence_length": 32,
        "train": {"path": rows["train"].path},
        "model": {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32},
        "lora": {"r": 2},
        "callbacks": [{"class_path": "callsheet.callbacks.CheckpointSaver"}],
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    assert main(["train", str(folder / "job.yaml")]) == 0
    return folder / "tiny"


def exported_on_a_rank(run: Path, folder: Path, overrides: list[str]) -> str:
    try:
        return export(str(run), overrides, folder=str(folder))
    except CheckpointError as error:
        return f"rejected: {error}"


@pytest.mark.test_all
@pytest.mark.parametrize("overrides", [pytest.param([], marks=pytest.mark.slow), SHARDED], ids=["ddp", "fsdp"])
def test_two_ranks_export_the_same_model_as_one_process_and_rank_0_reports_it(
    run: Path, tmp_path: Path, overrides: list[str]
) -> None:
    messages = run_ranks(exported_on_a_rank, 2, run, tmp_path / "out", overrides)
    assert messages[0].startswith(f"{run}, step 2: {tmp_path / 'out'} (")
    assert "model.safetensors, tokenizer.json" in messages[0]
    assert messages[1] == ""
    ours, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", run / "export"))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_failed_write_on_rank_0_is_an_error_on_all_ranks(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    messages = run_ranks(exported_on_a_rank, 2, run, tmp_path / "file" / "out", [])
    for text in messages:
        assert text.startswith("rejected: rank 0: NotADirectoryError")


class Warns(GPT2LMHeadModel):  # type: ignore[misc]
    """A model for whose layers peft warns that it adapts an option, and which gives another warning itself."""

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn("the adapters are wrong", stacklevel=1)
        super().add_adapter(*args, **kwargs)


def test_only_the_harmless_warnings_of_peft_are_hidden() -> None:
    model = Warns(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, bos_token_id=None, eos_token_id=None))
    with pytest.warns(UserWarning, match="the adapters are wrong") as seen:
        Lora(r=2).add_to(model)
    assert len(seen) == 1
