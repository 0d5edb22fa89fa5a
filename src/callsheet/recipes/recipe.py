"""The base of all recipes: what a job's file does not say again, from the first look at what is there to the report."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from callsheet.background import inner
from callsheet.callback import Callback
from callsheet.callbacks import NaNMonitor
from callsheet.checkpoint import find_checkpoints
from callsheet.distributed import read_ranks
from callsheet.errors import ConfigError, NonFiniteError, RunInUseError
from callsheet.loggers.file_names import replace_file
from callsheet.loggers.json_text import json_text
from callsheet.manager import CallbackManager, normalize_callbacks
from callsheet.randomness import seed_all
from callsheet.recipes.existing_run import NEW, of_rank_zero, reject_another_job, resumable, set_aside
from callsheet.recipes.job import JobConfig
from callsheet.recipes.settings import as_file, settings_of
from callsheet.run_lock import RunLock
from callsheet.time import TimeUnit
from callsheet.trainer import Trainer
from callsheet.trainer.arguments import duration, resolved_device
from callsheet.trainer.tasks import Task
from callsheet.working import working

logger = logging.getLogger("callsheet")

RESULTS = "results.json"
"""The file in a run's folder that has its results."""

TRIAL_BATCHES, TRIAL_SECONDS, TRIAL_TOKENS = 20, 10, 16
"""A run of at most so many batches or seconds is a trial: its evaluations take at most so many batches, and its samples so many tokens."""

AnyConfig = TypeVar("AnyConfig", bound=JobConfig)


