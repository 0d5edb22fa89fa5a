"""Collects logged values, and reduces them every few steps to a record of floats that is the same on all ranks.

Tensors stay on their device until the log boundary. There, each device's tensors are copied to the host in one copy, and the
values of all ranks are reduced with two collectives: a sum and a maximum. All ranks share a schema, which fixes the index of each
value in the reduced lists. The ranks compare digests of their schemas, and extend the shared schema if a rank logged new names.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, Protocol, get_args

from callsheet.core.callback import one_of
from callsheet.core.context import Across, Loggable, Over
from callsheet.errors import ConfigError
from callsheet.run.devices import on_one_device

if TYPE_CHECKING:
    from torch import Tensor

OVER: tuple[Over, ...] = get_args(Over)
ACROSS: tuple[Across, ...] = get_args(Across)

_MAX_VALUES_PER_SERIES = 256  # replace the values of a name by their sum when there are this many, which limits memory
_CUDA_GRAPHS_MODULE = "torch._inductor.cudagraph_trees"  # the module that torch imports when it records the first CUDA graph


Schema = dict[str, tuple[Over, Across]]
"""Maps each logged name to how its values are combined: `over` the steps and `across` the ranks."""

Names = str | tuple[str, ...]
"""One metric name, or a tuple with a name for each number in a one-dimensional tensor."""


class Reducer(Protocol):
    """Reduces values over the ranks. Every rank must make the same calls in the same order."""

    def sum_and_max(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the sum over the ranks of each value in `sums`, and the maximum over the ranks of each value in `maxima`."""

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in the order of ranks."""


class Series:
    """The values of one metric (or of several metrics that are logged in one tensor) that were logged since the last metrics record.

    The names of one tensor are a tuple, with a name for each number.
    """

    __slots__ = ("across", "last", "over", "unweighted", "values", "weights")

    def __init__(self, over: Over, across: Across) -> None:
        self.over = over
        self.across = across
        self.clear()

    def clear(self) -> None:
        """Remove all values."""
        self.values: list[Any] = []
        self.weights: list[Any] = []
        self.unweighted = 0  # the number of values that were logged without a weight; each counts with weight 1
        self.last: Any = None  # the value that was logged last; `values` may contain it only as a part of a sum or product

    def add(self, value: Any, weight: Any = None) -> None:
        """Add a logged value, with its weight."""
        self.last = value
        if self.over == "last":
            self.values = [value]
            return
        values = self.values
        if weight is None or self.over == "sum":
            values.append(value)
            self.unweighted += 1
        else:
            self.weights.append(weight)
            if hasattr(weight, "device") and hasattr(value, "device"):
                value, weight = on_one_device([value, weight])
            values.append(_wider(value) * _wider(weight))
        if len(values) >= _MAX_VALUES_PER_SERIES:
            self.values = [_total(values)]
            self.weights = [_total(self.weights)] if self.weights else []

    def split(self, names: Sequence[str]) -> Mapping[str, Series]:
        """Split this series of tensors into one series for each of the tensors' `names`. Return the new series by name."""
        apart: dict[str, Series] = {}
        for place, name in enumerate(names):
            apart[name] = series = Series(self.over, self.across)
            series.values = [vector[place] for vector in self.values]
            series.last = self.last[place] if self.values else None
            series.weights, series.unweighted = list(self.weights), self.unweighted
        return apart

    def result(self) -> tuple[Any, Any]:
        """Return the total of the logged values, and the weight by which to divide it, as numbers or scalar tensors."""
        if self.over != "mean":
            return _total(self.values), 1
        return _total(self.values), _total([self.unweighted, *self.weights]) if self.weights else self.unweighted


