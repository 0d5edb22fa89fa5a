from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from callsheet.checkpoint import export_huggingface, export_weights
from callsheet.errors import CheckpointError
from callsheet.testing.ranks import run_ranks

from .many_ranks import Net, error_of, gloo_group, model_and_optimizer, whole

LAST = "weights.safetensors"


def exported(root: str) -> Any:
    group = gloo_group()
    assert group is not None
    model, _ = model_and_optimizer(0, sharded=True)
    seal = export_weights(model, f"{root}/new/{LAST}", group=group)
    recorded = [error_of(lambda: export_weights(model, f"{root}/new/{LAST}", group=group))]
    recorded.append(error_of(lambda: export_weights(model, f"{root}/new/{LAST}/in/a/file", group=group)))
    assert export_weights(model, f"{root}/new/{LAST}", group=group, overwrite=True) == seal
    return whole(model(torch.arange(7))), recorded


def test_sharded_weights_are_exported_whole_and_tied_weights_once(tmp_path: Path) -> None:
    (logits, recorded), second = run_ranks(exported, 2, str(tmp_path))
    assert (logits, recorded) == second
    assert "already exists; choose a new path or pass overwrite=True" in recorded[0]
    assert "cannot write" in recorded[1]
    assert os.listdir(tmp_path / "new") == [LAST]
    model = Net()
    safetensors.torch.load_model(model, tmp_path / "new" / LAST)
    assert whole(model(torch.arange(7))) == logits
    with safetensors.safe_open(tmp_path / "new" / LAST, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        assert "head.weight" not in file.keys()  # noqa: SIM118


def test_state_that_is_not_a_tensor_is_rejected(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    with pytest.raises(CheckpointError, match=r"_extra_state: a <class 'dict'> in the model's state is not a tensor"):
        export_weights(Extra(1, 1), tmp_path / LAST)
    with pytest.raises(CheckpointError, match="weight: a meta tensor cannot be written"):
        export_weights(nn.Linear(1, 1, device="meta"), tmp_path / LAST)
    with pytest.raises(
        CheckpointError, match="a Linear is not a model of transformers: it has no save_pretrained; use export_weights"
    ):
        export_huggingface(nn.Linear(1, 1), tmp_path)
    assert not os.listdir(tmp_path)


def language_model(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=6, n_layer=2, n_head=2)).eval()


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"one": 0, "two": 1}, "one")))


def published(root: str) -> Any:
    group = gloo_group()
    model = language_model(0)
    assert model.lm_head.weight is model.transformer.wte.weight
    if group is not None:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    export_huggingface(model, f"{root}/hf", group=group, processor=tokenizer())
    with torch.no_grad():
        return whole(model(torch.arange(8)[None]).logits), error_of(lambda: export_huggingface(model, "memory://x", group=group))


@pytest.mark.test_all
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sharded_language_model_is_exported_for_transformers(tmp_path: Path, ranks: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ends = run_ranks(published, ranks, str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(model) is type(language_model(1))
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        logits = whole(model(torch.arange(8)[None]).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").vocab == {"one": 0, "two": 1}
    assert all(end[0] == logits for end in ends)
    assert all("transformers writes only to folders of this machine" in end[1] for end in ends)


def test_a_folder_is_not_replaced_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "precious.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"runs is a folder; give a file"):
        export_weights(torch.nn.Linear(2, 1), tmp_path / "runs", overwrite=True)
    assert (tmp_path / "runs" / "first" / "precious.txt").read_text() == "mine"


def test_the_old_file_is_kept_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    export_weights(torch.nn.Linear(2, 1), path)
    before = path.read_bytes()
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, no_limit[1]))  # the disk is full
    try:
        with pytest.raises(CheckpointError):
            export_weights(torch.nn.Linear(200, 1), path, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    assert path.read_bytes() == before
    export_weights(torch.nn.Linear(200, 1), path, overwrite=True)
    assert path.read_bytes() != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
