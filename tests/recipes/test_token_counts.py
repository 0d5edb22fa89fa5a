"""The unigram and bigram baselines, compared with an independent computation."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from callsheet.recipes.data.conversations import Example
from callsheet.recipes.data.docstrings import Docstrings
from callsheet.recipes.data.examples import Examples, Fit
from callsheet.recipes.data.tables import Row, Table
from callsheet.recipes.tasks.token_counts import TokenCounts


class GivenRows(Table):
    """Rows of letters; capital letters are targets."""

    def __init__(self, *rows: str) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # no slices here
        return {"row": self._rows[index]}

    def place(self, index: int) -> str:
        return f"row {index}"


def encode(row: Row, _: str) -> Example:
    """Return the letters as tokens. Capital letters are targets."""
    return Example([ord(letter.lower()) - ord("a") for letter in row["row"]], [letter.isupper() for letter in row["row"]])


def examples(*rows: str) -> Examples:
    return Examples(GivenRows(*rows), encode, Fit(100, "reject"))


def test_cross_entropies_equal_those_of_an_independent_computation() -> None:
    train, evaluated = ["abAB", "abBA", "cC", "Aab" + "A" * 3], ["bAC", "aBD"]
    follows = [(row[i - 1].lower(), row[i].lower()) for row in train for i in range(1, len(row)) if row[i].isupper()]
    single, pairs, before = Counter(b for _, b in follows), Counter(follows), Counter(a for a, _ in follows)
    followers = Counter(a for a, _ in pairs)

    def p(b: str) -> float:
        return (single[b] + 1) / (len(follows) + 4)

    wanted = [(row[i - 1].lower(), row[i].lower()) for row in evaluated for i in range(1, len(row)) if row[i].isupper()]
    unigram = -sum(math.log(p(b)) for _, b in wanted) / len(wanted)
    bigram = -sum(
        math.log((pairs[a, b] + followers[a] * p(b)) / (before[a] + followers[a]) if before[a] else p(b)) for a, b in wanted
    ) / len(wanted)
    found = TokenCounts(examples(*train), vocabulary=4).cross_entropies(examples(*evaluated))
    assert found == pytest.approx((unigram, bigram))


def test_rows_of_docstrings_come_from_their_source_and_no_file_is_in_two_sets() -> None:
    import argparse

    made = Docstrings(folder=str(argparse.__file__).rpartition("/")[0] + "/email", held_out_percent=40)
    sets = {"train": made.train, **made.validation}
    assert all(len(rows) > 5 for rows in sets.values())
    for name, rows in sets.items():
        for index, row in enumerate(rows):
            question, answer = (message["content"] for message in row["messages"])
            path, _, line = rows.place(index).rpartition(":")
            with open(path, encoding="utf-8") as file:
                source = file.read()
            signature = question.partition(": ")[2].partition("(")[0]
            assert f"def {signature.rpartition('.')[2]}(" in "\n".join(source.splitlines()[int(line) - 1 : int(line) + 3])
            assert answer in source
            assert name == "train" or ("." in signature) == (name == "methods")
    held_out = {rows.place(i).rpartition(":")[0] for rows in made.validation.values() for i in range(len(rows))}
    assert not held_out & {made.train.place(i).rpartition(":")[0] for i in range(len(made.train))}
