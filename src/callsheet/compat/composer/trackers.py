"""Composer's loggers for experiment trackers. Importing this module requires the trackers' packages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from callsheet.compat.composer.rejections import reject
from callsheet.errors import ConfigError
from callsheet.loggers.mlflow_logger import MLflowLogger
from callsheet.loggers.tensorboard_logger import TensorboardLogger as OurTensorboardLogger
from callsheet.loggers.wandb_logger import WandBLogger as OurWandBLogger


class WandBLogger(OurWandBLogger):
    """Logs to Weights & Biases, with Composer's options."""

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        tags: list[str] | None = None,
        log_artifacts: bool = False,
        rank_zero_only: bool = True,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        reject(
            "WandBLogger",
            {
                "log_artifacts": (log_artifacts, False, "checkpoints stay where they are"),
                "rank_zero_only": (rank_zero_only, True, "records are the same on all ranks"),
            },
        )
        given = dict(init_kwargs or {})
        known = {
            "mode": given.pop("mode", None),
            "job_type": given.pop("job_type", None),
            "folder": given.pop("dir", None),
            "settings": given.pop("settings", None),
        }
        if given:
            raise ConfigError(f"WandBLogger(init_kwargs=...) takes mode, job_type, dir and settings here, not {', '.join(given)}")
        super().__init__(project=project, group=group, run_name=name, entity=entity, tags=tags or (), **known)


class MLFlowLogger(MLflowLogger):
    """Logs to MLflow, with Composer's options."""

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        tracking_uri: str | os.PathLike[str] | None = None,
        rank_zero_only: bool = True,
        flush_interval: int = 10,
        **others: Any,
    ) -> None:
        reject("MLFlowLogger", {name: (value, None, "leave it out") for name, value in others.items()})
        reject("MLFlowLogger", {"rank_zero_only": (rank_zero_only, True, "records are the same on all ranks")})
        super().__init__(
            experiment=experiment_name,
            run_name=run_name,
            tags={name: str(value) for name, value in (tags or {}).items()},
            tracking_uri=os.fspath(tracking_uri) if tracking_uri is not None else None,
        )


class TensorboardLogger(OurTensorboardLogger):
    """Logs to TensorBoard, with Composer's options."""

    def __init__(self, log_dir: str | None = None, flush_interval: int = 100, rank_zero_only: bool = True) -> None:
        reject("TensorboardLogger", {"rank_zero_only": (rank_zero_only, True, "records are the same on all ranks")})
        super().__init__(folder=log_dir)
