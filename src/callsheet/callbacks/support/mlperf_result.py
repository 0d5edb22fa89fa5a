"""Writes the result file of an MLPerf Training benchmark, finds the values for it, and checks it against MLPerf's rules."""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from callsheet.core.callback import one_of
from callsheet.core.context import Context
from callsheet.core.optional import load
from callsheet.core.run_state import RunInfo
from callsheet.core.time import TimeUnit
from callsheet.errors import ConfigError

Division = Literal["open", "closed"]
Status = Literal["onprem", "cloud", "research"]

_RESERVED_NAMES_PATTERN = re.compile(
    r"submission_(benchmark|org|division|status|platform)|cache_clear|eval_accuracy|(init|run|block|epoch|eval)_(start|stop)"
)
_PARALLELISM_KEYS = ("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism")


class Target(NamedTuple):
    """The value that a metric must reach: this value or a lower one if `is_min` is True, otherwise this value or a higher one."""

    monitor: str
    value: float
    is_min: bool

    def is_reached(self, value: float) -> bool:
        """Return whether this value of the metric reaches the target."""
        return value <= self.value if self.is_min else value >= self.value


@dataclass(slots=True)
class Submission:
    """The facts about an MLPerf submission, and the place of its result file. The arguments are those of `MLPerfCallback`."""

    benchmark: str
    submitter: str
    system_name: str
    status: Status
    division: Division
    ruleset: str
    root_folder: str | os.PathLike[str] | None
    index: int | None

    def __post_init__(self) -> None:
        if self.benchmark and not self.submitter:
            raise ConfigError("submitter='': name the organization whose result this is")
        if self.index is not None and self.index < 0:
            raise ConfigError(f"index={self.index}: give 0 or more, or None")
        one_of("division", self.division, get_args(Division))
        one_of("status", self.status, get_args(Status))
        if self.benchmark:
            self.ruleset = _choose_ruleset(self.ruleset, self.benchmark)

    def platform(self, run: RunInfo) -> str:
        """Return the platform's name: `system_name` or, if it is empty, the number of ranks and the device's name."""
        return self.system_name or f"{run.world_size}x_{_device_name(run.device)}"

    def lines(self, run: RunInfo) -> dict[str, str]:
        """Return the values that describe the submission, under the names of MLPerf's rules."""
        return {
            "submission_benchmark": self.benchmark,
            "submission_org": self.submitter,
            "submission_division": self.division,
            "submission_status": self.status,
            "submission_platform": self.platform(run),
        }

    def file(self, run: RunInfo, owner: str) -> ResultFile:
        """Create the result file of a run, for the callback with the name `owner`."""
        root = run.folder / "mlperf" if self.root_folder is None and run.folder is not None else self.root_folder
        if root is None:
            raise ConfigError(f"the run has no folder for a result; give {owner} a root_folder=")
        return ResultFile(Path(root) / "results" / re.sub(r"[^\w.-]+", "_", self.platform(run)) / self.benchmark, self.index)


