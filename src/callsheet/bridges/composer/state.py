"""What a guest from Composer is given in the place of its State and Logger: a list of what may be read and asked for, over our context.

Guests of one run share them, as callbacks of one Composer Trainer do; see `run.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from callsheet.bridges.composer.names import label_of_dataset
from callsheet.bridges.guest_base import Facade
from callsheet.errors import NotSupported
from callsheet.time import Timestamp


class Found:
    """A metric that has been computed: what is left of a torchmetric here."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def compute(self) -> Tensor:
        """Its value, a scalar tensor."""
        return torch.as_tensor(self._value)


class State(Facade):
    """Composer's State, as far as a guest may use it."""

    OF: ClassVar[str] = "Composer's State"

    def __init__(self, run: Any) -> None:
        self._run = run
        self._stopped: Any = None

    # --- how far ---

    @property
    def timestamp(self) -> Any:
        """How far training is."""
        return self._run.timestamp(self._run.ctx.state.timestamp, self._run.counted)

    @property
    def previous_timestamp(self) -> Any:
        """The one before the last step."""
        run = self._run
        return run.timestamp_of(run.ctx.state.previous_timestamp, run.counted_before)

    @property
    def eval_timestamp(self) -> Any:
        """How far the evaluation in hand is."""
        run = self._run
        return run.timestamp_of(Timestamp(batch=run.batches_apart, batch_in_epoch=run.batches_apart), run.apart)

    predict_timestamp = eval_timestamp

    @property
    def max_duration(self) -> Any:
        """How long training is to last, or None; where a guest has stopped it, until then."""
        longest = self._run.ctx.state.max_duration
        return self._stopped or (self._run.time(longest) if longest is not None else None)

    def get_elapsed_duration(self) -> Any:
        """The completed fraction of `max_duration`, or None."""
        longest = self.max_duration
        return None if longest is None else self.timestamp.get(longest.unit) / longest

    def stop_training(self) -> None:
        """Ask that training end after this step; what is due at its boundary comes first."""
        run = self._run
        longest = self.max_duration
        unit = longest.unit.value if longest is not None and longest.unit.value != "ep" else "ba"
        self._stopped = self.timestamp.get(unit)
        run.ctx.control.stop("state.stop_training()")

    @property
    def dataloader_label(self) -> str:
        """`train`, `predict`, or the label of the dataset that is evaluated."""
        ctx = self._run.ctx
        if ctx.has("eval_name"):
            return label_of_dataset(ctx.eval_name)
        return "predict" if (ctx.event or "").startswith("on_predict") else "train"

    @property
    def dataloader_len(self) -> Any:
        """The batches of an epoch, where they are known."""
        batches = self._run.ctx.state.epoch_batches
        return self._run.kinds.Time(batches, "ba") if batches is not None and self.dataloader_label == "train" else None

    # --- what is trained ---

    @property
    def model(self) -> Any:
        """The model. To Composer's own callbacks one that is no ComposerModel looks as if it were in DDP's wrapper, which they know of."""
        model = self._run.ctx.model
        models = sys.modules.get("composer.models") if self._run.kinds.is_theirs else None
        return model if models is None or isinstance(model, models.ComposerModel) else _Wrapped(model)

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizer, alone in a list; empty before it is there."""
        ctx = self._run.ctx
        return [ctx.optimizer] if ctx.has("optimizer") and ctx.optimizer is not None else []

    @property
    def schedulers(self) -> Sequence[Any]:
        """The scheduler, alone in a list."""
        ctx = self._run.ctx
        return [ctx.scheduler] if ctx.has("scheduler") and ctx.scheduler is not None else []

    @property
    def batch(self) -> Any:
        """The batch in hand; inside a forward or a backward the microbatch."""
        ctx = self._run.ctx
        return ctx.microbatch if ctx.has("microbatch") else ctx.batch

    @batch.setter
    def batch(self, value: Any) -> None:
        """Replace it."""
        ctx = self._run.ctx
        setattr(ctx, "microbatch" if ctx.has("microbatch") else "batch", value)

    def batch_get_item(self, key: Any) -> Any:
        """A part of the batch, by its key or its place, or by a function or a pair of them that get and set it."""
        if isinstance(key, (tuple, list)) and len(key) == 2 and all(map(callable, key)):
            key = key[0]
        return key(self.batch) if callable(key) else self.batch[key]

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace such a part."""
        batch = self.batch
        if isinstance(key, (tuple, list)) and len(key) == 2 and all(map(callable, key)):
            self.batch = key[1](batch, value)
        elif isinstance(batch, tuple):
            self.batch = (*batch[:key], value, *batch[key + 1 :])
        else:
            batch[key] = value

    @property
    def outputs(self) -> Any:
        """What the model gave."""
        return self._run.ctx.outputs

    @outputs.setter
    def outputs(self, value: Any) -> None:
        """Replace it."""
        self._run.ctx.outputs = value

    @property
    def loss(self) -> Any:
        """The microbatch's loss, a scalar tensor; between steps the last step's, as Composer keeps it."""
        run = self._run
        return run.loss if run.loss is not None and not run.ctx.has("loss") else run.ctx.loss

    @loss.setter
    def loss(self, value: Any) -> None:
        """Replace it."""
        self._run.ctx.loss = value

    # --- what was found ---

    @property
    def train_metrics(self) -> Mapping[str, Any]:
        """The last step's loss, as `loss`, and the model's own metrics of training where a Trainer computes them."""
        loss = {} if self._run.loss is None else {"loss": Found(self._run.loss)}
        return {**loss, **self._run.train_metrics}

    @property
    def eval_metrics(self) -> Mapping[str, Mapping[str, Any]]:
        """By the dataset's label, and by name, what has `compute()`."""
        return {
            label_of_dataset(name): {metric: Found(value) for metric, value in values.items()}
            for name, values in self._run.evaluated.items()
        }

    @property
    def eval_metric_values(self) -> Mapping[str, Any]:
        """The last value of each metric."""
        return {name: value for values in self._run.evaluated.values() for name, value in values.items()}

    @property
    def train_metric_values(self) -> Mapping[str, Any]:
        """The same of training."""
        return {name: metric.compute() for name, metric in self.train_metrics.items()}

    # --- the rest ---

    @property
    def run_name(self) -> str:
        """The run's name."""
        name: str = self._run.ctx.run.name
        return name

    @property
    def callbacks(self) -> Sequence[Any]:
        """The guests from Composer."""
        return [guest.foreign for guest in self._run.guests]

    @property
    def device(self) -> Device:
        """Where the model is."""
        return Device(torch.device(self._run.ctx.run.device))

    @property
    def algorithms(self) -> Sequence[Any]:
        """None."""
        return []

    @property
    def profiler(self) -> None:
        """None."""
        return

    @property
    def fsdp_enabled(self) -> bool:
        """Whether parameters are to be gathered before they are read, which a guest need not do here."""
        return False


