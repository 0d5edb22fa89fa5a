"""Composer's Trainer, implemented by callsheet's."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from callsheet import trainer as callsheet_trainer
from callsheet.bridges.composer.guests import ComposerGuest, guest
from callsheet.bridges.composer.names import Callback as ComposerCallback
from callsheet.bridges.composer.run import ComposerRun, Kinds
from callsheet.bridges.composer.state import Logger, State
from callsheet.bridges.composer.time import Time
from callsheet.callbacks import CheckpointSaver, LoadCheckpoint
from callsheet.compat.composer.data import is_loader, loader_of
from callsheet.compat.composer.models import EpochScheduler, ModelTask, StepsSchedulers, TrainMetrics
from callsheet.compat.composer.rejections import reject
from callsheet.compat.composer.submodules import offer
from callsheet.core.callback import Callback
from callsheet.errors import ConfigError, NotSupported
from callsheet.loggers import ConsoleLogger, ProgressBarLogger
from callsheet.trainer.precision import PrecisionName

logger = logging.getLogger("callsheet")

_PRECISIONS: dict[Any, PrecisionName] = {"fp32": "fp32", "amp_bf16": "bf16", "amp_fp16": "fp16"}

_DEFAULTS: Mapping[str, Any] = {
    "train_dataloader_label": "train",
    "spin_dataloaders": True,
    "algorithms": None,
    "algorithm_passes": None,
    "scale_schedule_ratio": 1.0,
    "log_traces": False,
    "auto_log_hparams": False,
    "load_object_store": None,
    "load_ignore_keys": None,
    "load_exclude_algorithms": None,
    "load_progress_bar": True,
    "save_filename": "ep{epoch}-ba{batch}-rank{rank}.pt",
    "save_latest_filename": "latest-rank{rank}.pt",
    "save_overwrite": False,
    "save_weights_only": False,
    "save_ignore_keys": None,
    "save_metrics": False,
    "parallelism_config": None,
    "precision_config": None,
    "accumulate_train_batch_on_tokens": False,
    "deterministic_mode": False,
    "ddp_sync_strategy": None,
    "profiler": None,
    "python_log_level": None,
    "console_stream": "stderr",
}
"""Arguments of Composer's Trainer that are not supported, with their defaults. Any other value is rejected."""

_NAMES = "a checkpoint is a folder in save_folder that callsheet names; give the folder to load_path, or use autoresume=True"
_EXPORT = (
    "a checkpoint holds all that a resume needs; save the weights at the end with safetensors or torch.save(model.state_dict())"
)
_INSTEAD = {
    "save_filename": _NAMES,
    "save_latest_filename": _NAMES,
    "save_overwrite": "nothing is overwritten; give another run_name, or autoresume=True to continue the run",
    "save_weights_only": _EXPORT,
    "save_ignore_keys": "leave keys out when loading, with the callback LoadCheckpoint(ignore_keys=...)",
    "load_ignore_keys": "use the callback LoadCheckpoint(load_path, ignore_keys=...)",
    "load_object_store": "give load_path as a path or a URL such as 's3://...'",
    "parallelism_config": "use callsheet.Trainer(parallel=...)",
    "precision_config": "give precision='amp_bf16' or 'amp_fp16'",
    "profiler": "use callsheet.callbacks.TorchProfiler",
    "deterministic_mode": "call torch.use_deterministic_algorithms(True)",
    "python_log_level": "call logging.getLogger('callsheet').setLevel(...)",
    "console_stream": "give ConsoleLogger(stream=...) among the loggers",
}


class Evaluator:
    """One dataset for evaluation, with its own label and interval.

    Args:
        label: the name of the dataset, which its metrics have too.
        dataloader: an iterable of batches, or a `DataSpec`.
        metric_names: must be None: all of the model's metrics are computed.
        subset_num_batches: how many batches are used; None: the Trainer's `eval_subset_num_batches`.
        eval_interval: how often to evaluate; None: the Trainer's `eval_interval`.
        device_eval_microbatch_size: must be None.

    Raises:
        NotSupported: an argument is given that must be None.
    """

    def __init__(
        self,
        *,
        label: str,
        dataloader: Any,
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: Any = None,
        device_eval_microbatch_size: int | None = None,
    ) -> None:
        reject(
            f"Evaluator {label!r}: Evaluator",
            {
                "metric_names": (metric_names, None, "all of the model's metrics are computed; leave it out"),
                "device_eval_microbatch_size": (device_eval_microbatch_size, None, "give the dataloader smaller batches"),
            },
        )
        self.label, self.dataloader = label, dataloader
        self.subset_num_batches, self.eval_interval = subset_num_batches, eval_interval


