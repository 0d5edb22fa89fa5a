"""Composer's `Time`, `TimeUnit` and `Timestamp`, with the same units, comparisons and errors as the original."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any


class TimeUnit(StrEnum):
    """The units of a `Time`."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"

    @classmethod
    def _missing_(cls, value: object) -> TimeUnit | None:
        return next((unit for unit in cls if str(value).lower() in (unit.value, unit.name.lower())), None)


_CLOCK_PATTERN = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_COUNT_PATTERN = re.compile(rf"(.+?)({'|'.join(TimeUnit)})", re.IGNORECASE)


class Time:
    """A duration in one unit, such as batches. Its value is an integer or, in the unit `dur`, a fraction of the run's duration.

    It can be compared with, and added to, a time of the same unit, a string such as `"10ba"`, or a number, taken as that unit.

    Args:
        value: the number, an integer unless the unit is `dur`.
        unit: the unit, or its suffix or name, such as `"ba"` or `"batch"`.

    Raises:
        RuntimeError: an operation has operands of different units.
        TypeError: the number is a fraction, and the unit is not `dur`.
    """

    __slots__ = ("unit", "value")

    def __init__(self, value: float, unit: str | TimeUnit) -> None:
        self.unit = TimeUnit(unit)
        if self.unit is TimeUnit.DURATION:
            value = float(value)
        elif not isinstance(value, int):
            raise TypeError(f"{value!r} {self.unit.value} is a {type(value).__name__}; pass an integer")
        self.value: Any = value

    @classmethod
    def from_input(cls, given: Any, default_int_unit: TimeUnit | str | None = None) -> Time:
        """Create a time from a user's argument, such as `"10ba"` or 10.

        Args:
            given: a time, a string, or a number.
            default_int_unit: the unit of a number.

        Returns:
            The time, in the unit of `given`.

        Raises:
            RuntimeError: a number is given without `default_int_unit`, or `given` is no time.
            ValueError, TypeError: a string is invalid; see `from_timestring`.
        """
        if isinstance(given, str):
            return cls.from_timestring(given)
        if isinstance(given, (int, float)):
            if default_int_unit is None:
                raise RuntimeError(f"{given!r} has no unit; pass default_int_unit")
            return cls(given, default_int_unit)
        if hasattr(given, "unit") and hasattr(given, "value"):
            return given if isinstance(given, Time) else cls(given.value, given.unit.value)
        raise RuntimeError(f"{given!r} is not a time")

    @classmethod
    def from_timestring(cls, text: str) -> Time:
        """Create a time from a string such as `"10ba"`.

        Args:
            text: a number and a unit, such as `"10ba"` or `"0.5dur"`, or hours, minutes and seconds, such as `"1h30m"`.

        Returns:
            The time. Hours, minutes and seconds become seconds.

        Raises:
            ValueError: the string is not a time.
            TypeError: the number is a fraction, and the unit is not `dur`.
        """
        clock = _CLOCK_PATTERN.fullmatch(text.strip().lower())
        if clock and any(clock.groups()):
            hours, minutes, seconds = (int(part or 0) for part in clock.groups())
            return cls(3600 * hours + 60 * minutes + seconds, TimeUnit.SECOND)
        count = _COUNT_PATTERN.fullmatch(text.strip())
        if count is None:
            raise ValueError(f"{text!r} is not a time; write a number and a unit, such as '10ba'")
        number, unit = float(count[1]), TimeUnit(count[2])
        if unit is TimeUnit.DURATION:
            return cls(number, unit)
        if number != int(number):
            raise TypeError(f"{text!r}: {unit.value} is counted in whole numbers")
        return cls(int(number), unit)

    from_iteration = classmethod(lambda cls, number: cls(number, "iter"))
    from_epoch = classmethod(lambda cls, number: cls(number, "ep"))
    from_batch = classmethod(lambda cls, number: cls(number, "ba"))
    from_sample = classmethod(lambda cls, number: cls(number, "sp"))
    from_token = classmethod(lambda cls, number: cls(number, "tok"))
    from_duration = classmethod(lambda cls, number: cls(number, "dur"))

    def to_timestring(self) -> str:
        """Return the time as a string, such as `"10ba"`."""
        return str(self)

    def _value_of(self, other: Any, what: str) -> Any:
        """Return the value of `other`, a time, string or number. Raise RuntimeError if its unit is not the unit of this time."""
        time = Time.from_input(other, self.unit)
        if time.unit is not self.unit:
            raise RuntimeError(f"{self} and {time} cannot be {what}: their units differ")
        return time.value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, float, str)) and not hasattr(other, "unit"):
            return NotImplemented
        return bool(self.value == self._value_of(other, "compared"))

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < self._value_of(other, "compared"))

    def __le__(self, other: Any) -> bool:
        return bool(self.value <= self._value_of(other, "compared"))

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > self._value_of(other, "compared"))

    def __ge__(self, other: Any) -> bool:
        return bool(self.value >= self._value_of(other, "compared"))

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __add__(self, other: Any) -> Time:
        return Time(self.value + self._value_of(other, "added"), self.unit)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Time:
        return Time(self.value - self._value_of(other, "subtracted"), self.unit)

    def __rsub__(self, other: Any) -> Time:
        return (-self).__add__(other)

    def __neg__(self) -> Time:
        return Time(-self.value, self.unit)

    def __mod__(self, other: Any) -> Time:
        return Time(self.value % self._value_of(other, "divided"), self.unit)

    def __mul__(self, other: Any) -> Time:
        if isinstance(other, (int, float)):
            return Time(type(self.value)(self.value * other), self.unit)
        other = Time.from_input(other, self.unit)
        if TimeUnit.DURATION not in (self.unit, other.unit):
            raise RuntimeError(f"{self} and {other}: one of two factors has to be a fraction of the duration")
        unit = self.unit if other.unit is TimeUnit.DURATION else other.unit
        product = self.value * other.value
        return Time(product if unit is TimeUnit.DURATION else int(product), unit)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Time:
        """Divide by a number to get a time in the same unit, or by a time to get a fraction in the unit `dur`."""
        if isinstance(other, (int, float)):
            return Time(type(self.value)(self.value / other), self.unit)
        return Time(self.value / self._value_of(other, "divided"), TimeUnit.DURATION)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return f"{self.value}{self.unit.value}"

    def __repr__(self) -> str:
        return f"Time({self.value}, TimeUnit.{self.unit.name})"


