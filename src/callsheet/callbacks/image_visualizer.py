"""Pictures of what the model is given, and of how it divides them into classes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from callsheet.callback import Callback, label_of, one_of
from callsheet.callbacks.pictures import Key, Pictures, images_in, labels_in, predictions_in
from callsheet.context import Context
from callsheet.errors import ConfigError
from callsheet.time import Interval, Time, TimeUnit, elapsed_fraction

logger = logging.getLogger("callsheet")


class ImageVisualizer(Callback):
    """Give the loggers images of the model's inputs, or of its segmentation: inputs, predictions and labels side by side.

    They are the first images of a step's first microbatch on rank 0, as the model was given it: of the first step, and of the
    step that completes each `interval` (counted in epochs: the first step of the next one), told with the next record as
    `images/train`. Of each evaluation they are those of the first batch, told at its end as `images/<dataset>`. With a `name`
    of its own a second one's are called that instead of `images`.

    Until they are told they stay on the device, a copy of these few images alone; then they are copied to the host, where
    loggers want them. Which interval was told last survives a resume; what was not told yet is taken anew. Nothing is drawn
    from random states. Where it finds no images it says so once.

    Args:
        interval: how often in training, such as `"100ba"` or `"1ep"`; a whole number means batches.
        mode: `"input"`, or `"segmentation"`: class 0 is black, other classes have a colour each, the same always; pixels that
            are not judged (labels below 0, or 255) are grey.
        num_images: how many at most.
        channels_last: whether channels are the last dimension of images, outputs and one-hot labels, not the second; None: as
            it looks. Of more than three channels the first three are shown, of two the first.
        input_key: where in the batch the images are, a key or an index; None: the first floating-point or 8-bit tensor of shape
            (N, C, H, W) or (N, H, W, C) with 1, 3 or 4 channels, nested ones included. With a key, (N, H, W) is fine too.
        target_key: likewise for labels, of shape (N, H, W) or (N, 1, H, W), or one-hot; None: the first other tensor of the
            images' size.

    Raises:
        ConfigError: an argument that cannot work; a key that the batch does not have.
    """

    ranks = "zero"

    def __init__(
        self,
        *,
        interval: str | int | Time = "100ba",
        mode: str = "input",
        num_images: int = 8,
        channels_last: bool | None = None,
        input_key: Key | None = None,
        target_key: Key | None = None,
    ) -> None:
        if num_images < 1:
            raise ConfigError(f"num_images={num_images}: give at least 1")
        self._every = Interval.of("interval", interval)
        self._is_segmentation = one_of("mode", mode, ("input", "segmentation")) == "segmentation"
        self._num_images = num_images
        self._channels_last = channels_last
        self._input_key = input_key
        self._target_key = target_key
        self._begin()

    def _begin(self) -> None:
        self._told = self._taken = -1  # intervals
        self._is_due = False
        self._kept: dict[str, Pictures] = {}
        self._said: set[str] = set()

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Forget an earlier run."""
        self._begin()

    def on_train_step_start(self, ctx: Context) -> None:
        """See whether this is a step to look at."""
        after, is_fraction = ctx.state.timestamp.next_batch(), self._every.every.unit is TimeUnit.DURATION
        index = self._every.index(after, elapsed_fraction(after, ctx.state.max_duration) if is_fraction else None)
        self._is_due = index > self._taken
        self._taken = max(index, self._taken)

    def on_forward_end(self, ctx: Context) -> None:
        """Keep the first microbatch's."""
        if self._is_due:
            self._keep(f"{self.name or 'images'}/train", ctx.microbatch, ctx.outputs)

    def on_log(self, ctx: Context) -> None:
        """Tell them."""
        self._tell(ctx)
        self._told = self._taken

    def on_eval_start(self, ctx: Context) -> None:
        """The next batch is this dataset's first."""
        self._is_due = True

    def on_eval_forward_end(self, ctx: Context) -> None:
        """Keep the first batch's."""
        if self._is_due:
            self._keep(f"{self.name or 'images'}/{ctx.eval_name}", ctx.batch, ctx.outputs)

    def on_eval_end(self, ctx: Context) -> None:
        """Tell them."""
        self._tell(ctx)

    def _keep(self, name: str, batch: Any, outputs: Any) -> None:
        self._is_due = False
        first, last = slice(self._num_images), self._channels_last
        images = images_in(batch, self._input_key, last)
        if images is None:
            self._say("there are no images in the batch; if there are, say where: input_key=")
            return
        shown = images[first, ..., :3] if images.shape[-1] > 2 else images[first, ..., :1]
        shown = shown.detach().clone()  # not a view, which would hold the whole batch
        if not self._is_segmentation:
            self._kept[name] = Pictures(shown)
            return
        labels, predictions = labels_in(batch, self._target_key, last, images), predictions_in(outputs, last, images)
        if labels is None:
            self._say("the batch has no labels of the images' size; if it has, say where: target_key=")
        elif predictions is None:
            self._say("the model's outputs have no scores of shape (N, classes, H, W); mode='input' shows the images alone")
        else:
            self._kept[name] = Pictures(shown, predictions[first].clone(), labels[first].clone())

    def _tell(self, ctx: Context) -> None:
        kept, self._kept = self._kept, {}
        for name, pictures in kept.items():
            ctx.log_images(name, pictures.drawn())

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            logger.warning("%s has nothing to show: %s", label_of(self), why)

    def state_dict(self) -> Mapping[str, Any]:
        """Which interval was told last."""
        return {"told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._told = self._taken = state["told"]
