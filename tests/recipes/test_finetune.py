"""Fine-tuning: losses, rows, one and two ranks, full training and adapters."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from callsheet import Callback, Context
from callsheet.callbacks import CheckpointSaver
from callsheet.cli.main import main
from callsheet.core.randomness import seed_all
from callsheet.errors import ConfigError
from callsheet.loggers import JSONLLogger
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.finetune import Finetune, FinetuneConfig, finetune
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.models.lora import Lora
from callsheet.testing import run_ranks

SMALL = LanguageModel(hidden_size=16, layers=2, heads=2, intermediate_size=32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write conversations of repeated letters: 32 for training and 8 for validation."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"messages": [{"role": "user", "content": "a" * i}, {"role": "assistant", "content": "b" * (40 - i) + "c"}]}
        for i in range(40)
    ]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[8:]))
    (folder / "easy.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:4]))
    (folder / "hard.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[4:8]))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and its tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    tokenizer = byte_tokenizer()
    model: Any = SMALL.build(AutoModelForCausalLM, vocabulary=len(tokenizer), longest=128)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(data: Path, runs: Path, **values: Any) -> FinetuneConfig:
    given: dict[str, Any] = {
        "runs_folder": str(runs),
        "train": Rows(str(data / "train.jsonl")),
        "validation": {name: Rows(str(data / f"{name}.jsonl")) for name in ("easy", "hard")},
        "model": SMALL,
        "max_duration": "6ba",
        "eval_interval": None,
        "log_interval": 1,
        "batch_size": 4,
        "sequence_length": 80,
        "generated_tokens": 8,
        "optimizer": partial(torch.optim.AdamW, lr=3e-3),
        "threads": 1,
        "device": "cpu",
    }
    return FinetuneConfig(**given | values)


class Losses(Callback):
    """Records the loss of every metrics record, reduced over all ranks. With `log_interval=1`, this is every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, ctx: Context) -> None:
        if "train/loss" in ctx.record.values:
            self.found.append(ctx.record.values["train/loss"])


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits  # type: ignore[no-any-return]


