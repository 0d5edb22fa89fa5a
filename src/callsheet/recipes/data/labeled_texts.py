"""Converts rows with a text and a label to samples of token ids and a class index. Error messages name the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from callsheet.recipes.data.class_labels import ClassLabels
from callsheet.recipes.data.tables import check_columns, reject

TooLong = Literal["truncate", "reject"]
TOO_LONG: tuple[TooLong, ...] = get_args(TooLong)


@dataclass(frozen=True)
class LabeledTexts:
    """Converts rows with a text and a label to samples of token ids and a class index.

    All methods take a row and its place. If they cannot use the row, they raise a ConfigError that names the place.

    Args:
        tokenizer: a tokenizer of transformers.
        labels: the classes.
        text_column: the column of texts.
        label_column: the column of labels.
        longest: the maximum number of tokens of a text.
        truncates: whether longer texts are cut; otherwise they are rejected.
    """

    tokenizer: Any
    labels: ClassLabels
    text_column: str
    label_column: str
    longest: int
    truncates: bool

    def check_row(self, row: Mapping[str, Any], place: str) -> tuple[str, int]:
        """Check a row, and return its text and class index. The number of tokens is not checked if texts are truncated."""
        text, label = self._text(row, place), self.labels.number(row[self.label_column], place)
        if not self.truncates:
            self.ids(row, place)
        return text, label

    def sample(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the row as a sample: the token ids `input_ids`, and the class index `labels`."""
        return {"input_ids": self.ids(row, place), "labels": self.labels.number(row[self.label_column], place)}

    def ids(self, row: Mapping[str, Any], place: str) -> list[int]:
        """Return the token ids of the row's text. The row needs no label."""
        text, most, cut = self._text(row, place), self.longest, self.truncates
        ids: list[int] = self.tokenizer(text, truncation=cut, max_length=most if cut else None, verbose=False)["input_ids"]
        if not 0 < len(ids) <= most:
            hint = "give a longer sequence_length, or too_long=truncate" if ids else "leave the row out"
            reject(place, f"its {self.text_column} has {len(ids)} tokens, and may have 1 to {most}; {hint}")
        return ids

    def _text(self, row: Mapping[str, Any], place: str) -> str:
        check_columns(place, row, [self.text_column])
        text = row[self.text_column]
        if not isinstance(text, str) or not text:
            reject(place, f"its {self.text_column} is {text!r}; give a text, or leave the row out")
        return text
