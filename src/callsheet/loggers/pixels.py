"""Images as every destination can show them: 8 bits a channel, three channels."""

from __future__ import annotations

from typing import Any

import numpy

from callsheet.errors import ConfigError


def as_pixels(image: Any) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """`image` as an array of uint8 and shape (height, width, 3).

    Takes tensors and arrays of shape (height, width), (height, width, 1), (height, width, 3), (1, height, width) or (3, height, width),
    and PIL images. Integers are taken for values from 0 to 255, booleans for black and white. Floats within [0, 1] are taken as they
    are; others, such as normalised inputs, are stretched so that the least becomes black and the greatest white. What is not finite is black.

    Raises:
        ConfigError: another shape.
    """
    if hasattr(image, "detach"):  # bfloat16 is nothing that numpy knows
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image
    array = numpy.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = numpy.moveaxis(array, 0, 2)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3) or not array.size:
        raise ConfigError(
            f"an image of shape {tuple(array.shape)}: give (height, width), (height, width, 3) or (3, height, width), one at a time"
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
    """`image` as a PNG file's bytes; takes what `as_pixels` takes."""
    from io import BytesIO

    from callsheet.extras import load

    buffer = BytesIO()
    load("PIL.Image", extra="train", wanted_by="images").fromarray(as_pixels(image)).save(buffer, format="PNG", optimize=False)
    return buffer.getvalue()
