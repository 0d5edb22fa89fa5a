"""What is logged between two boundaries, and how it becomes one record of floats.

Tensors stay where they are until the boundary; there, those of a device cross in one copy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from callsheet.callback import one_of
from callsheet.errors import ConfigError

OVER = ("last", "mean", "sum")
ACROSS = ("mean", "sum", "max", "same")

_FOLD = 256  # so many values are kept before they are added up, so that a loop that never reads a record does not grow


class Series:
    """The values of one name since the last boundary."""

    __slots__ = ("across", "over", "unweighted", "values", "weights")

    def __init__(self, over: str, across: str) -> None:
        self.over = over
        self.across = across
        self.clear()

    def clear(self) -> None:
        """Forget the values."""
        self.values: list[Any] = []
        self.weights: list[Any] = []
        self.unweighted = 0  # values without a weight, which weigh one each

    def add(self, value: Any, weight: Any = None) -> None:
        """Take one more value."""
        if self.over == "last":
            self.values = [value]
            return
        if weight is None or self.over == "sum":
            self.values.append(value)
            self.unweighted += 1
        else:
            self.values.append(_wider(value) * _wider(weight))
            self.weights.append(weight)
        if len(self.values) >= _FOLD:
            self.values = [_total(self.values)]
            self.weights = [_total(self.weights)] if self.weights else []

    def result(self) -> tuple[Any, Any]:
        """The total, and the weight to divide it by: numbers or scalar tensors."""
        return _total(self.values), _total([self.unweighted, *self.weights]) if self.over == "mean" else 1


class MetricLog:
    """Collects what is logged, and gives it out at a boundary."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}

    def __bool__(self) -> bool:
        return any(series.values for series in self._series.values())

    def log(self, values: Mapping[str, Any], *, over: str = "last", across: str = "mean", weight: Any = None) -> None:
        """Take values by name; see `Context.log`.

        Raises:
            ConfigError: an unknown `over` or `across`, one that differs from the name's earlier one, or a value that is no scalar.
        """
        if weight is not None:
            weight = _scalar("weight", weight)
        for name, value in values.items():
            series = self.series(name, over, across)
            if type(value) is not float and type(value) is not int:
                value = _scalar(name, value)
            series.add(value, weight)

    def series(self, name: str, over: str, across: str) -> Series:
        """The series of one name, for a loop that adds to it at every step; raises as `log` does."""
        series = self._series.get(name)
        if series is None:
            one_of("over", over, OVER)
            one_of("across", across, ACROSS)
            self._series[name] = series = Series(over, across)
        elif series.over != over or series.across != across:
            raise ConfigError(
                f"the metric {name!r} was logged with over={series.over!r}, across={series.across!r} before, and now with "
                f"over={over!r}, across={across!r}; use one, or another name"
            )
        return series

    def take(self) -> dict[str, float]:
        """Everything since the last call as floats, in the order in which names first came; waits for the devices that hold tensors.

        A mean of nothing but weight zero is left out.
        """
        names = [name for name, series in self._series.items() if series.values]
        numbers = [number for name in names for number in self._series[name].result()]  # total, weight, total, weight, ...
        self.clear()
        by_device: dict[Any, list[int]] = {}
        for place, number in enumerate(numbers):
            if hasattr(number, "device"):
                by_device.setdefault(number.device, []).append(place)
        for device, places in by_device.items():
            torch = sys.modules["torch"]
            stacked = torch.stack([numbers[place].to(_wide(device)) for place in places]).tolist()  # the boundary's one copy
            for place, number in zip(places, stacked, strict=True):
                numbers[place] = number
        results = zip(names, numbers[::2], numbers[1::2], strict=True)
        return {name: float(total / weight) for name, total, weight in results if weight}

    def clear(self) -> None:
        """Forget everything since the last `take`, without waiting for anything."""
        for series in self._series.values():
            series.clear()

    def state_dict(self) -> dict[str, Any]:
        """What was logged since the last boundary, as plain data and tensors: a resumed run's next record is that of an unbroken one."""
        return {
            name: {
                "over": series.over,
                "across": series.across,
                "values": list(series.values),
                "weights": list(series.weights),
                "unweighted": series.unweighted,
            }
            for name, series in self._series.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._series = {}
        for name, saved in state.items():
            series = self.series(name, saved["over"], saved["across"])
            series.values, series.weights, series.unweighted = list(saved["values"]), list(saved["weights"]), saved["unweighted"]


def _scalar(name: str, value: Any) -> Any:
    """`value` as a number or a detached scalar tensor."""
    if hasattr(value, "detach"):
        if value.dim() and value.numel() == 1:
            value = value.reshape(())
        if value.dim():
            raise ConfigError(
                f"the metric {name!r} is a tensor of shape {tuple(value.shape)}, not a scalar; log its mean, or what you mean"
            )
        return value.detach()
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"the metric {name!r} is {value!r}, not a number") from None


def _total(values: list[Any]) -> Any:
    """The sum; of tensors in one stack, not a chain of additions, and wide enough for large counts and half precision."""
    if len(values) > 1 and all(hasattr(value, "device") for value in values):
        wide = _wide(values[0].device)
        return sys.modules["torch"].stack([value.to(wide) for value in values]).sum()
    return sum(map(_wider, values[1:]), start=_wider(values[0]))


def _wider(value: Any) -> Any:
    """`value`; a tensor of fewer than 32 bits in a type in which it can be multiplied and added up."""
    return value.to(_wide(value.device)) if hasattr(value, "detach") and value.itemsize < 4 else value


def _wide(device: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.float32 if device.type == "mps" else torch.float64