class ResultFile:
    """An MLPerf result file, which consists of `:::MLLOG` lines.

    The file is named `result_<number>.txt`, with the given number or the first that is free in the folder.

    Raises:
        ConfigError: a file with this number exists.
    """

    def __init__(self, folder: Path, index: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count() if index is None else (index,):
            self.path = folder / f"result_{number}.txt"
            try:
                self._file = open(self.path, "x", encoding="utf-8")  # noqa: SIM115 - closed by `close`
                return
            except FileExistsError:
                continue
        raise ConfigError(f"index={index}: {self.path} exists; give another index, or None for the first that is free")

    def write(self, key: str, value: Any = None, *, time_ms: int | None = None, **metadata: Any) -> None:
        """Write a line to the result file without buffering. `time_ms` is a Unix time in milliseconds; None means now."""
        self._file.write(_line(key, value, time_ms or now_ms(), metadata))
        self._file.flush()

    def complaints(self, rest: Iterable[tuple[str, Any]], ruleset: str, **metadata: Any) -> list[str]:
        """Append the lines `rest` to a copy of the file. Return the complaints of MLPerf's compliance checker about the copy.

        The list is empty if the checker accepts the copy.
        """
        text = self.path.read_text(encoding="utf-8") + "".join(_line(key, value, now_ms(), metadata) for key, value in rest)
        rules = _rules()
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / self.path.name
            copy.write_text(text, encoding="utf-8")
            lines, _ = rules.mlp_parser.parse_file(str(copy), ruleset=ruleset)
        checker = rules.make_checker("training", ruleset, quiet=True, werror=False)
        rules.enqueued_configs.clear()  # a check that raises an exception leaves entries in this global queue, so empty it
        guard = logging.NullHandler()  # keeps `logging.info`, which the checker calls, from adding a handler to the root logger
        logging.getLogger().addHandler(guard)
        try:
            checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
        except Exception as error:  # some rules assume that an earlier rule has found a value, and raise if it is missing
            checker.put_message(f"the checker itself failed: {error!r}")
        finally:
            logging.getLogger().removeHandler(guard)
        messages = (*checker.overwritable.values(), *checker.not_overwritable)
        return [message.partition("\ncurrent context")[0] for message in messages]

    def close(self) -> None:
        """Close the result file."""
        self._file.close()


def now_ms() -> int:
    """Return the current Unix time in whole milliseconds."""
    return int(time.time() * 1000)


def find_hyperparameters(ctx: Context, sizes: Sequence[Sequence[int]], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that are known after a run's first step, under the names that MLPerf's rules give to them.

    The batch size comes first, because the rules require this.

    Args:
        ctx: the run's context.
        sizes: for each rank the samples in each of the step's microbatches, 0 where unknown; empty if there were no microbatch events.
        given: values that are already known.
    """
    values: dict[str, Any] = {}
    parallelism = {name: given.get(name, 1) for name in _PARALLELISM_KEYS}
    if all(rank and all(rank) for rank in sizes):
        if set(parallelism.values()) == {1}:  # without model parallelism, each rank has its own samples, so add them up
            values["global_batch_size"] = sum(sum(rank) for rank in sizes)
        values["micro_batch_size"] = max(max(rank) for rank in sizes)
    if sizes[0]:
        values["gradient_accumulation_steps"] = len(sizes[0])
    values |= {**parallelism, "seed": torch.initial_seed(), "config_filename": Path(sys.argv[0]).name or "python"}
    longest = ctx.state.max_duration
    if longest is not None and longest.unit is TimeUnit.BATCH:
        values["max_steps"] = longest.value
    return values | (_of_optimizer(ctx.optimizer) if ctx.has("optimizer") else {})


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    name, groups = type(optimizer).__name__.lower(), optimizer.param_groups
    kind, first = "opt_adamw" if name == "adamw" else "opt_adam", groups[0]
    values = {"opt_name": name, "opt_base_learning_rate": float(first.get("initial_lr", first["lr"]))}
    if name.startswith("adam") and "betas" in first:
        values |= {f"{kind}_beta_1": first["betas"][0], f"{kind}_beta_2": first["betas"][1], f"{kind}_epsilon": first["eps"]}
    if "weight_decay" in first:  # take the maximum, because biases are often in a group without weight decay
        values["opt_adamw_weight_decay" if name == "adamw" else "opt_weight_decay"] = max(
            group["weight_decay"] for group in groups
        )
    return values


def samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor that is not empty, or 0 if it has no such tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next(filter(None, map(samples, parts)), 0)


def _device_name(device: str) -> str:
    """Return the GPU's name, or the processor's architecture."""
    return str(torch.cuda.get_device_name(device)) if device.startswith("cuda") else platform.machine() or device


def accuracy_keys(benchmark: str) -> tuple[str, ...]:
    """Return the names that MLPerf's rules give to this benchmark's quality metric."""
    return ("eval_accuracy", "averaged_validation_loss") if benchmark == "flux1" else ("eval_accuracy",)


def check_hyperparameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` as a dict. Raise ConfigError if a value is not plain data, or if a name is one that the callback itself writes."""
    for name in given:
        if _RESERVED_NAMES_PATTERN.fullmatch(name):
            raise ConfigError(f"hyperparameters: {name!r} is always written by the callback; leave it out")
    try:
        json.dumps(dict(given))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"hyperparameters={given!r}: give plain data ({error})") from None
    return dict(given)


def _choose_ruleset(ruleset: str, benchmark: str) -> str:
    """Return the version of MLPerf's rules to use, which is the newest if `ruleset` is empty.

    Raises:
        MissingPackage: `mlperf-logging` is not installed.
        ConfigError: the package does not have these rules, or they do not have this benchmark.
    """
    meta = load("mlperf_logging.benchmark_meta", extra="mlperf", wanted_by="MLPerfCallback")
    folders = [path.name for path in Path(_rules().__file__).parent.iterdir()]
    versions = {match[1] for name in folders if (match := re.fullmatch(r"training_(\d+\.\d+\.\d+)", name))}
    there = sorted(versions, key=lambda version: [int(number) for number in version.split(".")])
    chosen = one_of("ruleset", ruleset or there[-1], tuple(there))
    one_of(f"benchmark of the rules {chosen}", benchmark, tuple(meta.get_allowed_benchmarks("training", chosen)))
    return chosen


def _rules() -> Any:
    return load("mlperf_logging.compliance_checker.mlp_compliance", extra="mlperf", wanted_by="MLPerfCallback")


def _line(key: str, value: Any, time_ms: int, metadata: dict[str, Any]) -> str:
    kind = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(key.rpartition("_")[2], "POINT_IN_TIME")
    # MLPerf's check of seeds requires the keys `file` and `lineno`.
    place = {"file": "callsheet/callbacks/mlperf.py", "lineno": sys._getframe(2).f_lineno}
    line = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value}
    return f":::MLLOG {json.dumps({**line, 'metadata': {**place, **metadata}})}\n"
