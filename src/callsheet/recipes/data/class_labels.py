"""The classes of a classification task: their names, numbers and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from callsheet.errors import ConfigError, did_you_mean
from callsheet.recipes.data.tables import reject
from callsheet.recipes.models.language_model import CLASSIFIER_SUFFIX, LanguageModel, load_pretrained

Weights = Literal["none", "balanced"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)


class ClassLabels:
    """Converts the labels of rows (names or numbers) to class indices, which start at 0.

    Args:
        names: the names of the classes, in the order of their numbers.
        are_numbers: whether the names are only the numbers as text, because the rows have no names.

    Raises:
        ConfigError: there are fewer than two names, or a name occurs twice.
    """

    def __init__(self, names: Sequence[str], *, are_numbers: bool = False) -> None:
        twice = [name for name, number in Counter(names).items() if number > 1]
        if twice:
            raise ConfigError(f"labels: {', '.join(twice)} occurs more than once; give each class its own name")
        if len(names) < 2:
            raise ConfigError(
                f"labels: the only class is {', '.join(names) or 'none'}; a classification needs two classes or more"
            )
        self.names = list(names)
        self.are_numbers = are_numbers
        self._numbers = {name: number for number, name in enumerate(names)}

    @classmethod
    def of(cls, labels: Iterable[tuple[str, Any]]) -> ClassLabels:
        """Make the classes from the labels of rows: names in alphabetical order or, if the labels are numbers, all numbers from 0 to the largest.

        Raises:
            ConfigError: a label is neither a name nor a number, some are names and others numbers, or there is only one class.
        """
        found: dict[Any, str] = {}
        for place, label in labels:
            _check_kind(label, place)
            found.setdefault(label, place)
        numbers = [label for label in found if isinstance(label, int)]
        if numbers and len(numbers) < len(found):
            name = next(label for label in found if isinstance(label, str))
            reject(
                found[name],
                f"the label {name!r} is a name, but the one at {found[numbers[0]]} is a number; give only names or only numbers",
            )
        if numbers:
            if min(numbers) < 0:
                reject(found[min(numbers)], f"the label {min(numbers)} is below 0, the number of the first class")
            return cls([str(number) for number in range(max(numbers) + 1)], are_numbers=True)
        return cls(sorted(found))

    def __len__(self) -> int:
        return len(self.names)

    def number(self, label: Any, place: str) -> int:
        """Return the class index of a label.

        Raises:
            ConfigError: there is no such class; the message names the place.
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
            reject(
                place, f"the label {label!r} is not one of the classes{near} ({', '.join(self.names[:20])}); add it to `labels`"
            )
        return self._numbers[label]


def align_with_head(labels: ClassLabels, model: LanguageModel, *, may_reorder: bool) -> ClassLabels:
    """Return the labels. If the pretrained model has a classification head, they get the class indices that the head uses.

    If the head has the same class names, the labels are put in the head's order. If the labels are only numbers, they get the head's names.

    Args:
        may_reorder: whether the order of the labels may change, because the user gave no order.

    Raises:
        ConfigError: the head has a different number of classes, or numbers the classes in another order.
    """
    if model.path is None:
        return labels
    from transformers import AutoConfig

    has = load_pretrained(AutoConfig, model.path, "model", model.revision)
    if not any(CLASSIFIER_SUFFIX in kind for kind in has.architectures or ()):
        return labels
    names = [has.id2label[number] for number in range(has.num_labels)]
    if len(names) != len(labels):
        raise ConfigError(
            f"the model {model.path} has {len(names)} classes ({', '.join(names[:20])}), and the data has {len(labels)} "
            f"({', '.join(labels.names[:20])}); name all classes of the model in `labels`, or give a model without a classification head"
        )
    if labels.are_numbers or (may_reorder and sorted(names) == sorted(labels.names)):
        return ClassLabels(names)
    numbers = {name.casefold(): number for number, name in enumerate(names)}
    for number, name in enumerate(labels.names):
        its = numbers.get(name.casefold(), number)
        if its != number:
            raise ConfigError(
                f"labels: the class {name} is number {number} of {', '.join(labels.names[:20])}, but in the model {model.path} it is number {its} "
                f"of {', '.join(names[:20])}; give `labels` in the model's order"
            )
    return labels


def class_weights(given: str | Sequence[float], counts: Sequence[int], names: Sequence[str]) -> list[float] | None:
    """Return the weight of each class in the loss; None for equal weights.

    The result is `given`, or None for `none`. For `balanced`, the weight of a class is (number of rows) / (number of classes * rows
    of the class).

    With `balanced`, all classes have the same total weight, and the mean weight of a row is 1.

    Args:
        counts: the number of training rows of each class; all 0 if they were not counted.

    Raises:
        ConfigError: there are not as many weights as classes; or `balanced` is given, and a class has no counted rows.
    """
    if given == "none":
        return None
    if given == "balanced":
        if not any(counts):
            raise ConfigError("class_weights=balanced: streamed rows are not counted before training; give the weights as a list")
        if not all(counts):
            name = names[list(counts).index(0)]
            raise ConfigError(f"class_weights=balanced: the class {name} has no rows to train on; give the weights as a list")
        return [sum(counts) / (len(counts) * count) for count in counts]
    if len(given) != len(names):
        raise ConfigError(
            f"class_weights: {len(given)} weights are given for {len(names)} classes ({', '.join(names)}); give one for each class"
        )
    return [float(weight) for weight in given]


def _check_kind(label: Any, place: str) -> None:
    if isinstance(label, bool) or not isinstance(label, (int, str)):
        reject(place, f"the label {label!r} is neither a name nor a whole number")