class MetricLog:
    """Collects logged values and, when a metrics record is due, returns them reduced over the ranks.

    Args:
        reducer: reduces over the ranks; None for a single rank.
    """

    def __init__(self, reducer: Reducer | None = None) -> None:
        self._series: dict[Names, Series] = {}  # each name is in exactly one series
        self._how: Schema = {}  # all names of this rank, in the order in which they were first logged
        self._reducer = reducer
        self._schema: Schema = {}  # the names that the ranks have exchanged, so that all ranks know them

    def __bool__(self) -> bool:
        return any(series.values for series in self._series.values())

    def log(
        self, values: Loggable, *, over: Over = "last", across: Across = "mean", weight: float | Tensor | None = None
    ) -> None:
        """Add values by name, or a tensor with the values of several names. The arguments are those of `Context.log`.

        Raises:
            ConfigError: `over` or `across` is unknown or differs from an earlier call with the same name, or a value is not one
                number for each name.
        """
        if weight is not None:
            weight = scalar("weight", weight)
        for name, value in values.items():
            if isinstance(name, tuple):
                self._log_vector(name, _vector(name, value), over, across, weight)
                continue
            series = self.series(name, over, across)
            if type(value) is not float and type(value) is not int:
                value = scalar(name, value)
            series.add(value, weight)

    def series(self, names: Names, over: Over, across: Across) -> Series:
        """Return the series of a metric. With the series, a loop can add a value at every step without looking up the name.

        Args:
            names: one name or, for a one-dimensional tensor, a tuple with a name for each of its numbers.
            over: how the values since the last metrics record are combined: `last`, `mean` or `sum`.
            across: how the values of the ranks are combined: `mean`, `sum`, `max` or `same`.

        Raises:
            ConfigError: `over` or `across` is unknown, or differs from an earlier call with the same name.
        """
        series = self._series.get(names)
        if series is None:
            one_of("over", over, OVER)
            one_of("across", across, ACROSS)
            if names in self._how:  # so far, this name shared one tensor with other names: split that tensor's series
                self._split(next(key for key in self._series if isinstance(key, tuple) and names in key))
                return self.series(names, over, across)
            self._how |= dict.fromkeys((names,) if isinstance(names, str) else names, (over, across))
            self._series[names] = series = Series(over, across)
        elif series.over != over or series.across != across:
            name = names if isinstance(names, str) else names[0]
            raise ConfigError(
                f"the metric {name!r} was logged with over={series.over!r}, across={series.across!r} before, and now with "
                f"over={over!r}, across={across!r}; use one, or another name"
            )
        return series

    def _log_vector(self, names: tuple[str, ...], vector: Any, over: Over, across: Across, weight: Any) -> None:
        if names in self._series or self._how.keys().isdisjoint(names):
            self.series(names, over, across).add(vector, weight)
        else:  # some names were logged alone, or in another tensor, so log each value separately
            for name, value in zip(names, vector.unbind(), strict=True):
                self.series(name, over, across).add(value, weight)

    def _split(self, names: tuple[str, ...]) -> None:
        """Split the series of a tensor that was logged under several names into one series for each name."""
        apart: dict[Names, Series] = {}
        for key, series in self._series.items():
            apart.update(series.split(names) if key == names else {key: series})
        self._series = apart

    def latest(self, family: str) -> dict[str, float | Tensor]:
        """Return the newest value of each metric whose name begins with `family/`, if it was logged after the last `take`.

        Args:
            family: the part of the metrics' names before the first `/`, such as `train`.

        Returns:
            The values by full name, as they were logged. Numbers that were logged in one tensor under several names are not
            included.
        """
        found = {name: series.last for name, series in self._series.items() if isinstance(name, str) and series.values}
        return {name: value for name, value in found.items() if name.startswith(f"{family}/")}

    def take(self) -> dict[str, float]:
        """Return everything that was logged since the last call, as floats, in the order in which the names were first logged.

        This waits for devices that hold tensors.

        A mean whose weights are all zero is left out. With a reducer, this is a collective, and the result includes the names of
        all ranks.

        Raises:
            ConfigError: ranks logged one name with different `over` or `across`.
        """
        keys = [key for key, series in self._series.items() if series.values]
        numbers = [number for key in keys for number in self._series[key].result()]  # alternately a total and its weight
        self.clear()
        _fetch(numbers)
        totals: dict[str, tuple[float, float]] = {}
        for key, total, weight in zip(keys, numbers[::2], numbers[1::2], strict=True):
            if isinstance(key, tuple):
                totals |= zip(key, zip(total, repeat(float(weight))), strict=True)
            else:
                totals[key] = (float(total), float(weight))
        if self._reducer is not None:
            totals = self._reduce_totals(totals, self._reducer)
        return {name: total / weight for name, (total, weight) in totals.items() if weight}

    def _reduce_totals(self, totals: dict[str, tuple[float, float]], reducer: Reducer) -> dict[str, tuple[float, float]]:
        """Return each metric's total and weight, reduced over all ranks, by the metric's name."""
        while True:
            wanted = self._schema | self._how
            digest = _digest(wanted)
            by_max = [name for name, (_, across) in self._schema.items() if across in _ACROSS_BY_MAX]
            by_sum = [name for name in self._schema if name not in by_max]
            sums, maxima = reducer.sum_and_max(
                [slot for name in by_sum for slot in _sum_slots(totals.get(name), self._schema[name][1])],
                [digest, -digest, *(slot for name in by_max for slot in _max_slots(totals.get(name)))],
            )
            if maxima[0] == -maxima[1] == _digest(self._schema):
                break
            self._schema = wanted if maxima[0] == -maxima[1] else _merge_schemas(self._schema, reducer.gather(self._how))
        found = dict(zip(by_max, map(_of_max_slots, maxima[2::2], maxima[3::2]), strict=True))
        for name, total, weight in zip(by_sum, sums[::2], sums[1::2], strict=True):
            found[name] = (total, (1.0 if weight else 0.0) if self._schema[name][1] == "sum" else weight)
        return {name: found[name] for name in self._schema}

    def clear(self) -> None:
        """Remove everything that was logged since the last `take`, without waiting for a device."""
        for series in self._series.values():
            if series.values:
                series.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what was logged since the last metrics record, as plain data and tensors.

        With this state, the next metrics record of a resumed run equals that of a run without interruption.
        """
        return {
            key if isinstance(key, str) else key[0]: {
                "over": series.over,
                "across": series.across,
                "values": list(series.values),
                "weights": list(series.weights),
                "unweighted": series.unweighted,
                "last": series.last,
                "names": [] if isinstance(key, str) else list(key),
            }
            for key, series in self._series.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._series, self._how = {}, {}
        for name, saved in state.items():
            series = self.series(tuple(saved.get("names", ())) or name, saved["over"], saved["across"])
            series.values, series.weights, series.unweighted = list(saved["values"]), list(saved["weights"]), saved["unweighted"]
            series.last = saved.get("last", series.values[-1] if series.values else None)  # earlier versions did not save `last`


_ACROSS_BY_MAX = ("max", "same")
"""The values of `across` for which the maximum over the ranks is computed.

