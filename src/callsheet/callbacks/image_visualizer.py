"""Logs images of the model's inputs and of its segmentation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, get_args

from callsheet.callbacks.support.pictures import Key, Pictures, images_in, labels_in, predictions_in
from callsheet.core.callback import Callback, label_of, one_of
from callsheet.core.context import Context
from callsheet.core.ranks import RankGate
from callsheet.core.time import Interval, Time, TimeUnit, elapsed_fraction
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

Mode = Literal["input", "segmentation"]
MODES: tuple[Mode, ...] = get_args(Mode)


class ImageVisualizer(Callback):
    """Log images of the model's inputs or, for a segmentation model, inputs, predictions and labels side by side.

    The images are the first ones in a step's first microbatch on rank 0, as the model received them. They are taken in the first
    step and in the step that completes each `interval`; for an interval in epochs, in the first step of the next epoch. They are
    logged with the next record as `images/train`. Images of an evaluation come from its first batch and are logged at its end as
    `images/<dataset>`. If the callback has a `name`, the name replaces `images`.

    A copy of these few images stays on the device until they are logged, and is then copied to the host for the loggers. A
    resumed run knows for which interval images were last logged, and takes images again that were not logged yet. The callback
    draws no random numbers. If it finds no images, it warns once.

    Args:
        interval: how often to log images during training, such as `"100ba"` or `"1ep"`; a whole number means batches.
        mode: `"input"` or `"segmentation"`. In a segmentation, class 0 is black and every other class has a fixed color. Pixels
            that are ignored (labels below 0, or 255) are gray.
        num_images: the maximum number of images.
        channels_last: whether channels are the last dimension of images, outputs and one-hot labels, not the second; None
            guesses. If there are more than three channels, the first three are shown; if there are two, only the first.
        input_key: the key or index of the images in the batch. None takes the first floating-point or 8-bit tensor of shape
            (N, C, H, W) or (N, H, W, C) with 1, 3 or 4 channels, even if the tensor is nested. With a key, (N, H, W) is accepted
            too.
        target_key: the key or index of the labels, of shape (N, H, W) or (N, 1, H, W), or one-hot. None takes the first other tensor
            of the images' size.

    Raises:
        ConfigError: an argument is invalid, or the batch has no value for `input_key` or `target_key`.
    """

    ranks: RankGate = "zero"
    required_fields = ("batch", "microbatch", "outputs")

    def __init__(
        self,
        *,
        interval: str | int | Time = "100ba",
        mode: Mode = "input",
        num_images: int = 8,
        channels_last: bool | None = None,
        input_key: Key | None = None,
        target_key: Key | None = None,
    ) -> None:
        if num_images < 1:
            raise ConfigError(f"num_images={num_images}: give at least 1")
        self._every = Interval.of("interval", interval)
        self._is_segmentation = one_of("mode", mode, MODES) == "segmentation"
        self._num_images = num_images
        self._channels_last = channels_last
        self._input_key = input_key
        self._target_key = target_key
        self._begin()

    def _begin(self) -> None:
        # `_logged` is the number of the last interval whose images were logged.
        # `_taken` is the number of the last interval whose images were collected.
        self._logged = self._taken = -1
        self._is_due = False
        self._kept: dict[str, Pictures] = {}
        self._warnings: set[str] = set()

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self._begin()

    def on_train_step_start(self, ctx: Context) -> None:
        """Decide whether to collect images in this step."""
        after, is_fraction = ctx.state.timestamp.next_batch(), self._every.every.unit is TimeUnit.DURATION
        index = self._every.index(after, elapsed_fraction(after, ctx.state.max_duration) if is_fraction else None)
        self._is_due = index > self._taken
        self._taken = max(index, self._taken)

    def on_forward_end(self, ctx: Context) -> None:
        """Copy images of the step's first microbatch, to log them later."""
        if self._is_due:
            self._keep(f"{self.name or 'images'}/train", ctx.microbatch, ctx.outputs)

    def on_log(self, ctx: Context) -> None:
        self._log(ctx)
        self._logged = self._taken

    def on_eval_start(self, ctx: Context) -> None:
        """Set a flag, so that `on_eval_forward_end` collects images of the dataset's first batch."""
        self._is_due = True

    def on_eval_forward_end(self, ctx: Context) -> None:
        """Copy images of the dataset's first batch, to log them later."""
        if self._is_due:
            self._keep(f"{self.name or 'images'}/{ctx.eval_name}", ctx.batch, ctx.outputs)

    def on_eval_end(self, ctx: Context) -> None:
        self._log(ctx)

    def _keep(self, name: str, batch: Any, outputs: Any) -> None:
        self._is_due = False
        first, last = slice(self._num_images), self._channels_last
        images = images_in(batch, self._input_key, last)
        if images is None:
            self._warn("the batch has no images; if it does, give their place with input_key=")
            return
        shown = images[first, ..., :3] if images.shape[-1] > 2 else images[first, ..., :1]
        shown = shown.detach().clone()  # a copy, because a view would keep the whole batch in memory
        if not self._is_segmentation:
            self._kept[name] = Pictures(shown)
            return
        labels, predictions = labels_in(batch, self._target_key, last, images), predictions_in(outputs, last, images)
        if labels is None:
            self._warn("the batch has no labels of the images' size; if it does, give their place with target_key=")
        elif predictions is None:
            self._warn("the model's outputs have no scores of shape (N, classes, H, W); mode='input' shows only the images")
        else:
            self._kept[name] = Pictures(shown, predictions[first].clone(), labels[first].clone())

    def _log(self, ctx: Context) -> None:
        kept, self._kept = self._kept, {}
        for name, pictures in kept.items():
            ctx.log_images(name, pictures.draw())

    def _warn(self, why: str) -> None:
        if why not in self._warnings:
            self._warnings.add(why)
            logger.warning("%s has nothing to show: %s", label_of(self), why)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the index of the last interval for which images were logged."""
        return {"logged": self._logged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Checkpoints of earlier versions of callsheet have the key "told" instead of "logged".
        self._logged = self._taken = state["logged"] if "logged" in state else state["told"]
