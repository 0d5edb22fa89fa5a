"""Classification: accuracy, F1 and baselines, class weights, one and two ranks, and rejected input."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from callsheet import Callback, Context
from callsheet.callbacks import CheckpointSaver
from callsheet.cli.main import main
from callsheet.core.randomness import seed_all
from callsheet.errors import ConfigError
from callsheet.loggers import JSONLLogger
from callsheet.recipes.classify import Classify, ClassifyConfig, classify
from callsheet.recipes.data.class_labels import ClassLabels, class_weights
from callsheet.recipes.data.package_pieces import PackagePieces
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.tasks.class_baselines import ByteCounts
from callsheet.testing import run_ranks

SMALL = LanguageModel(hidden_size=16, layers=1, heads=2, intermediate_size=32)
WORDS = {"fruit": "apple", "metal": "zinc", "river": "Oder"}
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write texts of one repeated word. Half of them have the first class."""
    folder = tmp_path_factory.mktemp("data")
    names = ["fruit", "fruit", "metal", "river"]
    rows = [{"text": WORDS[names[i % 4]] * (1 + i % 5), "label": names[i % 4]} for i in range(61)]
    write_rows(folder / "train.jsonl", rows[:32])
    write_rows(folder / "near.jsonl", rows[32:43])
    write_rows(folder / "far.jsonl", rows[43:50])
    write_rows(folder / "test.jsonl", rows[50:])
    write_rows(folder / "wrong.jsonl", [*rows[50:], *({**row, "label": "metal"} for row in rows[52:57])])
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an encoder without a classification head, and its tokenizer."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=262, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def config_of(data: Path, runs: Path, **values: Any) -> ClassifyConfig:
    given: dict[str, Any] = {
        "runs_folder": str(runs),
        "train": Rows(str(data / "train.jsonl")),
        "validation": {name: Rows(str(data / f"{name}.jsonl")) for name in ("near", "far")},
        "test": Rows(str(data / "test.jsonl")),
        "model": SMALL,
        "max_duration": "6ba",
        "eval_interval": None,
        "batch_size": 8,
        "sequence_length": 32,
        "optimizer": OPTIMIZER,
        "threads": 1,
        "device": "cpu",
    }
    return ClassifyConfig(**given | values)


class Losses(Callback):
    """Records the loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.found.append(float(ctx.loss))


class Logged(Callback):
    """Records the loss of every metrics record, reduced over all ranks."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, ctx: Context) -> None:
        if "train/loss" in ctx.record.values:
            self.found.append(ctx.record.values["train/loss"])


@pytest.mark.parametrize("changes", [{"batch_size": 1}, {"batch_size": 4, "microbatch_size": 1}], ids=["batches", "microbatches"])
def test_a_batch_whose_classes_all_have_weight_0_changes_nothing(changes: dict[str, int], data: Path, tmp_path: Path) -> None:
    losses, weights = Losses(), [0.0, 1.0, 1.0]
    classify(config_of(data, tmp_path, class_weights=weights, max_duration="12ba", test=None, **changes), callbacks=[losses])
    assert len(losses.found) == 12
    assert all(map(math.isfinite, losses.found))
    assert (0.0 in losses.found) == (changes["batch_size"] == 1)


@pytest.mark.parametrize("weights", ["none", [0.5, 1.0, 2.0]], ids=["equal", "weighted"])
def test_losses_equal_those_of_a_plain_loop(data: Path, tmp_path: Path, weights: Any) -> None:
    config = config_of(data, tmp_path, max_duration="50ba", class_weights=weights, clip_grad_norm=None, test=None)
    losses = Losses()
    classify(config, callbacks=[losses])

    plain = Classify(config)
    plain.read_data()
    seed_all(config.seed)
    model = plain.make_model().train()
    optimizer = OPTIMIZER(model.parameters())
    seed_all(config.seed)
    loader = plain.train_data()
    expected: list[float] = []
    weight = None if weights == "none" else torch.tensor(weights)
    while len(expected) < 50:
        for batch in loader:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = cross_entropy(logits, batch["labels"], weight=weight)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(float(loss.detach()))
    assert losses.found == pytest.approx(expected[:50], abs=1e-6)
    assert losses.found[-1] < 0.3 * losses.found[0]


