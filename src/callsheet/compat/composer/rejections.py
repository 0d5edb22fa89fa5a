"""Raises errors for arguments of Composer that callsheet does not support; each error names its argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.errors import NotSupported


def reject(who: str, given: Mapping[str, tuple[Any, Any, str]]) -> None:
    """Raise NotSupported for the first argument whose value differs from Composer's default.

    For each name, `given` has the value, the default, and what to do instead.

    Raises:
        NotSupported: the message names the argument, and has a hint.
    """
    for name, (value, default, hint) in given.items():
        if value is not default and value != default:
            raise NotSupported(f"{who}({name}={value!r}) is not supported, unlike in Composer: {hint}")


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

_NAMES_HINT = "a checkpoint is a folder in save_folder that callsheet names; give the folder to load_path, or use autoresume=True"
_EXPORT_HINT = (
    "a checkpoint holds all that a resume needs; save the weights at the end with safetensors or torch.save(model.state_dict())"
)
_HINTS = {
    "save_filename": _NAMES_HINT,
    "save_latest_filename": _NAMES_HINT,
    "save_overwrite": "nothing is overwritten; give another run_name, or autoresume=True to continue the run",
    "save_weights_only": _EXPORT_HINT,
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


def reject_others(others: Mapping[str, Any]) -> None:
    """Raise an error for an unknown argument, and for an unsupported argument whose value is not Composer's default.

    Raises:
        NotSupported: callsheet does not support the value of an argument of Composer's Trainer.
        TypeError: Composer's Trainer has no such argument.
    """
    for name in others:
        if name not in _DEFAULTS:
            raise TypeError(f"Composer's Trainer has no argument {name!r}")
    if others.get("algorithms"):
        raise NotSupported("Trainer(algorithms=...) is not supported, unlike in Composer: apply them to model and data yourself")
    reject(
        "Trainer",
        {
            name: (value, _DEFAULTS[name], _HINTS.get(name, "leave it out"))
            for name, value in others.items()
            if name != "algorithms"
        },
    )


def reject_all(method: str, others: Mapping[str, Any]) -> None:
    """Raise NotSupported if a method of the Trainer was called with arguments that callsheet does not support."""
    if others:
        raise NotSupported(
            f"Trainer.{method}({next(iter(others))}=...) is not supported, unlike in Composer: give it to the Trainer"
        )
