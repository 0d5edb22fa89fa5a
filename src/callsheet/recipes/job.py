"""The configuration that all recipes share, such as the run's name, its duration and its intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from callsheet.core.callback import one_of
from callsheet.core.time import Interval
from callsheet.errors import ConfigError
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, TIMEOUT_SECONDS
from callsheet.run.run_guard import check_lock_timeout
from callsheet.trainer.arguments import duration, log_boundary, positive
from callsheet.trainer.parallel import KINDS, ParallelKind
from callsheet.trainer.precision import PRECISIONS, PrecisionName

MakesOptimizer = Callable[[Iterable[Any]], Optimizer]
MakesScheduler = Callable[[Optimizer], LRScheduler]


@dataclass(kw_only=True)
class JobConfig:
    """The configuration that all recipes share.

    Args:
        run_name: the name of the run, and of its folder in `runs_folder`.
        runs_folder: the folder that contains the runs' folders.
        resume: `auto` resumes the run with the name `run_name` if it exists. `new` renames the folder of this earlier run and
            starts a new run. The path of a checkpoint resumes from this checkpoint.
        seed: the seed for the weights, for the order of the data, and for generated text.
        max_duration: how long to train, such as `75s`, `1000ba` or `2ep`. It needs a unit.
        eval_interval: how often to evaluate, such as `200ba` or `1ep`; there is always an evaluation at the end. None: only at the
            end.
        log_interval: how often to make a metrics record. A number without a unit means batches, here and in every interval.
        batch_size: the number of samples in a batch on one rank.
        eval_batch_size: the number of samples in a batch on one rank in evaluation; None is `batch_size`.
        microbatch_size: the number of samples in one forward and backward pass; None is the whole batch.
        gradient_accumulation_steps: the number of batches from which the gradients of one optimizer step are computed.
        clip_grad_norm: the gradient norm above which gradients are scaled down. With None, gradients are not scaled, and their
            norm is not measured.
        optimizer: an optimizer class by `class_path`, with its `init_args`; None is torch's AdamW with its defaults.
        scheduler: a learning-rate scheduler class by `class_path`, with its `init_args`, stepped after every optimizer step; None
            keeps the rate constant.
        precision: `bf16` and `fp16` run the model under torch's autocast; `fp32` runs the model without autocast.
        parallel: how several ranks share the work. `ddp` keeps the whole model on every rank, `fsdp` shards the model, `single`
            is for one process. `auto` is `ddp` if the model fits on a device, otherwise `fsdp`.
        compile: whether the model's forward pass is compiled.
        gradient_checkpointing: whether activations are recomputed in the backward pass, if the model supports it.
        save_in_background: whether checkpoints are written while training continues.
        device: the device to train on, such as `cpu` or `cuda`; `auto` is CUDA if available, else the CPU.
        workers: the number of processes that load data, on each rank.
        threads: the number of torch's threads on the CPU; None leaves the choice to torch.
        timeout_seconds: how many seconds a rank waits for an answer of the other ranks before the run fails.
        lock_timeout_seconds: how many seconds to wait if another process trains in the run's folder.
        stop_on_nan: whether the run ends with an error if a loss is NaN or infinite; otherwise, training continues.
        export: whether the trained model is written to the folder `export` of the run, so that `from_pretrained` can load it.

    Raises:
        ConfigError: an argument is invalid.
    """

    run_name: str = "run"
    runs_folder: str = "runs"
    resume: str = "auto"
    seed: int = 17
    max_duration: str | int = "1ep"
    eval_interval: str | int | None = "1ep"
    log_interval: str | int = 10
    batch_size: int = 16
    eval_batch_size: int | None = None
    microbatch_size: int | None = None
    gradient_accumulation_steps: int = 1
    clip_grad_norm: float | None = 1.0
    optimizer: MakesOptimizer | None = None
    scheduler: MakesScheduler | None = None
    precision: PrecisionName = "fp32"
    parallel: ParallelKind = "auto"
    compile: bool = False
    gradient_checkpointing: bool = False
    save_in_background: bool = False
    device: str = "auto"
    workers: int = 0
    threads: int | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS
    stop_on_nan: bool = True
    export: bool = False

    may_change: ClassVar[frozenset[str]] = frozenset(
        {
            "resume",
            "runs_folder",
            "max_duration",
            "eval_interval",
            "log_interval",
            "eval_batch_size",
            "workers",
            "threads",
            "device",
        }
        | {
            "parallel",
            "compile",
            "gradient_checkpointing",
            "save_in_background",
            "timeout_seconds",
            "lock_timeout_seconds",
            "stop_on_nan",
            "export",
        }
        | {"recipe", "config", "callbacks", "loggers"}
    )
    """Keys that may change when a run is resumed: they affect neither the model, nor the data, nor the optimization."""

    def __post_init__(self) -> None:
        duration(self.max_duration, None)
        one_of("precision", self.precision, PRECISIONS)
        one_of("parallel", self.parallel, KINDS)
        if self.eval_interval is not None:
            Interval.of("eval_interval", self.eval_interval)
        log_boundary(self.log_interval)
        for name in ("batch_size", "eval_batch_size", "microbatch_size", "gradient_accumulation_steps", "threads"):
            positive(name, getattr(self, name), int)
        positive("clip_grad_norm", self.clip_grad_norm, float, may_be_infinite=True)
        positive("timeout_seconds", self.timeout_seconds, float)
        if self.workers < 0:
            raise ConfigError(f"workers={self.workers}: give 0 or more processes")
        check_lock_timeout(self.lock_timeout_seconds)

    def make_optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Return the configured optimizer.

        Args:
            parameters: the parameters to train, or groups of parameters as in torch.optim.
        """
        return self.optimizer(parameters) if self.optimizer is not None else torch.optim.AdamW(parameters)