class Trainer:
    """Composer's Trainer, with those of its arguments that callsheet's Trainer supports.

    The model gets whole batches in `model(batch)` and `model.loss(outputs, batch)`, and also in `eval_forward`, `get_metrics` and
    `update_metric` if it has them. Callbacks and loggers may be those of Composer, of `callsheet.compat.composer`, or of
    callsheet. Composer's events are fired in its order. `state` and `logger` are the objects that callbacks receive.

    Algorithms, and everything else that callsheet does not have, are rejected; see the page "Composer".

    Args:
        model: the model to train, such as a `ComposerModel`.
        train_dataloader: an iterable of batches, or a `DataSpec`; None: the Trainer only evaluates or predicts.
        train_subset_num_batches: how many batches of an epoch are used; -1: all.
        max_duration: how long to train, such as `"2ep"`; a number means epochs. None: one epoch.
        optimizers: an optimizer, alone or in a list; None: SGD with a learning rate of 0.1, as in Composer, with a warning.
        schedulers: schedulers of torch, or functions of the state that return a factor for the learning rate; one or several.
        step_schedulers_every_batch: whether they are stepped after every batch, or after every epoch. None: torch's after every
            epoch, Composer's after every batch.
        eval_dataloader: a dataloader, a `DataSpec`, an `Evaluator`, or a list of these; None: no evaluation.
        eval_interval: how often to evaluate; a number means epochs, and 0 means never during training.
        eval_subset_num_batches: how many batches of an evaluation are used; -1: all.
        callbacks, loggers: one or several.
        run_name: the name of the run; None: a name is generated.
        progress_bar: whether to show a progress bar, unless `log_to_console` is set.
        log_to_console: whether to print metrics as lines to the standard error output.
        console_log_interval: how often these lines are printed.
        load_path: the folder of a checkpoint of callsheet to resume from; None: none.
        load_weights_only: whether only the model's weights are loaded from `load_path`, into a new run.
        load_strict_model_weights: with `load_weights_only`, whether the names of all weights must match.
        save_folder: the folder for checkpoints; None: none are saved at an interval.
        save_interval: how often to save.
        save_num_checkpoints_to_keep: how many checkpoints to keep; -1: all.
        autoresume: whether to resume from the newest valid checkpoint of this run, if there is one.
        device: `cpu` or `gpu`; None: a GPU if there is one.
        precision: `fp32`, `amp_bf16` or `amp_fp16`; None: `fp32`.
        device_train_microbatch_size: the number of samples in one forward and backward pass; None: the whole batch.
        seed: the seed of the random numbers; None: no seed is set.
        dist_timeout: how many seconds a rank waits for an answer of the other ranks before the run fails.
        compile_config: arguments of `torch.compile`; None: the model is not compiled.
        others: other arguments of Composer's Trainer, which must have Composer's defaults.

    Raises:
        NotSupported: an argument is not supported; the message names it, and has a hint.
        ConfigError: an argument cannot work.
        TypeError: Composer's Trainer has no such argument.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        train_dataloader: Any = None,
        train_subset_num_batches: int = -1,
        max_duration: Any = None,
        optimizers: Any = None,
        schedulers: Any = None,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_interval: Any = 1,
        eval_subset_num_batches: int = -1,
        callbacks: Any = None,
        loggers: Any = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        log_to_console: bool = False,
        console_log_interval: Any = "1ba",
        load_path: str | None = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        save_folder: str | os.PathLike[str] | None = None,
        save_interval: Any = "1ep",
        save_num_checkpoints_to_keep: int = -1,
        autoresume: bool = False,
        device: Any = None,
        precision: Any = None,
        device_train_microbatch_size: Any = None,
        seed: int | None = None,
        dist_timeout: float = 300.0,
        compile_config: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        _reject_others(others)
        self._of_kind: dict[str, int] = {}
        self._shared = run = ComposerRun(Kinds.of(ComposerCallback()))
        self.state: State = run.state
        self.logger: Logger = run.logger
        # Keep Composer's counts of samples and tokens up to date, even if the user gives no Composer callback.
        keeper = ComposerGuest(ComposerCallback(), name="composer", phase="change", run=run)
        own: list[Callback] = [keeper]
        if train_dataloader is not None and optimizers is None:
            logger.warning("no optimizers were given: SGD with a learning rate of 0.1, as Composer's default")
        optimizer = _one("optimizers", optimizers) or torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = self._scheduler(schedulers, optimizer, step_schedulers_every_batch)
        if scheduler is not None and not scheduler.every_batch:
            own.append(StepsSchedulers(scheduler))
        whole: Any = model  # annotated as Any, because a ComposerModel has more methods than a Module
        train_metrics = whole.get_metrics(is_train=True) if hasattr(model, "get_metrics") else {}
        if train_metrics:
            own.append(measuring := TrainMetrics(model, train_metrics))
            run.train_metrics = measuring.metrics
        own += [self._ours(each) for each in _several(callbacks)]
        if save_folder is not None:
            keep = None if save_num_checkpoints_to_keep < 0 else save_num_checkpoints_to_keep
            own.append(CheckpointSaver(save_interval=_interval("save_interval", save_interval), keep=keep))
        if load_path is not None and load_weights_only:
            own.append(LoadCheckpoint(path=load_path, strict=load_strict_model_weights))
        all_loggers = [self._ours(each) for each in _several(loggers)]
        if log_to_console:
            all_loggers.append(ConsoleLogger(stream="stderr", interval=_interval("console_log_interval", console_log_interval)))
        elif progress_bar:
            all_loggers.append(ProgressBarLogger())
        self._evaluators = self._named(eval_dataloader, eval_subset_num_batches)
        self._trainer = callsheet_trainer.Trainer(
            model,
            ModelTask(model),
            loader_of(train_dataloader, train_subset_num_batches),
            self._evaluators or None,
            optimizer=optimizer,
            scheduler=scheduler,
            max_duration=_interval("max_duration", max_duration) if max_duration is not None else "1ep",
            microbatch_size=_microbatch_size(device_train_microbatch_size),
            precision=_precision(precision),
            eval_interval=None if eval_interval == 0 else _interval("eval_interval", eval_interval),
            log_interval=1,  # Composer's loggers receive a record of every batch
            compile=dict(compile_config) if compile_config is not None else False,
            callbacks=own,
            loggers=all_loggers,
            progress=False,
            run_name=run_name,
            checkpoints_folder=save_folder,
            resume="auto" if autoresume else load_path if not load_weights_only else None,
            seed=seed,
            device={"gpu": "cuda", None: "auto"}.get(device, device),
            timeout_seconds=dist_timeout,
        )
        run.ctx = self._trainer.ctx

    def fit(self, *, duration: Any = None, **others: Any) -> None:
        """Train until `max_duration`, or for a given duration from the current point.

        Args:
            duration: how long to train from the current point, such as `"100ba"`; a number means epochs. None: until
                `max_duration`.
            others: must be empty.

        Raises:
            NotSupported: any other argument is given; pass it to the Trainer instead.
        """
        _reject_all("fit", others)
        longest = None
        if duration is not None:
            time = Time.from_input(duration, "ep")
            longest = str(self.state.timestamp.get(time.unit) + time)
        self._trainer.fit(longest)

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate the model, and set `state.eval_metrics` to the results.

        Args:
            eval_dataloader: what to evaluate; see the constructor. None: the data of the constructor.
            subset_num_batches: how many batches are used; -1: all.
        """
        given = self._named(eval_dataloader, subset_num_batches) if eval_dataloader is not None else None
        self._trainer.evaluate({name: evaluator.dataloader for name, evaluator in given.items()} if given else None)

    def predict(self, dataloader: Any, subset_num_batches: int = -1, *, return_outputs: bool = True) -> list[Any]:
        """Return the model's outputs on the CPU, one item per batch.

        Args:
            dataloader: an iterable of batches, or a `DataSpec`.
            subset_num_batches: how many batches are used; -1: all.
            return_outputs: whether to return the outputs. If not, the list is empty: callbacks receive the outputs.
        """
        outputs = self._trainer.predict(loader_of(dataloader, subset_num_batches))
        return [_to_cpu(each) for each in outputs] if return_outputs else []

    def save_checkpoint(self, name: str | None = None) -> str:
        """Write a checkpoint folder, and wait until it is durable.

        Args:
            name: the path of the folder; None: a folder among the run's checkpoints.

        Returns:
            The path of the folder.
        """
        return self._trainer.save_checkpoint(name).path

    def close(self) -> None:
        """End the run and close all callbacks."""
        self._trainer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        self._trainer.__exit__(kind, error, frames)

    def _ours(self, given: Any) -> Callback:
        """Return a callback of callsheet unchanged, and one of Composer in a guest adapter, through which callsheet can call it."""
        if isinstance(given, Callback):
            return given
        kind = type(given).__name__
        # Number the names, so that several callbacks of one class each keep their own state.
        self._of_kind[kind] = self._of_kind.get(kind, 0) + 1
        name = kind if self._of_kind[kind] == 1 else f"{kind}-{self._of_kind[kind]}"
        return guest(given, name=name, run=None if Kinds.of(given).is_theirs else self._shared)

    def _scheduler(self, schedulers: Any, optimizer: Any, every_batch: bool | None) -> EpochScheduler | None:
        several = _several(schedulers)
        if not several:
            return None
        if every_batch is None:  # by default, step torch's schedulers every epoch and Composer's every batch
            every_batch = not any(isinstance(each, LRScheduler) for each in several)
        return EpochScheduler(
            optimizer,
            [each if isinstance(each, LRScheduler) else self._compiled(each, optimizer) for each in several],
            every_batch=every_batch,
        )

    def _compiled(self, scheduler: Callable[..., float], optimizer: Any) -> LRScheduler:
        """Make a torch scheduler from a Composer scheduler, a function that returns a factor for the learning rates.

        If the function takes a second argument, Composer's scale ratio, it gets 1.0.
        """
        takes_ratio = getattr(getattr(scheduler, "__code__", None), "co_argcount", 2) > 1

        def factor(_: int) -> float:
            if self._shared.ctx is None:
                return 1.0  # the Trainer is still being constructed, and it computes the real factor when training begins
            return scheduler(self.state, 1.0) if takes_ratio else scheduler(self.state)

        return LambdaLR(optimizer, factor)

    def _named(self, given: Any, batches: int) -> dict[str, callsheet_trainer.Evaluator]:
        found: dict[str, callsheet_trainer.Evaluator] = {}
        for number, each in enumerate(_evaluators(given), 1):
            # Number the labels, to keep every evaluator. Composer itself keeps only the last of several evaluators without a
            # label.
            label = "eval" if number == 1 else f"eval-{number}"
            evaluator = each if isinstance(each, Evaluator) else Evaluator(label=label, dataloader=each)
            if evaluator.label in found:
                raise ConfigError(f"two evaluators are called {evaluator.label!r}; give each an Evaluator(label=...) of its own")
            cut = evaluator.subset_num_batches if evaluator.subset_num_batches is not None else batches
            every = evaluator.eval_interval
            found[evaluator.label] = callsheet_trainer.Evaluator(
                loader_of(evaluator.dataloader, cut), _interval("eval_interval", every) if every is not None else None
            )
        return found


