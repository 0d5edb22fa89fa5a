"""Images of all supported types are converted to the same pixel format."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from callsheet.errors import ConfigError
from callsheet.loggers.support.pixels import as_pixels, png


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (1, 5, 7), (5, 7, 3), (3, 5, 7)])
@pytest.mark.parametrize("kind", [numpy.zeros, torch.zeros])
def test_images_of_all_shapes_become_height_width_and_three_channels(kind: Any, shape: tuple[int, ...]) -> None:
    assert as_pixels(kind(shape)).shape == (5, 7, 3)


def test_three_by_three_images_are_taken_as_height_width_channels() -> None:
    assert as_pixels(numpy.arange(27).reshape(3, 3, 3))[0, 1].tolist() == [3, 4, 5]


def test_values_are_scaled_to_0_to_255() -> None:
    assert as_pixels(torch.tensor([[0.0, 0.5, 1.0]]))[0, :, 0].tolist() == [0, 128, 255]
    assert as_pixels(torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.bfloat16))[0, :, 0].tolist() == [0, 128, 255]
    assert as_pixels(torch.tensor([[3, 200, 300]]))[0, :, 1].tolist() == [3, 200, 255]
    assert as_pixels(torch.tensor([[True, False]]))[0, :, 2].tolist() == [255, 0]
    assert as_pixels(torch.tensor([[float("nan"), 1.0]]))[0, :, 2].tolist() == [0, 255]
    assert as_pixels(torch.full((2, 2), 7.0)).max() == 0  # a constant image cannot be scaled


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4, 5), (4, 5, 2), (0, 4)])
def test_other_shapes_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"one at a time"):
        as_pixels(torch.zeros(shape))


def test_a_png_image_is_read_back_unchanged() -> None:
    pixels = numpy.random.default_rng(0).integers(0, 256, (9, 4, 3), dtype=numpy.uint8)
    assert numpy.array_equal(numpy.asarray(Image.open(BytesIO(png(pixels)))), pixels)
