"""Packed examples: none is lost, little is padding, and the model's outputs are those of single examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from callsheet.errors import ConfigError
from callsheet.recipes.data.packing import Pack, check_kept_apart, pack_samples, plan
from callsheet.recipes.data.padding import Padding

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model_of(kind: str, **values: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **values})).eval()


def samples(*lengths: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in lengths:
        ids = torch.randint(0, 64, (length,), generator=generator)
        labels = torch.where(torch.arange(length) < length // 3 + 1, -100, ids)
        made.append({"input_ids": ids, "labels": labels})
    return made


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200))
def test_a_plan_has_every_example_once_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = plan(lengths, 40)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled) <= 40
    assert sum(fill <= 20 for fill in filled) <= 1  # two rows that are at most half full would be one


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_logits_of_packed_examples_equal_those_of_single_examples(attention: str, is_flat: bool) -> None:
    model = model_of("llama", attn_implementation=attention)
    of_rows = [samples(9, 5, 12), samples(4, 11)]
    batch = Pack(0, flat=is_flat)([pack_samples(row) for row in of_rows])
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
        rows = logits.split([26, 15], dim=1) if is_flat else logits.split(1)
        for row, of_row in zip(rows, of_rows, strict=True):
            start = 0
            for sample in of_row:
                alone = model(sample["input_ids"][None]).logits[0]
                end = start + len(alone)
                torch.testing.assert_close(row[0, start:end], alone, atol=1e-5, rtol=0)
                start = end


def test_packed_and_padded_rows_have_the_same_loss() -> None:
    model, some = model_of("llama"), samples(9, 5, 12, 4, 11)
    with torch.no_grad():
        alone = model(**Padding(0)(some), use_cache=False).loss
        together = model(**Pack(0)([pack_samples(some[:3]), pack_samples(some[3:])]), use_cache=False).loss
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "values"), [("llama", {}), ("mistral", {"sliding_window": 4}), ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2})]
)
def test_models_that_separate_examples_are_accepted_and_stay_in_training_mode(kind: str, values: dict[str, Any]) -> None:
    model = model_of(kind, **values).train()
    check_kept_apart(model)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "values"), [("bloom", {"n_layer": 2, "n_head": 2}), ("mamba", {"state_size": 4})])
def test_models_that_do_not_separate_examples_are_rejected(kind: str, values: dict[str, Any], dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"packing: true does not work with .* give packing: false"):
        check_kept_apart(model_of(kind, **values).to(dtype))
