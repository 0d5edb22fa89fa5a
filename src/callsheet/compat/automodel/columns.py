"""Datasets whose columns are renamed, for AutoModel's setting `column_mapping`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from callsheet.errors import ConfigError
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.data.tables import Stream, Table, check_columns


@dataclass
class MappedRows(Rows):
    """A dataset whose columns are renamed to `prompt` and `completion` when it is read.

    Args:
        columns: maps `answer`, `question` and `context` to the names of the columns that hold them. A prompt consists of the
            context and then the question.
    """

    columns: dict[str, str] = field(default_factory=dict)

    def read(self, columns: Collection[str]) -> Table | Stream:
        rows = super().read(tuple(self.columns.values()))
        if isinstance(rows, Stream):
            raise ConfigError(f"{self.path}: columns of rows that are streamed cannot be renamed; give prompt and completion")
        return MappedTable(rows, self.columns)


class MappedTable(Table):
    """The table that `MappedRows.read` returns. Its rows have the columns `prompt` and `completion`."""

    def __init__(self, table: Table, columns: dict[str, str]) -> None:
        self._table, self._columns = table, columns

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        row, columns = self._table[index], self._columns
        check_columns(self.place(index), row, columns.values())
        asked = [row[columns[name]] for name in ("context", "question") if name in columns]
        return {
            "prompt": "\n".join(asked) if all(isinstance(text, str) for text in asked) else asked[0],
            "completion": row[columns["answer"]],
        }

    def place(self, index: int) -> str:
        return self._table.place(index)
