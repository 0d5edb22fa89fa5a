"""Distillation: the loss, training and reusing the teacher, one and two ranks, and rejected configurations."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from callsheet import Callback, Context
from callsheet.callbacks import CheckpointSaver
from callsheet.cli.main import main
from callsheet.core.randomness import seed_all
from callsheet.errors import CheckpointError, ConfigError
from callsheet.loggers import JSONLLogger
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.distill import Distill, DistillConfig, distill
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.testing import run_ranks

STUDENT = LanguageModel(hidden_size=16, layers=1, heads=2, intermediate_size=32)
TEACHER = LanguageModel(hidden_size=32, layers=2, heads=2, intermediate_size=64)
OPTIMIZER = partial(torch.optim.AdamW, lr=3e-3)
IDS = torch.arange(97, 117)[None]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows with answers of different lengths: 32 for training and 8 for validation."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": "a" * (1 + i % 7), "completion": "b" * (3 + i % 5) + "c"} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[8:]))
    (folder / "held_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:8]))
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an untrained model whose predictions are confident."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(3)
    tokenizer = byte_tokenizer()
    model: Any = TEACHER.build(AutoModelForCausalLM, vocabulary=len(tokenizer), longest=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(data: Path, runs: Path, teacher: LanguageModel, **values: Any) -> DistillConfig:
    given: dict[str, Any] = {
        "runs_folder": str(runs),
        "train": Rows(str(data / "train.jsonl")),
        "validation": {"held_out": Rows(str(data / "held_out.jsonl"))},
        "model": STUDENT,
        "teacher": teacher,
        "max_duration": "6ba",
        "eval_interval": None,
        "batch_size": 8,
        "sequence_length": 32,
        "generated_tokens": 4,
        "samples": 1,
        "optimizer": OPTIMIZER,
        "threads": 1,
        "device": "cpu",
    }
    return DistillConfig(**given | values)


class Losses(Callback):
    """Records the losses of every step by name."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.found.append({name: float(loss) for name, loss in ctx.loss_dict.items()})


