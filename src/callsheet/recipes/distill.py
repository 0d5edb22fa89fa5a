"""Knowledge distillation: a small language model learns from a large one."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml
from torch import nn

from callsheet.callbacks import CheckpointSaver
from callsheet.checkpoint import find_checkpoints
from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.core.time import Time, TimeUnit
from callsheet.errors import ConfigError
from callsheet.loggers import JSONLLogger, ProgressBarLogger
from callsheet.recipes.data.packing import check_kept_apart
from callsheet.recipes.existing_run import of_rank_zero
from callsheet.recipes.finetune import Finetune, FinetuneConfig
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.models.lora import Lora
from callsheet.recipes.settings import as_file
from callsheet.recipes.tasks.distillation_task import DistillationTask
from callsheet.run.resumption import AUTO
from callsheet.trainer import Trainer
from callsheet.trainer.arguments import duration, positive
from callsheet.trainer.tasks import Task

logger = logging.getLogger("callsheet")

BEFORE_KEY = "distill/before"
"""The key in `ctx.user_state` under which the student's cross entropies before training are stored."""
TEACHER_FOLDER, HARD_LABELS_FOLDER = "teacher", "hard_labels"
"""The subfolders of the run's folder for the teacher, and for the student that is trained on the labels alone."""


@dataclass(kw_only=True)
class DistillConfig(FinetuneConfig):
    """The configuration of the recipe `distill`: the options of `finetune`, where `model` is the student, and options for the teacher.

    Args:
        teacher: the teacher, which must have the student's vocabulary. A teacher without a `path` is first trained on the same
            data.
        teacher_duration: how long a teacher without a `path` is trained, such as `200ba`; `2dur` is twice `max_duration`. The
            `optimizer` and the `scheduler` are those of the student.
        kd_temperature: the temperature by which the logits of student and teacher are divided before they are compared.
        mix: the fraction of the loss that comes from the labels, from 0 to 1; the rest comes from the teacher.
        compare_with_hard_labels: whether a second student is trained for the same number of steps on the labels alone, so that the
            results of the two students can be compared.
    """

    run_name: str = "distill"
    teacher: LanguageModel = field(default_factory=LanguageModel)
    teacher_duration: str | int = "1dur"
    kd_temperature: float = 2.0
    mix: float = 0.5
    compare_with_hard_labels: bool = False

    may_change: ClassVar[frozenset[str]] = FinetuneConfig.may_change | {"compare_with_hard_labels"}

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("kd_temperature", self.kd_temperature, float)
        if not 0 <= self.mix <= 1:
            raise ConfigError(f"mix={self.mix}: give a share from 0 (the teacher alone) to 1 (the labels alone)")
        self.teacher_length()
        has_tokenizer = self.teacher.path is not None or self.teacher.tokenizer is not None
        tokenizer = self.teacher.tokenizer if has_tokenizer else self.model.tokenizer or self.model.path
        self.teacher = replace(
            self.teacher, tokenizer=tokenizer
        )  # a copy, because one object may be both the teacher and the student
        self.teacher.key = "teacher"
        self.teacher.check()
        if self.model.path is None and self.model.tokenizer is None:
            self.model = replace(self.model, tokenizer=self.teacher.tokenizer or self.teacher.path)

    def teacher_length(self) -> str:
        """Return the training duration of a teacher that has no `path`.

        If `teacher_duration` is a multiple of `max_duration`, such as `2dur`, it is converted to the unit of `max_duration`.

        Raises:
            ConfigError: `teacher_duration` is invalid or not above 0.
        """
        given = self.teacher_duration
        if not str(given).strip().endswith("dur"):
            return str(duration(given, None, "teacher_duration"))
        share, own = Time.parse(given).value, duration(self.max_duration, None)
        if share <= 0:
            raise ConfigError(f"teacher_duration={given!r}: give more than 0, such as '2dur', which is twice max_duration")
        return str(Time(share * own.value if own.unit is TimeUnit.SECOND else max(1, round(share * own.value)), own.unit))


