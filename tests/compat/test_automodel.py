"""Scripts in the style of NeMo AutoModel's page on callbacks, on small versions of its four recipes; only their imports are changed."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from callsheet import Callback as OurCallback
from callsheet import Context
from callsheet.bridges.automodel import guest
from callsheet.bridges.guest_base import NotOnTheList
from callsheet.callbacks import History
from callsheet.compat import automodel
from callsheet.compat.automodel import (
    Callback,
    CallbackRunner,
    FinetuneRecipeForVLM,
    KnowledgeDistillationRecipeForNextTokenPrediction,
    MetricsSample,
    TrainFinetuneRecipeForNextTokenPrediction,
    TrainFinetuneRecipeForSequenceClassification,
    rank_zero_only,
)
from callsheet.errors import ConfigError
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.finetune import FinetuneConfig
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.recipes.models.language_model import LanguageModel

torch.set_num_threads(1)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def configuration(folder: Path, model: str, **changes: Any) -> dict[str, Any]:
    """Return a configuration for four steps of an epoch of six. It validates after the second step and at both checkpoints (steps 3 and 4)."""
    rows = folder / "rows"
    return {
        "step_scheduler": {"global_batch_size": 4, "local_batch_size": 4, "ckpt_every_steps": 3, "val_every_steps": 2, "max_steps": 4},
        "dist_env": {"backend": "nccl", "timeout_minutes": 1},
        "rng": {"_target_": "nemo_automodel.components.training.rng.StatefulRNG", "seed": 1111, "ranked": True},
        "model": {"_target_": f"nemo_automodel.{model}.from_config", "config": LLAMA},
        "checkpoint": {"enabled": True, "checkpoint_dir": str(folder / "checkpoints"), "model_save_format": "safetensors"},
        "distributed": {"strategy": "fsdp2", "tp_size": 1, "cp_size": 1},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {"path_or_dataset_id": str(rows / "train.jsonl"), "seq_length": 32},
        "validation_dataset": {"path_or_dataset_id": str(rows / "validation.jsonl")},
        "optimizer": {"_target_": "torch.optim.Adam", "lr": 1.0e-2, "betas": [0.9, 0.999], "eps": 1e-8},
        "callsheet": {"device": "cpu", "threads": 1},
    } | changes  # fmt: skip


def rows(folder: Path, row: Callable[[int], dict[str, Any]]) -> None:
    """Write 24 rows for training, 6 for validation and 6 for a test."""
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    for name, numbers in (("train", range(24)), ("validation", range(24, 30)), ("test", range(30, 36))):
        (folder / "rows" / f"{name}.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in numbers))


def sums(folder: Path) -> None:
    rows(folder, lambda i: {"prompt": f"{i} + {i} =", "completion": str(2 * i)})


def llm(folder: Path) -> dict[str, Any]:
    sums(folder)
    return configuration(folder, "NeMoAutoModelForCausalLM")


def classification(folder: Path) -> dict[str, Any]:
    rows(folder, lambda i: {"text": "apple", "label": "fruit"} if i % 2 else {"text": "zinc", "label": "metal"})
    return configuration(folder, "NeMoAutoModelForSequenceClassification")


def distillation(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    sums(folder)
    tokenizer = byte_tokenizer()
    torch.manual_seed(1)
    teacher: Any = LanguageModel(config=LLAMA).build(AutoModelForCausalLM, vocabulary=len(tokenizer), longest=64)
    teacher.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    teacher_keys = {
        "teacher_model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": str(folder / "teacher"),
        },
        "kd_ratio": 0.25,
        "kd_loss_fn": {"_target_": "nemo_automodel.components.loss.kd_loss.KDLoss", "temperature": 3.0, "ignore_index": -100},
    }
    return configuration(folder, "NeMoAutoModelForCausalLM", **teacher_keys)


def vision(folder: Path) -> dict[str, Any]:
    rows(
        folder,
        lambda i: {"image": "red.png" if i % 2 else "blue.png", "prompt": "Which?", "completion": "red" if i % 2 else "blue"},
    )
    for colour in ("red", "blue"):
        Image.new("RGB", (12, 9), colour).save(folder / "rows" / f"{colour}.png")
    cfg = configuration(folder, "NeMoAutoModelForImageTextToText", freeze_config={"freeze_vision_tower": True})
    cfg["model"] = {"_target_": "nemo_automodel.NeMoAutoModelForImageTextToText.from_config"}
    cfg["dataset"]["seq_length"] = 128
    return cfg


SCRIPT = """
import logging

