"""Reads Hugging Face's `trainer_state.json`, which the Trainer writes to each checkpoint and at the end of training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from callsheet.report.imports.imported_run import ImportedRun, as_number
from callsheet.report.imports.source import Source

LOOKS_FOR = "trainer_state.json, also in checkpoint folders"

_STATE_FILE = "trainer_state.json"
_MAX_FILE_BYTES = 256 * 2**20
_CHECKPOINT_PATTERN = re.compile(r"checkpoint-(\d{1,15})")
_SETTING_NAMES = (
    "max_steps",
    "num_train_epochs",
    "train_batch_size",
    "num_input_tokens_seen",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "trial_params",
)
# `train_loss` is the mean loss of the whole training, logged at its end
_METRIC_NAMES = {"loss": "train/loss", "train_loss": "train/mean_loss"}
_SPLIT_OF_PREFIX = {"train_": "train/", "eval_": "validation/", "test_": "test/"}


def find(source: Source) -> list[Path]:
    """Return the Trainer's output folders below the source."""
    return list(dict.fromkeys(_output_folder(path) for path in source.files if path.name == _STATE_FILE))


def read(source: Source) -> Iterator[ImportedRun]:
    """Yield one run for each output folder of the Trainer, read from the newest `trainer_state.json` in it."""
    for folder in find(source):
        files = [path for path in source.files if path.name == _STATE_FILE and _output_folder(path) == folder]
        run = ImportedRun(folder.name, str(folder))
        state = _newest(files, run)
        if state is not None:
            _fill(run, state)
        yield run


def _fill(run: ImportedRun, state: Mapping[str, Any]) -> None:
    history = state["log_history"]
    for entry in history:
        if not isinstance(entry, dict):
            run.left_out["damaged entries"] += 1
            continue
        run.add_row({_name(name): value for name, value in entry.items() if name != "step"}, entry.get("step"))
        seconds = as_number(entry.get("train_runtime"))
        if seconds is not None:
            run.outcome, run.seconds = "finished", seconds
    total, done = state.get("max_steps"), state.get("global_step")
    if isinstance(total, int) and isinstance(done, int) and 0 < total <= done:
        run.outcome = "finished"
    if not run.outcome:
        run.reason = f"{_STATE_FILE} does not record the end of the training"
    run.hyperparameters = {name: state[name] for name in _SETTING_NAMES if state.get(name) is not None}


def _name(name: str) -> str:
    if name in _METRIC_NAMES:
        return _METRIC_NAMES[name]
    for begin, prefix in _SPLIT_OF_PREFIX.items():
        if name.startswith(begin) and name != begin:
            return prefix + name.removeprefix(begin)
    return f"train/{name}"


def _newest(files: list[Path], run: ImportedRun) -> dict[str, Any] | None:
    """Return the state of the last readable checkpoint or of the output folder itself, whichever has more steps."""
    numbered = sorted(files, key=_number, reverse=True)  # newest checkpoint first, and the file in the output folder last
    found: list[dict[str, Any]] = []
    for path in numbered:
        if found and _number(path) >= 0:
            continue
        try:
            found.append(_state(path))
        except (OSError, ValueError, RecursionError) as error:
            run.warnings.append(f"{path} cannot be read: {error}")
    return max(found, key=lambda state: (as_number(state.get("global_step")) or 0.0, len(state["log_history"])), default=None)


def _state(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {_MAX_FILE_BYTES:,} bytes")
    state = json.loads(path.read_bytes())
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise ValueError("it has no list log_history")
    return state


def _output_folder(path: Path) -> Path:
    return path.parent.parent if _number(path) >= 0 else path.parent


def _number(path: Path) -> int:
    """Return the number of the checkpoint folder that contains the file; -1 if the file is in no such folder."""
    found = _CHECKPOINT_PATTERN.fullmatch(path.parent.name)
    return int(found[1]) if found else -1
