"""The base class of all recipes, with the steps that they share: set-up, resuming, training, evaluation, export and the report."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from callsheet.callbacks import NaNMonitor
from callsheet.checkpoint import find_checkpoints
from callsheet.core.background import inner
from callsheet.core.callback import Callback
from callsheet.core.callbacks_argument import manager_of
from callsheet.core.manager import CallbackManager
from callsheet.core.randomness import seed_all
from callsheet.core.ranks import read_ranks
from callsheet.core.time import TimeUnit
from callsheet.core.working import working
from callsheet.errors import ConfigError, NonFiniteError, RunInUseError
from callsheet.loggers.support.file_names import replace_file
from callsheet.loggers.support.json_text import json_text
from callsheet.recipes.existing_run import NEW, NEW_RUN_HINT, of_rank_zero, reject_another_job, resumable, set_aside
from callsheet.recipes.job import JobConfig
from callsheet.recipes.settings import as_file, settings_of
from callsheet.run.run_guard import why_not_writable
from callsheet.run.run_lock import RunLock
from callsheet.trainer import Trainer
from callsheet.trainer.arguments import duration, resolve_device
from callsheet.trainer.tasks import Task

logger = logging.getLogger("callsheet")

RESULTS = "results.json"
"""The name of the file with the results, in a run's folder."""

TRIAL_BATCHES, TRIAL_SECONDS, TRIAL_TOKENS = 20, 10, 16
"""A run of at most `TRIAL_BATCHES` batches or `TRIAL_SECONDS` seconds is a trial. Its samples have at most `TRIAL_TOKENS` tokens."""

_ONE_CYCLE_ERROR = "Tried to step "
"""The start of the error message that `OneCycleLR` raises after its last step."""

AnyConfig = TypeVar("AnyConfig", bound=JobConfig)


