"""The datasets of a fine-tuning job: tokenized examples that are padded, or packed into rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.recipes.data.conversations import Conversations
from callsheet.recipes.data.examples import Examples, ExampleStream, Fit, TooLong
from callsheet.recipes.data.packing import Pack, Packed, PackedStream
from callsheet.recipes.data.padding import Padding
from callsheet.recipes.data.tables import Stream, Table


class ExampleSets:
    """The datasets of a job. All rows are tokenized at the start, except streamed rows, which are tokenized when they are read.

    Args:
        rows: the rows by the dataset's name.
        conversations: converts a row to tokens.
        longest: the maximum number of tokens of an example, and of a packed row.
        too_long: what happens to longer examples.
        packing: whether several examples are put into one row.
        flat: whether all packed rows of a batch are concatenated into one row, which flash attention requires.
        pad_id: the padding token.

    Raises:
        ConfigError: a row cannot be used, or is too long and `too_long` is `reject`; the message names its place.
    """

    def __init__(
        self,
        rows: Mapping[str, Table | Stream],
        conversations: Conversations,
        *,
        longest: int,
        too_long: TooLong,
        packing: bool,
        flat: bool,
        pad_id: int,
    ) -> None:
        self._longest, self._packing = longest, packing
        self._fits = {name: Fit(longest, too_long) for name in rows}
        self.examples: dict[str, Examples | ExampleStream] = {
            name: Examples(some, conversations.example, self._fits[name])
            if isinstance(some, Table)
            else ExampleStream(some, conversations.example, self._fits[name])
            for name, some in rows.items()
        }
        self.collate: Any = Pack(pad_id, flat=flat) if packing else Padding(pad_id)
        """The `collate_fn` of the DataLoaders of all datasets: it combines samples into a batch."""

    def dataset(self, name: str) -> Any:
        """Return the samples of the dataset `name`, which are examples or, with packing, rows of several examples."""
        examples = self.examples[name]
        if not self._packing:
            return examples
        return Packed(examples, self._longest) if isinstance(examples, Examples) else PackedStream(examples, self._longest)

    def __str__(self) -> str:
        """Return a text with the number of examples of each dataset, and the number of examples that were too long."""
        parts = []
        for name, examples in self.examples.items():
            count = "a stream"
            if isinstance(examples, Examples):
                count = f"{len(examples):,} examples" + (f" in {len(self.dataset(name)):,} rows" if self._packing else "")
            parts.append(f"{name}: {count}{self._fits[name]}")
        return "; ".join(parts)