def _several(given: Any) -> list[Any]:
    """Return the argument, which is None, one object or several, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _evaluators(given: Any) -> list[Any]:
    """Return the argument for evaluation data as a list. It is None, a dataloader, an Evaluator, or a list of these.

    A list of batches is one dataloader.
    """
    is_list = isinstance(given, (list, tuple)) and len(given) > 0
    are_evaluators = [isinstance(each, Evaluator) for each in given] if is_list else []
    if any(are_evaluators) and not all(are_evaluators):
        kinds = ", ".join(type(each).__name__ for each in given)
        raise ConfigError(
            "Mixing Evaluator with other classes is not allowed, please wrap all other classes with the Evaluator class: "
            f"Evaluator(label=..., dataloader=...). Given: {kinds}"
        )
    return _several(given) if is_list and all(map(is_loader, given)) else [] if given is None else [given]


def _one(what: str, given: Any) -> Any:
    several = _several(given)
    if len(several) > 1:
        raise NotSupported(f"Trainer({what}=...) takes one here, not {len(several)}")
    return several[0] if several else None


def _interval(what: str, given: Any) -> str:
    """Convert an interval to callsheet's format. In Composer, a whole number means epochs."""
    if callable(given):
        raise NotSupported(f"Trainer({what}={given!r}) takes no function here; ask with ctx.control in a callback of callsheet's")
    return str(Time.from_input(given, "ep"))


