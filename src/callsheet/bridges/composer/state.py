"""The State and Logger that Composer's callbacks receive when they run in callsheet's loop.

They have only some of the attributes of Composer's own objects. The values come from callsheet's context.

All guests of a run share one State and one Logger, as the callbacks of one Composer Trainer do; see `run.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from callsheet.bridges.composer.names import label_of_dataset
from callsheet.bridges.guest_base import Facade
from callsheet.core.time import Timestamp
from callsheet.errors import NotSupported


class Found:
    """Wraps a computed value in an object with a `compute` method, since Composer's callbacks expect metrics of torchmetrics."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def compute(self) -> Tensor:
        """Return the value as a tensor."""
        return torch.as_tensor(self._value)


class State(Facade):
    """Takes the place of Composer's State for Composer's callbacks, with only those attributes that these callbacks may use.

    All Composer callbacks of a run share one object, which callsheet makes.

    Args:
        run: the `ComposerRun`, which has Composer's counters and callsheet's current context.

    Raises:
        NotSupported: on reading any other attribute of Composer's State; the message lists the attributes that a callback may use.
    """

    REPLACED_OBJECT: ClassVar[str] = "Composer's State"

    def __init__(self, run: Any) -> None:
        self._run = run
        self._stopped: Any = None

    # --- progress ---

    @property
    def timestamp(self) -> Any:
        """The progress of training as a Composer `Timestamp`."""
        run = self._run
        return self.previous_timestamp if run.looks_back else run.timestamp(run.ctx.state.timestamp, run.counted)

    @property
    def previous_timestamp(self) -> Any:
        """The timestamp without the step, epoch or iteration that was counted last."""
        run = self._run
        return run.timestamp_of(*(run.previous or (run.ctx.state.previous_timestamp, run.counted)))

    @property
    def eval_timestamp(self) -> Any:
        """The progress of the current evaluation as a Composer `Timestamp`."""
        run = self._run
        return run.timestamp_of(Timestamp(batch=run.eval_batches, batch_in_epoch=run.eval_batches), run.eval_counted)

    predict_timestamp = eval_timestamp

    @property
    def max_duration(self) -> Any:
        """The length of training; None if there is no limit. After `stop_training`, the progress at which it was called."""
        longest = self._run.ctx.state.max_duration
        return self._stopped or (self._run.time(longest) if longest is not None else None)

    def get_elapsed_duration(self) -> Any:
        """Return the completed fraction of `max_duration`; None if there is no limit."""
        longest = self.max_duration
        return None if longest is None else self.timestamp.get(longest.unit) / longest

    def restart(self) -> None:
        """Forget that a callback has stopped training earlier, because training begins again."""
        self._stopped = None

    def stop_training(self) -> None:
        """Request a stop of training after this step. An evaluation that is due after the step is still carried out."""
        run = self._run
        longest = self.max_duration
        unit = longest.unit.value if longest is not None and longest.unit.value != "ep" else "ba"
        self._stopped = self.timestamp.get(unit)
        run.ctx.control.stop("state.stop_training()")

    @property
    def dataloader_label(self) -> str:
        """The label of the current dataloader: `train`, `predict`, or the label of the dataset that is evaluated."""
        ctx = self._run.ctx
        if ctx.has("eval_name"):
            return label_of_dataset(ctx.eval_name)
        return "predict" if (ctx.event or "").startswith("on_predict") else "train"

    @property
    def dataloader_len(self) -> Any:
        """The number of batches in an epoch of training; None if it is not known, and during evaluations and predictions."""
        batches = self._run.ctx.state.epoch_batches
        return self._run.kinds.Time(batches, "ba") if batches is not None and self.dataloader_label == "train" else None

    # --- model, optimizer and batch ---

    @property
    def model(self) -> Any:
        """The model. If it is not a ComposerModel, Composer's own callbacks get a wrapper with the model as its `module`."""
        model = self._run.ctx.model
        models = sys.modules.get("composer.models") if self._run.kinds.is_theirs else None
        return model if models is None or isinstance(model, models.ComposerModel) else _Wrapped(model)

    @property
    def optimizers(self) -> Sequence[Any]:
        """A list with the optimizer; empty before the optimizer is available."""
        ctx = self._run.ctx
        return [ctx.optimizer] if ctx.has("optimizer") and ctx.optimizer is not None else []

    @property
    def schedulers(self) -> Sequence[Any]:
        """A list with the scheduler; empty if there is none."""
        ctx = self._run.ctx
        return [ctx.scheduler] if ctx.has("scheduler") and ctx.scheduler is not None else []

    @property
    def batch(self) -> Any:
        """The current batch. During a forward or backward pass, this is the current microbatch."""
        ctx = self._run.ctx
        return ctx.microbatch if ctx.has("microbatch") else ctx.batch

    @batch.setter
    def batch(self, value: Any) -> None:
        """Replace the batch; during a forward or backward pass, replace the microbatch."""
        ctx = self._run.ctx
        setattr(ctx, "microbatch" if ctx.has("microbatch") else "batch", value)

    def batch_get_item(self, key: Any) -> Any:
        """Return a part of the batch, such as its inputs.

        Args:
            key: the key or index of the part, a function that takes the batch, or a pair of functions that get and set the part.
        """
        if isinstance(key, (tuple, list)) and len(key) == 2 and all(map(callable, key)):
            key = key[0]
        return key(self.batch) if callable(key) else self.batch[key]

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace a part of the batch, such as its inputs.

        Args:
            key: see `batch_get_item`. A single function is not allowed, because it cannot replace a part.
            value: the new part.
        """
        batch = self.batch
        if isinstance(key, (tuple, list)) and len(key) == 2 and all(map(callable, key)):
            self.batch = key[1](batch, value)
        elif isinstance(batch, tuple):
            self.batch = (*batch[:key], value, *batch[key + 1 :])
        else:
            batch[key] = value

    @property
    def outputs(self) -> Any:
        """The model's outputs."""
        return self._run.ctx.outputs

    @outputs.setter
    def outputs(self, value: Any) -> None:
        """Replace the outputs."""
        self._run.ctx.outputs = value

    @property
    def loss(self) -> Any:
        """The microbatch's loss, a scalar tensor. Between two steps, this is the loss of the last step, the mean of its microbatches."""
        run = self._run
        return run.loss if run.loss is not None and not run.ctx.has("loss") else run.ctx.loss

    @loss.setter
    def loss(self, value: Any) -> None:
        """Replace the loss."""
        self._run.ctx.loss = value

    # --- metrics ---

    @property
    def train_metrics(self) -> Mapping[str, Any]:
        """The last step's loss, as `loss`, and the model's own training metrics if a Trainer computes them."""
        loss = {} if self._run.loss is None else {"loss": Found(self._run.loss)}
        return {**loss, **self._run.train_metrics}

    @property
    def eval_metrics(self) -> Mapping[str, Mapping[str, Any]]:
        """The results of evaluations, by the dataset's label and the metric's name, as objects with a `compute` method."""
        return {
            label_of_dataset(name): {metric: Found(value) for metric, value in values.items()}
            for name, values in self._run.evaluated.items()
        }

    @property
    def eval_metric_values(self) -> Mapping[str, Any]:
        """The latest value of each evaluation metric, by the metric's name."""
        return {name: value for values in self._run.evaluated.values() for name, value in values.items()}

    @property
    def train_metric_values(self) -> Mapping[str, Any]:
        """The latest value of each training metric, by the metric's name."""
        return {name: metric.compute() for name, metric in self.train_metrics.items()}

    # --- the rest ---

    @property
    def run_name(self) -> str:
        """The run's name."""
        name: str = self._run.ctx.run.name
        return name

    @property
    def callbacks(self) -> Sequence[Any]:
        """All Composer callbacks of this run."""
        return [guest.foreign for guest in self._run.guests]

    @property
    def device(self) -> Device:
        """The device of this rank."""
        return Device(torch.device(self._run.ctx.run.device))

    @property
    def algorithms(self) -> Sequence[Any]:
        """An empty list, because callsheet does not run Composer's algorithms."""
        return []

    @property
    def profiler(self) -> None:
        """None, because callsheet has no Composer profiler."""
        return

    @property
    def fsdp_enabled(self) -> bool:
        """False: in callsheet's loop, Composer's callbacks can read a model's parameters without gathering them first."""
        return False


