"""Durations with a unit, timestamps of a run's progress, and intervals ("every N of a unit")."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn, TypeVar, overload

from callsheet.errors import ConfigError, MixedUnitsError, did_you_mean

T = TypeVar("T")


class TimeUnit(StrEnum):
    """The unit of a time. The value of a member is the suffix of the unit in a string: `"10ba"` is ten batches.

    Rounds, epochs, batches, samples and tokens are whole numbers; `dur` (a fraction of `max_duration`) and `sec` are floats. The
    units and their suffixes are those of the framework Composer.
    """

    ROUND = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"


_FRACTIONAL_UNITS = frozenset({TimeUnit.DURATION, TimeUnit.SECOND})
_WHOLE_NUMBER_HINT = ", and only dur and sec take fractions; give whole ones, as in '10ba'"
# For hints in error messages: the error for "10steps" suggests the unit "ba".
_UNIT_OF_NAME = {unit.name.lower(): unit for unit in TimeUnit} | {"step": TimeUnit.BATCH}

# The patterns `_COUNT_PATTERN` and `_CLOCK_PATTERN` also match some invalid numbers, which int() and float() reject afterwards.
# The patterns are strings, so that `re` compiles each pattern at its first use and not when this module is imported.
_COUNT_PATTERN = r"([+-]?[\d._]+(?:e[+-]?\d+)?)\s*([a-z]*)"
_CLOCK_PATTERN = r"(?:([\d._]+)\s*h)?\s*(?:([\d._]+)\s*m)?\s*(?:([\d._]+)\s*s)?"
_PATTERN_FLAGS = re.ASCII | re.IGNORECASE


def _unit(word: str) -> TimeUnit:
    try:
        return TimeUnit(word.lower())
    except ValueError:
        given = word.lower()
        meant = next(
            (unit for name, unit in _UNIT_OF_NAME.items() if given.startswith(name) or (given[1:] and name.startswith(given))),
            given,
        )
        units = [unit.value for unit in TimeUnit]
        near = did_you_mean(meant, units)
        raise ConfigError(f"unknown unit {word!r}{near} (one of {', '.join(units)}; or wall-clock: '1h30m')") from None


def _number(digits: str, unit: TimeUnit, text: str) -> float:
    try:
        return float(digits) if unit in _FRACTIONAL_UNITS else int(digits)
    except ValueError:
        kind = "number" if unit in _FRACTIONAL_UNITS else f"whole number{_WHOLE_NUMBER_HINT}"
        raise ConfigError(f"{digits!r} in {text!r} is no {kind}") from None


def _read(text: str) -> tuple[float, TimeUnit]:
    """Return the number and the unit of a text such as `"10ba"`, `"0.5dur"` or `"1h30m"`. Raise ConfigError if the text is invalid."""
    bare = text.strip()
    if bare and (clock := re.fullmatch(_CLOCK_PATTERN, bare, _PATTERN_FLAGS)):
        hours, minutes, seconds = (_number(part or "0", TimeUnit.SECOND, text) for part in clock.groups())
        return 3600 * hours + 60 * minutes + seconds, TimeUnit.SECOND
    count = re.fullmatch(_COUNT_PATTERN, bare, _PATTERN_FLAGS)
    if count is None:
        raise ConfigError(f"{text!r} is no time; write a number and a unit, as in '10ba', '0.5dur' or '1h30m'")
    number, word = count.groups()
    if not word:
        raise ConfigError(f"{text!r} has no unit; write one after the number, as in '10ba'")
    unit = _unit(word)
    return _number(number, unit, text), unit


@dataclass(frozen=True, slots=True)
class Time:
    """A duration or count in one unit, such as batches: `Time("10ba")`, `Time(10, "ba")`, `Time("1h30m")`.

    A string consists of a number and a unit. Upper case, spaces before the unit, and underscores in the number are allowed. A
    string may also consist of hours, minutes and seconds, which become `sec` ("10m" is ten minutes, "36h" is allowed). The
    attribute `value` is an int, or a float for `dur` and `sec`. The value may be negative, because a subtraction may give such a
    time.

    Times of one unit can be added, subtracted, divided and compared, also with strings: `Time("10ba") + "5ba" < "1_000ba"`. They
    can be multiplied and divided by a number; whole units are rounded down. Times of different units are never equal. A time
    equals a string only if the string is exactly `str(time)`; this way equal values have the same hash.

    Args:
        value: a string with a unit, or a finite number. Only the units `dur` and `sec` take fractions.
        unit: the unit of a number, a `TimeUnit` or its suffix, such as `"ba"`. Must be None if `value` is a string.

    Raises:
        ConfigError: the time is invalid; the message has a hint.
        MixedUnitsError: two times of different units are compared or combined with an operator other than `==`.

    Examples:
        >>> Time("7ba") / 2
        Time("3ba")
        >>> Time("1h30m") / Time("45m")
        2.0
    """

    value: float
    unit: TimeUnit

    def __init__(self, value: str | float, unit: TimeUnit | str | None = None) -> None:
        if isinstance(value, str):
            if unit is not None:
                raise ConfigError(f"{value!r} beside the unit {str(unit)!r}; give one string, as in '10ba'")
            value, unit = _read(value)
        if unit is None:
            raise ConfigError(f"{value!r} has no unit; write one, as in '10ba'")
        unit = _unit(unit)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
            raise ConfigError(f"{value!r} is no number of {unit.value!r}; give a finite one, as in '10{unit.value}'")
        if unit in _FRACTIONAL_UNITS:
            value = float(value) + 0.0  # -0.0 becomes 0.0, so that equal times have the same string
        elif not isinstance(value, int):
            raise ConfigError(f"{value!r} {unit.value} is no whole number{_WHOLE_NUMBER_HINT}")
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "unit", unit)

    @classmethod
    def parse(cls, value: str | int | Time, default: TimeUnit | None = None) -> Time:
        """Return a value that a user wrote, such as `"10ba"`, as a Time.

        Args:
            value: a Time, a string such as `"10ba"`, or a whole number.
            default: the unit of a whole number without a unit, such as `10` or `"10"`; None: a number without a unit is invalid.

        Raises:
            ConfigError: the value is a bool or no valid time, or it has no unit and there is no default.
        """
        if isinstance(value, Time):
            return value
        if default is not None and isinstance(value, str) and value.strip().isdecimal():
            value = int(value)  # the command line and environment variables pass numbers as text
        return cls(value) if isinstance(value, str) else cls(value, default)

    def _with(self, other: object, how: Callable[[float, float], T]) -> T:
        """Return `how(self.value, other.value)`, for operators such as `<` and `+`. Raise MixedUnitsError for different units.

        Return NotImplemented if `other` is not a time.
        """
        if isinstance(other, str):
            other = Time(other)
        if not isinstance(other, Time):
            return NotImplemented  # type: ignore[no-any-return]  # NotImplemented makes Python try the operator of `other`
        if other.unit is not self.unit:
            raise MixedUnitsError(f"{self} and {other}: {self.unit.value!r} and {other.unit.value!r} do not mix; use one unit")
        return how(self.value, other.value)

    def _scale(self, value: float) -> Time:
        return Time(value if self.unit in _FRACTIONAL_UNITS else math.floor(value), self.unit)

    def __lt__(self, other: Time | str) -> bool:
        return self._with(other, lambda a, b: a < b)

    def __le__(self, other: Time | str) -> bool:
        return self._with(other, lambda a, b: a <= b)

    def __gt__(self, other: Time | str) -> bool:
        return self._with(other, lambda a, b: a > b)

    def __ge__(self, other: Time | str) -> bool:
        return self._with(other, lambda a, b: a >= b)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return str(self) == other
        if isinstance(other, Time):
            return self.unit is other.unit and self.value == other.value
        return NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    def __add__(self, other: Time | str) -> Time:
        return self._with(other, lambda a, b: Time(a + b, self.unit))

    __radd__ = __add__

    def __sub__(self, other: Time | str) -> Time:
        return self._with(other, lambda a, b: Time(a - b, self.unit))

    def __rsub__(self, other: str) -> Time:
        return self._with(other, lambda a, b: Time(b - a, self.unit))

    def __mul__(self, number: float) -> Time:
        return self._scale(self.value * number) if isinstance(number, int | float) else NotImplemented

    __rmul__ = __mul__

    @overload
    def __truediv__(self, other: float) -> Time: ...
    @overload
    def __truediv__(self, other: Time | str) -> float: ...
    def __truediv__(self, other: float | Time | str) -> Time | float:
        if isinstance(other, int | float):
            return self._scale(self.value / other)
        return self._with(other, lambda a, b: a / b)

    def __str__(self) -> str:
        return f"{str(self.value).removesuffix('.0')}{self.unit.value}"

    def __repr__(self) -> str:
        return f'Time("{self}")'


# The index of each unit's counter in a `Timestamp`. The first six fields of a `Timestamp` are in the order of `_COUNTED_UNITS`.
_COUNTED_UNITS = [unit for unit in TimeUnit if unit is not TimeUnit.DURATION]
_SLOT_OF_UNIT: dict[TimeUnit, int] = {unit: slot for slot, unit in enumerate(_COUNTED_UNITS)}


class Timestamp(NamedTuple):
    """The progress of a run: the numbers of completed rounds, epochs, batches, samples and tokens over all ranks, and the seconds of training.

    A timestamp is immutable. Comparing it with a Time or a string compares the counter of that time's unit: `timestamp >= "10ba"`.
    Two timestamps can be equal, but ordering them raises TypeError, because their counters may disagree on the order.

    Attributes:
        round: the number of completed rounds.
        epoch: the number of completed epochs.
        batch: the number of completed batches, which are steps.
        sample: the number of samples, summed over the ranks.
        token: the number of tokens, summed over the ranks.
        seconds: the seconds of training, as rank 0 measures them.
        epoch_in_round: the number of completed epochs in the current round.
        batch_in_epoch: the number of completed batches in the current epoch.
        sample_in_epoch: the number of samples in the current epoch.
        token_in_epoch: the number of tokens in the current epoch.
        seconds_in_epoch: the seconds of training within the current epoch.
    """

    # Timestamp is a named tuple because one is made at every step, and making a frozen dataclass takes three times as long.
    round: int = 0
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    seconds: float = 0.0
    epoch_in_round: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    seconds_in_epoch: float = 0.0

    def next_batch(self) -> Timestamp:
        """Return the timestamp after one more batch."""
        # `tuple.__new__` is faster than calling the class `Timestamp`, and takes half as long as `_replace`.
        rounds, epoch, batch, sample, token, seconds, nth_epoch, nth_batch, nth_sample, nth_token, since = self
        after = rounds, epoch, batch + 1, sample, token, seconds, nth_epoch, nth_batch + 1, nth_sample, nth_token, since
        return tuple.__new__(Timestamp, after)

    def next_epoch(self) -> Timestamp:
        """Return the timestamp after one more epoch. The counters of the current epoch, such as `batch_in_epoch`, are set to 0."""
        fresh = self._replace(batch_in_epoch=0, sample_in_epoch=0, token_in_epoch=0, seconds_in_epoch=0.0)
        return fresh._replace(epoch=self.epoch + 1, epoch_in_round=self.epoch_in_round + 1)

    def next_round(self) -> Timestamp:
        """Return the timestamp after one more round (group of epochs); `epoch_in_round` is set to 0."""
        return self._replace(round=self.round + 1, epoch_in_round=0)

    def with_counts(self, *, samples: int = 0, tokens: int = 0, seconds: float = 0.0) -> Timestamp:
        """Return a copy of this timestamp, with these samples, tokens and seconds of training added to its counters.

        They are added both to the counters of the run and to the counters of the current epoch.

        Args:
            samples: the number of further samples, counted over all ranks.
            tokens: the number of further tokens, counted over all ranks.
            seconds: how many more seconds training has taken.
        """
        rounds, epoch, batch, sample, token, all_seconds, nth_epoch, nth_batch, nth_sample, nth_token, since = self
        more = sample + samples, token + tokens, all_seconds + seconds
        more_in_epoch = nth_sample + samples, nth_token + tokens, since + seconds
        return Timestamp(rounds, epoch, batch, *more, nth_epoch, nth_batch, *more_in_epoch)

    def count(self, unit: TimeUnit) -> float:  # type: ignore[override]  # hides the method `tuple.count`, which is not needed
        """Return the progress in a unit, such as the number of batches: an int, or a float for `sec`.

        Args:
            unit: the unit, such as `TimeUnit.BATCH`.

        Raises:
            ConfigError: the unit is `dur`, which depends on `max_duration` too.
        """
        try:
            return self[_SLOT_OF_UNIT[unit]]
        except KeyError:
            raise ConfigError(f"a timestamp does not count {str(unit)!r}; use elapsed_fraction() for 'dur'") from None

    def get(self, unit: TimeUnit) -> Time:
        """Return the progress in a unit, such as batches, as a Time.

        Args:
            unit: the unit, such as `TimeUnit.BATCH`.

        Raises:
            ConfigError: the unit is `dur`, which depends on `max_duration` too.
        """
        return Time(self.count(unit), unit)

    def _against(self, other: object, how: Callable[[float, float], bool]) -> bool:
        if not isinstance(other, Time | str):
            raise TypeError(f"a timestamp orders against a Time or a string like '10ba', not {other!r}")
        time = Time.parse(other)
        return how(self.count(time.unit), time.value)

    def __lt__(self, other: Time | str) -> bool:  # type: ignore[override]  # the `<` of a tuple would compare the rounds first
        return self._against(other, lambda a, b: a < b)

    def __le__(self, other: Time | str) -> bool:  # type: ignore[override]
        return self._against(other, lambda a, b: a <= b)

    def __gt__(self, other: Time | str) -> bool:  # type: ignore[override]
        return self._against(other, lambda a, b: a > b)

    def __ge__(self, other: Time | str) -> bool:  # type: ignore[override]
        return self._against(other, lambda a, b: a >= b)

    def __add__(self, other: Time | str) -> Time:  # type: ignore[override]  # the `+` of a tuple would concatenate
        """Return the progress in the unit of `other`, plus `other`, as a Time. `timestamp + "100ba"` is 100 batches after the timestamp."""
        return self._shift(other, 1)

    def __sub__(self, other: Time | str) -> Time:
        """Return the progress in the unit of `other`, minus `other`, as a Time. `timestamp - "100ba"` is 100 batches before the timestamp."""
        return self._shift(other, -1)

    def __mul__(self, other: object) -> NoReturn:
        raise TypeError("a timestamp has no multiple; multiply timestamp.get(unit)")

    def __rmul__(self, other: object) -> NoReturn:
        self.__mul__(other)

    def _shift(self, other: object, sign: int) -> Time:
        if not isinstance(other, Time | str):
            raise TypeError(f"a timestamp adds to a Time or a string like '10ba', not {other!r}")
        time = Time.parse(other)
        return self.get(time.unit) + time * sign

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the timestamp as plain JSON data."""
        return self._asdict()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timestamp:
        """Return the timestamp for the data that `to_dict` returned.

        Args:
            data: the fields of the timestamp by name; all are required.

        Raises:
            ConfigError: a key is missing or unknown, or a value is not a number from 0 up.
        """
        odd = set(cls._fields).symmetric_difference(data if isinstance(data, Mapping) else ())
        if odd:
            raise ConfigError(f"no saved timestamp: missing or unknown {', '.join(sorted(map(str, odd)))}")
        for name, zero in cls._field_defaults.items():
            value, kinds = data[name], {int, type(zero)}  # accept an int for a float field, because JSON may write 5.0 as 5
            if type(value) not in kinds or not 0 <= value < math.inf:  # `isinstance` would accept a bool, which is not a count
                raise ConfigError(f"no saved timestamp: {name} is {value!r}; it needs {type(zero).__name__}, from 0 up")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Interval:
    """A recurring point in training, such as every 100 batches.

    For example: `Interval("100ba")`, `Interval(100)`, `Interval("0.1dur", at_end=True)`.

    Args:
        every: the time between two points.
        default: the unit of a whole number without a unit.
        at_end: whether the interval is also due when training reaches `max_duration`.

    Raises:
        ConfigError: the time is invalid, or not above 0.
    """

    every: Time
    at_end: bool

    def __init__(self, every: str | int | Time, default: TimeUnit = TimeUnit.BATCH, *, at_end: bool = False) -> None:
        time = Time.parse(every, default)
        if time.value <= 0:
            raise ConfigError(f"an interval must be more than 0, not {str(time)!r}; to have it never due, leave it out")
        object.__setattr__(self, "every", time)
        object.__setattr__(self, "at_end", at_end)

    @classmethod
    def of(cls, argument: str, given: str | int | Time) -> Interval:
        """Return the value of a user's argument as an Interval. If the value is invalid, the error names the argument.

        Args:
            argument: the name of the argument, for the error message.
            given: the value of the argument.

        Raises:
            ConfigError: the time is invalid, or not above 0.
        """
        try:
            return cls(given)
        except ConfigError as error:
            raise ConfigError(f"{argument}={given!r}: {error}") from None

    def index(self, timestamp: Timestamp, elapsed: float | None = None) -> int:
        """Return how many whole intervals are complete at a timestamp.

        A `dur` interval that ends exactly at this timestamp counts as complete. Elapsed fraction, interval and quotient each have
        a relative rounding error of at most 2**-53, so the quotient is increased by a relative 2**-50 before it is rounded down.

        Args:
            timestamp: the progress of training.
            elapsed: the fraction of training that is done. Only intervals in the unit `dur` need it.

        Raises:
            ConfigError: the interval is in `dur`, and `elapsed` is None.
        """
        slot = _SLOT_OF_UNIT.get(self.every.unit)
        if slot is not None:
            return int(timestamp[slot] // self.every.value)
        if elapsed is None:
            raise ConfigError(f"'{self}' needs a known max_duration; give the run one, or the interval another unit")
        return math.floor(elapsed / self.every.value * (1 + 2**-50))

    def is_due(
        self, previous: Timestamp, now: Timestamp, previous_elapsed: float | None = None, elapsed: float | None = None
    ) -> bool:
        """Return True if an interval was completed since `previous`, or if `at_end` is set and training reached its end since `previous`.

        Args:
            previous: the timestamp of the previous check.
            now: the current timestamp.
            previous_elapsed, elapsed: the fraction of training that was done at `previous`, and that is done `now`; None if training
                has no `max_duration`.

        Raises:
            ConfigError: the interval is in `dur`, and a fraction is None.
        """
        if self.index(now, elapsed) != self.index(previous, previous_elapsed):
            return True
        ended = elapsed is not None and elapsed >= 1.0
        return self.at_end and ended and (previous_elapsed is None or previous_elapsed < 1.0)

    def __str__(self) -> str:
        return f"every {self.every}{' and at the end' if self.at_end else ''}"


def elapsed_fraction(timestamp: Timestamp, max_duration: Time | None) -> float | None:
    """Return the completed fraction of `max_duration`: 1.0 when `max_duration` is reached, and more than 1.0 afterwards.

    Return None if there is no `max_duration`.

    Raises ConfigError for a `max_duration` that is in `dur`, which would be a fraction of itself, or not above 0.
    """
    if max_duration is None:
        return None
    if max_duration.unit is TimeUnit.DURATION or max_duration.value <= 0:
        raise ConfigError(f"max_duration cannot be {str(max_duration)!r}; give more than 0, in a unit other than dur")
    return timestamp.count(max_duration.unit) / max_duration.value