def test_a_trained_encoder_s_results_answers_and_export_agree(data: Path, encoder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    config = config_of(
        data, tmp_path, model=LanguageModel(path=str(encoder)), max_duration="40ba", class_weights="balanced", export=True
    )
    recipe = classify(config, callbacks=[CheckpointSaver()], loggers=[JSONLLogger()])
    for name in ("near", "far", "test"):
        assert recipe.results[f"{name}/accuracy"] == recipe.results[f"{name}/f1"] == 1.0
    assert recipe.results["majority class/accuracy"] == pytest.approx(5 / 11)  # as counted in test.jsonl
    assert recipe.results["majority class/f1"] == pytest.approx(2 * 5 / 11 / (5 / 11 + 1) / 3)
    assert recipe.results["naive Bayes of bytes/accuracy"] == 1.0
    records = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    logged = {name for record in records for name in record["values"]}
    assert {"train/loss", "train/grad_norm", "near/loss", "near/accuracy", "far/f1", "test/accuracy"} <= logged

    folder = recipe.folder / "export"
    again, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(["zinczinc"], return_tensors="pt")
    with torch.no_grad():
        found, expected = again.eval()(**inputs).logits, recipe.trainer.model.eval()(**inputs).logits
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert again.config.id2label == {0: "fruit", 1: "metal", 2: "river"}

    opened = Classify(config).open()
    answers = list(opened.answers([{"text": "zinczinc"}, {"text": "apple"}, *[{"text": "Oder"}] * 9]))
    assert [answer["label"] for answer in answers] == ["metal", "fruit", *["river"] * 9]
    assert answers[0]["probability"] == pytest.approx(float(expected.softmax(-1)[0, 1]), abs=1e-5)
    assert sum(answers[0]["probabilities"].values()) == pytest.approx(1)
    with pytest.raises(ConfigError, match="row 2: there is no column 'text'"):
        list(opened.answers([{"text": "a"}, {"txt": "b"}]))
    with pytest.raises(ConfigError, match="row 2: half of a surrogate pair"):
        list(opened.answers([{"text": "a"}, {"text": "\ud83d"}]))


def test_a_resumed_run_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    def weights(folder: str, *durations: str) -> dict[str, Tensor]:
        for duration in durations:
            config = config_of(data, tmp_path / folder, max_duration=duration, class_weights="balanced")
            recipe = classify(config, callbacks=[CheckpointSaver(save_interval="3ba")])
        return {name: tensor.detach().clone() for name, tensor in recipe.trainer.model.named_parameters()}

    uninterrupted, resumed = weights("uninterrupted", "9ba"), weights("resumed", "5ba", "9ba")
    assert uninterrupted.keys() == resumed.keys()
    assert all(torch.equal(uninterrupted[name], tensor) for name, tensor in resumed.items())


def on_a_rank(data: Path, runs: Path, parallel: str, ranks: int) -> Any:
    """Train on this rank. Every step is an epoch, so it does not matter which rank has which rows."""
    logged = Logged()
    values: dict[str, Any] = {
        "class_weights": [0.5, 1.0, 2.0],
        "batch_size": 32 // ranks,
        "eval_batch_size": 3,
        "export": True,
        "max_duration": "3ba",
        "log_interval": 1,
        "test": Rows(str(data / "wrong.jsonl")),
    }
    recipe = Classify(config_of(data, runs, parallel=parallel, **values), callbacks=[logged])
    recipe.setup()
    probabilities = [answer["probability"] for answer in recipe.answers([{"text": word} for word in "abcdefg"])]
    recipe.run()
    return logged.found, recipe.evaluated, probabilities


@pytest.mark.test_all
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks_train_like_one_with_the_whole_batch(data: Path, tmp_path: Path, parallel: str) -> None:
    from transformers import AutoModelForSequenceClassification

    expected, evaluated, probabilities = on_a_rank(data, tmp_path / "one", "single", 1)
    assert evaluated["test"]["accuracy"] < 0.9  # with 1.0, an error in the reduction over the ranks could stay unnoticed
    assert len(probabilities) == 7
    both = run_ranks(on_a_rank, 2, data, tmp_path / "two", parallel, 2)
    assert [answers for _, _, answers in both] == [pytest.approx(probabilities, abs=1e-5), []]
    for losses, found, _ in both:
        assert losses == pytest.approx(expected, abs=1e-4)
        for name, results in evaluated.items():
            assert found[name] == pytest.approx(results, abs=1e-4)
    folders = [tmp_path / name / "classify" / "export" for name in ("one", "two")]
    one, two = (AutoModelForSequenceClassification.from_pretrained(folder).eval() for folder in folders)
    ids = torch.arange(97, 117)[None]
    with torch.no_grad():
        torch.testing.assert_close(two(ids).logits, one(ids).logits, atol=1e-4, rtol=0)


def test_labels_may_be_numbers_and_a_stream_needs_named_labels(data: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"text": "ab" * (1 + i % 3), "label": i % 2} for i in range(16)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    found = Rows(str(tmp_path / "rows.parquet"))
    recipe = Classify(config_of(data, tmp_path, train=found, validation={"v": found}, test=None))
    recipe.read_data()
    assert recipe.labels.names == ["0", "1"]
    assert recipe.about_data() == "2 classes, 16 rows for train, 16 rows for v"

    streamed = Rows(str(data / "train.jsonl"), streaming=True)
    with pytest.raises(ConfigError, match="name them in `labels`"):
        Classify(config_of(data, tmp_path, train=streamed)).read_data()
    config = config_of(data, tmp_path, train=streamed, labels=["metal", "fruit", "river"], max_duration="3ba")
    assert classify(config).trainer.state.timestamp.batch == 3


REJECTED: dict[str, tuple[list[Any] | str, list[str], str]] = {
    "empty": ([], [], "the file has no rows"),
    "no JSON": ('{"text": "a", "label": "x"}\nnonsense\n', [], "bad.jsonl:2: this line is not JSON"),
    "no column": ([{"text": "a", "lable": "x"}], [], "bad.jsonl:1: there is no column 'label'; did you mean 'lable'?"),
    "unknown label": (
        [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}, {"text": "c", "label": "xx"}],
        ["--labels", "[x, y]"],
        "bad.jsonl:3: the label 'xx' is not one of the classes; did you mean 'x'?",
    ),
    "out of range": (
        [{"text": "a", "label": 0}, {"text": "b", "label": 2}],
        ["--labels", "[x, y]"],
        "bad.jsonl:2: the label 2 is out of range; there are 2 classes, 0 to 1",
    ),
    "one class": ([{"text": "a", "label": "x"}], [], "a classification needs two classes"),
    "names and numbers": ([{"text": "a", "label": "x"}, {"text": "b", "label": 1}], [], "bad.jsonl:1: the label 'x' is a name"),
    "no text": ([{"text": "a", "label": "x"}, {"text": None, "label": "y"}], [], "bad.jsonl:2: its text is None"),
    "too long": (
        [{"text": "a", "label": "x"}, {"text": "b" * 40, "label": "y"}],
        ["--too_long", "reject", "--sequence_length", "32"],
        "bad.jsonl:2: its text has 40 tokens, and may have 1 to 32",
    ),
    "weights": (
        [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}],
        ["--class_weights", "[1, 2, 3]"],
        "class_weights: 3 weights are given for 2 classes (x, y); give one for each class",
    ),
}