class Recipe(Generic[AnyConfig]):
    """The base class of recipes, which are training jobs. A recipe defines its model, data and task by overriding methods.

    `setup()` makes the model, the data and the trainer, and decides whether an earlier run is resumed. `run()` trains and
    evaluates. `report()` returns the results as text. To evaluate or export the model of an existing run, or to use it for
    predictions, call `open()` instead of `setup()`. Every rank must call these methods.

    Args:
        config: the configuration of the job.
        callbacks: a manager, a callback, or any iterable of callbacks.
        loggers: more callbacks, called after the others.
        resolved: the whole configuration as YAML, for the run's folder; by default it is made from `config`.

    Raises:
        ConfigError: `config` is not one of the recipe's class `Config`.

    Attributes:
        trainer: available after `setup()` or `open()`.
        results: the results by name, with the baselines; all in the unit that `results_are_in` names.
        evaluated: the losses and metrics of each evaluated dataset, including `test` if there is one.
    """

    Config: ClassVar[type[JobConfig]] = JobConfig
    results_are_in: ClassVar[str] = "the results"
    new_run_hint: str = NEW_RUN_HINT
    """How to start a new run if a run cannot be resumed, for messages. Set it if the user's program has other names for the settings."""
    setting_names: Mapping[str, str] = MappingProxyType({})
    """The names of keys in the user's program, for messages, if they are not the keys of this recipe: `{"lora": "peft"}`."""

    def __init__(
        self,
        config: AnyConfig | None = None,
        callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
        loggers: Iterable[Callback] = (),
        *,
        resolved: str = "",
    ) -> None:
        if config is not None and not isinstance(config, self.Config):
            raise ConfigError(f"config is {type(config).__name__}; {type(self).__name__} takes a {self.Config.__name__}")
        self.config: AnyConfig = config if config is not None else self.Config()  # type: ignore[assignment]  # a subclass has its own `Config`
        self.callbacks = manager_of(callbacks)
        if self.config.stop_on_nan and not any(isinstance(inner(each), NaNMonitor) for each in self.callbacks.callbacks):
            self.callbacks.add(NaNMonitor())
        self.callbacks.add(loggers)
        self.resolved = resolved
        self.results: dict[str, float] = {}
        self.evaluated: dict[str, dict[str, float]] = {}
        self.ranks = read_ranks()
        self.trainer: Trainer
        self._aside: Path | None = None
        self._is_opened = False

    # --- methods that a recipe overrides ---

    def read_data(self) -> None:
        """Read the data and check it.

        Data that cannot be used is rejected here, before anything in the folder of an earlier run is changed.
        """

    def make_model(self) -> nn.Module:
        """Return the model with its weights. All ranks have set the random state from `seed` before this call.

        Raises:
            NotImplementedError: the recipe does not override this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement make_model()")

    def make_task(self) -> Task | None:
        """Return the task, which defines forward pass, loss and metrics; None for a model that computes its own loss."""
        return None

    def train_data(self) -> Iterable[Any]:
        """Return the batches to train on.

        Raises:
            NotImplementedError: the recipe does not override this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement train_data()")

    def validation_data(self) -> Mapping[str, Iterable[Any]]:
        """Return the batches to evaluate on, by dataset name."""
        return {}

    def test_data(self) -> Iterable[Any] | None:
        """Return the batches to test on once, after training."""
        return None

    def processor(self) -> Any:
        """Return the tokenizer or processor that is exported with the weights, or None."""
        return None

    def about_data(self) -> str:
        """Return a short description of the data."""
        return ""

    def begin(self) -> None:
        """Prepare the training, for example by evaluating the untrained model. Called in new runs and in resumed runs."""

    def finish(self) -> None:
        """Compute `results` and the baselines, and generate samples. The recipe calls this method after training and evaluation."""

    def generated_texts(self) -> Iterable[str]:
        """Return texts that the trained model has generated, for the report."""
        return ()

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
        """Yield the model's prediction for each row, in order, as plain data.

        Every rank must call this method. Rank 0 gets the predictions.

        Args:
            rows: the rows, in the form of the recipe's data.

        Raises:
            ConfigError: a row cannot be used (the message begins with its number, such as `row 3`, counted from 1), or the recipe
                does not support predictions.
        """
        raise ConfigError(f"the recipe {type(self).__name__} does not support predictions")

    # --- methods that all recipes share ---

    @property
    def is_trial(self) -> bool:
        """Whether `max_duration` is so short that the run is only a trial. Evaluation and generation are then shortened too."""
        longest = duration(self.config.max_duration, None)
        return longest.value <= {TimeUnit.BATCH: TRIAL_BATCHES, TimeUnit.SECOND: TRIAL_SECONDS}.get(longest.unit, 0)

    def short(self, tokens: int) -> int:
        """Return the number of tokens to generate: in a trial run at most `TRIAL_TOKENS`, otherwise `tokens`.

        Args:
            tokens: the configured number. In a trial run, fewer tokens are generated.
        """
        return min(tokens, TRIAL_TOKENS) if self.is_trial and not self._is_opened else tokens

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.runs_folder) / self.config.run_name

    def setup(self) -> None:
        """Make the model, the data and the trainer, for a new run or to resume an existing one.

        Raises:
            ConfigError: the data, the model or another value cannot be used; the run's folder is not writable; or the existing run
                belongs to another job.
            RunInUseError: another process trains in the run's folder.
        """
        config, folder = self.config, self.folder
        written = self.resolved or as_file(type(self), config)
        model = self._prepare_model()

        lock = RunLock(folder)  # the Trainer takes over this lock of the run's folder

        def decide() -> list[str | None]:
            if why := why_not_writable(folder):
                raise ConfigError(
                    f"cannot write to the run's folder {folder} ({why}); make it writable, or choose another runs_folder"
                )
            with contextlib.suppress(OSError):  # if the lock cannot be acquired, the Trainer reports the error later
                lock.acquire(config.lock_timeout_seconds)
            resume = resumable(folder, config.resume)
            if resume is None:
                aside = set_aside(folder)
                return [None, str(aside) if aside is not None else None]
            if resume == "auto":
                reject_another_job(folder / "config.yaml", written, config.may_change, self.new_run_hint, self.setting_names)
            return [resume, None]

        try:
            # Rank 0 may wait for the lock of the run's folder. Then the other ranks must wait longer for rank 0.
            patience = config.timeout_seconds + config.lock_timeout_seconds
            resume, aside = of_rank_zero(self.ranks, decide, timeout=patience)
            self._aside = Path(aside) if aside is not None else None
            self.trainer = self._trainer(model, resume)
        except BaseException:
            if self._aside is not None and self.ranks.rank == 0:
                self._restore_earlier_run(self._aside)
            raise
        finally:
            lock.release()
        if self.ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "call_sheet.txt").write_text(f"{self.callbacks.call_sheet()}\n", encoding="utf-8")
            replace_file(folder / "config.yaml", written.encode())

    def _restore_earlier_run(self, aside: Path) -> None:
        """Restore the original name of the earlier run's folder, because the new run failed to start.

        The folder is not renamed if another process has started a run under the earlier name.
        """
        lock = RunLock(self.folder)
        try:
            lock.acquire(0)
        except (RunInUseError, OSError):
            return
        try:
            if not self.folder.exists():
                aside.rename(self.folder)
                logger.info("restored the earlier run in %s", self.folder)
        finally:
            lock.release()

    def open(self, checkpoint: str | None = None) -> Self:
        """Make the trainer of an existing run, with weights from a checkpoint, to evaluate or export the model.

        The run's folder is not changed.

        Args:
            checkpoint: the path of the checkpoint; None: the newest valid one.

        Returns:
            The recipe itself.

        Raises:
            ConfigError: there is no checkpoint, or no valid one.
        """
        found = find_checkpoints(self.folder / "checkpoints").checkpoints if checkpoint is None else []
        if checkpoint is None and not any(each.seal.info.get("is_finite", True) for each in found):
            why = "has no checkpoint; train first: callsheet train ..."
            if found:
                why = f"has no good checkpoint: {len(found)} have weights or a loss that are not finite; name one of them to use it anyway"
            raise ConfigError(f"{self.folder} {why}")
        self._is_opened = True
        self.trainer = self._trainer(self._prepare_model(), checkpoint or "auto")
        self.trainer.model.eval()
        return self

    def run(self) -> dict[str, float]:
        """Train, evaluate and compute the results.

        Returns:
            The results by name, in the unit that `results_are_in` names. They are empty if the run was preempted.

        Raises:
            NonFiniteError: the loss is NaN or infinite, and `stop_on_nan` is set.
            ConfigError: a `OneCycleLR` has fewer steps than the run.
        """
        with self.trainer as trainer:
            self.begin()
            try:
                trainer.fit()
            except NonFiniteError as error:
                if not self.config.stop_on_nan:
                    raise
                raise NonFiniteError(f"{error}; set stop_on_nan=false to train on regardless") from error
            except ValueError as error:
                if not str(error).startswith(_ONE_CYCLE_ERROR):
                    raise
                raise ConfigError(f"scheduler: {error}; give OneCycleLR more total_steps, or use another scheduler") from error
            if trainer.preempted:
                return self.results
            self.evaluate()
            with self._working("computing baselines and samples"):
                self.finish()
            self.write_results()
            if self.config.export:
                with self._working("exporting the model"):
                    self.export(self.folder / "export")
        return self.results

    def write_results(self) -> None:
        """Write `results.json` to the run's folder: the results, the evaluations, and the generated samples, as plain data."""
        content = {
            "step": self.trainer.state.timestamp.batch,
            "is_trial": self.is_trial,
            "unit": self.results_are_in,
            "results": self.results,
            "evaluated": self.evaluated,
            "samples": [sample.strip("\n") for sample in self.generated_texts()],
        }
        if self.ranks.rank == 0 and not self.trainer.run.has_lost_folder:
            replace_file(self.folder / RESULTS, json_text(content, indent=2).encode())

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Evaluate the model.

        Returns:
            The losses and metrics of every validation dataset and of the test data (as `test`), by dataset and name.
        """
        trainer = self.trainer
        if trainer.state.evaluators:
            # Use the results of `fit` if it has evaluated after its last step. Otherwise, evaluate now: if there is no interval, if
            # the run was already complete (its checkpoint may have a trial's results), or if it was opened without training.
            self.evaluated = dict(trainer.eval_results if trainer.is_evaluated and not self._is_opened else trainer.evaluate())
        if (test := self.test_data()) is not None:
            self.evaluated["test"] = trainer.test(test)
        return self.evaluated

    def export(self, path: str | Path) -> None:
        """Write the model's weights.

        Args:
            path: for a model of transformers, a folder, which also gets the tokenizer or processor; for any other model, a
                safetensors file.
        """
        self.trainer.export(path, processor=self.processor())

    def describe(self) -> str:
        """Return a few sentences that say which data, model and earlier run were found, and what the job will do."""
        trainer, again = self.trainer, "--resume new sets it aside and starts a new run"
        size = sum(parameter.numel() for parameter in trainer.model.parameters())
        trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
        some = f", of which {_millions(trained)} are trained," if trained < size else ""
        ranks = f" of {self.ranks.world_size} ranks" if self.ranks.world_size > 1 else ""
        lines = ["; ".join(filter(None, [f"{_millions(size)} parameters{some} on {trainer.device}{ranks}", self.about_data()]))]
        step, elapsed = trainer.state.timestamp.batch, trainer.state.elapsed or 0.0
        if self._aside is not None:
            had = "" if self.config.resume == NEW else ", which had no checkpoint,"
            lines.append(f"The earlier run{had} is now {self._aside}; starting a new one.")
        elif step and trainer.state.is_complete:
            longer = trainer.state.max_duration * 2 if trainer.state.max_duration is not None else ""
            lines.append(
                f"Found the run {trainer.run.name!r}, complete at step {step}; --max_duration {longer} continues it, {again}."
            )
        elif trainer.earlier_stop is not None:
            # `fit` logs what stopped the run and how to continue, so leave both out here.
            lines.append(f"Found the run {trainer.run.name!r}, complete at step {step} ({again}).")
        elif step:
            lines.append(
                f"Found the run {trainer.run.name!r} at step {step}, {elapsed:.0%} of {trainer.state.max_duration}; resuming it ({again})."
            )
        else:
            lines.append(f"Starting the run {trainer.run.name!r}, for {trainer.state.max_duration}.")
        if self.is_trial:
            lines.append(
                f"This is a trial: evaluations take at most {TRIAL_BATCHES} batches, and samples have at most {TRIAL_TOKENS} tokens."
            )
        return "\n".join(lines)

    def report(self) -> str:
        """Return the results with their baselines, the generated samples, and the paths of the run's files, as text."""
        folder = self.folder
        lines = list(self.generated_texts())
        if self.results:
            width = max(map(len, self.results))
            lines.append(f"{self.results_are_in}:")
            lines += [f"  {name:<{width}}  {value:6.3f}" for name, value in self.results.items()]
        lines = [_printable(line) for line in lines]
        lines.append(f"\nThe run ({self.trainer.state.timestamp.batch} steps, {self._how_it_ended()}) is in {folder}: ")
        if folder.exists():
            lines[-1] += ", ".join(sorted(entry.name for entry in folder.iterdir()))
        if (checkpoints := folder / "checkpoints").exists():
            lines.append(f"Its checkpoints: {', '.join(sorted(entry.name for entry in checkpoints.iterdir() if entry.is_dir()))}")
        return "\n".join(lines)

    def _how_it_ended(self) -> str:
        """Return the run's outcome with its reason as text: `finished`, or `stopped by EarlyStopper: ...`."""
        outcome, reason = str(self.trainer.run.outcome), self.trainer.run.outcome_reason
        return outcome if not reason else reason if reason.startswith(outcome) else f"{outcome}: {reason}"

    # --- methods for use in subclasses ---

    def loader(self, dataset: Any, *, collate: Any = None, train: bool) -> DataLoader[Any]:
        """Return a DataLoader of the dataset, with the configured batch size and options.

        Args:
            dataset: the samples, as a map-style or an iterable dataset.
            collate: makes a batch of a list of samples; None: torch's default.
            train: whether the batches are for training. Then all batches have the same size, and the samples of a map-style dataset
                are shuffled. Otherwise, the samples are in the dataset's order.

        Raises:
            ConfigError: the data to train on is smaller than a batch.
        """
        config = self.config
        if not train and self.is_trial and not self._is_opened:
            dataset = _first(dataset, TRIAL_BATCHES * (config.eval_batch_size or config.batch_size))
        if train and not isinstance(dataset, IterableDataset) and len(dataset) < config.batch_size:
            raise ConfigError(
                f"batch_size={config.batch_size}: the data to train on has only {len(dataset)} samples, fewer than a batch; give a "
                "smaller batch_size, or more data"
            )
        return DataLoader(
            dataset,
            batch_size=config.batch_size if train else config.eval_batch_size or config.batch_size,
            shuffle=train and not isinstance(dataset, IterableDataset),
            drop_last=train,
            collate_fn=collate,
            num_workers=config.workers,
            persistent_workers=config.workers > 0,
        )

    def _prepare_model(self) -> nn.Module:
        resolve_device(self.config.device, self.ranks)  # raises an error for a wrong device before data is read
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        with self._working("reading the data"):
            self.read_data()
        seed_all(self.config.seed)
        with self._working("making the model"):
            return self.make_model()

    def _working(self, what: str) -> AbstractContextManager[None]:
        """While the `with` block runs, show on rank 0 that the work `what` is in progress."""
        return working(f"{self.config.run_name}: {what}", is_shown=self.ranks.rank == 0)

    def _trainer(self, model: nn.Module, resume: str | None) -> Trainer:
        config, task = self.config, self.make_task()
        with self._working("setting up the trainer"):
            return self._make_trainer(model, task, config, resume)

    def _make_trainer(self, model: nn.Module, task: Task | None, config: AnyConfig, resume: str | None) -> Trainer:
        return Trainer(
            model,
            task,
            train_dataloader=None
            if self._is_opened
            # A run that was opened without training needs no training data, whose saved position may be that of other ranks.
            else self.train_data,
            eval_dataloader=self.validation_data(),
            optimizer=config.make_optimizer,
            scheduler=config.scheduler,
            max_duration=str(config.max_duration),
            microbatch_size=config.microbatch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            clip_grad_norm=config.clip_grad_norm,
            precision=config.precision,
            parallel=config.parallel,
            compile=config.compile,
            gradient_checkpointing=config.gradient_checkpointing,
            eval_interval=config.eval_interval,
            log_interval=config.log_interval,
            callbacks=self.callbacks,
            progress=not self._is_opened,
            run_name=config.run_name,
            runs_folder=config.runs_folder,
            save_in_background=config.save_in_background,
            resume=resume,
            seed=config.seed,
            device=config.device,
            timeout_seconds=config.timeout_seconds,
            lock_timeout_seconds=config.lock_timeout_seconds,
            config=yaml.safe_load(self.resolved) if self.resolved else settings_of(config),
        )


def _printable(text: str) -> str:
    """Return `text` with control characters escaped, so that a terminal can show it.

    A model may generate control characters, which would change the terminal.
    """
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} million"


def _first(dataset: Any, most: int) -> Any:
    """Return the first `most` samples of a dataset, or the whole dataset if it has no length."""
    if isinstance(dataset, IterableDataset) or len(dataset) <= most:
        return dataset
    return Subset(dataset, range(most))