class RequestsEvaluation(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            ctx.control.evaluate("a test")


def test_results_are_those_of_the_last_step(data: Path, tmp_path: Path) -> None:
    """An evaluation within the run, of an earlier run or of a trial is not reported as the final result."""

    def loss_of_the_end(config: FinetuneConfig) -> float:
        job = Finetune(config).open()
        with job.trainer:
            return job.evaluate()["easy"]["loss"]

    requested = config_of(data, tmp_path, run_name="a", evaluate_first=False)
    results = finetune(requested, callbacks=[RequestsEvaluation(), CheckpointSaver()]).results
    assert results["easy/loss"] == loss_of_the_end(requested)
    given: dict[str, Any] = {"run_name": "b", "evaluate_first": False, "batch_size": 1, "eval_batch_size": 1}
    finetune(config_of(data, tmp_path, **given, max_duration="4ba", eval_interval="2ba"), callbacks=[CheckpointSaver()])
    longer = config_of(data, tmp_path, **given, max_duration="24ba")
    results = finetune(longer, callbacks=[CheckpointSaver()]).results
    assert results["easy/loss"] == loss_of_the_end(longer)


IDS = torch.arange(97, 117)[None]


@pytest.mark.test_all
@pytest.mark.parametrize("packing", [False, True])
def test_losses_equal_those_of_a_plain_loop(data: Path, tmp_path: Path, packing: bool) -> None:
    config = config_of(data, tmp_path, max_duration="50ba", packing=packing, clip_grad_norm=None)
    losses = Losses()
    finetune(config, callbacks=[losses])

    plain = Finetune(config)
    plain.read_data()
    seed_all(config.seed)
    model = plain.make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seed_all(config.seed)
    expected: list[float] = []
    loader = plain.train_data()
    while len(expected) < 50:
        for batch in loader:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(float(loss.detach()))
    assert losses.found == pytest.approx(expected[:50], abs=1e-6)
    assert losses.found[-1] < 0.6 * losses.found[0]


@pytest.mark.test_all
def test_results_have_baselines_and_metrics_are_named_after_the_datasets(data: Path, tmp_path: Path) -> None:
    config = config_of(data, tmp_path, max_duration="60ba", packing=True, batch_size=8, test=Rows(str(data / "easy.jsonl")))
    recipe = finetune(config, loggers=[JSONLLogger()])
    results = recipe.results
    assert set(results) == {
        f"{name}{what}" for name in ("easy", "hard") for what in ("/loss", ", before training", ", unigram", ", bigram")
    } | {"test/loss", "test, unigram", "test, bigram"}
    assert results["easy/loss"] == pytest.approx(results["test/loss"])
    for name in ("easy", "hard"):
        assert results[f"{name}/loss"] < results[f"{name}, unigram"] < results[f"{name}, before training"]
    text = "\n".join(recipe.generated_texts())
    assert text.count("<|assistant|>' ---") == 4  # two of each dataset
    assert "(the data: bbbb" in text
    records = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    logged = {name for record in records for name in record["values"]}
    assert {"train/loss", "train/grad_norm", "easy/loss", "hard/loss", "test/loss"} <= logged
    assert "32 examples in " in recipe.describe()


@pytest.mark.test_all
@pytest.mark.parametrize("lora", [None, Lora(dropout=0.1)], ids=["full", "lora"])
def test_a_resumed_run_ends_with_the_same_weights(data: Path, base: Path, tmp_path: Path, lora: Lora | None) -> None:
    def weights(folder: str, *durations: str) -> dict[str, Tensor]:
        for duration in durations:
            config = config_of(data, tmp_path / folder, max_duration=duration, lora=lora, model=LanguageModel(path=str(base)))
            recipe = finetune(config, callbacks=[CheckpointSaver(save_interval="3ba")])
            assert set(recipe.trainer.ctx.user_state["finetune/before"]) == {"easy", "hard"}
        return {name: tensor.detach().clone() for name, tensor in recipe.trainer.model.named_parameters()}

    uninterrupted, resumed = weights("uninterrupted", "12ba"), weights("resumed", "5ba", "12ba")
    assert all(torch.equal(uninterrupted[name], tensor) for name, tensor in resumed.items())


def test_the_exported_folder_has_the_model_and_the_tokenizer_s_end_token(data: Path, base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = config_of(data, tmp_path, model=LanguageModel(path=str(base)), export=True)
    recipe = finetune(config, callbacks=[CheckpointSaver()])
    again = AutoModelForCausalLM.from_pretrained(recipe.folder / "export")
    torch.testing.assert_close(logits_of(again, IDS), logits_of(recipe.trainer.model, IDS), atol=1e-6, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(recipe.folder / "export")
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template == byte_tokenizer().chat_template
    rows: list[dict[str, Any]] = [{"prompt": "aaa"}, {"messages": [{"role": "user", "content": "aaa"}]}, {"prompt": "a"}]
    opened = Finetune(recipe.config).open()
    with opened.trainer:
        answers = list(opened.answers(rows))
        with pytest.raises(ConfigError, match="row 1: a prompt of 132 tokens and 8 generated tokens are more than the 128"):
            list(opened.answers([{"prompt": "a" * 130}]))
        with pytest.raises(ConfigError, match="row 1: half of a surrogate pair"):
            list(opened.answers([{"prompt": "\ud83d"}]))
    assert answers[0] == answers[1]
    assert set(answers[2]) == {"completion"}


@pytest.mark.parametrize("merge", [True, False])
def test_only_adapters_are_trained_and_they_are_exported_merged_or_separately(
    data: Path, base: Path, tmp_path: Path, merge: bool
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora = Lora(r=4, targets=["q_proj", "v_proj"] if merge else "all-linear", merge=merge)
    config = config_of(data, tmp_path, model=LanguageModel(path=str(base)), lora=lora, export=True)
    recipe = finetune(config, callbacks=[CheckpointSaver()])
    model, before = recipe.trainer.model, AutoModelForCausalLM.from_pretrained(base)
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    for name, parameter in before.named_parameters():
        here = frozen.get(name, frozen.get(name.replace("_proj.", "_proj.base_layer.")))
        assert here is not None
        assert torch.equal(here, parameter)
    assert all("lora_" in name for name in model.state_dict())
    again = (
        AutoModelForCausalLM.from_pretrained(recipe.folder / "export")
        if merge
        else PeftModel.from_pretrained(before, recipe.folder / "export")
    )
    found, expected = logits_of(again, IDS), logits_of(model, IDS)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert not torch.allclose(expected, logits_of(AutoModelForCausalLM.from_pretrained(base), IDS), atol=1e-4)


def test_examples_that_are_too_long_are_dropped_truncated_or_rejected(data: Path, tmp_path: Path) -> None:
    with (tmp_path / "train.jsonl").open("w") as file:
        for length in (10, 20, 30):
            file.write(json.dumps({"prompt": "a" * length, "completion": "b"}) + "\n")

    def found(**values: Any) -> tuple[list[int], str]:
        train = Rows(str(tmp_path / "train.jsonl"))
        recipe = Finetune(config_of(data, tmp_path, sequence_length=25, train=train, validation={}, **values))
        recipe.read_data()
        return [len(sample["input_ids"]) for sample in recipe.sets.examples["train"]], recipe.about_data()

    # the lengths include two tokens for the roles and one for the end
    assert found(too_long="drop") == ([14, 24], "train: 2 examples, 1 longer than 25 tokens left out")
    assert found(too_long="truncate", completion_only=False) == (
        [14, 24, 25],
        "train: 3 examples, 1 longer than 25 tokens truncated",
    )
    # Truncation removes the whole answer of one example, so that example is left out.
    assert found(too_long="truncate") == (
        [14, 24],
        "train: 2 examples, 1 longer than 25 tokens left out",
    )
    with pytest.raises(ConfigError, match=r"train\.jsonl:3: it has 34 tokens, more than the sequence_length of 25"):
        found()


def test_parquet_rows_give_the_same_examples(data: Path, tmp_path: Path) -> None:
    import datasets

    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    rows[0]["messages"][0]["name"] = "only here"  # it is None in all other rows of the parquet file
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    found = []
    for path in (data / "train.jsonl", tmp_path / "train.parquet"):
        recipe = Finetune(config_of(data, tmp_path, train=Rows(str(path)), validation={}))
        recipe.read_data()
        found.append([sample["input_ids"].tolist() for sample in recipe.sets.examples["train"]])
    assert found[0] == found[1]


def test_a_stream_can_be_trained_on_with_and_without_packing(data: Path, tmp_path: Path) -> None:
    stream = Rows(str(data / "train.jsonl"), streaming=True)
    losses = [Losses(), Losses()]
    for packing, found in zip((False, True), losses, strict=True):
        config = config_of(data, tmp_path / str(packing), train=stream, packing=packing, max_duration="5ba", validation={})
        recipe = finetune(config, callbacks=[found])
        assert recipe.results == {}
        assert "train: a stream" in recipe.about_data()
    assert losses[0].found[0] == pytest.approx(losses[1].found[0], abs=0.1)


# --- several ranks ---

WHOLE = {"evaluate_first": False, "samples": 1}
"""Settings of all cases."""


CASES: dict[str, dict[str, Any]] = {
    "ddp, packed": {"parallel": "ddp", "packing": True},
    "fsdp": {"parallel": "fsdp"},
    "fsdp, packed, merged adapters": {"parallel": "fsdp", "packing": True, "lora": Lora()},
    "fsdp, adapters alone": {"parallel": "fsdp", "lora": Lora(merge=False)},
}


def on_a_rank(data: Path, runs: Path, base: Path, ranks: int) -> list[Any]:
    """Train each case with the global batch divided over this many ranks. Every step is an epoch, so the order of rows does not matter."""
    found = []
    for name, case in CASES.items():
        values: dict[str, Any] = {
            **case,
            **WHOLE,
            "batch_size": (16 if case.get("packing") else 32) // ranks,
            "sequence_length": 96,
            "export": True,
        }
        values |= {"parallel": "single"} if ranks == 1 else {}
        losses = Losses()
        for duration in ("2ba", "4ba") if "lora" in case else ("4ba",):  # a run, and then its resumption
            config = config_of(data, runs / str(ranks), run_name=name, model=LanguageModel(path=str(base)), **values)
            config.max_duration = duration
            recipe = finetune(config, callbacks=[losses, CheckpointSaver()])
        found.append((losses.found, recipe.results, recipe.generated))
    return found


@pytest.mark.test_all
def test_two_ranks_train_and_export_the_same_model_as_one_process(data: Path, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    expected = on_a_rank(data, tmp_path, base, 1)
    for rank, found in enumerate(run_ranks(on_a_rank, 2, data, tmp_path, base, 2)):
        for (losses, results, generated), (losses_of_one, results_of_one, generated_of_one) in zip(found, expected, strict=True):
            if rank == 0:
                assert losses == pytest.approx(losses_of_one, abs=1e-5)
                assert len(losses) == 4
            assert results == pytest.approx(results_of_one, abs=1e-5)
            assert generated == generated_of_one
    for name in CASES:
        one, two = (
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
            if (folder / "adapter_config.json").exists()
            else AutoModelForCausalLM.from_pretrained(folder)
            for folder in (tmp_path / ranks / name / "export" for ranks in "12")
        )
        torch.testing.assert_close(logits_of(two, IDS), logits_of(one, IDS), atol=1e-5, rtol=0)


# --- the command line ---


def test_the_shipped_recipe_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(40):
        (source / f"m{i}.py").write_text(
            f'def f{i}(x):\n    """Return {i}."""\n\nclass A:\n    def g(self):\n        """Give {i}."""\n'
        )
    status = main([
        "train", "finetune", "--runs_folder", str(tmp_path / "runs"), "--max_duration", "4ba", "--eval_interval", "2ba", "--threads", "1",
        "--docstrings.folder", str(source), "--batch_size", "2", "--model.layers", "1", "--device", "cpu",
    ])  # fmt: skip
    output = capsys.readouterr().out
    assert status == 0, output
    assert "functions, bigram" in output
    assert "methods/loss" in output
    assert (tmp_path / "runs" / "docstrings" / "checkpoints").is_dir()


def recipe_file(folder: Path, **values: Any) -> str:
    content = {
        "recipe": "finetune",
        "runs_folder": str(folder / "runs"),
        "threads": 1,
        "device": "cpu",
        "max_duration": "1ba",
        **values,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


GOOD = '{"prompt": "a", "completion": "b"}\n'


@pytest.mark.parametrize(
    ("content", "values", "message"),
    [
        ("", {}, "data.jsonl: the file has no rows"),
        (GOOD + "{nonsense\n", {}, "data.jsonl:2: this line is not JSON"),
        (GOOD + '{"prompt": "a"}\n', {}, "data.jsonl:2: there is no column 'completion'"),
        (GOOD + '{"question": "a"}\n', {}, "data.jsonl:2: there is nothing to learn from in the columns question"),
        (GOOD + '{"text": "aaaaaaaaa"}\n', {"sequence_length": 8}, "data.jsonl:2: it has 10 tokens, more than the sequence_length of 8"),
        (GOOD, {"too_long": "cut"}, "too_long=cut: give Literal"),
        (GOOD, {"lora": {"targets": ["query"]}}, "no module called query; its linear layers are"),
        (GOOD, {"lora": {"merge": False}}, "lora.merge"),
        (GOOD, {"chat_template": "nowhere.jinja"}, "nowhere.jinja"),
        (GOOD, {"validation": {"train": {"path": "x.jsonl"}}}, "a dataset cannot be called train"),
        (GOOD, {"model": {"config": {"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2}}, "packing": True}, "packing"),
        (GOOD, {"prompts": ["a" * 600]}, "prompts: 'aaa"),
    ],
)  # fmt: skip
def test_invalid_rows_and_configurations_are_rejected_before_the_run_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, values: dict[str, Any], message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    small = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32}
    status = main(["train", recipe_file(tmp_path, **{"train": {"path": str(path)}, "model": small, **values})])
    error = capsys.readouterr().err
    assert status == 2, error
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()