class Distill(Finetune):
    """Knowledge distillation: a small language model learns from a large one.

    The student is evaluated before training, at the evaluation interval, and after training, when it is also tested. The metrics are
    `loss`, `ce_loss`, `kd_loss` and `teacher_loss`.

    The arguments are those of `Recipe`.
    """

    Config = DistillConfig
    config: DistillConfig
    results_are_in = "nats per token of the answers, as cross entropies; the baselines use token counts of the training answers"

    def read_data(self) -> None:
        """Read the data as in fine-tuning. Raise ConfigError if the teacher's vocabulary differs from the student's."""
        super().read_data()
        own, others = self.tokenizer.get_vocab(), self.config.teacher.make_tokenizer().get_vocab()
        if own != others:
            token = min(own.items() ^ others.items(), key=lambda one: (one[1], one[0]))[0]
            theirs, ours = (
                f"{names[token]} of {len(names)}" if token in names else f"none of {len(names)}" for names in (others, own)
            )
            raise ConfigError(
                f"teacher: its vocabulary differs from the student's: {token!r} is token {theirs} of the teacher, and {ours} of the student; "
                "give a teacher and a student with one tokenizer"
            )

    def make_model(self) -> nn.Module:
        """Return the student model. Also load the teacher, if it has a `path`."""
        model = super().make_model()
        self.teacher = self._teacher(self.config.teacher) if self.config.teacher.path is not None else None
        return model

    def make_task(self) -> Task:
        """Return a task whose loss mixes the loss on the labels with the distance between the outputs of student and teacher.

        If the configured teacher has no `path`, train the teacher first.
        """
        if self.teacher is None:
            self.teacher = self._teacher(replace(self.config.teacher, path=str(self._train_teacher()), config=None, freeze=[]))
        config = self.config
        return DistillationTask(self.teacher, temperature=config.kd_temperature, mix=config.mix, vocabulary=len(self.tokenizer))

    def begin(self) -> None:
        """Evaluate the untrained student, unless training has already begun."""
        trainer = self.trainer
        if self.config.evaluate_first and trainer.state.evaluators and not trainer.state.timestamp.batch:
            found = trainer.evaluate()
            trainer.ctx.user_state[BEFORE_KEY] = {name: losses["ce_loss"] for name, losses in found.items()}

    def finish(self) -> None:
        """Compute the results of student, teacher and baselines, and let the student answer the prompts."""
        super().finish()
        before = self.trainer.ctx.user_state.get(BEFORE_KEY, {})
        results: dict[str, float] = {}
        for name, found in self.evaluated.items():
            results |= {f"{name}/ce_loss": found["ce_loss"], f"{name}, teacher": found["teacher_loss"]}
            if name in before:
                results[f"{name}, untrained student"] = before[name]
        self.results = results | {name: value for name, value in self.results.items() if not name.endswith("/loss")}

    def run(self) -> dict[str, float]:
        """Train and evaluate the student.

        If `compare_with_hard_labels` is set, also train another student on the labels alone, for comparison.
        """
        super().run()
        if self.config.compare_with_hard_labels and not self.trainer.preempted:
            steps = self.trainer.state.timestamp.batch
            other = self._inner_recipe(HARD_LABELS_FOLDER, self.config.model, f"{steps}ba", self.config.lora)
            _run(other)
            self.results |= {f"{name}, labels alone": found["loss"] for name, found in other.evaluated.items()}
            self.write_results()
        return self.results

    def _trainer(self, model: nn.Module, resume: str | None) -> Trainer:
        # `resume=None` requires an empty folder, but the run's folder already contains the teacher. Therefore, pass AUTO.
        return super()._trainer(model, resume or AUTO)

    # --- the runs that train the teacher, and a student on labels alone ---

    def _teacher(self, which: LanguageModel) -> nn.Module:
        from transformers import AutoModelForCausalLM

        teacher = which.build(AutoModelForCausalLM, vocabulary=len(self.tokenizer), longest=self.config.sequence_length)
        if self.config.packing and not self._is_flash:
            check_kept_apart(teacher)
        return teacher

    def _train_teacher(self) -> Path:
        """Return the folder of the exported teacher. If this run has no trained teacher yet, train one first.

        Raises:
            ConfigError: the run is resumed, and its teacher is missing.
        """
        exported = self.folder / TEACHER_FOLDER / "export"
        recipe = self._inner_recipe(TEACHER_FOLDER, self.config.teacher, self.config.teacher_length(), None)

        def look() -> bool:
            kept = self._aside / TEACHER_FOLDER if self._aside is not None and self.config.resume == AUTO else None
            # Continue with the teacher in the renamed folder of an earlier run, if that run ended while it trained the teacher.
            if kept is not None and not self.folder.exists() and _is_run_of(kept, recipe):
                self.folder.mkdir(parents=True)
                kept.rename(self.folder / TEACHER_FOLDER)
            is_there = exported.exists()  # a folder with this name is complete, because an export gets this name only at its end
            if not is_there and find_checkpoints(self.folder / "checkpoints").checkpoints:
                raise ConfigError(f"{self.folder} is to be resumed, but its teacher is not in {exported}; {self.new_run_hint}")
            return is_there

        if not of_rank_zero(self.ranks, look, timeout=self.config.timeout_seconds):
            trial = ", and only as a trial, because max_duration is short" if self.is_trial else ""
            logger.info("training the teacher first, for %s%s", self.config.teacher_length(), trial)
            _run(recipe)
        return exported

    def _inner_recipe(self, name: str, model: LanguageModel, length: str, lora: Lora | None) -> Finetune:
        """Return a recipe that fine-tunes `model` on this run's data, in the subfolder `name`. A run in that folder is resumed."""
        kept = {each.name: getattr(self.config, each.name) for each in fields(FinetuneConfig)}
        own = {
            "run_name": name,
            "runs_folder": str(self.folder),
            "resume": AUTO,
            "max_duration": length,
            "export": True,
            "eval_interval": None,
        }
        silent: dict[str, Any] = {"evaluate_first": False, "prompts": [], "samples": 0}
        config = FinetuneConfig(**kept | own | silent | {"model": model, "lora": lora})
        resolved = yaml.safe_dump({**yaml.safe_load(as_file(Finetune, config)), "recipe": "finetune"}, sort_keys=False)
        recipe = _InnerFinetune(config, [CheckpointSaver(keep=1)], [ProgressBarLogger(), JSONLLogger()], resolved=resolved)
        key = "teacher" if name == TEACHER_FOLDER else "model"
        recipe.new_run_hint = self.new_run_hint
        # The user knows the keys of the model of this run, such as `model.path`, as keys of `key`, such as `teacher.path`.
        renamed = {
            f"model{ours.removeprefix(key)}": theirs for ours, theirs in self.setting_names.items() if ours.startswith(f"{key}.")
        }
        others = {ours: theirs for ours, theirs in self.setting_names.items() if not ours.startswith("model.")}
        recipe.setting_names = {**others, **renamed, "model": self.setting_names.get(key, key)}
        return recipe


