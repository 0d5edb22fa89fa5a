"""Opens the images of rows: files next to the rows, bytes, or Pillow images. Error messages name the row."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callsheet.recipes.data.tables import reject

if TYPE_CHECKING:
    from PIL.Image import Image


def open_image(value: Any, folder: Path, place: str, *, pixels: bool = True) -> Image:
    """Open an image of a row, and return it upright and in RGB.

    Args:
        value: a path, absolute or relative to `folder`; the bytes of a file; a dictionary with one of these, as `datasets` writes
            it; or a Pillow image.
        pixels: whether the pixels are needed; False reads only the header of the file.

    Raises:
        ConfigError: `value` is none of these, there is no such file, or it has no readable image.
    """
    from PIL import Image, ImageOps

    if isinstance(value, Mapping):  # an image in the format of the library `datasets`: {"bytes": ..., "path": ...}
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if not isinstance(value, (Image.Image, bytes, str, Path)):
        reject(place, f"an image is {_describe_value(value)}; give the path of a file, relative to {folder}, or the file's bytes")
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
        reject(place, f"there is no image {what}; paths are relative to {folder}, or to image_folder if it is given")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow raises these errors for a broken file.
        reject(place, f"{what} cannot be read as an image ({error}); give one that Pillow opens, or leave the row out")
    return upright


def _describe_value(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}" if value is not None else "none (null)"