def test_less_data_than_a_batch_is_rejected_by_the_batch_size(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    config = ClassifyConfig(train=Rows(str(tmp_path / "rows.jsonl")), batch_size=3, runs_folder=str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^batch_size=3: the data to train on has only 2 samples, .*; give a smaller batch_size"
    ):
        Classify(config).setup()


@pytest.mark.parametrize("case", REJECTED)
def test_invalid_input_is_rejected_with_its_line_before_the_run_starts(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, options, message = REJECTED[case]
    path = tmp_path / "bad.jsonl"
    if isinstance(content, str):
        path.write_text(content)
    else:
        write_rows(path, content)
    (tmp_path / "runs").mkdir()
    arguments = ["train", "classify", "--train.path", str(path), "--runs_folder", str(tmp_path / "runs"), *options]
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.test_all
def test_the_shipped_recipe_runs_and_writes_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--pieces.most_pieces", "8", "--pieces.packages", "[email, json, logging]", "--batch_size", "4", "--threads", "1"]
    assert main(["train", "classify", "--runs_folder", str(tmp_path), "--max_duration", "3ba", *small]) == 0
    output = capsys.readouterr().out
    assert "3 classes, 24 rows for train" in output
    assert "majority class/accuracy" in output
    assert (tmp_path / "stdlib-packages" / "metrics.jsonl").exists()


def model_with_classes(folder: Path, *names: str) -> LanguageModel:
    """Return a model whose head has these classes."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=262, max_position_embeddings=64, id2label=dict(enumerate(names)), **sizes)
    BertForSequenceClassification(config).save_pretrained(folder / "model")
    return LanguageModel(str(folder / "model"), tokenizer="bytes")


def test_an_existing_head_keeps_its_classes_and_their_order(data: Path, tmp_path: Path) -> None:
    def recipe_with_classes(*names: str, **values: Any) -> Classify:
        recipe = Classify(config_of(data, tmp_path, model=model_with_classes(tmp_path, *names), **values))
        recipe.read_data()
        return recipe

    recipe = recipe_with_classes("river", "fruit", "metal")
    assert recipe.labels.names == ["river", "fruit", "metal"]
    assert recipe.counts.rows.tolist() == [8, 16, 8]
    with pytest.raises(ConfigError, match=r"has 2 classes \(river, fruit\), and the data has 3"):
        recipe_with_classes("river", "fruit")

    assert recipe_with_classes("x", "y", "z").labels.names == ["fruit", "metal", "river"]  # the head has other classes
    given = ["fruit", "metal", "river"]
    assert recipe_with_classes(*given, labels=given).labels.names == given
    message = r"the class fruit is number 0 of fruit, metal, river, but in the model .* it is number 2 of river, metal, fruit"
    with pytest.raises(ConfigError, match=message):
        recipe_with_classes("river", "metal", "fruit", labels=given)
    with pytest.raises(ConfigError, match=r"the class metal is number 1 of .* it is number 0 of METAL, FRUIT, x"):
        recipe_with_classes("METAL", "FRUIT", "x", labels=["y", "metal", "river"])


def test_with_numbers_as_labels_the_head_s_names_are_kept_and_exported(tmp_path: Path) -> None:
    from transformers import AutoConfig

    rows = Rows(str(write_rows(tmp_path / "rows.jsonl", [{"text": "ab" * (1 + i % 3), "label": i % 3} for i in range(16)])))
    given = {"train": rows, "validation": {}, "test": None, "max_duration": "1ba", "export": True}
    recipe = classify(config_of(tmp_path, tmp_path, model=model_with_classes(tmp_path, "neg", "neu", "pos"), **given))
    assert recipe.labels.names == ["neg", "neu", "pos"]
    assert recipe.counts.rows.tolist() == [6, 5, 5]
    assert AutoConfig.from_pretrained(recipe.folder / "export").id2label == {0: "neg", 1: "neu", 2: "pos"}


def test_class_labels_class_weights_and_byte_counts() -> None:
    labels = ClassLabels.of([("1", "b"), ("2", "a"), ("3", "b")])
    assert labels.names == ["a", "b"]
    assert (labels.number("b", ""), labels.number(0, "")) == (1, 0)
    with pytest.raises(ConfigError, match="x: the label True is neither"):
        labels.number(True, "x")
    assert class_weights("balanced", [3, 1], labels.names) == pytest.approx([2 / 3, 2])
    with pytest.raises(ConfigError, match="the class b has no rows"):
        class_weights("balanced", [3, 0], labels.names)
    counts = ByteCounts(2)
    for text, label in [("aab", 0), ("abb", 1), ("bbb", 1)]:
        counts.add(text, label)
    assert counts.majority() == 1
    assert counts.naive_bayes(["aaaa", "bbbb"]).tolist() == [0, 1]


def test_pieces_of_each_split_come_from_different_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.py").write_text(f"{name}{number}" * 40)
    pieces = PackagePieces(str(tmp_path), ["one", "two"], characters=40, most_pieces=7)
    files = [
        {table.place(i).partition(",")[0] for i in range(len(table))}
        for table in (pieces.train(), pieces.validation(), pieces.test())
    ]
    assert all(files)
    assert sum(map(len, files)) == len(set.union(*files))
    train = pieces.train()
    assert len(train) == 14
    assert train[0] == {"text": train[0]["text"], "label": "one"}
    assert train[0]["text"] in Path(train.place(0).partition(",")[0]).read_text()
    with pytest.raises(ConfigError, match="has not three files of a package tow; did you mean 'two'"):
        _ = PackagePieces(str(tmp_path), ["one", "tow"]).files