class _Wrapped:
    """Holds a model in the attribute `module`, as DDP does, because Composer's own callbacks expect such a wrapper."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self.module(*args, **given)

    __class__ = property(lambda self: type(self.module))  # so that `isinstance` checks the class of the wrapped model


class Device(Facade):
    """Wraps a torch device with the interface of Composer's `Device`."""

    REPLACED_OBJECT: ClassVar[str] = "Composer's Device"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """The type of the device as Composer names it, such as `gpu` or `cpu`."""
        return "gpu" if self._device.type == "cuda" else self._device.type

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device."""
        return tensor.to(self._device)

    def module_to_device(self, module: nn.Module) -> nn.Module:
        """Move the module to this device, and return it."""
        return module.to(self._device)


class Logger(Facade):
    """Takes the place of Composer's Logger: what Composer's callbacks log goes to callsheet's metrics records and loggers.

    All Composer callbacks of a run share one object, which callsheet makes.

    Args:
        run: the `ComposerRun`, which has callsheet's current context.

    Raises:
        NotSupported: on reading an attribute of Composer's Logger that this class does not have.
    """

    REPLACED_OBJECT: ClassVar[str] = "Composer's Logger"

    def __init__(self, run: Any) -> None:
        self._run = run

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # copies and pickles of a model that has this object as its `logger` contain None instead

    @property
    def destinations(self) -> Sequence[Any]:
        """An empty tuple, because the run's loggers are callsheet's and not Composer's."""
        return ()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics for the next metrics record. If a name is logged several times before this record, the last value counts.

        Args:
            metrics: numbers or scalar tensors by name.
            step: has no effect, because the record has the step at which it is made.
        """
        self._run.ctx.log(metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Log the settings of the run.

        Args:
            hyperparameters: plain data by name.
        """
        self._run.ctx.log_hyperparameters(hyperparameters)

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table.

        Args:
            columns: the titles of the columns.
            rows: the rows, each with a cell for each column.
            name: the name of the table.
            step: has no effect, because the current step is logged.
        """
        self._run.ctx.log_table(name, columns, rows)

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None, masks: Any = None,
        mask_class_labels: Any = None, use_table: bool = True,
    ) -> None:  # fmt: skip
        """Log one image or several.

        Args:
            images: an array or tensor of shape (height, width), (height, width, 3) or (3, height, width); or several, as a
                sequence or as one tensor with four dimensions.
            name: the name under which they are logged.
            channels_last: has no effect, because the place of the channels is read from the shape.
            step: has no effect, because the current step is logged.
            masks: must be None.
            mask_class_labels: has no effect without masks.
            use_table: has no effect, because callsheet's loggers have no such choice.

        Raises:
            NotSupported: masks are given, which callsheet's loggers do not support. Log them as separate images.
        """
        if masks is not None:
            raise NotSupported(
                "Composer's Logger logs masks over images, but callsheet's loggers do not; log the masks as separate images"
            )
        several = images if isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4 else [images]
        self._run.ctx.log_images(name, [_one_image(torch.as_tensor(image)) for image in several])

    def upload_file(self, remote_file_name: str, file_path: Any, *, overwrite: bool = False) -> None:
        """Pass a file to the run's loggers.

        Args:
            remote_file_name: the name of the file in the loggers' storage.
            file_path: where the file is.
            overwrite: has no effect. Each logger decides.
        """
        self._run.ctx.log_file(remote_file_name, file_path)

    def has_file_upload_destination(self) -> bool:
        """Return False, because it is not known whether the run's loggers upload files."""
        return False


def _one_image(image: Tensor) -> Tensor:
    """Return an image of shape (1, height, width) as (height, width), and any other image unchanged."""
    return image.squeeze(0) if image.ndim == 3 and image.shape[0] == 1 else image
