"""Logs to TensorBoard, Weights & Biases and MLflow as Megatron Bridge does: on the last rank, with Megatron's metric names.

The trackers are available at `context.state`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from callsheet.bridges.megatron_bridge.state import GlobalState
from callsheet.compat.megatron_bridge.config import ConfigContainer
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.optional import load
from callsheet.core.ranks import read_ranks

METRIC_NAMES = {"train/learning_rate": "learning-rate", "train/grad_norm": "grad-norm"}
"""Maps callsheet's metric names to Megatron's. The names of losses are not listed here, because `_translate_name` derives them."""


class Trackers(Callback):
    """A callback that opens the configured trackers, and writes every metrics record to them until `close` is called."""

    phase = "report"
    on_error = "isolate"

    def __init__(self, config: ConfigContainer, state: GlobalState) -> None:
        self._write: list[Callable[[dict[str, float], int], Any]] = []
        self._close: list[Callable[[], Any]] = []
        ranks, logger = read_ranks(), config.logger
        if ranks.rank != ranks.world_size - 1:
            return
        try:
            if logger.tensorboard_dir is not None:
                state.tensorboard_logger = self._tensorboard(logger.tensorboard_dir)
            if logger.wandb_project is not None:
                state.wandb_logger = self._wandb(config)
            if logger.mlflow_experiment is not None:
                state.mlflow_logger = self._mlflow(config)
        except BaseException:
            self.close()
            raise

    def _tensorboard(self, folder: str) -> Any:
        writer = load("torch.utils.tensorboard", extra="tensorboard", wanted_by="logger.tensorboard_dir").SummaryWriter(
            log_dir=folder
        )

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._write.append(write)
        self._close.append(writer.close)
        return writer

    def _wandb(self, config: ConfigContainer) -> Any:
        logger = config.logger
        wandb = load("wandb", extra="wandb", wanted_by="logger.wandb_project")
        folder = Path(logger.wandb_save_dir or Path(config.checkpoint.save or ".") / "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        wandb.init(
            dir=str(folder), name=logger.wandb_exp_name, project=logger.wandb_project, entity=logger.wandb_entity, config=config.to_dict()
        )  # fmt: skip
        self._write.append(lambda values, step: wandb.log(values, step=step))
        self._close.append(wandb.finish)
        return wandb

    def _mlflow(self, config: ConfigContainer) -> Any:
        logger = config.logger
        mlflow = load("mlflow", extra="mlflow", wanted_by="logger.mlflow_experiment")
        if logger.mlflow_tracking_uri is not None:
            mlflow.set_tracking_uri(logger.mlflow_tracking_uri)
        mlflow.set_experiment(logger.mlflow_experiment)
        if mlflow.active_run() is None:
            mlflow.start_run(run_name=logger.mlflow_run_name)
            self._close.append(mlflow.end_run)
        mlflow.log_params(
            {
                f"{part}.{name}": value
                for part, some in config.to_dict().items()
                if isinstance(some, dict)
                for name, value in some.items()
            }
        )

        def write(values: dict[str, float], step: int) -> None:
            mlflow.log_metrics({name.replace(" ", "-"): value for name, value in values.items()}, step=step)

        self._write.append(write)
        return mlflow

    def on_log(self, ctx: Context) -> None:
        """Log the losses, the learning rate and the gradient norm of the metrics record to the trackers."""
        values = {named: value for name, value in ctx.record.values.items() if (named := _translate_name(name)) is not None}
        for write in self._write if values else ():
            write(values, ctx.record.step)

    def close(self) -> None:
        """Close the trackers. A second call does nothing."""
        while self._close:
            self._close.pop()()


def _translate_name(name: str) -> str | None:
    dataset, _, metric = name.partition("/")
    if name in METRIC_NAMES:
        return METRIC_NAMES[name]
    if not metric.endswith("loss") or metric == "loss":
        return None
    return metric if dataset == "train" else f"{metric} {dataset}"