class Recipe(Generic[AnyConfig]):
    """A job: a model, its data, and what is said when it is done. A recipe's own file says what stands under "what a recipe says" below.

    `setup()` makes everything and finds out what there is to resume; `run()` trains, evaluates and finishes; `report()` says what came
    of it. `open()` instead of `setup()` takes a run as it is, to be evaluated, asked or exported. Every rank does all of them.

    Args:
        config: what the job is made of.
        callbacks: a manager, a callback, or any iterable of callbacks.
        loggers: more callbacks, told after the others.
        resolved: the whole configuration as YAML, for the run's folder; made of `config` where there is none.

    Attributes:
        trainer: there is one after `setup()` or `open()`.
        results: what came of it, by name, the baselines beside it; all in the unit that `results_are_in` names.
        evaluated: the losses and metrics of each evaluated dataset, and of `test` where there is one.
    """

    Config: ClassVar[type[JobConfig]] = JobConfig
    results_are_in: ClassVar[str] = "the results"

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
        self.config: AnyConfig = config if config is not None else self.Config()  # type: ignore[assignment]  # its own Config
        self.callbacks = normalize_callbacks(callbacks) or CallbackManager()
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

    # --- what a recipe says ---

    def read_data(self) -> None:
        """Find the data and look at it; what cannot work is refused here, before an earlier run is touched."""

    def make_model(self) -> nn.Module:
        """The model, with its weights. The random state is that of `seed`, on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its model is")

    def make_task(self) -> Task | None:
        """What forward, loss and metrics are; None for a model that has its own loss."""
        return None

    def train_data(self) -> Iterable[Any]:
        """The batches to train on."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it trains on")

    def validation_data(self) -> Mapping[str, Iterable[Any]]:
        """The batches to evaluate on, by the dataset's name."""
        return {}

    def test_data(self) -> Iterable[Any] | None:
        """The batches that are looked at once, when all is done."""
        return None

    def processor(self) -> Any:
        """The tokenizer or processor that is exported beside the weights, or None."""
        return None

    def about_data(self) -> str:
        """The data, in a few words."""
        return ""

    def begin(self) -> None:
        """Before training, also before it goes on."""

    def finish(self) -> None:
        """After training and evaluation: set `results`, with baselines, and write what the trained model is to write."""

    def written(self) -> Iterable[str]:
        """Passages for the report: what the trained model has written."""
        return ()

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
        """What the model says of each row, in order: the row's prediction as plain data.

        Of several ranks all take part, and rank 0 has the answers.

        Raises:
            ConfigError: of a row that cannot be answered; the message begins with `row 3`, where the first is 1.
        """
        raise ConfigError(f"the recipe {type(self).__name__} has no predictions for rows of its own")

    # --- what all of them do ---

    @property
    def is_trial(self) -> bool:
        """Whether `max_duration` is so short that the recipe is only tried out: all its other parts are short then as well."""
        longest = duration(self.config.max_duration, None)
        return longest.value <= {TimeUnit.BATCH: TRIAL_BATCHES, TimeUnit.SECOND: TRIAL_SECONDS}.get(longest.unit, 0)

    def short(self, tokens: int) -> int:
        """Return how many tokens to generate: `tokens`, or a few in a trial."""
        return min(tokens, TRIAL_TOKENS) if self.is_trial and not self._is_opened else tokens

    @property
    def folder(self) -> Path:
        """The run's."""
        return Path(self.config.runs_folder) / self.config.run_name

    def setup(self) -> None:
        """Make the model, the data and the trainer; a run that is there already is resumed or set aside.

        Raises:
            ConfigError: the data, the model or another value cannot work; the run that is there is of another job.
            RunInUseError: another process trains in the run's folder.
        """
        config, folder = self.config, self.folder
        written = self.resolved or as_file(type(self), config)
        model = self._prepared()

        lock = RunLock(folder)  # the Trainer takes it over

        def decide() -> list[str | None]:
            with contextlib.suppress(OSError):  # where no lock can be held the Trainer says so
                lock.acquire(config.lock_timeout_seconds)
            resume = resumable(folder, config.resume)
            if resume is None:
                aside = set_aside(folder)
                return [None, str(aside) if aside is not None else None]
            if resume == "auto":
                reject_another_job(folder / "config.yaml", written, config.may_change)
            return [resume, None]

        try:
            # The other ranks wait for rank 0, which may wait for the lock.
            patience = config.timeout_seconds + config.lock_timeout_seconds
            resume, aside = of_rank_zero(self.ranks, decide, timeout=patience)
            self._aside = Path(aside) if aside is not None else None
            self.trainer = self._trainer(model, resume)
        except BaseException:
            if self._aside is not None and self.ranks.rank == 0:
                self._put_back(self._aside)
            raise
        finally:
            lock.release()
        if self.ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "call_sheet.txt").write_text(f"{self.callbacks.call_sheet()}\n")
            (folder / "config.yaml").write_text(written)

    def _put_back(self, aside: Path) -> None:
        """The new run could not begin: the earlier one gets its name back, unless somebody else has begun one there."""
        lock = RunLock(self.folder)
        try:
            lock.acquire(0)
        except (RunInUseError, OSError):
            return
        try:
            if not self.folder.exists():
                aside.rename(self.folder)
                logger.info("the run in %s is there again", self.folder)
        finally:
            lock.release()

    def open(self, checkpoint: str | None = None) -> Self:
        """Make the trainer of a run that is there, with the weights of its newest good checkpoint or of `checkpoint`; leaves its folder alone.

        Raises:
            ConfigError: there is no checkpoint, or no good one.
        """
        found = find_checkpoints(self.folder / "checkpoints").checkpoints if checkpoint is None else []
        if checkpoint is None and not any(each.seal.info.get("is_finite", True) for each in found):
            why = "holds no checkpoint; train first: callsheet train ..."
            if found:
                why = f"holds no good checkpoint, but {len(found)} with weights or a loss that are not finite; name one of them to have it"
            raise ConfigError(f"{self.folder} {why}")
        self._is_opened = True
        self.trainer = self._trainer(self._prepared(), checkpoint or "auto")
        self.trainer.model.eval()
        return self

    def run(self) -> dict[str, float]:
        """Train, evaluate and finish; returns the results, which are empty where the run had to make way."""
        with self.trainer as trainer:
            self.begin()
            try:
                trainer.fit()
            except NonFiniteError as error:
                if not self.config.stop_on_nan:
                    raise
                raise NonFiniteError(f"{error}; stop_on_nan=false trains on all the same") from error
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
        """Write `results.json` to the run's folder: the results, what was evaluated, and what the model has written, as plain data."""
        told = {
            "step": self.trainer.state.timestamp.batch,
            "is_trial": self.is_trial,
            "unit": self.results_are_in,
            "results": self.results,
            "evaluated": self.evaluated,
            "samples": [sample.strip("\n") for sample in self.written()],
        }
        if self.ranks.rank == 0:
            replace_file(self.folder / RESULTS, json_text(told, indent=2).encode())

    def evaluate(self) -> dict[str, dict[str, float]]:
        """The losses and metrics of every validation dataset, and of the test data, by the dataset's name."""
        trainer = self.trainer
        if trainer.state.evaluators:  # a run that was complete has not evaluated; what was opened is evaluated anew
            self.evaluated = dict((not self._is_opened and trainer.eval_results) or trainer.evaluate())
        if (test := self.test_data()) is not None:
            self.evaluated["test"] = trainer.test(test)
        return self.evaluated

    def export(self, path: str | Path) -> None:
        """Write the weights, with tokenizer or processor, as a Hugging Face folder; where the model is none, as a safetensors file."""
        self.trainer.export(path, processor=self.processor())

    def found(self) -> str:
        """What was there, and what will be done about it, in a sentence or two."""
        trainer, again = self.trainer, "--resume new sets it aside and starts anew"
        size = sum(parameter.numel() for parameter in trainer.model.parameters())
        trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
        some = f", of which {_millions(trained)} are trained," if trained < size else ""
        ranks = f" of {self.ranks.world_size} ranks" if self.ranks.world_size > 1 else ""
        lines = ["; ".join(filter(None, [f"{_millions(size)} parameters{some} on {trainer.device}{ranks}", self.about_data()]))]
        step, elapsed = trainer.state.timestamp.batch, trainer.state.elapsed or 0.0
        if self._aside is not None:
            had = "" if self.config.resume == NEW else ", which had no checkpoint,"
            lines.append(f"The run that was there{had} is now {self._aside}; starting anew.")
        elif step and trainer.state.is_complete:
            longer = trainer.state.max_duration * 2 if trainer.state.max_duration is not None else ""
            lines.append(
                f"Found the run {trainer.run.name!r}, complete at step {step}; --max_duration {longer} goes on, {again}."
            )
        elif trainer.earlier_stop is not None:  # `fit` says who stopped it, and how to train on
            lines.append(f"Found the run {trainer.run.name!r}, complete at step {step} ({again}).")
        elif step:
            lines.append(
                f"Found the run {trainer.run.name!r} at step {step}, {elapsed:.0%} of {trainer.state.max_duration}; going on with it ({again})."
            )
        else:
            lines.append(f"Starting the run {trainer.run.name!r}, for {trainer.state.max_duration}.")
        if self.is_trial:
            lines.append(
                f"This is a trial: evaluations take at most {TRIAL_BATCHES} batches, and samples have at most {TRIAL_TOKENS} tokens."
            )
        return "\n".join(lines)

    def report(self) -> str:
        """What came of it: the results beside their baselines, what the model writes, and where everything lies."""
        folder = self.folder
        lines = list(self.written())
        if self.results:
            width = max(map(len, self.results))
            lines.append(f"{self.results_are_in}:")
            lines += [f"  {name:<{width}}  {value:6.3f}" for name, value in self.results.items()]
        lines.append(f"\nThe run ({self.trainer.run.outcome}, {self.trainer.state.timestamp.batch} steps) lies in {folder}: ")
        if folder.exists():
            lines[-1] += ", ".join(sorted(entry.name for entry in folder.iterdir()))
        if (checkpoints := folder / "checkpoints").exists():
            lines.append(f"Its checkpoints: {', '.join(sorted(entry.name for entry in checkpoints.iterdir() if entry.is_dir()))}")
        return "\n".join(lines)

    # --- for the files of recipes ---

    def loader(self, dataset: Any, *, collate: Any = None, train: bool) -> DataLoader[Any]:
        """Batches of a dataset: in random order and all of one size to train on, in its own order to evaluate on."""
        config = self.config
        if not train and self.is_trial and not self._is_opened:
            dataset = _first(dataset, TRIAL_BATCHES * (config.eval_batch_size or config.batch_size))
        return DataLoader(
            dataset,
            batch_size=config.batch_size if train else config.eval_batch_size or config.batch_size,
            shuffle=train and not isinstance(dataset, IterableDataset),
            drop_last=train,
            collate_fn=collate,
            num_workers=config.workers,
            persistent_workers=config.workers > 0,
        )

    def _prepared(self) -> nn.Module:
        resolved_device(self.config.device, self.ranks)  # to be refused before data is read
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        with self._working("reading the data"):
            self.read_data()
        seed_all(self.config.seed)
        with self._working("making the model"):
            return self.make_model()

    def _working(self, what: str) -> AbstractContextManager[None]:
        """Show on rank 0 that this is being done."""
        return working(f"{self.config.run_name}: {what}", is_shown=self.ranks.rank == 0)

    def _trainer(self, model: nn.Module, resume: str | None) -> Trainer:
        config, task = self.config, self.make_task()
        with self._working("setting up the trainer"):
            return self._made_trainer(model, task, config, resume)

    def _made_trainer(self, model: nn.Module, task: Task | None, config: AnyConfig, resume: str | None) -> Trainer:
        return Trainer(
            model,
            task,
            train_dataloader=None if self._is_opened else self.train_data,  # the place in it binds to the ranks that there were
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


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} million"


def _first(dataset: Any, most: int) -> Any:
    """Return the first `most` samples of a dataset, or the dataset where its size is not known."""
    if isinstance(dataset, IterableDataset) or len(dataset) <= most:
        return dataset
    return Subset(dataset, range(most))
