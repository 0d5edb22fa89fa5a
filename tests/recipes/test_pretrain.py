"""Pretraining on rows of text: compared with a plain loop, on two ranks, and exported."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from callsheet import Callback, Context
from callsheet.callbacks import CheckpointSaver, History
from callsheet.cli.main import main
from callsheet.errors import ConfigError
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.data.text_rows import TextRows
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.pretrain import Pretrain, PretrainConfig, pretrain
from callsheet.testing import run_ranks

LENGTH = 16
SHAPE: dict[str, Any] = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16}


def write_texts(folder: Path, name: str = "train", rows: int = 60) -> Path:
    path = folder / f"{name}.jsonl"
    lines = [json.dumps({"text": f"{name} has a row {number} of few words, and so on."}) for number in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def config(folder: Path, **options: Any) -> PretrainConfig:
    rows = TextRows(
        Rows(str(write_texts(folder))), {"held_out": Rows(str(write_texts(folder, "held_out", 8)))}, Rows(str(write_texts(folder, "test", 8))),
        sequence_length=LENGTH,
    )  # fmt: skip
    return PretrainConfig(
        **{
            "runs_folder": str(folder / "runs"),
            "max_duration": "6ba",
            "eval_interval": "3ba",
            "batch_size": 4,
            "threads": 1,
            "log_interval": 1,
            "model": LanguageModel(**SHAPE),
            "rows": rows,
            "optimizer": partial(torch.optim.AdamW, lr=1e-2),
            "prompts": ["train has"],
            "generated_tokens": 8,
            **options,
        }
    )


def test_training_on_rows_reaches_a_lower_loss_than_the_unigram_baseline(tmp_path: Path) -> None:
    recipe = pretrain(config(tmp_path, max_duration="120ba", eval_interval="1ep"), callbacks=[history := History()])
    assert list(recipe.results) == ["held_out/loss", "test/loss", "held_out, unigram", "test, unigram"]
    assert recipe.results["test/loss"] < recipe.results["test, unigram"] < 5.6
    assert history["train/label_tokens"][0] == 4 * (LENGTH - 1)
    assert recipe.generations[0][0] == "train has"


def test_the_results_are_written_to_the_run_s_folder(tmp_path: Path) -> None:
    recipe = pretrain(config(tmp_path))
    recorded = json.loads((tmp_path / "runs" / "pretrain" / "results.json").read_text())
    assert recorded["results"] == recipe.results
    assert recorded["evaluated"] == recipe.evaluated
    assert recorded["step"] == 6
    assert recorded["unit"] == recipe.results_are_in
    assert recorded["samples"] == [sample.strip("\n") for sample in recipe.generated_texts()]
    assert "train has" in recorded["samples"][0]


class CountsEvaluations(Callback):
    """Counts the batches of evaluations and tests."""

    batches = 0

    def on_eval_step_end(self, ctx: Context) -> None:
        self.batches += 1

    on_test_step_end = on_eval_step_end


@pytest.mark.parametrize(("max_duration", "is_trial"), [("20ba", True), ("21ba", False)])
def test_a_short_run_shortens_evaluation_and_generation(max_duration: str, is_trial: bool, tmp_path: Path) -> None:
    held_out, test = (Rows(str(write_texts(tmp_path, name, rows))) for name, rows in (("held_out", 10), ("test", 8)))
    rows = TextRows(Rows(str(write_texts(tmp_path))), {"held_out": held_out}, test, sequence_length=LENGTH)
    job = config(tmp_path, rows=rows, max_duration=max_duration, eval_interval=None, eval_batch_size=1, generated_tokens=40)
    recipe = pretrain(job, callbacks=[counts := CountsEvaluations()])
    assert recipe.is_trial is is_trial
    assert ("This is a trial" in recipe.describe()) is is_trial
    assert recipe.short(40) == (16 if is_trial else 40)
    sizes = [len(recipe._sets[name]) for name in ("held_out", "test")]
    assert counts.batches == sum(min(size, 20) if is_trial else size for size in sizes)
    assert min(sizes) > 20


@pytest.mark.parametrize("source", ["stream", "parquet"])
def test_a_stream_and_parquet_give_the_same_windows_as_json_lines(source: str, tmp_path: Path) -> None:
    lines = config(tmp_path)
    other = config(tmp_path)
    assert other.rows is not None
    if source == "stream":
        other.rows.train.streaming = True
    else:
        rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
        other.rows.train = Rows(str(tmp_path / "train.parquet"))
    windows = []
    for each in (lines, other):
        recipe = Pretrain(each)
        recipe.read_data()
        windows.append([window["input_ids"].tolist() for window in recipe._sets["train"]])
    assert windows[0] == windows[1]
    assert len(windows[0]) > 100


def test_a_stream_can_be_trained_on(tmp_path: Path) -> None:
    given = config(tmp_path)
    assert given.rows is not None
    given.rows.train.streaming = True
    recipe = pretrain(given)
    assert recipe.trainer.state.timestamp.batch == 6
    assert list(recipe.results) == ["held_out/loss", "test/loss"]


def test_a_one_cycle_schedule_that_ends_before_the_run_is_rejected_by_its_key(tmp_path: Path) -> None:
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=2)
    with pytest.raises(ConfigError, match=r"^scheduler: Tried to step 3 times.*; give OneCycleLR more total_steps"):
        pretrain(config(tmp_path, scheduler=schedule))


def test_losses_equal_those_of_a_plain_loop(tmp_path: Path) -> None:
    """The same model, data and order, for 50 steps."""
    recipe = Pretrain(config(tmp_path, max_duration="50ba", clip_grad_norm=1.0, prompts=[]), callbacks=[history := History()])
    recipe.setup()
    weights = {name: value.clone() for name, value in recipe.trainer.model.state_dict().items()}
    order: list[torch.Tensor] = []
    hook = recipe.trainer.model.register_forward_pre_hook(
        lambda model, args, kwargs: order.append(kwargs["input_ids"].clone()) if model.training else None, with_kwargs=True
    )
    recipe.run()
    hook.remove()
    model: Any = recipe.make_model()
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for ids in order:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == 50
    assert history["train/loss"] == pytest.approx(losses, abs=1e-6)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = pretrain(config(tmp_path, run_name="whole"))
    pretrain(config(tmp_path, run_name="parts", max_duration="4ba"), callbacks=[CheckpointSaver(save_interval="2ba")])
    parts = pretrain(config(tmp_path, run_name="parts"), callbacks=[CheckpointSaver(save_interval="2ba")])
    for one, other in zip(whole.trainer.model.parameters(), parts.trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.results == parts.results


def test_the_exported_model_gives_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = pretrain(config(tmp_path, export=True))
    folder = tmp_path / "runs" / "pretrain" / "export"
    ids = AutoTokenizer.from_pretrained(folder)("a few words", return_tensors="pt")["input_ids"]
    model = recipe.trainer.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, model(ids).logits, atol=1e-6, rtol=0)


def on_ranks(folder: str, parallel: str) -> dict[str, float]:
    given = config(Path(folder), parallel=parallel, batch_size=2, run_name=f"on-{parallel}", prompts=["train has"])
    return dict(pretrain(given, callbacks=[CheckpointSaver(save_interval="3ba")]).results)


@pytest.mark.test_all
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks_reach_about_the_same_loss_as_one(parallel: str, tmp_path: Path) -> None:
    alone = pretrain(config(tmp_path)).results
    one, other = run_ranks(on_ranks, 2, str(tmp_path), parallel)
    assert one == other
    assert one["held_out/loss"] == pytest.approx(alone["held_out/loss"], rel=0.1)  # the data order differs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file has no rows"),
        ('{"text": "fine"}\n{"text": 3}\n', "train.jsonl:2: the column 'text' holds int, not a text"),
        ('{"text": "fine"}\n{text}\n', "train.jsonl:2: this line is not JSON"),
        ('{"txt": "fine"}\n', "train.jsonl:1: there is no column 'text'; did you mean 'txt'?"),
        ('{"text": "short"}\n', "train has 6 tokens, and a window has 16: give more rows, or a shorter sequence_length"),
    ],
)
def test_invalid_rows_are_rejected_before_the_run_starts(content: str, message: str, tmp_path: Path) -> None:
    given = config(tmp_path)
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(ConfigError) as rejected:
        pretrain(given)
    assert message in str(rejected.value)
    assert not (tmp_path / "runs").exists()


def test_a_recipe_file_runs_with_a_value_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path), write_texts(tmp_path, "held_out", 8)
    (tmp_path / "mine.yaml").write_text(
        "recipe: pretrain\nmax_duration: 4ba\nbatch_size: 2\nthreads: 1\ngenerated_tokens: 2\n"
        f"model: {json.dumps(SHAPE)}\n"
        "rows:\n  train: {path: train.jsonl}\n  validation: {held_out: {path: held_out.jsonl}}\n  sequence_length: 16\n"
    )
    assert main(["train", "mine.yaml", "--rows.train.limit", "40"]) == 0
    printed = capsys.readouterr().out
    assert "held_out/loss" in printed
    assert "held_out, unigram" in printed


def test_a_run_that_was_started_in_python_can_be_evaluated_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = pretrain(config(tmp_path), callbacks=[CheckpointSaver(save_interval="3ba")])
    assert main(["evaluate", str(tmp_path / "runs" / "pretrain")]) == 0
    assert f"{recipe.results['held_out/loss']:.5f}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"holds a run with another batch_size.*; resume='new' sets the run aside"):
        pretrain(config(tmp_path, batch_size=2, max_duration="9ba"))
    again = pretrain(config(tmp_path, max_duration="9ba"), callbacks=[CheckpointSaver(save_interval="3ba")])
    assert again.trainer.state.timestamp.batch == 9
