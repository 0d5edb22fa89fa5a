"""Fine-tuning a vision-language model: rows and images, labels, training, export, and what is rejected."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from callsheet import Callback
from callsheet.callbacks import CheckpointSaver
from callsheet.cli.main import main
from callsheet.core.context import Context
from callsheet.core.randomness import seed_all
from callsheet.errors import ConfigError
from callsheet.recipes import FinetuneVLM, FinetuneVLMConfig, finetune_vlm
from callsheet.recipes.data.image_batches import ImageBatches
from callsheet.recipes.data.image_text import ImageText
from callsheet.recipes.data.images import open_image
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.models.byte_processor import CHAT_TEMPLATE, byte_processor
from callsheet.recipes.models.vision_language_model import VisionLanguageModel, check_images
from callsheet.testing import run_ranks
from callsheet.trainer.tasks import IGNORED_LABEL

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def tiny_model(**values: Any) -> VisionLanguageModel:
    shape: dict[str, Any] = {"vision_hidden_size": 16, "vision_layers": 1, "hidden_size": 16, "layers": 1, "heads": 2}
    return VisionLanguageModel(**{**shape, "intermediate_size": 32, **values})


def make_rows(folder: Path, count: int = 12) -> Path:
    """Write rows with squares whose colour is to be named. Every third row has two images and two turns."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, colour in COLOURS.items():
        Image.new("RGB", (12, 9), colour).save(folder / "images" / f"{name}.png")
    names = list(COLOURS)
    lines: list[Any] = []
    for number in range(count):
        one, other = names[number % 3], names[(number + 1) % 3]
        if number % 3:
            lines.append({"image": f"images/{one}.png", "prompt": f"What is it? {number}", "completion": one})
        else:
            lines.append({"messages": turns(one, other), "images": [f"images/{one}.png", f"images/{other}.png"]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def turns(one: str, other: str) -> list[dict[str, Any]]:
    image = {"type": "image"}
    return [
        {"role": "user", "content": [image, {"type": "text", "text": "And this?"}]},
        {"role": "assistant", "content": one},
        {"role": "user", "content": [{"type": "text", "text": "Now "}, image]},
        {"role": "assistant", "content": [{"type": "text", "text": other}]},
    ]


def small_config(folder: Path, **values: Any) -> FinetuneVLMConfig:
    rows = Rows(str(folder / "rows.jsonl" if (folder / "rows.jsonl").exists() else make_rows(folder)))
    defaults: dict[str, Any] = {
        "model": tiny_model(), "train": rows, "validation": {"seen": rows}, "runs_folder": str(folder / "runs"), "batch_size": 4, "threads": 1,
        "max_duration": "4ba", "eval_interval": None, "log_interval": 1, "sequence_length": 128, "answer_tokens": 6, "answered_rows": 3,
    }  # fmt: skip
    return FinetuneVLMConfig(**{**defaults, **values})


def weights(recipe: FinetuneVLM) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in recipe.trainer.model.state_dict().items()}


class KeepsBatches(Callback):
    """Keeps the batches and the losses of all steps."""

    def __init__(self) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.batches.append({name: value.clone() for name, value in ctx.batch.items()})
        self.losses.append(float(ctx.loss))


# --- data ---


@pytest.mark.parametrize("side", ["left", "right"])
def test_exactly_the_assistant_s_messages_are_targets(tmp_path: Path, side: str) -> None:
    processor = byte_processor(8, 2)
    processor.tokenizer.padding_side = side
    rows = Rows(str(make_rows(tmp_path)))
    table, form = rows.read(()), ImageText(processor, rows)
    batch = ImageBatches(processor, 128, "reject")([form(table[i], table.place(i)) for i in range(3)])  # type: ignore[union-attr]  # a table
    targets = [processor.tokenizer.decode([token for token in row if token != IGNORED_LABEL]) for row in batch["labels"].tolist()]
    assert targets == ["red<|end|>green<|end|>", "green<|end|>", "blue<|end|>"]
    assert batch["pixel_values"].shape == (4, 3, 8, 8)  # two images of the first row
    is_target = batch["labels"] != IGNORED_LABEL
    assert torch.equal(batch["labels"][is_target], batch["input_ids"][is_target])
    assert processor.tokenizer.padding_side == side


def test_a_token_across_the_end_of_the_prompt_is_a_target(tmp_path: Path) -> None:
    """The tokenizer merges the end of the prompt and the start of its answer into one token. The processor has no template."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["a", "b", "c", "bc", "<image>", "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("b", "c")]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<image>", "<end>")])
    processor = byte_processor(4, 2)
    processor.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    processor.image_token, processor.image_token_id, processor.chat_template = "<image>", 4, None
    row = {"image": Image.new("L", (4, 4)), "prompt": "ab", "completion": "cca"}
    batch = ImageBatches(processor, 64, "reject")([ImageText(processor, None)(row, "row 1")])
    assert batch["input_ids"].tolist() == [[4, 4, 4, 4, 0, 3, 2, 0, 5]]
    assert batch["labels"].tolist() == [[-100] * 5 + [3, 2, 0, 5]]


def test_images_with_different_numbers_of_tokens_may_be_between_turns(tmp_path: Path) -> None:
    """Idefics cuts an image into tiles and writes tokens around them, so the number of tokens depends on the image."""
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    tokenizer = byte_processor(8, 2).tokenizer
    around = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_tokens([*around, *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))], special_tokens=True)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=CHAT_TEMPLATE.replace("<|image|>", "<image>")
    ).save_pretrained(tmp_path)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = {
        "model_type": "idefics3", "scale_factor": 2, "pad_token_id": 257, "vision_config": {**shape, "image_size": 16, "patch_size": 4},
        "text_config": {"model_type": "llama", **shape},
    }  # fmt: skip
    described = VisionLanguageModel(processor=str(tmp_path), config=config, freeze=["vision_tower", "projector"])
    processor = described.make_processor()
    row = {"messages": turns("red", "green"), "images": [Image.new("RGB", (30, 12)), Image.new("RGB", (9, 30))]}
    other = {"image": Image.new("RGB", (16, 16)), "prompt": "p", "completion": "blue"}
    form, batches = ImageText(processor, None), ImageBatches(processor, 256, "reject")
    batch = batches([form(row, "row 1"), form(other, "row 2")])
    targets = [processor.tokenizer.decode([token for token in row if token != IGNORED_LABEL]) for row in batch["labels"].tolist()]
    assert targets == ["red<|end|>green<|end|>", "blue<|end|>"]
    model = described.make_model(processor, 256)
    check_images(model, batch)
    assert model(**batch).loss > 0
    trained = {name.split(".")[1] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"text_model", "weight"}


def test_a_row_that_is_too_long_is_truncated_after_its_images_or_rejected() -> None:
    processor = byte_processor(8, 2)
    form = ImageText(processor, None)
    example = form({"image": Image.new("RGB", (8, 8)), "prompt": "p", "completion": "c" * 50}, "row 7")
    assert ImageBatches(processor, 30, "truncate")([example])["labels"].shape == (1, 30)
    with pytest.raises(
        ConfigError, match=r"row 7: this row has 70 tokens, those of its 1 images included, and sequence_length is 30"
    ):
        ImageBatches(processor, 30, "reject")([example])
    with pytest.raises(ConfigError, match=r"row 7: .* would cut an image"):
        ImageBatches(processor, 10, "truncate")([example])


def test_images_are_read_from_paths_bytes_and_dictionaries(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    Image.new("RGBA", (3, 2), (255, 0, 0, 255)).save(path)
    for value in ("one.png", path.read_bytes(), {"bytes": path.read_bytes(), "path": None}, {"bytes": None, "path": "one.png"}):
        image = open_image(value, tmp_path, "row 1")
        assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (3, 2), (255, 0, 0))


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_rows_with_a_column_of_images_can_be_trained_on(tmp_path: Path, streaming: bool) -> None:
    import datasets

    columns = {"image": [Image.new("RGB", (4, 4), colour) for colour in COLOURS.values()] * 4, "prompt": ["Which?"] * 12}
    features = datasets.Features(
        {"image": datasets.Image(), "prompt": datasets.Value("string"), "completion": datasets.Value("string")}
    )
    datasets.Dataset.from_dict({**columns, "completion": list(COLOURS) * 4}, features=features).to_parquet(
        tmp_path / "rows.parquet"
    )
    rows = Rows(str(tmp_path / "rows.parquet"), streaming=streaming)
    recipe = finetune_vlm(small_config(tmp_path, train=rows, validation={"seen": rows}, max_duration="2ba"))
    assert recipe.trainer.state.timestamp.batch == 2
    assert recipe.evaluated["seen"]["loss"] > 0
    assert ("seen, always the commonest completion" in recipe.results) is not streaming


# --- training ---


@pytest.mark.test_all
def test_losses_and_answers_equal_those_of_a_plain_loop(tmp_path: Path) -> None:
    kept = KeepsBatches()
    config = small_config(
        tmp_path, max_duration="50ba", answered_rows=12, optimizer=lambda some: torch.optim.AdamW(some, lr=0.02)
    )
    recipe = finetune_vlm(config, callbacks=[kept])
    again = FinetuneVLM(config)
    again.read_data()
    seed_all(config.seed)
    model = again.make_model()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.02)
    losses = []
    for batch in kept.batches:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == 50
    assert kept.losses == pytest.approx(losses, abs=1e-6)
    assert recipe.results["seen/exact_match"] == pytest.approx(exact_match_without_padding(again, model.eval()))
    assert recipe.results["seen/exact_match"] > recipe.results["seen, always the commonest completion"] == pytest.approx(2 / 3)


def exact_match_without_padding(recipe: FinetuneVLM, model: Any) -> float:
    """Return the share of rows that the model answers correctly, one at a time and without padding."""
    correct = 0
    for example in recipe._examples("seen", 12):
        inputs = recipe.batches.encode([example.question()], side="right")
        made = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, eos_token_id=recipe.vlm_processor.tokenizer.eos_token_id
        )
        text = recipe.vlm_processor.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :])
        correct += text == f"{example.completion}<|end|>"
    return correct / 12


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = finetune_vlm(small_config(tmp_path, run_name="whole", max_duration="5ba"))
    finetune_vlm(small_config(tmp_path, run_name="broken", max_duration="2ba"), callbacks=[CheckpointSaver(save_interval="2ba")])
    resumed = finetune_vlm(small_config(tmp_path, run_name="broken", max_duration="5ba"))
    assert resumed.describe().startswith("0.0")
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name


def train_on_ranks(folder: str) -> dict[str, Any]:
    """Train on this rank in each parallel mode, and return the losses and results."""
    ends = {}
    for parallel in ("ddp", "fsdp"):
        config = small_config(Path(folder), parallel=parallel, batch_size=6, run_name=parallel, export=True)
        recipe = finetune_vlm(config, callbacks=[kept := KeepsBatches()])
        weights = [int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in kept.batches]
        ends[parallel] = {"losses": kept.losses, "weights": weights, "results": recipe.results}
    return ends


@pytest.mark.test_all
def test_two_ranks_train_evaluate_answer_and_export_like_one_process(tmp_path: Path) -> None:
    make_rows(tmp_path)
    ranks = run_ranks(train_on_ranks, 2, str(tmp_path))
    alone = finetune_vlm(small_config(tmp_path, batch_size=12), callbacks=[kept := KeepsBatches()])  # a batch has all rows
    batch = alone.batches(alone._examples("seen", 12))
    for parallel in ("ddp", "fsdp"):
        results = ranks[0][parallel]["results"]
        assert [rank[parallel]["results"] for rank in ranks] == [results] * 2
        losses = torch.tensor(
            [rank[parallel]["losses"] for rank in ranks], dtype=torch.float64
        )  # each rank has the loss of its own rows
        labels = torch.tensor([rank[parallel]["weights"] for rank in ranks])
        assert ((losses * labels).sum(dim=0) / labels.sum(dim=0)).tolist() == pytest.approx(kept.losses, abs=1e-5)
        assert results == pytest.approx(alone.results, abs=1e-5)
        with torch.no_grad():
            assert float(loaded_model(tmp_path / "runs" / parallel / "export")(**batch).loss) == pytest.approx(
                results["seen/loss"], abs=1e-5
            )


def loaded_model(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def test_the_exported_model_gives_the_same_logits_and_can_be_trained_further(tmp_path: Path) -> None:
    from transformers import AutoProcessor

    recipe = finetune_vlm(small_config(tmp_path, export=True))
    folder = recipe.folder / "export"
    batch = recipe.batches(recipe._examples("train", 4))
    processor = AutoProcessor.from_pretrained(folder)
    form = ImageText(processor, recipe.config.train)
    examples = [form(recipe.rows["train"][i], f"{recipe.config.train.path}:{i + 1}") for i in (0, 3, 6, 9)]  # type: ignore[union-attr]
    assert all(torch.equal(batch[name], value) for name, value in ImageBatches(processor, 128, "reject")(examples).items())
    with torch.no_grad():
        torch.testing.assert_close(
            loaded_model(folder)(**batch).logits, recipe.trainer.model.eval()(**batch).logits, atol=1e-6, rtol=0
        )
    before = weights(recipe)
    model = VisionLanguageModel(path=str(folder), freeze=["vision_tower", "language_model"])
    again = finetune_vlm(
        small_config(tmp_path, model=model, run_name="again", optimizer=lambda some: torch.optim.SGD(some, lr=0.5))
    )
    changed = {name for name, value in weights(again).items() if not torch.equal(value, before[name])}
    assert changed
    assert all("multi_modal_projector" in name for name in changed)
    rows: list[Mapping[str, Any]] = [{"image": str(tmp_path / "images" / "red.png"), "prompt": "What is it?"}, {"messages": turns("red", "blue")[:3],
                                     "images": [Image.new("RGB", (4, 4))] * 2}]  # fmt: skip
    answers = list(again.answers(rows))
    assert [set(answer) for answer in answers] == [{"completion"}, {"completion"}]
    assert all(isinstance(answer["completion"], str) for answer in answers)


@pytest.mark.parametrize(
    ("word", "prefixes"),
    [("vision_tower", ("model.vision_tower.",)), ("projector", ("model.multi_modal_projector.",)),
     ("language_model", ("model.language_model.", "lm_head.")),
     ("model.language_model.layers.0.mlp.*", ("model.language_model.layers.0.mlp.",)),
     ("*.layers.0.mlp.*", ("model.language_model.layers.0.mlp.", "model.vision_tower.encoder.layers.0.mlp."))],
)  # fmt: skip
def test_freeze_accepts_names_of_parts_and_patterns_of_parameters(word: str, prefixes: tuple[str, ...]) -> None:
    model = tiny_model(freeze=[word]).make_model(byte_processor(8, 2), 64)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith(prefixes)
    }


def test_the_shipped_recipe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--max_duration", "3ba", "--eval_interval", "null", "--answered_rows", "4", "--threads", "1", "--checked_rows", "5"]
    shape = ["--model.hidden_size", "16", "--model.layers", "1", "--model.vision_layers", "1", "--model.vision_hidden_size", "16"]
    assert main(["train", "finetune_vlm", *given, *shape]) == 0
    output = capsys.readouterr().out
    assert "rows of handwritten digits" in output
    assert "test/exact_match" in output
    assert "test, always the commonest completion" in output


# --- what is rejected ---


def break_row(**changed: Any) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        lines = path.read_text().splitlines()
        row = {"image": "images/red.png", "prompt": "p", "completion": "c", **changed}
        lines[1] = json.dumps({name: value for name, value in row.items() if value is not ...})
        path.write_text("\n".join(lines))

    return do


def break_image(path: Path) -> None:
    (path.parent / "images" / "green.png").write_bytes(b"this is no picture")


def empty(path: Path) -> None:
    path.write_text("")


def break_line(path: Path) -> None:
    path.write_text(path.read_text() + "{nothing\n")


BAD: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "empty": (empty, ["rows.jsonl: the file has no rows", "give one"]),
    "no JSON": (break_line, ["rows.jsonl:13: this line is not JSON"]),
    "no column": (
        break_row(completion=..., compleetion="c"),
        ["rows.jsonl:2: there is no column 'completion'", "did you mean 'compleetion'"],
    ),
    "no file": (break_row(image="images/rad.png"), ["rows.jsonl:2: there is no image", "images/rad.png; paths are relative to"]),
    "null": (break_row(image=None), ["rows.jsonl:2: there is no image in this row"]),
    "number": (break_row(image=3), ["rows.jsonl:2: an image is int 3; give the path"]),
    "no image": (break_image, ["rows.jsonl:1: ", "green.png cannot be read as an image"]),
    "too many": (
        break_row(image=..., prompt=..., messages=turns("red", "blue"), images=["images/red.png"]),
        ["rows.jsonl:2: 2 parts of the messages are of the type image, but the row has 1 images"],
    ),
    "too long": (
        break_row(completion="c" * 500),
        ["rows.jsonl:2: this row has 5", "tokens without those of its images, and sequence_length is 256"],
    ),
    "no answer": (break_row(completion=""), ["rows.jsonl:2: the completion is empty"]),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_row_is_rejected_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    change, parts = BAD[case]
    change(make_rows(tmp_path))
    Path("job.yaml").write_text(
        "recipe: finetune_vlm\ntrain: {path: rows.jsonl}\nmax_duration: 1ep\nbatch_size: 12\nsequence_length: 256\n"
    )
    shape = ["--model.hidden_size", "16", "--model.layers", "1", "--model.vision_layers", "1"]
    assert main(["train", "job.yaml", "--threads", "1", *shape]) == 2
    err = capsys.readouterr().err
    assert all(part in err for part in parts), err
    assert "Traceback" not in err
    assert not Path("runs/finetune_vlm/checkpoints").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 4}, "inserts 4 image tokens, but the model makes 16"),
        ({"num_additional_image_tokens": 0}, "inserts 15 image tokens, but the model makes 16"),
        ({"size": 16}, "cannot use the processor.s output for an image: .*16"),
    ],
)
def test_a_processor_that_does_not_fit_the_model_is_rejected(change: dict[str, Any], message: str) -> None:
    model = tiny_model().make_model(byte_processor(8, 2), 64)
    processor = byte_processor(change.pop("size", 8), 2)
    for name, value in change.items():
        setattr(processor, name, value)
    example = ImageText(processor, None)({"image": Image.new("RGB", (8, 8)), "prompt": "p", "completion": "c"}, "row 1")
    batch = ImageBatches(processor, 128, "reject")([example])
    with pytest.raises(ConfigError, match=message):
        check_images(model, batch)


def test_a_processor_with_another_image_token_is_rejected() -> None:
    config = tiny_model().make_model(byte_processor(8, 2), 64).config.to_dict()  # type: ignore[operator, union-attr]
    processor = byte_processor(8, 2)
    processor.image_token_id = 7
    with pytest.raises(ConfigError, match=r"has 7 as its image token, but the model of model\.config 261"):
        VisionLanguageModel(config=config).make_model(processor, 64)


def test_a_vocabulary_that_is_too_small_and_a_model_of_another_kind_are_rejected() -> None:
    llava = tiny_model().make_model(byte_processor(8, 2), 64).config.to_dict()  # type: ignore[operator, union-attr]
    llava["text_config"]["vocab_size"] = 100
    with pytest.raises(ConfigError, match=r"262 tokens, and the model of model\.config knows 100"):
        VisionLanguageModel(config=llava).make_model(byte_processor(8, 2), 64)
    with pytest.raises(ConfigError, match=r"this recipe cannot train a model of model\.config"):
        VisionLanguageModel(config={"model_type": "bert"}).make_model(byte_processor(8, 2), 64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"microbatch_size": 2}, "a smaller batch_size with gradient_accumulation_steps"),
        ({"too_long": "truncated"}, "did you mean 'truncate'"),
        ({"validation": {"test": Rows("x")}, "train": Rows("x")}, "cannot be called test"),
        ({"validation": {"seen": Rows("x")}}, "without train"),
    ],
)
def test_invalid_configurations_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FinetuneVLMConfig(**values)


def test_a_freeze_pattern_that_matches_no_parameter_is_rejected() -> None:
    model = tiny_model(freeze=["lm_heads.*"])
    with pytest.raises(ConfigError, match=r"^model\.freeze: no parameter matches lm_heads.*; give patterns"):
        model.make_model(byte_processor(8, 2), 64)