def _precision(given: Any) -> PrecisionName:
    name = str(getattr(given, "value", given or "fp32")).lower()
    if name not in _PRECISIONS:
        raise NotSupported(
            f"Trainer(precision={name!r}) is not supported, unlike in Composer: give one of {', '.join(_PRECISIONS)}"
        )
    return _PRECISIONS[name]


def _microbatch_size(given: Any) -> int | None:
    if given is None or isinstance(given, int):
        return given
    raise NotSupported(
        f"Trainer(device_train_microbatch_size={given!r}) is not supported, unlike in Composer: give the samples of a microbatch"
    )


def _reject_others(others: Mapping[str, Any]) -> None:
    for name in others:
        if name not in _DEFAULTS:
            raise TypeError(f"Composer's Trainer has no argument {name!r}")
    if others.get("algorithms"):
        raise NotSupported("Trainer(algorithms=...) is not supported, unlike in Composer: apply them to model and data yourself")
    reject(
        "Trainer",
        {
            name: (value, _DEFAULTS[name], _INSTEAD.get(name, "leave it out"))
            for name, value in others.items()
            if name != "algorithms"
        },
    )


def _reject_all(method: str, others: Mapping[str, Any]) -> None:
    if others:
        raise NotSupported(
            f"Trainer.{method}({next(iter(others))}=...) is not supported, unlike in Composer: give it to the Trainer"
        )


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {name: _to_cpu(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_cpu, value))
    return value


offer(__name__, {"trainer": "Trainer"})
