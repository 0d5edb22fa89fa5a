"""Tables and streams of rows: from files of JSON lines, or from datasets of the library `datasets`. Errors name the place of the row."""

from __future__ import annotations

import json
import mmap
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from callsheet.errors import ConfigError, check_characters, did_you_mean

_SURROGATE_PATTERN = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Matches each part of a surrogate pair in the bytes of a JSON text. The parser combines the parts of whole pairs to one character."""

Row = Mapping[str, Any]


class Table(Sequence[Row]):
    """A sequence of rows that can be read in any order."""

    def place(self, index: int) -> str:
        """Return the place of a row for messages, such as `train.jsonl:17`."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def places(self) -> Iterator[tuple[str, Row]]:
        """Yield each row with its place, such as `train.jsonl:17`, for error messages."""
        return ((self.place(index), self[index]) for index in range(len(self)))


class LineTable(Table):
    """A table of the rows in files of JSON lines. All lines are checked at the start, but kept on disk and read when needed."""

    def __init__(self, files: Sequence[Path], columns: Collection[str] = (), limit: int | None = None) -> None:
        self._files = files
        self._file, self._start, self._line = array("L"), array("Q"), array("Q")
        self._maps: dict[int, mmap.mmap] = {}
        for number, file in enumerate(files):
            for line_number, start, line in _lines(file):
                if limit is not None and len(self) >= limit:
                    break
                row = _parse_line(line, f"{file}:{line_number}")
                check_columns(f"{file}:{line_number}", row, columns)
                self._file.append(number)
                self._start.append(start)
                self._line.append(line_number)
        if not len(self):
            _reject_empty(files)

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, index: Any) -> Any:
        number, start = self._file[index], self._start[index]
        if number not in self._maps:
            with self._files[number].open("rb") as file:
                self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content = self._maps[number]
        end = content.find(b"\n", start)
        return _parse_line(content[start : end if end >= 0 else len(content)], self.place(index))

    def place(self, index: int) -> str:
        """Return the row's file and its line number, counted from 1."""
        return f"{self._files[self._file[index]]}:{self._line[index]}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # do not pickle the open files, because each worker process opens the files itself


class DatasetTable(Table):
    """A table of rows from a dataset of the library `datasets`, without the null keys that Arrow adds (see `_own_keys`)."""

    def __init__(self, dataset: Any, path: str) -> None:
        self._dataset = dataset
        self._path = path

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return _own_row(self._dataset[index], self._dataset.features)

    def place(self, index: int) -> str:
        """Return the data's path and the row's number, counted from 1."""
        return f"{self._path}, row {index + 1}"


class Stream(IterableDataset[Any]):
    """Rows that can only be read in sequence. If there are several workers, each reads its own part of the rows.

    A resumed run reads the rows again that it had already used, and skips them.
    """

    def places(self) -> Iterator[tuple[str, Row]]:
        """Yield each row with its place, such as `train.jsonl:17`, for error messages.

        Raises:
            ConfigError: a row cannot be read, or a column is missing; the message names the place.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in self.places())


class LineStream(Stream):
    """A stream of the rows in files of JSON lines. Each line is checked when it is read."""

    def __init__(self, files: Sequence[Path], columns: Collection[str] = (), limit: int | None = None) -> None:
        self._files = files
        self._columns = columns
        self._rows_of: dict[Path, int] = {}  # how many rows to use of each file; empty if `limit` is None
        if limit is not None:
            for file in files:
                self._rows_of[file] = sum(1 for _ in islice(_lines(file), limit))
                limit -= self._rows_of[file]
        if next(self.places(), None) is None:
            _reject_empty(files)

    def places(self) -> Iterator[tuple[str, Row]]:
        """Yield each row with its file and line number, counted from 1."""
        for file in _own_files(self._files):
            for number, _, line in islice(_lines(file), self._rows_of.get(file)):
                place = f"{file}:{number}"
                row = _parse_line(line, place)
                check_columns(place, row, self._columns)
                yield place, row


class DatasetStream(Stream):
    """A stream of rows from a dataset of the library `datasets`, without the null keys that Arrow adds (see `_own_keys`).

    Args:
        source: the dataset.
        path: what the user has given as the path.
        columns: the columns that every row must have.
        parquet: the files, if the dataset is read from Parquet files.
    """

    def __init__(self, source: Any, path: str, columns: Collection[str] = (), parquet: Sequence[str] = ()) -> None:
        self._source = source
        self._path = path
        self._columns = columns
        self._parquet = parquet

    def places(self) -> Iterator[tuple[str, Row]]:
        """Yield each row with the data's path and the row's number, counted from 1. A worker counts the rows of its own part."""
        features, rows, worker = self._source.features, iter(self._source), get_worker_info()
        part = f" of the part of worker {worker.id}" if worker is not None else ""
        for number in count(1):
            place = f"{self._path}, row {number}{part}"
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # `datasets` and the hub raise many kinds of errors
                place = self._place_in_file(number) or place
                if isinstance(error, FileNotFoundError):
                    raise ConfigError(f"there is no file {error.filename or place}") from error
                raise ConfigError(
                    f"{place}: this row or one of the next rows cannot be read: "
                    f"{type(error).__name__}: {' '.join(str(error).split())}; repair the data, or leave the row out"
                ) from error
            check_columns(place, row, self._columns)
            yield place, _own_row(row, features)

    def _place_in_file(self, number: int) -> str:
        """Return the Parquet file of the row `number`, with the row's number in this file. Return an empty string if it is unknown."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_metadata

        for file in _own_files(self._parquet):
            try:
                rows = read_metadata(file).num_rows
            except (OSError, ArrowException):  # the file is missing or damaged
                return str(file)
            if number <= rows:
                return f"{file}, row {number}"
            number -= rows
        return ""


