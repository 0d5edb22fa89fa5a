"""Images of rows: a file beside the rows, bytes, or an image of Pillow; what is none is named by its place."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callsheet.recipes.rows import reject

if TYPE_CHECKING:
    from PIL.Image import Image


def opened(value: Any, folder: Path, place: str, *, pixels: bool = True) -> Image:
    """The image, upright and in RGB.

    Args:
        value: a path, relative to `folder` or whole; bytes of a file; a dictionary of either, as `datasets` writes it; or an image.
        pixels: whether the pixels are wanted; False looks at the head of the file alone.

    Raises:
        ConfigError: it is none of these, there is no such file, or it holds no image that can be read.
    """
    from PIL import Image, ImageOps

    if isinstance(value, Mapping):  # {"bytes": ..., "path": ...}
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if not isinstance(value, (Image.Image, bytes, str, Path)):
        reject(place, f"an image is {_shown(value)}; give the path of a file, relative to {folder}, or the file's bytes")
    what = f"an image of {len(value)} bytes" if isinstance(value, bytes) else "an image"
    try:
        if isinstance(value, Image.Image):
            image = value
        elif isinstance(value, bytes):
            image = Image.open(BytesIO(value))
        else:
            what = str(folder / value)
            image = Image.open(what)
        if not pixels:
            if image is not value:
                image.close()
            return image
        upright: Image.Image = ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        reject(place, f"there is no image {what}; paths are relative to {folder}, or to image_folder where that is given")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's of files that are broken
        reject(place, f"{what} cannot be read as an image ({error}); give one that Pillow opens, or leave the row out")
    return upright


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}" if value is not None else "none (null)"
