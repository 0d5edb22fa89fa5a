"""A result of the MLPerf Training benchmarks: its file, what is to stand in it, and what the installed rules say of it."""

from __future__ import annotations

import itertools
import json
import logging
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from callsheet.callback import one_of
from callsheet.context import Context
from callsheet.errors import ConfigError
from callsheet.extras import load
from callsheet.time import TimeUnit

_OWN = re.compile(
    r"submission_(benchmark|org|division|status|platform)|cache_clear|eval_accuracy|(init|run|block|epoch|eval)_(start|stop)"
)
_PARALLELISM = ("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism")


class ResultFile:
    """A file of `:::MLLOG` lines, the first free `result_<number>.txt` of a folder, or the one of a given number.

    Raises:
        ConfigError: there is one of this number.
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
        raise ConfigError(f"index={index}: there is a {self.path} already; give another, or None for the first that is free")

    def write(self, key: str, value: Any = None, *, time_ms: int | None = None, **metadata: Any) -> None:
        """Append a line, at once; `time_ms` since 1970 is now where it is None."""
        self._file.write(_line(key, value, time_ms or now_ms(), metadata))
        self._file.flush()

    def complaints(self, rest: Iterable[tuple[str, Any]], ruleset: str, **metadata: Any) -> list[str]:
        """What the compliance checker would have to say if these lines came next and last; nothing if it accepts them."""
        text = self.path.read_text(encoding="utf-8") + "".join(_line(key, value, now_ms(), metadata) for key, value in rest)
        rules = _rules()
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / self.path.name
            copy.write_text(text, encoding="utf-8")
            lines, _ = rules.mlp_parser.parse_file(str(copy), ruleset=ruleset)
        checker = rules.make_checker("training", ruleset, quiet=True, werror=False)
        rules.enqueued_configs.clear()  # left over where an earlier check failed
        guard = logging.NullHandler()  # it calls `logging.info`, which gives a bare root logger a handler that stays
        logging.getLogger().addHandler(guard)
        try:
            checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
        except Exception as error:  # a rule that reads what an earlier one should have found: as it would come out in the end
            checker.put_message(f"the checker itself failed: {error!r}")
        finally:
            logging.getLogger().removeHandler(guard)
        said = (*checker.overwritable.values(), *checker.not_overwritable)
        return [message.partition("\ncurrent context")[0] for message in said]

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


def found(ctx: Context, sizes: Sequence[Sequence[int]], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a run tells of itself after its first step, by the rules' names, which want the batch size first.

    Args:
        ctx: the run's.
        sizes: of each rank the samples in each of the step's microbatches, 0 where it is not known; empty where none was told.
        given: what is known already.
    """
    told: dict[str, Any] = {}
    parallelism = {name: given.get(name, 1) for name in _PARALLELISM}
    if all(rank and all(rank) for rank in sizes):
        if set(parallelism.values()) == {1}:  # else several ranks have the same samples
            told["global_batch_size"] = sum(sum(rank) for rank in sizes)
        told["micro_batch_size"] = max(max(rank) for rank in sizes)
    if sizes[0]:
        told["gradient_accumulation_steps"] = len(sizes[0])
    told |= {**parallelism, "seed": torch.initial_seed(), "config_filename": Path(sys.argv[0]).name or "python"}
    longest = ctx.state.max_duration
    if longest is not None and longest.unit is TimeUnit.BATCH:
        told["max_steps"] = longest.value
    return told | (_of_optimizer(ctx.optimizer) if ctx.has("optimizer") else {})


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    name, groups = type(optimizer).__name__.lower(), optimizer.param_groups
    kind, first = "opt_adamw" if name == "adamw" else "opt_adam", groups[0]
    told = {"opt_name": name, "opt_base_learning_rate": float(first.get("initial_lr", first["lr"]))}
    if name.startswith("adam") and "betas" in first:
        told |= {f"{kind}_beta_1": first["betas"][0], f"{kind}_beta_2": first["betas"][1], f"{kind}_epsilon": first["eps"]}
    if "weight_decay" in first:  # biases are often left out of it, in a group of their own
        told["opt_adamw_weight_decay" if name == "adamw" else "opt_weight_decay"] = max(group["weight_decay"] for group in groups)
    return told


def samples(batch: Any) -> int:
    """How many it holds, by the first dimension of its first tensor; 0 where it has none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next(filter(None, map(samples, parts)), 0)


def device_name(device: str) -> str:
    """The maker's name of the GPU, or the processor's kind."""
    return str(torch.cuda.get_device_name(device)) if device.startswith("cuda") else platform.machine() or device


def accuracy_keys(benchmark: str) -> tuple[str, ...]:
    """The names under which the rules of this benchmark want the metric."""
    return ("eval_accuracy", "averaged_validation_loss") if benchmark == "flux1" else ("eval_accuracy",)


def checked_hyperparameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, as it can be written; ConfigError for what is no plain data, and for names that are written in any case."""
    for name in given:
        if _OWN.fullmatch(name):
            raise ConfigError(f"hyperparameters: {name!r} is written in any case; leave it out")
    try:
        json.dumps(dict(given))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"hyperparameters={given!r}: give plain data ({error})") from None
    return dict(given)


def checked_ruleset(ruleset: str, benchmark: str) -> str:
    """The rules to go by: the newest where `ruleset` is empty.

    Raises:
        MissingPackage: `mlperf-logging` is not installed.
        ConfigError: it does not have these rules, or they do not have this benchmark.
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
    place = {"file": "callsheet/callbacks/mlperf.py", "lineno": sys._getframe(2).f_lineno}  # what checks seeds reads it
    told = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value}
    return f":::MLLOG {json.dumps({**told, 'metadata': {**place, **metadata}})}\n"