class _Wrapped:
    """A model, and itself as its `module`."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self.module(*args, **given)

    __class__ = property(lambda self: type(self.module))  # to isinstance() it is what it wraps


class Device(Facade):
    """Composer's Device."""

    OF: ClassVar[str] = "Composer's Device"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """`gpu` or `cpu`."""
        return "gpu" if self._device.type == "cuda" else self._device.type

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """The tensor, there."""
        return tensor.to(self._device)

    def module_to_device(self, module: nn.Module) -> nn.Module:
        """The module, there."""
        return module.to(self._device)


class Logger(Facade):
    """Composer's Logger: what is logged goes into our records, and to the run's loggers."""

    OF: ClassVar[str] = "Composer's Logger"

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def destinations(self) -> Sequence[Any]:
        """None that could be asked for by their class: the run's loggers are ours."""
        return ()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Numbers, for the next record; of several under one name until then the last."""
        self._run.ctx.log(metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Settings of the run."""
        self._run.ctx.log_hyperparameters(hyperparameters)

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """A table."""
        self._run.ctx.log_table(name, columns, rows)

    def log_images(
        self, images: Any, name: str = "Images", channels_last: bool = False, step: int | None = None, masks: Any = None,
        mask_class_labels: Any = None, use_table: bool = True,
    ) -> None:  # fmt: skip
        """Images, one or several. Raises NotSupported for masks, which our loggers do not know."""
        if masks is not None:
            raise NotSupported(
                "Composer's Logger logs masks over images, and callsheet's loggers do not; log them as images of their own"
            )
        several = images if isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4 else [images]
        self._run.ctx.log_images(name, [_one_image(torch.as_tensor(image)) for image in several])

    def upload_file(self, remote_file_name: str, file_path: Any, *, overwrite: bool = False) -> None:
        """A file that was written."""
        self._run.ctx.log_file(remote_file_name, file_path)

    def has_file_upload_destination(self) -> bool:
        """Whether files are uploaded: loggers here say nothing about that."""
        return False


def _one_image(image: Tensor) -> Tensor:
    """Without a lone channel, which our loggers take as none."""
    return image.squeeze(0) if image.ndim == 3 and image.shape[0] == 1 else image
