"""Reads rows of data from JSON lines, Parquet files, a folder of these, or a dataset on the hub.

Errors name the place of the row.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from callsheet.errors import ConfigError, check_characters, did_you_mean
from callsheet.recipes.data.tables import (
    DatasetStream,
    DatasetTable,
    LineStream,
    LineTable,
    Row,
    Stream,
    Table,
    check_columns,
    check_exists,
)

_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_FILES_OF_DATASETS = ("metadata.jsonl", "dataset_info.json", "dataset_dict.json")
"""Files that mark a folder which only the library `datasets` can read."""
_SPLIT_PREFIXES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""For each split of a dataset, the prefixes of its file names, such as `valid` for `validation`."""

Transform = Callable[[Row, str], Any]
"""A function that converts a row; its arguments are the row and the row's place.

It rejects a row by calling `reject(place, why)`.
"""


@dataclass
class Rows:
    """A source of rows: files, a folder, or a dataset on the Hugging Face hub, and the split to use.

    Args:
        path: a file of JSON lines or a Parquet file, a pattern such as `data/*.jsonl`, a folder of such files (or of images, with their
            `metadata.jsonl`), a folder that the library `datasets` has saved, or the name of a dataset on the hub.
        name: the configuration of a dataset on the hub.
        split: the split to read, if the folder or the dataset has several.
        revision: the revision of a dataset on the hub.
        streaming: whether to read rows only when they are needed, without knowing their number.
        limit: how many rows to use, from the first; None uses all.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    limit: int | None = None

    def read(self, columns: Collection[str]) -> Table | Stream:
        """Return the rows as a table or, if `streaming` is set, as a stream.

        Streamed rows are not read here, so only the columns of the first row are checked, if they are known.

        Args:
            columns: the columns that every row must have.

        Raises:
            ConfigError: there are no rows, a line is not a JSON object, a column is missing, or the files are of several kinds.
        """
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit}: give 1 or more rows")
        # An existing file is no pattern, even if its name has brackets.
        is_pattern = glob.has_magic(self.path) and not Path(self.path).exists()
        files = sorted(glob.glob(self.path)) if is_pattern else self._of_folder() or [self.path]
        if is_pattern and not files:
            raise ConfigError(f"no file matches {self.path}")
        self._check_kinds(files)
        is_local = not any("://" in file for file in files)
        for file in files if is_local else ():
            if file.endswith(".parquet") and not Path(file).is_dir():
                check_exists(Path(file))
        if all(file.endswith(_JSON_ENDINGS) for file in files) and (is_local or not self.streaming):
            paths = [Path(file) for file in files]
            return (LineStream if self.streaming else LineTable)(paths, columns, self.limit)
        return self._dataset(files, columns)

    def _of_folder(self) -> list[str]:
        """Return the files with rows in the folder `path`. Return no files if the library `datasets` must read the folder.

        `datasets` reads a folder without JSON-lines files. If file names begin with splits' names, return only the files of `split`.
        """
        folder = Path(self.path)
        if not folder.is_dir() or any((folder / name).exists() for name in _FILES_OF_DATASETS):
            return []
        found = sorted(file for file in folder.iterdir() if file.suffix in (*_JSON_ENDINGS, ".parquet") and file.is_file())
        if not any(file.suffix in _JSON_ENDINGS for file in found):
            return []
        split = _SPLIT_PREFIXES.get(self.split, (self.split,))
        if mine := [file for file in found if file.name.startswith(split)]:
            return [str(file) for file in mine]
        named = [
            file.name
            for file in found
            if file.name.startswith(tuple(name for names in _SPLIT_PREFIXES.values() for name in names))
        ]
        if named:
            raise ConfigError(
                f"{self.path} has no file of the split {self.split!r}, but has {', '.join(named)}; name another split, or give a file as the path"
            )
        return [str(file) for file in found]

    def _check_kinds(self, files: Sequence[str]) -> None:
        """Raise ConfigError if some of the files have JSON lines and others are Parquet files."""
        lines, parquet = (next((file for file in files if file.endswith(ending)), None) for ending in (_JSON_ENDINGS, ".parquet"))
        if lines is not None and parquet is not None:
            raise ConfigError(
                f"{self.path} has files of JSON lines and Parquet files, such as {Path(lines).name} and {Path(parquet).name}; give a "
                f"pattern for one kind as the path, such as {Path(lines).parent / '*'}{Path(lines).suffix}"
            )

    def _dataset(self, files: list[str], columns: Collection[str]) -> Table | Stream:
        import datasets

        is_parquet, is_json = (all(file.endswith(endings) for file in files) for endings in (".parquet", _JSON_ENDINGS))
        try:
            if is_parquet or is_json:
                kind = "parquet" if is_parquet else "json"
                escaped = [glob.escape(file) for file in files]  # escape the names, because `datasets` reads them as patterns
                found = datasets.load_dataset(kind, data_files=escaped, split="train", streaming=self.streaming)
            elif is_saved := any((Path(self.path) / name).exists() for name in ("state.json", "dataset_dict.json")):
                found = self._prepare_saved(datasets.load_from_disk(self.path))
            else:
                found = datasets.load_dataset(
                    self.path, self.name, split=self.split, revision=self.revision, streaming=self.streaming
                )
        except ConfigError:
            raise
        except Exception as error:  # `datasets` and the hub raise many kinds of errors
            raise ConfigError(
                f"no rows could be read from {self.path}: {type(error).__name__}: {error}; give a file of JSON lines or a Parquet file, "
                "a folder of them, or the name of a dataset on the hub"
            ) from error
        names = getattr(found, "column_names", None)
        if names is not None:
            check_columns(self.path, names, columns)
        if self.streaming:
            if self.limit is not None and not is_saved:  # `_prepare_saved` has applied the limit
                found = found.take(self.limit)
            return DatasetStream(found, self.path, columns, files if is_parquet else ())
        if not len(found):
            raise ConfigError(f"{self.path} has no rows")
        return DatasetTable(found if self.limit is None else found.select(range(min(self.limit, len(found)))), self.path)

    def _prepare_saved(self, found: Any) -> Any:
        """Return the dataset that `datasets` has loaded from a saved folder; of several splits, the split `split`."""
        if isinstance(found, Mapping):
            if self.split not in found:
                near = did_you_mean(self.split, found)
                raise ConfigError(f"{self.path} has no split {self.split!r}{near} (it has {', '.join(found) or 'none'})")
            found = found[self.split]
        if not self.streaming:
            return found
        columns = found.format["columns"]
        found = found.with_format(None)  # rows have plain values, and a formatted dataset cannot be divided
        if columns != found.column_names:
            found = found.select_columns(columns)
        if self.limit is not None:
            found = found.select(range(min(self.limit, len(found))))
        # As an iterable dataset, it is divided among the workers of a dataloader, one part for each of its files.
        return found.to_iterable_dataset(max(1, min(len(found.cache_files), len(found))))


class Prepared(Dataset[Any]):
    """A dataset of a table's rows, which are converted when they are read."""

    def __init__(self, table: Table, transform: Transform) -> None:
        self.table = table
        self._transform = transform

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self.table[index], self.table.place(index))


class PreparedStream(IterableDataset[Any]):
    """A dataset of a stream's rows, which are converted when they are read."""

    def __init__(self, stream: Stream, transform: Transform) -> None:
        self._stream = stream
        self._transform = transform

    def __iter__(self) -> Iterator[Any]:
        return (self._transform(row, place) for place, row in self._stream.places())


def prepare_rows(rows: Table | Stream, transform: Transform) -> Prepared | PreparedStream:
    """Return a dataset of the rows, which `transform` converts when they are read."""
    return Prepared(rows, transform) if isinstance(rows, Table) else PreparedStream(rows, transform)


def number_rows(rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    """Yield each row that a program has given, with its place, such as `row 3`, for error messages.

    Raises:
        ConfigError: a text in a row has half of a surrogate pair.
    """
    for number, row in enumerate(rows, 1):
        try:
            text = json.dumps(row, ensure_ascii=False, skipkeys=True, default=lambda value: None)
        except (ValueError, RecursionError):
            text = ""  # a value that the recipe does not use contains itself
        check_characters(text, f"row {number}")
        yield f"row {number}", row