from nemo_automodel.components.callbacks import Callback, rank_zero_only
from nemo_automodel.recipes.{module} import {recipe}


class Reporter(Callback):
    def on_train_start(self, recipe, **kwargs):
        reported.append(f"start: {{recipe.dist_env.world_size}} ranks, {{recipe.step_scheduler.max_steps}} steps")

    def on_train_batch_end(self, recipe, **kwargs):
        train_log_data = kwargs["train_log_data"]
        assert recipe.step_scheduler.step == train_log_data.step
        samples.append(train_log_data)
        reported.append(f"step {{train_log_data.step}}: {{train_log_data.metrics['loss'] > 0}}")

    def on_validation_end(self, recipe, **kwargs):
        for name, log_data in kwargs["val_results"].items():
            validated.append(log_data)
            modes.append(recipe.model_parts[0].training)
            reported.append(f"validation {{name!r}}: {{log_data.metrics['val_loss'] > 0}}")

    def on_save_checkpoint(self, recipe, **kwargs):
        checkpoints.append(kwargs["checkpoint_info"])
        reported.append("saved")

    def on_train_end(self, recipe, **kwargs):
        reported.append(f"end: {{recipe.step_scheduler.step}}")


class OnFirstRank(Callback):
    @rank_zero_only
    def on_validation_end(self, recipe, **kwargs):
        reported.append("first rank")


recipe = {recipe}(
    cfg,
    callbacks=[Reporter(), OnFirstRank()]
)

