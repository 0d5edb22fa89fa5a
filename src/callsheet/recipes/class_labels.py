"""The classes of a classification: their names and numbers, how many rows have each, and what each weighs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from callsheet.errors import ConfigError, did_you_mean
from callsheet.recipes.language_model import CLASSIFIES, LanguageModel, loaded
from callsheet.recipes.rows import reject

WEIGHTS = ("none", "balanced")


class ClassLabels:
    """Labels as rows have them, names or numbers, and the numbers from 0 that the model has for them.

    Args:
        names: of the classes, in the order of their numbers.
        are_numbers: whether the names are those numbers, for want of others.

    Raises:
        ConfigError: fewer than two, or one twice.
    """

    def __init__(self, names: Sequence[str], *, are_numbers: bool = False) -> None:
        twice = [name for name, number in Counter(names).items() if number > 1]
        if twice:
            raise ConfigError(f"labels: {', '.join(twice)} stands there more than once; give each class one name")
        if len(names) < 2:
            raise ConfigError(f"labels: {', '.join(names) or 'none'} is all there is; a classification needs two classes or more")
        self.names = list(names)
        self.are_numbers = are_numbers
        self._numbers = {name: number for number, name in enumerate(names)}

    @classmethod
    def of(cls, labels: Iterable[tuple[str, Any]]) -> ClassLabels:
        """Those that occur, given with their places: names in alphabetical order, or the numbers up to the greatest.

        Raises:
            ConfigError: one is neither a name nor a number, some are names and others numbers, or there is but one.
        """
        found: dict[Any, str] = {}
        for place, label in labels:
            _check_kind(label, place)
            found.setdefault(label, place)
        numbers = [label for label in found if isinstance(label, int)]
        if numbers and len(numbers) < len(found):
            name = next(label for label in found if isinstance(label, str))
            reject(found[name], f"the label {name!r} is a name, and that at {found[numbers[0]]} a number; give names or numbers")
        if numbers:
            if min(numbers) < 0:
                reject(found[min(numbers)], f"the label {min(numbers)} is below 0, the number of the first class")
            return cls([str(number) for number in range(max(numbers) + 1)], are_numbers=True)
        return cls(sorted(found))

    def __len__(self) -> int:
        return len(self.names)

    def number(self, label: Any, place: str) -> int:
        """The class's number.

        Raises:
            ConfigError: there is no such class; with the place.
        """
        _check_kind(label, place)
        if isinstance(label, int):
            if not 0 <= label < len(self.names):
                reject(
                    place, f"the label {label} is out of range; there are {len(self.names)} classes, 0 to {len(self.names) - 1}"
                )
            return label
        if label not in self._numbers:
            near = did_you_mean(label, self.names)
            reject(place, f"the label {label!r} is none of the classes{near} ({', '.join(self.names[:20])}); add it to `labels`")
        return self._numbers[label]


def agreed_with_head(labels: ClassLabels, model: LanguageModel, *, may_reorder: bool) -> ClassLabels:
    """The labels as a classifying head that the model has already is to tell them apart.

    Where they are the head's, in its order; where they are mere numbers, with the head's names.

    Args:
        may_reorder: whether nobody gave them an order.

    Raises:
        ConfigError: the head has another number of classes, or some of them under other numbers.
    """
    if model.path is None:
        return labels
    from transformers import AutoConfig

    has = loaded(AutoConfig, model.path, "model", model.revision)
    if not any(CLASSIFIES in kind for kind in has.architectures or ()):
        return labels
    names = [has.id2label[number] for number in range(has.num_labels)]
    if len(names) != len(labels):
        raise ConfigError(
            f"the model {model.path} tells {len(names)} classes apart ({', '.join(names[:20])}), and there are {len(labels)} "
            f"({', '.join(labels.names[:20])}); name all of the model's in `labels`, or give a model without a classifying head"
        )
    if labels.are_numbers or (may_reorder and sorted(names) == sorted(labels.names)):
        return ClassLabels(names)
    numbers = {name.casefold(): number for number, name in enumerate(names)}
    for number, name in enumerate(labels.names):
        its = numbers.get(name.casefold(), number)
        if its != number:
            raise ConfigError(
                f"labels: the class {name} is number {number} of {', '.join(labels.names[:20])}, and to the model {model.path} it is number {its} "
                f"of {', '.join(names[:20])}; name them in `labels` in the model's order"
            )
    return labels


def class_weights(given: str | Sequence[float], counts: Sequence[int], names: Sequence[str]) -> list[float] | None:
    """What a sample of each class weighs: as given; nothing for `none`; for `balanced` rows / (classes * rows of the class).

    Balanced classes all weigh the same together, and the mean row weighs 1.

    Args:
        counts: rows of each class to train on; all 0 where they were not counted.

    Raises:
        ConfigError: there are not as many as classes; or they are to be balanced, and a class has no rows that were counted.
    """
    if given == "none":
        return None
    if given == "balanced":
        if not any(counts):
            raise ConfigError(
                "class_weights=balanced: rows that are streamed are not counted beforehand; give the weights as a list"
            )
        if not all(counts):
            name = names[list(counts).index(0)]
            raise ConfigError(f"class_weights=balanced: the class {name} has no rows to train on; give the weights as a list")
        return [sum(counts) / (len(counts) * count) for count in counts]
    if len(given) != len(names):
        raise ConfigError(f"class_weights has {len(given)} numbers, and there are {len(names)} classes: {', '.join(names)}")
    return [float(weight) for weight in given]


def _check_kind(label: Any, place: str) -> None:
    if isinstance(label, bool) or not isinstance(label, (int, str)):
        reject(place, f"the label {label!r} is neither a name nor a whole number")