class _InnerFinetune(Finetune):
    """A fine-tuning run inside another recipe, such as that of a teacher. Its export folder appears when the export is complete."""

    def export(self, path: str | Path) -> None:
        """Export the model to a temporary folder, and rename that folder when it is complete."""
        draft = Path(f"{path}.new")

        def clear() -> None:
            if draft.exists():  # remove an incomplete export that an earlier run has left
                shutil.rmtree(draft)

        def put() -> None:
            if Path(path).exists():
                shutil.rmtree(path)
            draft.rename(path)

        of_rank_zero(self.ranks, clear, timeout=self.config.timeout_seconds)
        super().export(draft)
        of_rank_zero(self.ranks, put, timeout=self.config.timeout_seconds)


def _is_run_of(folder: Path, recipe: Finetune) -> bool:
    file = folder / "config.yaml"
    return file.exists() and file.read_bytes() == recipe.resolved.encode()


def _run(recipe: Finetune) -> None:
    recipe.setup()
    recipe.run()
    if recipe.trainer.preempted and recipe.trainer.signal is not None:
        raise SystemExit(128 + recipe.trainer.signal)  # a signal preempted the inner run, and must end the whole job too


def distill(
    config: DistillConfig | None = None,
    *,
    callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
    loggers: Iterable[Callback] = (),
) -> Distill:
    """Run the recipe: set up, train, evaluate and test.

    Args:
        config: the configuration; None: a `DistillConfig` with its default values.
        callbacks: a manager, a callback, or any iterable of callbacks; None: only those that the recipe adds.
        loggers: more callbacks, called after the others.

    Returns:
        The recipe, with its `results` and its `trainer`.

    Raises:
        ConfigError, RunInUseError: see `Recipe.setup`.
        NonFiniteError: see `Recipe.run`.

    Examples:
        >>> from callsheet.recipes import DistillConfig, LanguageModel, Rows, distill  # doctest: +SKIP
        >>> student, teacher = LanguageModel("small"), LanguageModel("large")  # doctest: +SKIP
        >>> distill(DistillConfig(model=student, teacher=teacher, train=Rows("chats.jsonl"))).results  # doctest: +SKIP
    """
    recipe = Distill(config, callbacks, loggers)
    recipe.setup()
    recipe.run()
    return recipe
