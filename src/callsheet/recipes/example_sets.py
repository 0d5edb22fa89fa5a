"""The datasets of a job as examples of tokens, by name: padded or packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.recipes.conversations import Conversations
from callsheet.recipes.examples import Examples, ExampleStream, Fit
from callsheet.recipes.packing import Pack, Packed, PackedStream
from callsheet.recipes.padding import Padding
from callsheet.recipes.rows import Stream, Table


class ExampleSets:
    """Makes tokens of all rows that are not streamed.

    Args:
        rows: by the dataset's name.
        conversations: what makes tokens of a row.
        longest: tokens an example may have, and a packed row.
        too_long: what becomes of longer ones.
        packing: whether several examples stand in a row.
        flat: whether all packed rows of a batch stand in one, as flash attention wants it.
        pad_id: the token to fill up with.

    Raises:
        ConfigError: a row that cannot be used, or is too long and to be refused; it names the place.
    """

    def __init__(
        self,
        rows: Mapping[str, Table | Stream],
        conversations: Conversations,
        *,
        longest: int,
        too_long: str,
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
        """Makes a batch of the samples of any of them."""

    def dataset(self, name: str) -> Any:
        """Its samples: examples, or rows of several."""
        examples = self.examples[name]
        if not self._packing:
            return examples
        return Packed(examples, self._longest) if isinstance(examples, Examples) else PackedStream(examples, self._longest)

    def __str__(self) -> str:
        """How many there are of each, and what did not fit."""
        said = []
        for name, examples in self.examples.items():
            count = "a stream"
            if isinstance(examples, Examples):
                count = f"{len(examples):,} examples" + (f" in {len(self.dataset(name)):,} rows" if self._packing else "")
            said.append(f"{name}: {count}{self._fits[name]}")
        return "; ".join(said)
