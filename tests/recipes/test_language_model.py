"""Models from a configuration or a folder: mistakes are rejected, and no weight is random unless requested."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from callsheet.errors import ConfigError
from callsheet.recipes.models.byte_processor import byte_processor
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.models.vision_language_model import VisionLanguageModel

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def build_model(model: LanguageModel, auto: Any = AutoModelForCausalLM, **values: Any) -> Any:
    return model.build(auto, vocabulary=262, longest=64, **values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a Llama of one layer."""
    LlamaForCausalLM(LlamaConfig(vocab_size=262, **SMALL)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# --- keys ---


def test_a_key_that_no_configuration_has_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"llama has no key 'hiden_size'; did you mean 'hidden_size'"):
        build_model(LanguageModel(config={"model_type": "llama", "hiden_size": 16}))
    gpt: dict[str, Any] = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ConfigError, match="gpt2 has no key 'rope_theta'"):
        build_model(LanguageModel(config={**gpt, "rope_theta": 3.0}))


def test_general_keys_alternative_names_and_older_names_are_accepted() -> None:
    values = {"model_type": "llama", **SMALL, "num_labels": 3, "output_attentions": True, "rope_theta": 3.0}
    model = build_model(LanguageModel(config=values))
    assert model.config.num_labels == 3
    assert model.config.rope_parameters["rope_theta"] == 3.0
    assert build_model(LanguageModel(config=model.config.to_dict())).config.num_hidden_layers == 1
    every = {"model_type": "modernbert", **SMALL, "num_hidden_layers": 4, "global_attn_every_n_layers": 2, "pad_token_id": 0}
    kinds = build_model(LanguageModel(config=every), AutoModelForSequenceClassification).config.layer_types
    assert kinds == ["full_attention", "sliding_attention"] * 2
    other_names = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert build_model(LanguageModel(config={"model_type": "gpt2", **other_names})).config.n_embd == 16


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_an_unknown_key_in_a_nested_configuration_is_rejected(part: str) -> None:
    made: Any = VisionLanguageModel(hidden_size=16, layers=1, heads=2, intermediate_size=32).make_model(byte_processor(8, 2), 64)
    config = made.config.to_dict()
    assert VisionLanguageModel(config=config).make_model(byte_processor(8, 2), 64)
    config[part]["hiden_size"] = 16
    with pytest.raises(ConfigError, match=rf"model\.config\.{part}: .* has no key 'hiden_size'; did you mean 'hidden_size'"):
        VisionLanguageModel(config=config).make_model(byte_processor(8, 2), 64)


def test_values_that_override_those_of_a_folder_must_be_known_keys(folder: Path) -> None:
    assert build_model(LanguageModel(str(folder), config={"attention_dropout": 0.5})).config.attention_dropout == 0.5
    with pytest.raises(ConfigError, match="has no key 'attention_dropot'; did you mean 'attention_dropout'"):
        build_model(LanguageModel(str(folder), config={"attention_dropot": 0.5}))


# --- weights ---


def test_a_folder_that_lacks_weights_is_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks 9 of the weights of a LlamaForCausalLM, .* such as model\.layers\.1\.input"):
        build_model(LanguageModel(str(folder), config={"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="lacks 9 of the weights"):  # only the head may be new
        build_model(LanguageModel(str(folder), config={"num_hidden_layers": 2}), AutoModelForSequenceClassification)
    LlamaModel(LlamaConfig(vocab_size=262, **SMALL)).save_pretrained(tmp_path / "headless")
    with pytest.raises(ConfigError, match=r"lacks 1 of the weights of a LlamaForCausalLM, .* lm_head\.weight"):
        build_model(LanguageModel(str(tmp_path / "headless")))
    LlamaForCausalLM(LlamaConfig(vocab_size=262, **SMALL, tie_word_embeddings=True)).save_pretrained(tmp_path / "tied")
    tied = build_model(LanguageModel(str(tmp_path / "tied")))
    assert torch.equal(tied.lm_head.weight, tied.model.embed_tokens.weight)


def test_a_classification_head_may_be_new_if_the_folder_has_none(folder: Path, tmp_path: Path) -> None:
    assert build_model(LanguageModel(str(folder)), AutoModelForSequenceClassification, num_labels=3).score.out_features == 3
    config = BertConfig(vocab_size=262, max_position_embeddings=64, **SMALL)
    BertForMaskedLM(config).save_pretrained(tmp_path / "masked")  # without a pooler
    assert build_model(LanguageModel(str(tmp_path / "masked")), AutoModelForSequenceClassification).classifier.out_features == 2

    classifier = BertForSequenceClassification(config)
    state = {name: tensor for name, tensor in classifier.state_dict().items() if not name.startswith("classifier")}
    classifier.save_pretrained(tmp_path / "broken", state_dict=state)
    assert AutoConfig.from_pretrained(tmp_path / "broken").architectures == ["BertForSequenceClassification"]
    with pytest.raises(ConfigError, match="lacks 2 of the weights"):
        build_model(LanguageModel(str(tmp_path / "broken")), AutoModelForSequenceClassification)


# --- lengths ---


def test_sequences_that_are_too_long_for_the_model_are_rejected(tmp_path: Path) -> None:
    message = "sequences of up to 64 tokens are longer than the 63 that the model takes; give shorter ones"
    short = {**SMALL, "max_position_embeddings": 63}
    with pytest.raises(ConfigError, match=message):
        build_model(LanguageModel(config={"model_type": "llama", **short}))
    LlamaForCausalLM(LlamaConfig(vocab_size=262, **short)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build_model(LanguageModel(str(tmp_path)))
    assert build_model(LanguageModel(config={"model_type": "llama", **short, "max_position_embeddings": 64}))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make the hub unreachable, and return its empty cache folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("what", ["model", "tokenizer", "processor"])
def test_an_unknown_model_name_fails_at_once_if_the_hub_is_unreachable(
    what: str, no_hub: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, began = VisionLanguageModel(path="nosuch/model-x"), time.monotonic()
    loads = {
        "model": lambda: model.build(AutoModelForCausalLM, vocabulary=8, longest=8),
        "tokenizer": model.make_tokenizer,
        "processor": model.make_processor,
    }[what]
    with pytest.raises(
        ConfigError, match=f"no {what} could be loaded from 'nosuch/model-x': there is no such folder, no copy .* the hub"
    ):
        loads()
    assert time.monotonic() - began < 10  # the hub's client would retry for half a minute
    assert [record.getMessage() for record in caplog.records] == [
        f"there is no folder nosuch/model-x; loading the {what} of that name from the hub"
    ]


def test_a_cached_model_is_used_if_the_hub_is_unreachable(no_hub: Path, tmp_path: Path) -> None:
    model = LanguageModel(hidden_size=16, layers=1, heads=2, intermediate_size=16)
    copy = no_hub / "models--kept--tiny" / "snapshots" / "abc"
    made: Any = model.build(AutoModelForCausalLM, vocabulary=32, longest=8)
    made.save_pretrained(copy)
    (no_hub / "models--kept--tiny" / "refs").mkdir()
    (no_hub / "models--kept--tiny" / "refs" / "main").write_text("abc")
    again = LanguageModel(path="kept/tiny").build(AutoModelForCausalLM, vocabulary=32, longest=8)
    assert torch.equal(next(iter(again.parameters())), next(iter(made.parameters())))


def test_a_tokenizer_without_padding_and_end_token_is_rejected(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="neither a padding token nor an end token"):
        LanguageModel(tokenizer=str(tmp_path)).make_tokenizer()
