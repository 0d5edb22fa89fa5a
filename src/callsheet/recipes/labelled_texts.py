"""Rows of a text and a label as samples of token ids and a number; what cannot be one is named by its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from callsheet.recipes.class_labels import ClassLabels
from callsheet.recipes.rows import check_columns, reject

TOO_LONG = ("truncate", "reject")


@dataclass(frozen=True)
class LabelledTexts:
    """How a row becomes a sample. All methods take its place as well, and raise ConfigError with it for a row that they cannot use.

    Args:
        tokenizer: of transformers.
        labels: the classes.
        text_column: where the text is.
        label_column: where the label is.
        longest: how many tokens a text may have.
        truncates: whether longer ones are cut; else they are refused.
    """

    tokenizer: Any
    labels: ClassLabels
    text_column: str
    label_column: str
    longest: int
    truncates: bool

    def checked(self, row: Mapping[str, Any], place: str) -> tuple[str, int]:
        """Its text, and its class's number; tokens are only counted where there may be too many."""
        text, label = self._text(row, place), self.labels.number(row[self.label_column], place)
        if not self.truncates:
            self.ids(row, place)
        return text, label

    def sample(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        """`input_ids` and `labels`."""
        return {"input_ids": self.ids(row, place), "labels": self.labels.number(row[self.label_column], place)}

    def ids(self, row: Mapping[str, Any], place: str) -> list[int]:
        """The tokens of its text; it needs no label."""
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