_UNIT_OF_COUNTER = {
    "iteration": TimeUnit.ITERATION,
    "epoch": TimeUnit.EPOCH,
    "batch": TimeUnit.BATCH,
    "sample": TimeUnit.SAMPLE,
    "token": TimeUnit.TOKEN,
    "epoch_in_iteration": TimeUnit.EPOCH,
    "token_in_iteration": TimeUnit.TOKEN,
    "batch_in_epoch": TimeUnit.BATCH,
    "sample_in_epoch": TimeUnit.SAMPLE,
    "token_in_epoch": TimeUnit.TOKEN,
}
_WALL_CLOCK_FIELDS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
_ZERO_DURATION = datetime.timedelta(0)


class Timestamp:
    """The progress of a run, counted in every unit. It is immutable: methods such as `to_next_batch` return a new one.

    If it is compared with a time or a string such as `"10ba"`, its counter in that unit is used.

    Args:
        counted: the counters by name, as numbers or times, and the durations (`total_wct`, `iteration_wct`, `epoch_wct`,
            `batch_wct`) as `timedelta`. What is left out is 0.

    Raises:
        TypeError: there is no such counter.
        ValueError: a time is in another unit than its counter.
    """

    iteration: Time
    epoch: Time
    batch: Time
    sample: Time
    token: Time
    epoch_in_iteration: Time
    token_in_iteration: Time
    batch_in_epoch: Time
    sample_in_epoch: Time
    token_in_epoch: Time
    total_wct: datetime.timedelta
    iteration_wct: datetime.timedelta
    epoch_wct: datetime.timedelta
    batch_wct: datetime.timedelta

    def __init__(self, **counted: Any) -> None:
        for name in counted.keys() - {*_UNIT_OF_COUNTER, *_WALL_CLOCK_FIELDS}:
            raise TypeError(f"a Timestamp has no {name!r}")
        for name, unit in _UNIT_OF_COUNTER.items():
            time = Time.from_input(counted.get(name, 0), unit)
            if time.unit is not unit:
                raise ValueError(f"{name}={time} is not in {unit.value}")
            setattr(self, name, time)
        for name in _WALL_CLOCK_FIELDS:
            setattr(self, name, counted.get(name) or _ZERO_DURATION)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain numbers and the durations as `timedelta`, by name."""
        return {name: getattr(self, name).value for name in _UNIT_OF_COUNTER} | {
            name: getattr(self, name) for name in _WALL_CLOCK_FIELDS
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Timestamp.__init__(self, **state)

    def copy(self, **changes: Any) -> Timestamp:
        """Return a copy in which some counters have other values.

        Args:
            changes: the new values by name; see the constructor. None leaves a counter as it is.
        """
        return Timestamp(**self.state_dict() | {name: value for name, value in changes.items() if value is not None})

    def get(self, unit: str | TimeUnit) -> Time:
        """Return the progress in one unit, such as epochs.

        Args:
            unit: the unit, or its suffix or name, such as `"ba"`.

        Raises:
            ValueError: the unit is `dur`: a timestamp does not know the run's duration.
        """
        unit = TimeUnit(unit)
        if unit is TimeUnit.SECOND:
            return Time(int(self.total_wct.total_seconds()), unit)
        if unit is TimeUnit.DURATION:
            raise ValueError("a timestamp does not know the run's duration")
        time: Time = getattr(self, unit.name.lower())
        return time

    def _against(self, other: Any, how: Callable[[Any, Any], bool]) -> bool:
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if not hasattr(other, "unit"):
            return NotImplemented  # type: ignore[no-any-return]  # with this result, Python tries the other operand
        return how(self.get(TimeUnit(other.unit.value)).value, other.value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return self.state_dict() == other.state_dict()
        return self._against(other, lambda a, b: a == b)

    def __lt__(self, other: Any) -> bool:
        return self._against(other, lambda a, b: a < b)

    def __le__(self, other: Any) -> bool:
        return self._against(other, lambda a, b: a <= b)

    def __gt__(self, other: Any) -> bool:
        return self._against(other, lambda a, b: a > b)

    def __ge__(self, other: Any) -> bool:
        return self._against(other, lambda a, b: a >= b)

    __hash__ = None  # type: ignore[assignment]  # a Timestamp equals times of several units, whose hashes differ

    def to_next_batch(self, samples: Any = 0, tokens: Any = 0, duration: datetime.timedelta | None = None) -> Timestamp:
        """Return the timestamp after one more batch.

        Args:
            samples: the number of samples in the batch.
            tokens: the number of tokens in the batch.
            duration: how long the batch took; None: no time.
        """
        took, samples, tokens = duration or _ZERO_DURATION, int(samples), int(tokens)
        return self.copy(
            batch=self.batch + 1,
            batch_in_epoch=self.batch_in_epoch + 1,
            sample=self.sample + samples,
            sample_in_epoch=self.sample_in_epoch + samples,
            token=self.token + tokens,
            token_in_epoch=self.token_in_epoch + tokens,
            token_in_iteration=self.token_in_iteration + tokens,
            total_wct=self.total_wct + took,
            iteration_wct=self.iteration_wct + took,
            epoch_wct=self.epoch_wct + took,
            batch_wct=took,
        )

    def to_next_epoch(self, duration: datetime.timedelta | None = None) -> Timestamp:
        """Return the timestamp after one more epoch. The counters within the epoch start at 0 again.

        Args:
            duration: how long the epoch took since its last batch; None: no time.
        """
        took = duration or _ZERO_DURATION
        return self.copy(
            epoch=self.epoch + 1,
            epoch_in_iteration=self.epoch_in_iteration + 1,
            **dict.fromkeys(("batch_in_epoch", "sample_in_epoch", "token_in_epoch"), 0),
            total_wct=self.total_wct + took,
            iteration_wct=self.iteration_wct + took,
            **dict.fromkeys(("epoch_wct", "batch_wct"), _ZERO_DURATION),
        )

    def to_next_iteration(self, duration: datetime.timedelta | None = None) -> Timestamp:
        """Return the timestamp after one more iteration, which is a group of epochs.

        Args:
            duration: how long the iteration took since its last epoch; None: no time.
        """
        counters = ("epoch_in_iteration", "token_in_iteration", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
        return self.copy(
            iteration=self.iteration + 1,
            **dict.fromkeys(counters, 0),
            total_wct=self.total_wct + (duration or _ZERO_DURATION),
            **dict.fromkeys(("iteration_wct", "epoch_wct", "batch_wct"), _ZERO_DURATION),
        )

    def __repr__(self) -> str:
        return f"Timestamp({', '.join(f'{name}={value}' for name, value in self.state_dict().items() if value)})"