class Logged(Callback):
    """Records the losses of every metrics record, reduced over all ranks."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_log(self, ctx: Context) -> None:
        values = {name: value for name, value in ctx.record.values.items() if name.startswith("train/") and "loss" in name}
        self.found += [values] if values else []


def test_losses_equal_those_of_a_plain_loop(data: Path, teacher: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = config_of(
        data, tmp_path, LanguageModel(str(teacher)), max_duration="50ba", clip_grad_norm=None, mix=0.3, kd_temperature=1.5
    )
    losses = Losses()
    distill(config, callbacks=[losses])

    plain = Distill(config)
    plain.read_data()
    seed_all(config.seed)
    student: Any = plain.make_model().train()
    teacher_model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    optimizer = OPTIMIZER(student.parameters())
    seed_all(config.seed)
    loader = plain.train_data()
    expected: list[dict[str, float]] = []
    while len(expected) < 50:
        for batch in loader:
            inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
            counts = batch["labels"][:, 1:] != -100
            logits = student(**inputs).logits[:, :-1][counts]
            with torch.no_grad():
                teacher_probabilities = (teacher_model(**inputs).logits[:, :-1][counts] / 1.5).softmax(-1)
            hard = -logits.log_softmax(-1).gather(-1, batch["labels"][:, 1:][counts][:, None]).mean()
            soft = (
                1.5**2 * (teacher_probabilities * (teacher_probabilities.log() - (logits / 1.5).log_softmax(-1))).sum(-1).mean()
            )
            loss = 0.3 * hard + 0.7 * soft
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append({"loss": float(loss.detach()), "ce_loss": float(hard.detach()), "kd_loss": float(soft.detach())})
    for found, expected_losses in zip(losses.found, expected[:50], strict=True):
        assert found == pytest.approx(expected_losses, abs=1e-6, rel=1e-6)
    assert losses.found[-1]["kd_loss"] < 0.8 * losses.found[0]["kd_loss"]


def test_the_teacher_is_neither_trained_nor_saved_nor_exported(data: Path, teacher: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = config_of(data, tmp_path, LanguageModel(str(teacher)), export=True, mix=0.0, log_interval=1)
    recipe = distill(config, callbacks=[CheckpointSaver(save_interval=None)], loggers=[JSONLLogger()])
    before = AutoModelForCausalLM.from_pretrained(teacher)
    assert recipe.teacher is not None
    assert not recipe.teacher.training
    for name, parameter in recipe.teacher.named_parameters():
        assert parameter.grad is None
        assert not parameter.requires_grad
        assert torch.equal(parameter, before.get_parameter(name))
    student = recipe.trainer.model
    own = {id(parameter) for parameter in student.parameters()}
    assert recipe.trainer.optimizer is not None
    assert {id(parameter) for group in recipe.trainer.optimizer.param_groups for parameter in group["params"]} == own
    saved = sum(file.stat().st_size for file in (recipe.folder / "checkpoints").rglob("*.safetensors"))
    size = sum(parameter.numel() * 4 for parameter in student.parameters())
    assert saved < 3.8 * size < sum(parameter.numel() * 4 for parameter in before.parameters())  # weights and two moments

    again = AutoModelForCausalLM.from_pretrained(recipe.folder / "export").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, student.eval()(IDS).logits, atol=1e-6, rtol=0)
    assert len(AutoTokenizer.from_pretrained(recipe.folder / "export")) == len(byte_tokenizer())
    records = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    logged = {name for record in records for name in record["values"]}
    assert {f"train/{name}" for name in ("loss", "ce_loss", "kd_loss", "grad_norm", "label_tokens")} <= logged
    assert {f"held_out/{name}" for name in ("loss", "ce_loss", "kd_loss", "teacher_loss")} <= logged
    assert set(recipe.results) == {
        "held_out/ce_loss",
        *(f"held_out, {name}" for name in ("teacher", "untrained student", "unigram", "bigram")),
    }

    opened = Distill(config).open()
    evaluated = opened.evaluate()["held_out"]
    assert evaluated["ce_loss"] == pytest.approx(recipe.results["held_out/ce_loss"], abs=1e-6)
    assert evaluated["loss"] == pytest.approx(evaluated["kd_loss"])
    assert set(next(iter(opened.answers([{"prompt": "aa"}])))) == {"completion"}


def test_a_resumed_run_ends_with_the_same_weights(data: Path, teacher: Path, tmp_path: Path) -> None:
    def weights(folder: str, *durations: str) -> dict[str, Tensor]:
        for duration in durations:
            config = config_of(data, tmp_path / folder, LanguageModel(str(teacher)), max_duration=duration)
            recipe = distill(config, callbacks=[CheckpointSaver(save_interval="3ba")])
        return {name: tensor.detach().clone() for name, tensor in recipe.trainer.model.named_parameters()}

    uninterrupted, resumed = weights("uninterrupted", "9ba"), weights("resumed", "5ba", "9ba")
    assert uninterrupted.keys() == resumed.keys()
    assert all(torch.equal(uninterrupted[name], tensor) for name, tensor in resumed.items())


@pytest.mark.test_all
def test_the_teacher_is_trained_first_and_reused_by_a_longer_run(data: Path, tmp_path: Path) -> None:
    def run(**values: Any) -> tuple[Distill, int]:
        given = {"max_duration": "4ba", "teacher_duration": "5ba", "packing": True, "batch_size": 2, **values}
        recipe = distill(config_of(data, tmp_path, TEACHER, **given), callbacks=[CheckpointSaver()])
        return recipe, (recipe.folder / "teacher" / "export" / "model.safetensors").stat().st_mtime_ns

    first, made = run(compare_with_hard_labels=True)
    hard = first.results["held_out, labels alone"]
    assert hard != first.results["held_out/ce_loss"]
    assert hard < first.results["held_out, untrained student"]
    again, when = run(max_duration="6ba")
    assert again.trainer.state.timestamp.batch == 6
    assert when == made

    for name in ("teacher", "hard_labels"):  # both are ordinary runs
        assert yaml.safe_load((again.folder / name / "config.yaml").read_text())["recipe"] == "finetune"
        assert main(["evaluate", str(again.folder / name)]) == 0

    shutil.rmtree(again.folder / "teacher" / "export")
    with pytest.raises(ConfigError, match="its teacher is not in"):
        run(max_duration="8ba")
    assert run(resume="new")[1] != made


@pytest.mark.parametrize(
    ("max_duration", "teacher_duration", "length"),
    [
        ("5ba", "1dur", "5ba"),
        ("5ba", "0.1dur", "1ba"),
        ("9s", "2dur", "18sec"),
        ("5ba", "60s", "60sec"),
        ("2ep", "7ba", "7ba"),
    ],
)
def test_the_teacher_s_duration_may_be_relative_to_the_run_s(max_duration: str, teacher_duration: str, length: str) -> None:
    config = DistillConfig(model=STUDENT, teacher=TEACHER, max_duration=max_duration, teacher_duration=teacher_duration)
    assert config.teacher_length() == length


def test_eval_interval_applies_only_to_the_student(data: Path, tmp_path: Path) -> None:
    config = config_of(data, tmp_path, TEACHER, max_duration="4ba", eval_interval="1ba", batch_size=2)
    recipe = distill(config, loggers=[JSONLLogger()])

    def evaluations(folder: Path) -> list[int]:
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        return [event["step"] for event in events if event["event"] == "evaluation"]

    assert evaluations(recipe.folder) == [0, 1, 2, 3, 4]
    assert evaluations(recipe.folder / "teacher") == [4]


@pytest.mark.test_all
def test_a_run_without_a_checkpoint_reuses_its_trained_teacher(data: Path, tmp_path: Path) -> None:
    def run(**values: Any) -> Distill:
        given = {"teacher_duration": "2ba", "batch_size": 2, "max_duration": "1ba", **values}
        return distill(config_of(data, tmp_path, TEACHER, **given))

    first = run()  # without a checkpoint
    exported = first.folder / "teacher" / "export" / "model.safetensors"
    made = exported.stat().st_mtime_ns
    assert run().folder == first.folder
    assert exported.stat().st_mtime_ns == made
    run(teacher_duration="3ba")  # another teacher
    assert exported.stat().st_mtime_ns != made
    made = exported.stat().st_mtime_ns
    run(teacher_duration="3ba", resume="new")
    assert exported.stat().st_mtime_ns != made


def test_an_incompletely_exported_teacher_is_not_used(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk becomes full while the last file is written."""
    from transformers import PreTrainedTokenizerBase

    config = config_of(data, tmp_path, TEACHER, teacher_duration="2ba", batch_size=2, max_duration="1ba")
    save = PreTrainedTokenizerBase.save_pretrained

    def fails(tokenizer: Any, folder: str, **options: Any) -> None:
        save(tokenizer, folder, **options)
        (Path(folder) / "stale.json").touch()
        raise OSError("no space left on device")

    exported = tmp_path / "distill" / "teacher" / "export"
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", fails)
        with pytest.raises(CheckpointError, match="no space left"):
            distill(config)
    assert not exported.exists()
    assert (exported.with_name("export.new") / "tokenizer_config.json").exists()
    assert distill(config).trainer.state.timestamp.batch == 1
    assert {file.name for file in exported.iterdir()} >= {"model.safetensors", "tokenizer_config.json"}
    assert not (exported / "stale.json").exists()
    assert not exported.with_name("export.new").exists()