For `same`, all ranks have the same value, and the maximum returns it exactly. The sum over three ranks divided by three might
differ from it by rounding.
"""


def _sum_slots(total: tuple[float, float] | None, across: Across) -> tuple[float, float]:
    """Return what this rank contributes to two sums over the ranks: the sum of a metric's values, and the sum of the weights.

    With `across="sum"`, these are this rank's own result (such as the mean of its values) and the weight 1.
    """
    if total is None or not total[1]:
        return 0.0, 0.0
    return (total[0] / total[1], 1.0) if across == "sum" else total


def _max_slots(total: tuple[float, float] | None) -> tuple[float, float]:
    """Return what this rank contributes to a maximum over the ranks: a value, and a code (0: no value, 1: a number, 2: NaN).

    The code is needed because a maximum would lose a NaN.
    """
    if total is None or not total[1]:
        return -math.inf, 0.0
    value = total[0] / total[1]
    return (-math.inf, 2.0) if math.isnan(value) else (value, 1.0)


def _of_max_slots(value: float, mark: float) -> tuple[float, float]:
    return (math.nan if mark == 2.0 else value), min(mark, 1.0)


def _digest(schema: Schema) -> int:
    """Return a digest of the metric names and their options, in order: an integer that a float can represent exactly."""
    return int.from_bytes(hashlib.blake2b(repr(list(schema.items())).encode(), digest_size=6).digest())


def _merge_schemas(known: Schema, schemas: Sequence[Schema]) -> Schema:
    """Return all metric names with their options: first the known names, then the new names in the order of ranks."""
    merged, first = dict(known), dict[str, int]()
    for rank, schema in enumerate(schemas):
        for name, how in schema.items():
            if merged.setdefault(name, how) != how:
                where = f"on rank {first[name]}" if name in first else "before"
                raise ConfigError(
                    f"the metric {name!r} was logged with over={how[0]!r}, across={how[1]!r} on rank {rank}, and with "
                    f"over={merged[name][0]!r}, across={merged[name][1]!r} {where}; use one, or another name"
                )
            first.setdefault(name, rank)
    return merged


def lasting(tensor: Any) -> Any:
    """Return the tensor detached from its autograd graph, and copied if a CUDA graph could overwrite it.

    `torch.compile(mode="reduce-overhead")` records CUDA graphs. Each call of the compiled function then writes its outputs to the
    same memory, and torch raises an error if an output of an earlier call is read. So if the process uses such graphs, a tensor
    on a CUDA device is copied.
    """
    detached = tensor.detach()
    return detached.clone() if _CUDA_GRAPHS_MODULE in sys.modules and detached.is_cuda else detached


def scalar(name: str, value: Any) -> Any:
    """Return the logged `value` as a number or a detached scalar tensor. `name` is for the error message."""
    if hasattr(value, "detach"):
        if value.dim() and value.numel() == 1:
            value = value.reshape(())
        if value.dim():
            raise ConfigError(
                f"the metric {name!r} is a tensor of shape {tuple(value.shape)}, not a scalar; log its mean, or what you mean"
            )
        return lasting(value)  # detach the tensor, because it could keep its autograd graph in memory until the record is made
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"the metric {name!r} is {value!r}, not a number") from None


def _vector(names: tuple[str, ...], value: Any) -> Any:
    """Return `value` as a detached tensor that holds one number for each name."""
    if not hasattr(value, "detach") or not names or tuple(value.shape) != (len(names),):
        what = f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "detach") else repr(value)
        raise ConfigError(
            f"the {len(names)} metrics {names[:3]!r}, ... take a tensor of one dimension, as many numbers, not {what}"
        )
    return lasting(value)


def _fetch(numbers: list[Any]) -> None:
    """In the list `numbers`, replace scalar tensors by floats and one-dimensional tensors by lists. Copy once from each device."""
    by_device: dict[Any, list[int]] = {}
    for place, number in enumerate(numbers):
        if hasattr(number, "device"):
            by_device.setdefault(number.device, []).append(place)
    for device, places in by_device.items():
        torch, wide = sys.modules["torch"], _wide(device)
        parts: list[tuple[Any, list[int]]] = []  # one-dimensional tensors, each with the indices of its values in `numbers`
        scalars: dict[Any, list[int]] = {}  # for each dtype, the indices of its scalars, which can be stacked
        for place in places:
            if numbers[place].dim():
                parts.append((numbers[place], [place]))
            else:
                scalars.setdefault(numbers[place].dtype, []).append(place)
        parts += [(torch.stack([numbers[place] for place in group]), group) for group in scalars.values()]
        floats = iter(torch.cat([part.to(wide) for part, _ in parts]).tolist())
        for part, owners in parts:
            for place in owners:
                numbers[place] = list(islice(floats, len(part))) if numbers[place].dim() else next(floats)


def _total(values: list[Any]) -> Any:
    """Return the sum of the values, which are numbers or tensors.

    Tensors are stacked and summed at once, in a dtype wide enough for large counts and half precision.
    """
    tensors = [value for value in values if hasattr(value, "device")]
    if len(tensors) < 2:
        return _wider(values[0]) if len(values) == 1 else sum(map(_wider, values[1:]), start=_wider(values[0]))
    tensors = on_one_device(tensors)
    torch, wide = sys.modules["torch"], _wide(tensors[0].device)
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.to(wide) for tensor in tensors]
    total = torch.stack(tensors).to(wide).sum(0)
    if len(tensors) == len(values):
        return total
    return total + sum(value for value in values if not hasattr(value, "device"))


def _wider(value: Any) -> Any:
    """Return `value`. If it is a tensor with fewer than 32 bits per number, convert it to a dtype precise enough for sums."""
    return value.to(_wide(value.device)) if hasattr(value, "detach") and value.itemsize < 4 else value


def _wide(device: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.float32 if device.type == "mps" else torch.float64
