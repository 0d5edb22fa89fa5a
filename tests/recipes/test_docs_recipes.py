"""The programs in docs/recipes.md run, with tiny models and a few rows in place of the user's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.recipes.models.vision_language_model import VisionLanguageModel

from .tiny import model

pytestmark = pytest.mark.test_all

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
PROGRAMS = [
    text
    for text in re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if "Rows(" in text
]


def save_decoder(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    made: Any = model().build(AutoModelForCausalLM, vocabulary=len(tokenizer), longest=2048)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_encoder(folder: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=262, max_position_embeddings=512, **sizes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def save_vision_language_model(folder: Path) -> None:
    shape: dict[str, Any] = {"vision_hidden_size": 16, "vision_layers": 1, "hidden_size": 16, "layers": 1, "heads": 2}
    described = VisionLanguageModel(**shape, intermediate_size=32)
    processor = described.make_processor()
    made: Any = described.make_model(processor, 1024)
    made.save_pretrained(folder)
    processor.save_pretrained(folder)


def save_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the models and data that the programs name, in a new working directory."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    for path in ("models/llama-3.2-1b-instruct", "large", "small"):
        save_decoder(tmp_path / path)
    save_encoder(tmp_path / "my" / "encoder")
    save_vision_language_model(tmp_path / "models" / "smolvlm")
    chats = [{"prompt": f"{i} + {i} =", "completion": str(2 * i) * 100} for i in range(128)]
    for name in ("data/train", "data/billing", "chats"):
        save_rows(tmp_path / f"{name}.jsonl", chats)
    labeled = [{"text": name, "label": label} for name, label in (("apple", "fruit"), ("zinc", "metal")) for _ in range(8)]
    for name in ("train", "shop"):
        save_rows(tmp_path / f"{name}.jsonl", labeled)
    Image.new("RGB", (12, 9), "red").save(tmp_path / "red.png")
    for name in ("train", "validation"):
        save_rows(
            tmp_path / "receipts" / f"{name}.jsonl", [{"image": "../red.png", "prompt": "Which?", "completion": "red"}] * 32
        )
    return tmp_path


def test_there_is_a_program_for_each_recipe_with_rows() -> None:
    assert [re.search(r"^recipe = (\w+)\(", text, re.MULTILINE)[1] for text in PROGRAMS] == [  # type: ignore[index]
        "finetune",
        "finetune_vlm",
        "classify",
        "distill",
    ]


@pytest.mark.parametrize("text", PROGRAMS, ids=["finetune", "finetune_vlm", "classify", "distill"])
def test_the_program_trains_and_has_results(text: str, user_folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(text, str(PAGE), "exec"), names)
    recipe = names["recipe"]
    assert recipe.trainer.run.outcome == "finished"
    assert all(isinstance(value, (int, float)) for value in recipe.results.values())
    assert bool(recipe.results) == ("validation=" in text)