recipe.setup()
recipe.run_train_validation_loop()
"""

COMMON = {"loss", "grad_norm", "lr", "mem", "tps", "tps_per_gpu"}
TOKENS = {"num_tokens_per_step", "num_label_tokens"}
DISTILLED = {"ce_loss", "kd_loss"}
RECIPES: list[tuple[str, str, Callable[[Path], dict[str, Any]], set[str], set[str]]] = [
    ("llm.train_ft", "TrainFinetuneRecipeForNextTokenPrediction", llm, COMMON | TOKENS, {"num_label_tokens"}),
    (
        "llm.train_seq_cls",
        "TrainFinetuneRecipeForSequenceClassification",
        classification,
        COMMON | {"accuracy"},
        {"val_accuracy"},
    ),
    (
        "llm.kd",
        "KnowledgeDistillationRecipeForNextTokenPrediction",
        distillation,
        COMMON | TOKENS | DISTILLED | {"kd_ratio", "temperature"},
        {"num_label_tokens"} | DISTILLED,
    ),
    ("vlm.finetune", "FinetuneRecipeForVLM", vision, COMMON | TOKENS, {"num_label_tokens"}),
]


@pytest.mark.parametrize(
    ("module", "recipe", "make_config", "train_metrics", "validation_metrics"), RECIPES, ids=[row[0] for row in RECIPES]
)
def test_a_script_runs_when_its_imports_are_changed(
    module: str,
    recipe: str,
    make_config: Callable[[Path], dict[str, Any]],
    train_metrics: set[str],
    validation_metrics: set[str],
    tmp_path: Path,
) -> None:
    script = SCRIPT.format(module=module, recipe=recipe)
    script = re.sub(r"^from nemo_automodel[\w.]* import", "from callsheet.compat.automodel import", script, flags=re.MULTILINE)
    names: dict[str, Any] = {
        "cfg": make_config(tmp_path),
        "reported": [],
        "samples": [],
        "validated": [],
        "checkpoints": [],
        "modes": [],
    }
    exec(compile(script, "script.py", "exec"), names)
    validation = ["validation 'validation': True", "first rank"]
    assert names["reported"] == [
        "start: 1 ranks, 4 steps",
        *("step 0: True", "step 1: True", *validation),
        *("step 2: True", *validation, "saved"),
        *("step 3: True", *validation, "saved"),
        "end: 4",
    ]
    assert names["modes"] == [False, False, False]  # the model is in evaluation mode
    for sample in names["samples"]:
        assert set(sample.metrics) == train_metrics
        assert all(isinstance(value, (int, float)) for value in sample.metrics.values())
        assert json.loads(json.dumps(sample.to_dict()))["step"] == sample.step
    for sample in names["validated"]:
        assert set(sample.metrics) >= validation_metrics | {"val_loss", "lr", "mem"}
    for info, step in zip(names["checkpoints"], (2, 3), strict=True):
        assert (info["epoch"], info["step"], info["best_metric_key"]) == (0, step, "validation")
        assert Path(info["checkpoint_path"], "manifest.json").exists()  # it exists when the event is fired
        of_step = [sample.metrics["val_loss"] for sample in names["validated"] if sample.step == step]
        assert list(info["val_losses"].values()) == of_step
        assert info["train_loss"] == pytest.approx(names["samples"][step].metrics["loss"])
    if module == "llm.kd":
        metrics = names["samples"][0].metrics
        assert (metrics["kd_ratio"], metrics["temperature"]) == (0.25, 3.0)
        assert metrics["loss"] == pytest.approx(0.75 * metrics["ce_loss"] + 0.25 * metrics["kd_loss"], rel=1e-5)


class Recorded(Callback):
    """Records each call, and raises at a given step if an error is given."""

    def __init__(self, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.recorded: list[str] = []
        self.losses: list[float] = []
        self.exceptions: list[BaseException] = []
        self.fails_at, self.error = fails_at, error

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        self.recorded.append("step")
        self.losses.append(kwargs["train_log_data"].metrics["loss"])
        if self.error is not None and kwargs["train_log_data"].step == self.fails_at:
            raise self.error

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        self.recorded.append("exception")
        self.exceptions.append(kwargs["exception"])

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        self.recorded.append("end")


def run(cfg: Any, *callbacks: Any) -> TrainFinetuneRecipeForNextTokenPrediction:
    recipe = TrainFinetuneRecipeForNextTokenPrediction(cfg, callbacks=list(callbacks))
    recipe.setup()
    recipe.run_train_validation_loop()
    return recipe


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_on_exception_is_called_although_the_script_calls_no_runner(error: BaseException, tmp_path: Path) -> None:
    failing, other = Recorded(1, error), Recorded()
    with pytest.raises(type(error)) as caught:
        run(llm(tmp_path), other, failing)
    assert caught.value is error
    assert failing.recorded == other.recorded == ["step", "step", "exception"]
    assert other.exceptions == [error]


def test_an_exception_in_setup_is_reported_once(tmp_path: Path) -> None:
    cfg = llm(tmp_path)
    cfg["dataset"]["path_or_dataset_id"] = str(tmp_path / "nowhere.jsonl")
    recorded = Recorded()
    recipe = TrainFinetuneRecipeForNextTokenPrediction(cfg, callbacks=[recorded])
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl") as caught:
        recipe.setup()
    assert recorded.exceptions == [caught.value]
    with pytest.raises(AttributeError, match="setup"):
        _ = recipe.dist_env


def test_callsheet_configurations_and_callbacks_are_accepted(tmp_path: Path) -> None:
    class Ours(OurCallback):
        steps = 0

        def on_train_step_end(self, ctx: Context) -> None:
            self.steps += 1

    sums(tmp_path)
    config = FinetuneConfig(
        run_name="own", runs_folder=str(tmp_path), max_duration="4ba", log_interval=1, batch_size=4, threads=1, device="cpu",
        model=LanguageModel(config=LLAMA), train=Rows(str(tmp_path / "rows" / "train.jsonl")), sequence_length=32,
    )  # fmt: skip
    recorded, ours, history = Recorded(), Ours(), History()
    recipe = run(config, recorded, ours, history)
    assert recipe.cfg is config
    assert recorded.recorded == ["step"] * 4 + ["end"]
    assert ours.steps == 4
    assert recorded.losses == pytest.approx(history["train/loss"])
    assert recipe.step_scheduler.max_steps == 4


def test_several_validation_sets_are_reported_by_name(tmp_path: Path) -> None:
    cfg = llm(tmp_path)
    cfg["validation_dataset_squad"] = cfg.pop("validation_dataset")
    cfg["validation_dataset_hellaswag"] = {"path_or_dataset_id": str(tmp_path / "rows" / "test.jsonl")}
    cfg["checkpoint"]["best_metric_key"] = "hellaswag"
    found: list[dict[str, MetricsSample]] = []
    infos: list[dict[str, Any]] = []

    class RecordsResults(Callback):
        def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
            found.append(kwargs["val_results"])

        def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
            infos.append(kwargs["checkpoint_info"])

    run(cfg, RecordsResults())
    assert [list(each) for each in found] == [["squad", "hellaswag"]] * 3
    assert infos[-1]["val_losses"] == {name: sample.metrics["val_loss"] for name, sample in found[-1].items()}
    assert infos[-1]["best_metric_key"] == "hellaswag"


def test_a_run_that_a_callback_stopped_is_resumed(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
            if recipe.step_scheduler.step == 2:
                recipe.step_scheduler.max_steps = recipe.step_scheduler.step + 1

    stopped, rest, whole = Recorded(), Recorded(), Recorded()
    run(llm(tmp_path / "a"), stopped, Stops())
    assert stopped.recorded == ["step"] * 3 + ["end"]
    run(llm(tmp_path / "a"), rest)
    assert rest.recorded == ["step", "end"]
    run(llm(tmp_path / "b"), whole)
    assert stopped.losses + rest.losses == whole.losses


def test_a_resume_with_other_values_says_what_to_set_in_the_configuration(tmp_path: Path) -> None:
    run(llm(tmp_path))
    cfg = llm(tmp_path)
    cfg["optimizer"]["weight_decay"] = 0.5
    cfg["step_scheduler"]["local_batch_size"] = 2
    with pytest.raises(
        ConfigError,
        match=r"another step_scheduler\.local_batch_size, .*optimizer \(step_scheduler\.local_batch_size: 4 in the run, 2 now; .*"
        r"optimizer\.weight_decay: .*; another checkpoint\.checkpoint_dir starts a new run$",
    ) as found:
        run(cfg)
    assert "--" not in str(found.value)


@pytest.mark.parametrize(("how", "events"), [("max_steps", ["validation", "checkpoint 0"]), ("sigterm_flag", ["checkpoint 0"])])
def test_a_stop_of_a_callback_saves_a_checkpoint(how: str, events: list[str], tmp_path: Path) -> None:
    """As in AutoModel, where a step at which `max_steps` is reached is validated and saved, and one with `sigterm_flag` is saved."""
    recorded = []

    class Stops(Callback):
        def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
            scheduler = recipe.step_scheduler
            setattr(scheduler, how, 1 if how == "max_steps" else True)
            assert scheduler.is_ckpt_step
            assert (scheduler.is_last_step, scheduler.max_steps) == ((True, 1) if how == "max_steps" else (False, 4))

        def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
            recorded.append("validation")

        def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
            recorded.append(f"checkpoint {kwargs['checkpoint_info']['step']}")

    run(llm(tmp_path), Stops())
    assert recorded == events


def test_num_epochs_ends_training_before_max_steps_is_reached(tmp_path: Path) -> None:
    cfg = llm(tmp_path)
    cfg["step_scheduler"] |= {"max_steps": 100, "num_epochs": 1, "ckpt_every_steps": None}
    recorded = Recorded()
    recipe = run(cfg, recorded)
    assert recorded.recorded == ["step"] * 6 + ["end"]
    assert recipe.recipe.trainer.eval_results


def test_column_mapping_renames_columns_as_in_automodel(tmp_path: Path) -> None:
    cfg = llm(tmp_path)
    path = tmp_path / "rows" / "asked.jsonl"
    path.write_text("".join(json.dumps({"where": "sums", "q": f"{i}+1", "a": str(i + 1)}) + "\n" for i in range(24)))
    mapping = {"context": "where", "question": "q", "answer": "a"}
    cfg["dataset"] = {"path_or_dataset_id": str(path), "column_mapping": mapping, "seq_length": 32}
    recipe = TrainFinetuneRecipeForNextTokenPrediction(cfg)
    recipe.setup()
    try:
        assert recipe.recipe.rows["train"][0] == {"prompt": "sums\n0+1", "completion": "1"}
    finally:
        recipe.recipe.trainer.close()


REJECTED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda cfg: cfg["step_scheduler"].update(max_stepz=3), r"step_scheduler\.max_stepz: there is no such key; did you mean 'max_steps'\?"),
    (lambda cfg: cfg.update(optimiser={}), r"optimiser: there is no such key; did you mean 'optimizer'\?"),
    (lambda cfg: cfg["distributed"].update(tp_size=2), r"distributed\.tp_size: 2"),
    (lambda cfg: cfg["optimizer"].update(_target_="torch.optim.Adamm"), r"optimizer\._target_: there is no 'torch\.optim\.Adamm'"),
    (lambda cfg: cfg["dataset"].update(_target_="x.make_squad_dataset"), r"dataset\._target_: x\.make_squad_dataset is not supported"),
    (lambda cfg: cfg["step_scheduler"].update(global_batch_size=6), r"step_scheduler\.global_batch_size: 6 is no multiple"),
    (lambda cfg: cfg.update(wandb={"project": "p"}), r"wandb: give the recipe a logger of callsheet\.loggers"),
    (lambda cfg: cfg["callsheet"].update(thread=1), r"callsheet\.thread: there is no such key; did you mean 'threads'\?"),
    (lambda cfg: cfg["step_scheduler"].update(max_steps="four"), r"step_scheduler\.max_steps: 'four' should be a number"),
    (lambda cfg: cfg.update(dataloader={"shuffle": False}), r"dataloader\.shuffle: false is not supported"),
    (lambda cfg: cfg.pop("dataset"), r"dataset: there is nothing to train on"),
    (lambda cfg: cfg["checkpoint"].update(model_save_format="torch_save"), r"checkpoint\.model_save_format: 'torch_save'"),
    (lambda cfg: cfg.update(lr_scheduler={"lr_decay_style": "wsd"}), r"lr_scheduler\.lr_decay_style: 'wsd' is not supported"),
    (lambda cfg: cfg["dataset"].update(path="x"), r"dataset\.path: path_or_dataset_id says the same"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REJECTED, ids=[message[:30] for _, message in REJECTED])
def test_an_unsupported_or_invalid_key_is_rejected_by_name(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    cfg = llm(tmp_path)
    change(cfg)
    with pytest.raises(ConfigError, match=message):
        TrainFinetuneRecipeForNextTokenPrediction(cfg)


def test_all_supported_keys_of_a_configuration_apply(tmp_path: Path) -> None:
    cfg = llm(tmp_path) | {
        "peft": {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "match_all_linear": True, "dim": 4, "alpha": 8},
        "packed_sequence": {"packed_sequence_size": 64},
        "lr_scheduler": {"lr_decay_style": "cosine", "lr_warmup_steps": 2, "lr_decay_steps": 4, "min_lr": 1e-3},
        "validation_dataloader": {"batch_size": 2},
        "clip_grad_norm": {"max_norm": 0.5},
    }
    cfg["step_scheduler"] |= {"global_batch_size": 16}
    cfg["checkpoint"] |= {"save_consolidated": True, "is_async": True}
    config = TrainFinetuneRecipeForNextTokenPrediction(cfg)._config
    assert (config.lora.r, config.lora.alpha, config.lora.targets) == (4, 8.0, "all-linear")
    assert (config.packing, config.sequence_length, config.eval_batch_size) == (True, 64, 2)
    assert (config.batch_size, config.gradient_accumulation_steps, config.max_duration) == (4, 4, "4ba")
    assert (config.clip_grad_norm, config.export, config.save_in_background) == (0.5, True, True)
    assert (config.seed, config.timeout_seconds, config.device) == (1111, 60.0, "cpu")
    optimizer = config.optimizer([torch.nn.Parameter(torch.ones(1))])
    assert (type(optimizer).__name__, optimizer.param_groups[0]["lr"]) == ("Adam", 0.01)
    schedule = config.scheduler(optimizer)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[1] == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(0.001)


def test_a_configuration_is_read_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("step_scheduler:\n  max_steps: 3\nmodel:\n  config: {hidden_size: 8}\n")
    argv = ["--config", str(path), "--step_scheduler.max_steps", "5", "--seed=7"]
    cfg = automodel.parse_args_and_load_config("elsewhere.yaml", argv)
    assert cfg.step_scheduler.max_steps == cfg.get("step_scheduler.max_steps") == 5
    assert (cfg.get("model.config.hidden_size"), cfg.get("a.b", "none"), "model.config" in cfg) == (8, "none", True)
    assert cfg.to_dict() == {"step_scheduler": {"max_steps": 5}, "model": {"config": {"hidden_size": 8}}, "seed": 7}
    with pytest.raises(ConfigError, match="--seed"):
        automodel.parse_args_and_load_config(path, ["--seed"])
    with pytest.raises(ConfigError, match="no configuration is named"):
        automodel.parse_args_and_load_config(None, [])
    assert FinetuneRecipeForVLM.RECIPE_CLASS.__name__ == "FinetuneVLM"
    with pytest.raises(ConfigError, match="teacher_model: a distillation needs a teacher"):
        KnowledgeDistillationRecipeForNextTokenPrediction(llm(tmp_path))
    labeled = classification(tmp_path)
    labeled["dataset"]["column_mapping"] = {"answer": "label"}
    with pytest.raises(ConfigError, match=r"dataset\.column_mapping: give text_column"):
        TrainFinetuneRecipeForSequenceClassification(labeled)


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "automodel_style.py"
    with caplog.at_level("INFO"):
        runpy.run_path(str(example))["main"](str(tmp_path))
    assert capsys.readouterr().out == "2 validations would have been posted\n"
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+),", caplog.text)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert len(re.findall(r"saved .*checkpoints/ep0-ba\d+", caplog.text)) == 2


# --- the interface that AutoModel's own tests check ---


class AnyRecipe:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_a_runner_calls_callbacks_in_order_with_its_arguments_until_one_raises() -> None:
    recorded: list[Any] = []

    class First(Callback):
        def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
            recorded.append(("first", recipe, kwargs))

    class Second(Callback):
        def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
            recorded.append(("second", recipe, kwargs))
            raise ValueError("from the second")

    runner, recipe = CallbackRunner([First(), Second(), First()]), AnyRecipe()
    with pytest.raises(ValueError, match="from the second"):
        runner.on_train_start(recipe, extra=1)
    assert recorded == [("first", recipe, {"extra": 1}), ("second", recipe, {"extra": 1})]
    without_callbacks = CallbackRunner(None)
    assert without_callbacks.callbacks == []
    for hook in (
        "on_train_start",
        "on_train_batch_end",
        "on_validation_end",
        "on_save_checkpoint",
        "on_exception",
        "on_train_end",
    ):
        getattr(without_callbacks, hook)(recipe)
        assert getattr(Callback(), hook)(recipe) is None


@pytest.mark.parametrize(("recipe", "runs"), [
    (AnyRecipe(dist_env=AnyRecipe(is_main=True)), True),
    (AnyRecipe(dist_env=AnyRecipe(is_main=False)), False),
    (AnyRecipe(), True),
])  # fmt: skip
def test_rank_zero_only_uses_is_main_of_the_recipe_and_runs_without_it(recipe: AnyRecipe, runs: bool) -> None:
    class Gated(Callback):
        @rank_zero_only
        def on_train_start(self, recipe: Any, **kwargs: Any) -> Any:
            """Kept."""
            return "ran"

    assert Gated().on_train_start(recipe) == ("ran" if runs else None)
    assert Gated.on_train_start.__doc__ == "Kept."


def test_a_sample_has_the_time_at_which_it_was_created() -> None:
    sample = MetricsSample(step=1, epoch=0, metrics={"loss": 2.0}, timestamp="yesterday")
    assert sample.timestamp is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", sample.timestamp)
    assert datetime.fromisoformat(sample.timestamp).tzinfo is not None
    assert sample.to_dict() == {"step": 1, "epoch": 0, "timestamp": sample.timestamp, "loss": 2.0}
    assert MetricsSample(0, 0).metrics == {}


def test_a_recipe_s_facade_rejects_attributes_that_are_not_listed(tmp_path: Path) -> None:
    class Reads(Callback):
        def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
            for name in ("dataloader", "checkpointer"):
                with pytest.raises(NotOnTheList, match=f"AutoModel's recipe has here no '{name}': a guest may use cfg, dist_env"):
                    getattr(recipe, name)
            with pytest.raises(NotOnTheList, match="may not write 'cfg'"):
                recipe.cfg = {}
            read.append((recipe.dist_env.rank, recipe.dist_env.backend, str(recipe.dist_env.device), recipe.cfg.get("a.b")))

    from callsheet.testing import FakeLoop

    read: list[Any] = []
    FakeLoop(guest(Reads()), [1.0, 2.0], folder=tmp_path).run()
    assert read == [(0, "gloo", "cpu", None)]
