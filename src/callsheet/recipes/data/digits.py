"""scikit-learn's handwritten digits as rows: an image, a question about it, and the digit's name in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from callsheet.core.optional import load
from callsheet.recipes.data.tables import Table

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTION = "Which digit is this?"
PARTS = ("train", "validation", "test")


class Digits(Table):
    """Rows from a part of scikit-learn's 1,797 images of handwritten digits (Alpaydin and Kaynak 1998).

    Args:
        part: `train`, `validation` or `test`. About a tenth of the images is for validation, and a tenth for the test. The part of
            an image depends only on its number.
    """

    def __init__(self, part: str) -> None:
        self._numbers = _numbers()[part]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        from PIL import Image

        images, names = _digits()
        number = self._numbers[index]
        pixels = (images[number] * (255 / 16)).astype(np.uint8)  # scale the pixels from the range 0 to 16 to the range 0 to 255
        return {"image": Image.fromarray(pixels), "prompt": QUESTION, "completion": DIGIT_WORDS[names[number]]}

    def place(self, index: int) -> str:
        return f"digit {self._numbers[index]} of scikit-learn"


@cache
def _digits() -> tuple[Any, Sequence[int]]:
    found = load("sklearn.datasets", extra="digits", wanted_by="the recipe finetune_vlm, for its example,").load_digits()
    return found.images, found.target.tolist()


@cache
def _numbers() -> dict[str, list[int]]:
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    for number in range(len(_digits()[1])):
        draw = sha256(str(number).encode()).digest()[0] % 10
        parts[PARTS[draw + 1] if draw < 2 else "train"].append(number)
    return parts
