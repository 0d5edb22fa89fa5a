"""Finds images, labels and predictions in batches and outputs, and combines them into one picture."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.errors import ConfigError

Key = str | int

_CHANNEL_COUNTS = (1, 3, 4)
_IGNORED_LABEL = 255  # the label of pixels to ignore in segmentation datasets; negative labels are ignored too
_GRAY_LEVEL = 0.5


def _palette() -> Tensor:
    """Return a color for each class: black for class 0, and then colors whose hues differ much between consecutive classes."""
    hues = (
        (number * 0.618034 % 1, 0.9 if number % 2 else 0.6, 1.0 if number % 3 else 0.75) for number in range(1, _IGNORED_LABEL)
    )
    return torch.tensor([(0.0, 0.0, 0.0), *(colorsys.hsv_to_rgb(*hue) for hue in hues)])


PALETTE = _palette()
"""The colors of the classes, of shape (255, 3), within [0, 1]."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """Images of shape (N, H, W, 1 or 3) and, for a segmentation, the predicted and the true class of each pixel, (N, H, W)."""

    images: Tensor
    predictions: Tensor | None = None
    labels: Tensor | None = None

    def draw(self) -> list[Tensor]:
        """Return each image as a CPU tensor of shape (H, W) or (H, W, 3). Predictions and labels, if any, are shown beside the image.

        A segmentation shows image, prediction and label side by side, with values within [0, 1].
        """
        images = self.images.float().cpu() if self.images.is_floating_point() else self.images.cpu()
        if self.predictions is None or self.labels is None:
            return [image.squeeze(-1) for image in images]
        parts = zip(images, self.predictions.cpu(), self.labels.cpu(), strict=True)
        return [torch.cat([_within_one(image), colorize(predicted), colorize(true)], dim=1) for image, predicted, true in parts]


def images_in(batch: Any, key: Key | None, channels_last: bool | None) -> Tensor | None:
    """Return the batch's images, (N, H, W, C); None if no tensor looks like images.

    Raises:
        ConfigError: the batch does not have `key`, or its value is not images.
    """
    if key is None:
        images = next(filter(_looks_like_images, _tensors(batch)), None)
    else:
        images = _at(batch, key, "input_key")
        if not isinstance(images, Tensor) or images.dim() not in (3, 4):
            raise ConfigError(
                f"input_key={key!r}: {_describe(images)} is not images; give the key of a tensor of shape (N, C, H, W)"
            )
    if images is None:
        return None
    if images.dim() == 3:
        return images[..., None]
    if channels_last is None:
        channels_last = images.shape[1] not in _CHANNEL_COUNTS and images.shape[-1] in _CHANNEL_COUNTS
    return images if channels_last else images.movedim(1, -1)


def labels_in(batch: Any, key: Key | None, channels_last: bool | None, images: Tensor) -> Tensor | None:
    """Return the class of every pixel of `images` (N, H, W, C) as whole numbers (N, H, W); None if no tensor looks like labels.

    Raise ConfigError if the batch does not have `key`, or if its value is not labels.
    """
    if key is not None:
        labels = _at(batch, key, "target_key")
        if not isinstance(labels, Tensor) or labels.dim() not in (3, 4):
            raise ConfigError(
                f"target_key={key!r}: {_describe(labels)} is not labels of pixels; give the key of a tensor of shape (N, H, W)"
            )
        return classes(labels, channels_last, images)
    size = images.shape[:3]
    shapes = (size, (size[0], 1, *size[1:]), (*size, 1))
    # Skip the batch's image tensor, which contains no labels: `images` is a view of it, so both have the same address.
    itself = images.data_ptr()
    labels = next((each for each in _tensors(batch) if each.shape in shapes and each.data_ptr() != itself), None)
    return classes(labels, channels_last, images) if labels is not None else None


def predictions_in(outputs: Any, channels_last: bool | None, images: Tensor) -> Tensor | None:
    """Return the predicted class of every pixel of `images` (N, H, W, C), as (N, H, W); None if `outputs` has no class scores.

    The scores are the output `logits` or `out`, or else the first tensor with four dimensions. If there is only one class, it is
    predicted where its score is above 0.
    """
    named = [outputs[name] for name in ("logits", "out") if isinstance(outputs, Mapping) and name in outputs]
    scores = next((tensor for tensor in _tensors([named, outputs]) if tensor.dim() == 4 and len(tensor) == len(images)), None)
    return classes(scores, channels_last, images, are_scores=True) if scores is not None else None


def classes(tensor: Tensor, channels_last: bool | None, images: Tensor, *, are_scores: bool = False) -> Tensor:
    """Convert class indices, or scores for each class, to class indices of shape (N, H, W). Resize them to the size of `images`."""
    size = images.shape[1:3]
    if tensor.dim() == 4:
        if channels_last is None:
            channels_last = tensor.shape[1:3] == size != tensor.shape[2:]
        dim = -1 if channels_last else 1
        if tensor.shape[dim] > 1:
            tensor = tensor.argmax(dim)
        else:
            tensor = tensor.squeeze(dim)
            tensor = tensor > 0 if are_scores else tensor
    if tensor.shape[1:] != size:
        tensor = nn.functional.interpolate(tensor[:, None].float(), size=tuple(size), mode="nearest")[:, 0]
    return tensor.long()


def colorize(numbers: Tensor) -> Tensor:
    """Return the class indices as RGB colors, which adds a last dimension. Ignored pixels are gray."""
    judged = (numbers >= 0) & (numbers != _IGNORED_LABEL)
    return torch.where(judged[..., None], PALETTE[numbers % _IGNORED_LABEL], torch.tensor(_GRAY_LEVEL))


def _within_one(image: Tensor) -> Tensor:
    """Return an image with three channels and values within [0, 1]. Integers are divided by 255, other ranges are rescaled."""
    if not image.is_floating_point():
        image = image / 255
    image = torch.where(image.isfinite(), image, 0.0)
    least, greatest = image.min(), image.max()
    if least < 0 or greatest > 1:
        image = (image - least) / (greatest - least).clamp(min=torch.finfo(image.dtype).tiny)
    return image.expand(-1, -1, 3)


def _looks_like_images(tensor: Tensor) -> bool:
    is_kind = tensor.is_floating_point() or tensor.dtype is torch.uint8
    if not is_kind or tensor.dim() != 4:
        return False
    _, second, third, last = tensor.shape
    return (second in _CHANNEL_COUNTS and third > 1 and last > 1) or (last in _CHANNEL_COUNTS and second > 1 and third > 1)


def _at(batch: Any, key: Key, option: str) -> Any:
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{option}={key!r}: the batch, {_describe(batch)}, does not have it") from None


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    shape = tuple(value.shape) if isinstance(value, Tensor) else len(value) if isinstance(value, (list, tuple)) else None
    return f"a {type(value).__name__}" + (f" of {shape}" if shape is not None else "")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)
