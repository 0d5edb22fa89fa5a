"""Converts images to a form that every destination can show: three channels of 8 bits."""

from __future__ import annotations

from typing import Any

import numpy

from callsheet.errors import ConfigError


def as_pixels(image: Any) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """Return `image` as an array of uint8 and shape (height, width, 3).

    Accepts tensors and arrays of shape (height, width), (height, width, 1), (height, width, 3), (1, height, width) or (3, height,
    width), and PIL images. Integers are values from 0 to 255, booleans are black and white. Floats within [0, 1] are used as they are;
    others, such as normalized inputs, are scaled so that the minimum becomes black and the maximum white. NaN and infinity are black.

    Raises:
        ConfigError: the image has another shape.
    """
    if hasattr(image, "detach"):  # a torch tensor: convert floats to float32, because numpy has no bfloat16
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image
    array = numpy.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = numpy.moveaxis(array, 0, 2)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3) or not array.size:
        raise ConfigError(
            f"an image has the shape {tuple(array.shape)}; give (height, width), (height, width, 3) or (3, height, width), one at a time"
        )
    if array.dtype == bool:
        array = array * 255
    elif array.dtype.kind == "f":
        array = numpy.where(numpy.isfinite(array), array, 0).astype(numpy.float64)
        least, greatest = array.min(), array.max()
        if least < 0 or greatest > 1:
            array = (array - least) / max(greatest - least, numpy.finfo(float).tiny)
        array = array * 255
    pixels = numpy.clip(array.round() if array.dtype.kind == "f" else array, 0, 255).astype(numpy.uint8)
    return numpy.ascontiguousarray(numpy.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def png(image: Any) -> bytes:
    """Return `image`, which may be any image that `as_pixels` accepts, as the bytes of a PNG file."""
    from io import BytesIO

    from callsheet.core.optional import load

    buffer = BytesIO()
    load("PIL.Image", extra="train", wanted_by="images").fromarray(as_pixels(image)).save(buffer, format="PNG", optimize=False)
    return buffer.getvalue()