def reject(place: str, why: str) -> NoReturn:
    """Raise ConfigError for the row at `place`. The text `why` says what is wrong and what to do."""
    raise ConfigError(f"{place}: {why}")


def check_columns(place: str, there: Collection[str], wanted: Collection[str]) -> None:
    """Raise ConfigError unless each column in `wanted` is one of `there`, the existing columns.

    Raises:
        ConfigError: a column is missing; the message names the closest existing one.
    """
    for column in wanted:
        if column not in there:
            reject(place, f"there is no column {column!r}{did_you_mean(column, there)} (it has {', '.join(there) or 'none'})")


def _lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, the start and the content of each line of a file that is not blank.

    Raises:
        ConfigError: the file does not exist, or cannot be read.
    """
    check_exists(file)
    try:
        with file.open("rb") as lines:
            start = 0
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, start, line
                start += len(line)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


def check_exists(file: Path) -> None:
    """Raise ConfigError if a file does not exist."""
    if not file.is_file():
        beside = [each.name for each in file.parent.iterdir() if each.name != file.name] if file.parent.is_dir() else []
        raise ConfigError(f"there is no file {file}{did_you_mean(file.name, beside, cutoff=0.8)}")


def _reject_empty(files: Sequence[Path]) -> NoReturn:
    raise ConfigError(f"{', '.join(map(str, files))}: the file has no rows; give one with a JSON object on each line")


def _own_files(files: Sequence[Any]) -> list[Any]:
    """Return the files that this worker reads, as `datasets` divides them; all files if there are no workers."""
    worker = get_worker_info()
    return list(files) if worker is None else list(files[worker.id :: worker.num_workers])


def _own_row(row: Row, features: Mapping[str, Any] | None) -> Row:
    """Return a row without the null keys that Arrow adds inside the row's values (see `_own_keys`). All columns are kept."""
    return {name: _own_keys(value, (features or {}).get(name)) for name, value in row.items()}


def _own_keys(value: Any, feature: Any) -> Any:
    """Return the value without null keys, which Arrow adds for keys that only other rows have.

    In an Arrow column of objects (a struct), every object has the keys of all rows. A key that an object did not have is null there,
    and cannot be distinguished from a key that was null. Therefore, all null keys of objects are removed.

    Args:
        value: a value that `datasets` has read.
        feature: its type, as `datasets` describes it: a dictionary for a struct; None if `datasets` does not know the type.
    """
    if isinstance(value, Mapping) and (feature is None or isinstance(feature, Mapping)):
        return {name: _own_keys(part, (feature or {}).get(name)) for name, part in value.items() if part is not None}
    item = getattr(feature, "feature", None)  # the type of the items, if `feature` describes a list
    if isinstance(value, list) and (feature is None or item is not None):
        return [_own_keys(part, item) for part in value]
    return value


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        text = json.dumps(row, ensure_ascii=False) if _SURROGATE_PATTERN.search(line) else ""
    except ValueError as error:  # the line is not JSON or not UTF-8
        reject(place, f"this line is not JSON: {error}; give one JSON object per line")
    except RecursionError:
        reject(place, "the values of this line are nested too deeply to be read; give one flat JSON object per line")
    check_characters(text, place)
    if not isinstance(row, dict):
        reject(place, f"this line is a JSON {type(row).__name__}, not an object; give an object with a value for each column")
    return row
