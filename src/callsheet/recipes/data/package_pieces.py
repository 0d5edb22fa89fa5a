"""Data for a classifier of source code: pieces of code, labeled with the Python package from which they come.

By default, the packages are those of the standard library, so the data needs no download.
"""

from __future__ import annotations

import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from callsheet.errors import ConfigError, did_you_mean
from callsheet.recipes.data.tables import Table

_LEFT_OUT_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})
_MIN_FILES = 10  # smaller packages are not chosen automatically: training, validation and test each need files


@dataclass
class PackagePieces:
    """The source files of Python packages as rows of `text` and `label` (the package's name).

    Args:
        folder: the folder whose subfolders are the packages; None is the standard library of the running Python, without its tests.
        packages: the packages to use; None takes the largest `most_packages` that have at least ten files.
        most_packages: the number of packages to use, if `packages` is None.
        characters: the number of characters in a piece. Source files are cut into pieces, and each piece is one sample.
        most_pieces: the maximum number of pieces of a package in each of training, validation and test; they are evenly spread over
            the package's files.
        validation_percent: the percentage of files for validation; at least one file of each package is used.
        test_percent: the percentage of files for the test after training.
    """

    folder: str | None = None
    packages: list[str] | None = None
    most_packages: int = 8
    characters: int = 256
    most_pieces: int = 1500
    validation_percent: int = 10
    test_percent: int = 10

    def __post_init__(self) -> None:
        if min(self.characters, self.most_pieces, self.validation_percent, self.test_percent) < 1 or self.most_packages < 2:
            raise ConfigError("pieces: give two packages or more, and 1 or more for everything else")
        if self.validation_percent + self.test_percent >= 100:
            raise ConfigError(
                "pieces: validation_percent and test_percent come to 100 or more; nothing would be left to train on"
            )

    @cached_property
    def root(self) -> Path:
        """The folder that contains the packages."""
        return Path(self.folder if self.folder is not None else sysconfig.get_path("stdlib"))

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files of each package, in an order that does not depend on their content.

        Raises:
            ConfigError: there is no such folder or package, or too few files to hold some out.
        """
        if not self.root.is_dir():
            raise ConfigError(f"pieces.folder: there is no folder {self.root}")
        found: dict[str, list[Path]] = defaultdict(list)
        for path in self.root.rglob("*.py"):
            parts = path.relative_to(self.root).parts
            if len(parts) > 1 and not _LEFT_OUT_FOLDERS & set(parts) and path.stat().st_size:
                found[parts[0]].append(path)
        names = self.packages if self.packages is not None else self._largest(found)
        for name in names:
            if len(found.get(name, ())) < 3:
                raise ConfigError(
                    f"pieces.packages: {self.root} has not three files of a package {name}{did_you_mean(name, found)}; each package needs some to train "
                    "on, to validate and to test with"
                )
        return {name: sorted(found[name], key=self._draw) for name in names}

    def train(self) -> Table:
        """Return the rows for training."""
        return self._rows(0)

    def validation(self) -> Table:
        """Return the rows for validation, which come from other files than the rows for training."""
        return self._rows(1)

    def test(self) -> Table:
        """Return the rows for the test, which come from other files than the rows for training and validation."""
        return self._rows(2)

    def _largest(self, found: dict[str, list[Path]]) -> list[str]:
        sizes = {name: sum(path.stat().st_size for path in paths) for name, paths in found.items() if len(paths) >= _MIN_FILES}
        return sorted(sorted(sizes, key=lambda name: -sizes[name])[: self.most_packages])

    def _draw(self, path: Path) -> bytes:
        return sha256(path.relative_to(self.root).as_posix().encode()).digest()

    def _rows(self, part: int) -> Table:
        rows: list[tuple[str, str, str]] = []
        for name, paths in self.files.items():
            validation, test = (max(1, len(paths) * percent // 100) for percent in (self.validation_percent, self.test_percent))
            those = (paths[validation + test :], paths[:validation], paths[validation : validation + test])[part]
            pieces = [(name, piece, place) for path in those for piece, place in self._pieces(path)]
            step = max(1.0, len(pieces) / self.most_pieces)
            rows += [pieces[int(index * step)] for index in range(min(len(pieces), self.most_pieces))]
        return Pieces(rows)

    def _pieces(self, path: Path) -> list[tuple[str, str]]:
        text = path.read_text(encoding="utf-8", errors="replace")
        # Leave out an incomplete last piece, unless it is the only piece.
        starts = range(0, max(1, len(text) - self.characters + 1), self.characters)
        return [(text[start : start + self.characters], f"{path}, character {start}") for start in starts]


class Pieces(Table):
    """A table with a text and a label in each row, made from tuples of label, text and the place of the text in its file."""

    def __init__(self, pieces: list[tuple[str, str, str]]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, str]:  # type: ignore[override]  # slices are not supported
        label, text, _ = self._pieces[index]
        return {"text": text, "label": label}

    def place(self, index: int) -> str:
        """Return where the piece of a row begins, as a text for messages: its file and the position in the file."""
        return self._pieces[index][2]