@pytest.mark.test_all
def test_a_signal_during_the_teacher_s_training_preempts_it_and_it_resumes(data: Path, tmp_path: Path) -> None:
    def config() -> DistillConfig:
        return config_of(data, tmp_path, TEACHER, teacher_duration="90ba", batch_size=2, max_duration="1ba", log_interval=1)

    records = tmp_path / "distill" / "teacher" / "metrics.jsonl"
    is_over = threading.Event()

    def preempt() -> None:
        while not records.exists() and not is_over.wait(0.01):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=preempt)
    thread.start()
    try:
        with pytest.raises(SystemExit) as end:
            distill(config())
    finally:
        is_over.set()
        thread.join()
    assert end.value.code == 128 + signal.SIGTERM
    assert not (records.parent / "export").exists()
    assert distill(config()).trainer.state.timestamp.batch == 1
    steps = [json.loads(line)["step"] for line in records.read_text().splitlines() if "train/loss" in line]
    assert steps == list(range(1, 91))


# --- several ranks ---


def on_a_rank(data: Path, runs: Path, teacher: Path | None, parallel: str, ranks: int) -> Any:
    """Train on this rank. Every step is an epoch, so it does not matter which rank has which rows."""
    logged = Logged()
    which = LanguageModel(str(teacher)) if teacher is not None else TEACHER
    values = {
        "max_duration": "3ba",
        "teacher_duration": "2ba",
        "batch_size": 32 // ranks,
        "microbatch_size": 5,
        "log_interval": 1,
        "export": True,
    }
    recipe = distill(config_of(data, runs, which, parallel=parallel, **values), callbacks=[logged])
    assert recipe.teacher is not None
    sharded = [isinstance(model, FSDPModule) for model in (recipe.trainer.model, recipe.teacher)]
    here = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in recipe.teacher.parameters())
    return logged.found, recipe.evaluated, sharded, here / sum(p.numel() for p in recipe.teacher.parameters())


@pytest.mark.test_all
@pytest.mark.parametrize(("parallel", "has_teacher"), [pytest.param("ddp", True, marks=pytest.mark.slow), ("fsdp", False)])
def test_two_ranks_train_the_same_model_as_one_process(
    data: Path, teacher: Path, tmp_path: Path, parallel: str, has_teacher: bool
) -> None:
    from transformers import AutoModelForCausalLM

    given = teacher if has_teacher else None
    expected, evaluated, _, _ = on_a_rank(data, tmp_path / "one", given, "single", 1)
    assert [set(step) for step in expected] == [{"train/loss", "train/ce_loss", "train/kd_loss"}] * 3
    for losses, found, sharded, share in run_ranks(on_a_rank, 2, data, tmp_path / "two", given, parallel, 2):
        for step, expected_step in zip(losses, expected, strict=True):
            assert step == pytest.approx(expected_step, abs=1e-4)
        assert found["held_out"] == pytest.approx(evaluated["held_out"], abs=1e-4)
        assert sharded == [parallel == "fsdp"] * 2
        assert share == pytest.approx(0.5 if parallel == "fsdp" else 1.0, abs=0.05)
    folders = [tmp_path / name / "distill" / "export" for name in ("one", "two")]
    one, two = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders)
    with torch.no_grad():
        torch.testing.assert_close(two(IDS).logits, one(IDS).logits, atol=1e-4, rtol=0)


# --- the command line ---


def job_file(folder: Path, **values: Any) -> str:
    content = {"recipe": "distill", "runs_folder": str(folder / "runs"), "threads": 1, "max_duration": "1ba", **values}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_invalid_configurations_are_rejected_before_the_run_starts(
    data: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(other)
    rows = {"path": str(data / "train.jsonl")}
    (tmp_path / "bad.jsonl").write_text('{"text": "ab"}\n{"txet": "a"}\n')
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"teacher": {"path": str(teacher), "tokenizer": str(other)}, "model": {"tokenizer": "bytes"}},
            "'<|more|>' is token 262 of 263 of the teacher, and none of 262 of the student",
        ),
        ({"teacher": {"path": str(tmp_path / "nowhere")}}, "no tokenizer could be loaded from"),
        (
            {"teacher": {"path": str(teacher), "tokenizer": "bytes", "freeze": ["hed.*"]}, "sequence_length": 64},
            "teacher.freeze: no parameter matches hed.*",
        ),
        ({"mix": 1.5}, "mix=1.5"),
        ({"kd_temperature": 0.0}, "kd_temperature=0.0"),
        ({"teacher_duration": "long"}, "long"),
        ({"train": {"path": str(tmp_path / "bad.jsonl")}}, "bad.jsonl:2: there is nothing to learn from in the columns txet"),
    ]
    for values, message in cases:
        assert main(["train", job_file(tmp_path, **{"train": rows, **values})]) == 2, values
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
        assert not (tmp_path / "runs").exists()


def test_the_shipped_recipe_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(40):
        text = f'def f{i}(x):\n    """Return {i}."""\n\nclass A:\n    def g(self):\n        """Give {i}."""\n'
        (source / f"m{i}.py").write_text(text)
    status = main([
        "train", "distill", "--runs_folder", str(tmp_path / "runs"), "--max_duration", "3ba", "--eval_interval", "2ba", "--threads", "1",
        "--docstrings.folder", str(source), "--batch_size", "2", "--teacher_duration", "3ba", "--teacher.layers", "1", "--device", "cpu",
    ])  # fmt: skip
    output = capsys.readouterr().out
    assert status == 0, output
    for line in (
        "functions/ce_loss",
        "methods, teacher",
        "functions, untrained student",
        "methods, bigram",
        "functions, labels alone",
    ):
        assert line in output
    assert {"teacher", "hard_labels", "checkpoints"} <= {path.name for path in (tmp_path / "runs" / "small-docstrings").iterdir()}
