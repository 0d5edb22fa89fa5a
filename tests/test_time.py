"""Times, timestamps and intervals: what strings mean, the algebra, and when an interval is due."""

from __future__ import annotations

import copy
import doctest
import json
import math
import pickle
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import callsheet.core.time
from callsheet.core.time import Interval, Time, Timestamp, TimeUnit, elapsed_fraction
from callsheet.errors import ConfigError, MixedUnitsError

FRACTIONAL = (TimeUnit.DURATION, TimeUnit.SECOND)
WHOLE = tuple(unit for unit in TimeUnit if unit not in FRACTIONAL)
COUNTED = tuple(unit for unit in TimeUnit if unit is not TimeUnit.DURATION)

units = st.sampled_from(list(TimeUnit))
counts = st.integers(0, 10**9)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def times(draw: st.DrawFn, unit: TimeUnit | None = None) -> Time:
    unit = unit or draw(units)
    return Time(draw(finite), unit) if unit in FRACTIONAL else Time(draw(st.integers()), unit)


@st.composite
def same_unit(draw: st.DrawFn, count: int = 2) -> list[Time]:
    unit = draw(units)
    return [draw(times(unit)) for _ in range(count)]


@st.composite
def whole(draw: st.DrawFn, count: int) -> list[Time]:
    unit = draw(st.sampled_from(WHOLE))
    return [draw(times(unit)) for _ in range(count)]


@st.composite
def timestamps(draw: st.DrawFn) -> Timestamp:
    kinds = Timestamp._field_defaults.values()
    return Timestamp._make(draw(st.floats(0, 1e9) if isinstance(zero, float) else counts) for zero in kinds)


def completed(unit: TimeUnit, count: float) -> Timestamp:
    """Return a timestamp with `count` of `unit`, and 0 of all other units."""
    field = "seconds" if unit is TimeUnit.SECOND else unit.name.lower()
    return Timestamp._make(count if name == field else 0 for name in Timestamp._fields)


# Strings


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("10ba", 10, TimeUnit.BATCH),
        ("3EP", 3, TimeUnit.EPOCH),
        (" 1_000 Ba ", 1000, TimeUnit.BATCH),
        ("2iter", 2, TimeUnit.ROUND),
        ("7sp", 7, TimeUnit.SAMPLE),
        ("5tok", 5, TimeUnit.TOKEN),
        ("-5tok", -5, TimeUnit.TOKEN),
        ("0.5dur", 0.5, TimeUnit.DURATION),
        (".5dur", 0.5, TimeUnit.DURATION),
        ("1dur", 1.0, TimeUnit.DURATION),
        ("1e-3dur", 0.001, TimeUnit.DURATION),
        ("2.5sec", 2.5, TimeUnit.SECOND),
        ("1h30m", 5400, TimeUnit.SECOND),
        ("90m", 5400, TimeUnit.SECOND),
        ("2h", 7200, TimeUnit.SECOND),
        ("1h30m15s", 5415, TimeUnit.SECOND),
        ("1H 30M 15S", 5415, TimeUnit.SECOND),
        ("1h15s", 3615, TimeUnit.SECOND),
        ("1.5h", 5400, TimeUnit.SECOND),
        ("45s", 45, TimeUnit.SECOND),
        ("36h", 129600, TimeUnit.SECOND),
        ("10s", 10, TimeUnit.SECOND),
        ("10m", 600, TimeUnit.SECOND),
        ("10h", 36000, TimeUnit.SECOND),
    ],
)
def test_what_a_string_means(text: str, value: float, unit: TimeUnit) -> None:
    time = Time(text)
    assert (time.value, time.unit) == (value, unit)
    assert type(time.value) is (float if unit in FRACTIONAL else int)
    assert Time.parse(text) == time == Time(value, unit) == Time(value, unit.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no time; write a number and a unit, as in '10ba', '0.5dur' or '1h30m'"),
        ("ba", "'ba' is no time; write a number and a unit"),
        ("30m1h", "'30m1h' is no time"),
        ("10 ba 3", "'10 ba 3' is no time"),
        ("nansec", "'nansec' is no time"),
        ("10", "'10' has no unit; write one after the number, as in '10ba'"),
        ("1e5", "'1e5' has no unit"),
        ("10bat", "unknown unit 'bat'; did you mean 'ba'? (one of iter, ep, ba, sp, tok, dur, sec; or wall-clock: '1h30m')"),
        ("10 Epochs", "unknown unit 'Epochs'; did you mean 'ep'?"),
        ("10batches", "unknown unit 'batches'; did you mean 'ba'?"),
        ("10steps", "unknown unit 'steps'; did you mean 'ba'?"),
        ("10samples", "unknown unit 'samples'; did you mean 'sp'?"),
        ("10rounds", "unknown unit 'rounds'; did you mean 'iter'?"),
        ("10min", "unknown unit 'min' (one of iter, ep, ba, sp, tok, dur, sec; or wall-clock: '1h30m')"),
        ("1.5ba", "'1.5' in '1.5ba' is no whole number, and only dur and sec take fractions; give whole ones, as in '10ba'"),
        ("1e5tok", "'1e5' in '1e5tok' is no whole number"),
        ("1__0ba", "'1__0' in '1__0ba' is no whole number"),
        ("1.2.3dur", "'1.2.3' in '1.2.3dur' is no number"),
        ("1.2.3h", "'1.2.3' in '1.2.3h' is no number"),
        ("1e999sec", "inf is no number of 'sec'; give a finite one"),
    ],
)
def test_a_string_that_is_no_time_is_rejected_with_a_hint(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Time(text)
    assert str(error.value).startswith(message)


def test_an_int_is_parsed_in_the_default_unit() -> None:
    assert Time.parse(3, TimeUnit.EPOCH) == Time("3ep")
    assert Time.parse("3ba", TimeUnit.EPOCH) == Time("3ba")
    assert Time.parse(Time("3ba"), TimeUnit.EPOCH) == Time("3ba")
    with pytest.raises(ConfigError, match="3 has no unit; write one, as in '10ba'"):
        Time.parse(3)


def test_a_value_that_is_not_a_number_of_the_unit_is_rejected() -> None:
    with pytest.raises(ConfigError, match="True is no number of 'ba'"):
        Time.parse(True, TimeUnit.BATCH)
    with pytest.raises(ConfigError, match=r"2\.0 ba is no whole number"):
        Time(2.0, TimeUnit.BATCH)
    with pytest.raises(ConfigError, match="nan is no number of 'sec'"):
        Time(math.nan, "sec")
    with pytest.raises(ConfigError, match="None is no number of 'ba'"):
        Time(None, "ba")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'10ba' beside the unit 'ep'; give one string"):
        Time("10ba", "ep")
    with pytest.raises(ConfigError, match="unknown unit 'batch'; did you mean 'ba'"):
        Time(10, "batch")


@given(times())
def test_a_time_equals_the_one_made_from_its_string_its_repr_or_its_pickle(time: Time) -> None:
    assert Time(str(time)) == time
    assert eval(repr(time)) == time
    assert pickle.loads(pickle.dumps(time)) == copy.deepcopy(time) == time


def test_str_and_repr_are_the_shortest_spelling() -> None:
    assert str(Time("10ba")) == "10ba"
    assert repr(Time("10ba")) == 'Time("10ba")'
    assert [str(Time(text)) for text in ("1h", "0.50dur", "2.0sec", "1_0 EP")] == ["3600sec", "0.5dur", "2sec", "10ep"]
    assert str(Time(-0.0, "sec")) == "0sec"


@given(st.text())
def test_any_text_is_parsed_or_raises_a_config_error(text: str) -> None:
    try:
        time = Time(text)
    except ConfigError:
        return
    assert Time(str(time)) == time


def test_a_time_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Time("10ba").value = 3  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        Time("10ba").other = 3  # type: ignore[attr-defined]


# Arithmetic and order


@given(whole(3))
def test_whole_units_add_as_integers_do(abc: list[Time]) -> None:
    a, b, c = abc
    zero = Time(0, a.unit)
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + zero == zero + a == a
    assert a - b + b == a
    assert a - a == zero


@given(st.floats(-1e100, 1e100), st.floats(-1e100, 1e100), st.sampled_from(FRACTIONAL))
def test_fractional_units_add_as_floats_do(a: float, b: float, unit: TimeUnit) -> None:
    assert (Time(a, unit) + Time(b, unit)).value == (Time(b, unit) + Time(a, unit)).value == a + b
    assert (Time(a, unit) - Time(b, unit)).value == a - b


@given(same_unit(3))
def test_the_order_is_total_within_a_unit(abc: list[Time]) -> None:
    a, b, c = abc
    assert [a < b, a == b, a > b].count(True) == 1
    assert (a <= b, a >= b, a != b) == (not a > b, not a < b, a < b or a > b)
    assert not (a <= b and b <= c) or a <= c
    assert (a < b) == (a.value < b.value)
    assert (a != b) or hash(a) == hash(b)


@given(times(), times())
def test_times_of_different_units_cannot_be_combined(a: Time, b: Time) -> None:
    assume(a.unit is not b.unit)
    for operation in (
        lambda: a < b,
        lambda: a <= b,
        lambda: a > b,
        lambda: a >= b,
        lambda: a + b,
        lambda: a - b,
        lambda: a / b,
        lambda: a < str(b),
        lambda: a + str(b),
        lambda: str(a) - b,
    ):
        with pytest.raises(MixedUnitsError) as error:
            operation()
        assert f"{a.unit.value!r}" in str(error.value)
        assert f"{b.unit.value!r}" in str(error.value)
    assert a != b


@given(times())
def test_a_time_equals_its_string_and_has_the_same_hash(time: Time) -> None:
    assert time == str(time)
    assert str(time) == time
    assert hash(time) == hash(str(time))
    assert len({time, Time(str(time)), str(time)}) == 1
    assert time != str(time).upper()  # only the shortest spelling is equal, because other strings have other hashes


def test_strings_are_converted_to_times_in_arithmetic_and_comparisons() -> None:
    assert Time("10ba") + "5ba" == "5ba" + Time("10ba") == Time("15ba")
    assert Time("10ba") - "4ba" == "10ba" - Time("4ba") == Time("6ba")
    assert Time("1h") / "30m" == 2.0
    assert "9ba" < Time("10ba") <= "1_0 BA"
    assert Time("90m") >= "1h30m"


def test_scaling_by_a_number_rounds_whole_units_down() -> None:
    assert Time("10ba") * 2 == 2 * Time("10ba") == Time("20ba")
    assert Time("7ba") / 2 == Time("3ba")
    assert Time("-7ba") / 2 == Time("-4ba")
    assert Time("7ba") * 0.5 == Time("3ba")
    assert Time("10ba") / 0.1 == Time("100ba")
    assert Time("1dur") / 4 == Time("0.25dur")
    assert Time("1h") * 1.5 == Time("90m")
    assert Time("7ba") / Time("2ba") == 3.5
    with pytest.raises(ZeroDivisionError):
        Time("7ba") / 0


def test_arithmetic_with_a_bare_number_as_a_time_is_an_error() -> None:
    with pytest.raises(TypeError):
        Time("10ba") < 10  # type: ignore[operator]  # noqa: B015
    with pytest.raises(TypeError):
        10 >= Time("10ba")  # type: ignore[operator]  # noqa: B015, SIM300
    with pytest.raises(TypeError):
        Time("10ba") + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        Time("10ba") * Time("2ba")  # type: ignore[operator]
    assert Time("10ba") != 10


# Timestamps


@given(timestamps())
def test_next_batch_increments_the_counts_in_total_and_in_the_epoch(now: Timestamp) -> None:
    assert now.next_batch() == now._replace(batch=now.batch + 1, batch_in_epoch=now.batch_in_epoch + 1)
    assert type(now.next_batch()) is Timestamp


@given(timestamps())
def test_next_epoch_resets_the_counts_in_the_epoch(now: Timestamp) -> None:
    after = now.next_epoch()
    assert (after.epoch, after.epoch_in_round) == (now.epoch + 1, now.epoch_in_round + 1)
    assert after[-4:] == (0, 0, 0, 0.0)
    assert (after.round, *after[2:6]) == (now.round, *now[2:6])


@given(timestamps())
def test_next_round_resets_the_epochs_in_the_round(now: Timestamp) -> None:
    assert now.next_round() == now._replace(round=now.round + 1, epoch_in_round=0)


@given(timestamps(), counts, counts, st.floats(0, 1e6))
def test_with_counts_adds_to_the_counts_in_total_and_in_the_epoch(
    now: Timestamp, samples: int, tokens: int, seconds: float
) -> None:
    after = now.with_counts(samples=samples, tokens=tokens, seconds=seconds)
    assert (after.sample, after.sample_in_epoch) == (now.sample + samples, now.sample_in_epoch + samples)
    assert (after.token, after.token_in_epoch) == (now.token + tokens, now.token_in_epoch + tokens)
    assert (after.seconds, after.seconds_in_epoch) == (now.seconds + seconds, now.seconds_in_epoch + seconds)
    assert (after[:3], after[6:8]) == (now[:3], now[6:8])
    assert now.with_counts() == now


@pytest.mark.parametrize("unit", COUNTED)
def test_count_and_get_read_the_counter_of_the_unit(unit: TimeUnit) -> None:
    now = completed(unit, 7)
    assert {other: now.count(other) for other in COUNTED} == dict.fromkeys(COUNTED, 0) | {unit: 7}
    assert now.get(unit) == Time(7, unit)


def test_a_timestamp_cannot_be_read_or_compared_in_fractions_of_the_run() -> None:
    with pytest.raises(ConfigError, match=r"does not count 'dur'; use elapsed_fraction\(\)"):
        Timestamp().get(TimeUnit.DURATION)
    with pytest.raises(ConfigError, match="does not count 'dur'"):
        Timestamp() < "0.5dur"  # noqa: B015


@given(timestamps(), st.sampled_from(COUNTED), st.data())
def test_a_timestamp_is_compared_with_a_time_in_the_time_s_unit(now: Timestamp, unit: TimeUnit, data: st.DataObject) -> None:
    time = data.draw(st.one_of(times(unit), st.just(now.get(unit))))
    have = now.get(unit)
    for other in (time, str(time)):
        assert (now < other, now <= other, now > other, now >= other) == (
            have < time,
            have <= time,
            have > time,
            have >= time,
        )
    assert (time > now, time <= now) == (now < time, now >= time)


def test_two_timestamps_can_be_equal_but_are_not_ordered() -> None:
    assert Timestamp(batch=3) == Timestamp(batch=3)
    assert Timestamp(batch=3) != Timestamp(batch=4)
    assert hash(Timestamp(batch=3)) == hash(Timestamp(batch=3))
    with pytest.raises(TypeError, match="orders against a Time or a string like '10ba'"):
        Timestamp() < Timestamp()  # type: ignore[operator]  # noqa: B015
    with pytest.raises(TypeError):
        sorted([Timestamp(), Timestamp()])
    with pytest.raises(TypeError, match="not 5"):
        Timestamp() >= 5  # type: ignore[operator]  # noqa: B015


@given(timestamps())
def test_a_timestamp_is_equal_after_json_and_pickle(now: Timestamp) -> None:
    assert Timestamp.from_dict(json.loads(json.dumps(now.to_dict()))) == now
    assert pickle.loads(pickle.dumps(now)) == now


@pytest.mark.parametrize("name", Timestamp._fields)
@pytest.mark.parametrize("value", [True, None, "1", -1, math.nan, math.inf, [1]])
def test_from_dict_rejects_an_invalid_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"no saved timestamp: {name} is"):
        Timestamp.from_dict(Timestamp().to_dict() | {name: value})


def test_from_dict_rejects_a_fraction_of_a_batch() -> None:
    with pytest.raises(ConfigError, match=r"batch is 1\.5; it needs int, from 0 up"):
        Timestamp.from_dict(Timestamp().to_dict() | {"batch": 1.5})


def test_from_dict_rejects_missing_and_unknown_keys() -> None:
    saved = Timestamp().to_dict()
    with pytest.raises(ConfigError, match="missing or unknown iteration"):
        Timestamp.from_dict(saved | {"iteration": 1})
    del saved["batch"]
    with pytest.raises(ConfigError, match="missing or unknown batch"):
        Timestamp.from_dict(saved)
    with pytest.raises(ConfigError, match="missing or unknown"):
        Timestamp.from_dict([1, 2])  # type: ignore[arg-type]


# Intervals


def due_at(interval: Interval, unit: TimeUnit, length: int) -> list[int]:
    """Return the counts at which `interval` is due while `unit` is counted from 0 to `length`, the `max_duration`."""
    reached = [completed(unit, count) for count in range(length + 1)]
    elapsed = [elapsed_fraction(now, Time(length, unit)) for now in reached]
    return [
        count
        for count in range(1, length + 1)
        if interval.is_due(reached[count - 1], reached[count], elapsed[count - 1], elapsed[count])
    ]


@given(st.sampled_from(COUNTED), st.integers(1, 50), st.integers(1, 300))
def test_an_interval_is_due_at_its_multiples(unit: TimeUnit, every: int, length: int) -> None:
    assert due_at(Interval(every, unit), unit, length) == list(range(every, length + 1, every))


@given(st.integers(1, 300), st.integers(1, 1000), st.integers(0, 3))
def test_a_fraction_is_due_where_exact_arithmetic_has_it_due(length: int, numerator: int, digits: int) -> None:
    fraction = Fraction(numerator, 10**digits)
    indices = [Fraction(count, length) // fraction for count in range(length + 1)]
    exact = [count for count in range(1, length + 1) if indices[count] != indices[count - 1]]
    assert due_at(Interval(f"{numerator / 10**digits}dur"), TimeUnit.BATCH, length) == exact


@given(st.integers(1, 10**6), st.data())
def test_the_index_of_an_interval_of_one_nth_counts_every_part(parts: int, data: st.DataObject) -> None:
    done = data.draw(st.integers(0, parts))
    scale = data.draw(st.integers(1, 10**6))  # batches in a part
    interval = Interval(1 / parts * Time("1dur"))
    now, end = Timestamp(batch=done * scale), Time(parts * scale, "ba")
    assert interval.index(now, elapsed_fraction(now, end)) == done
    if done:  # one batch less is not the whole part
        short = Timestamp(batch=done * scale - 1)
        assert interval.index(short, elapsed_fraction(short, end)) == done - 1


def test_an_interval_of_a_tenth_is_due_ten_times() -> None:
    assert due_at(Interval("0.1dur"), TimeUnit.BATCH, 10) == list(range(1, 11))
    assert [Interval("0.1dur").index(Timestamp(), 0.1 * k) for k in range(11)] == list(range(11))
    assert [Interval("0.1dur").index(Timestamp(), k / 10) for k in range(11)] == list(range(11))


@given(timestamps(), st.sampled_from(["3ba", "1ep", "0.1dur", "1h"]), st.booleans(), st.floats(0, 2))
def test_no_interval_is_due_twice_at_one_timestamp(now: Timestamp, every: str, at_end: bool, elapsed: float) -> None:
    assert not Interval(every, at_end=at_end).is_due(now, now, elapsed, elapsed)


@given(st.integers(1, 50), st.integers(1, 300))
def test_at_end_adds_one_due_time_unless_a_multiple_is_the_end(every: int, length: int) -> None:
    multiples = range(every, length + 1, every)
    assert due_at(Interval(f"{every}ba", at_end=True), TimeUnit.BATCH, length) == sorted({*multiples, length})


def test_at_end_is_due_once_although_training_goes_beyond_the_end() -> None:
    interval = Interval("100ba", at_end=True)
    assert interval.is_due(Timestamp(batch=5), Timestamp(batch=6), 0.9, 1.1)
    assert interval.is_due(Timestamp(batch=5), Timestamp(batch=6), None, 1.0)
    assert not interval.is_due(Timestamp(batch=6), Timestamp(batch=7), 1.1, 1.2)
    assert not interval.is_due(Timestamp(batch=5), Timestamp(batch=6), None, None)
    assert not Interval("100ba").is_due(Timestamp(batch=5), Timestamp(batch=6), 0.9, 1.0)


def test_an_interval_is_due_if_one_or_more_multiples_were_passed() -> None:
    assert Interval("100ba").is_due(Timestamp(batch=90), Timestamp(batch=310))
    assert Interval("1000tok").is_due(Timestamp(token=900), Timestamp(token=1100))
    assert not Interval("1000tok").is_due(Timestamp(token=1100), Timestamp(token=1900))
    assert Interval("1.5sec").index(Timestamp(seconds=4.6)) == 3


def test_an_interval_of_zero_or_less_is_rejected() -> None:
    for every in (0, -3, "0ba", "-1ep", "0dur", "0s", Time("0tok")):
        with pytest.raises(ConfigError, match=r"an interval must be more than 0, not '.*'; to have it never due, leave"):
            Interval(every, TimeUnit.BATCH)
    with pytest.raises(ConfigError, match="True is no number"):
        Interval(True, TimeUnit.BATCH)


@pytest.mark.parametrize("every", [5, "5", " 5 "])
def test_a_bare_number_in_an_interval_means_batches(every: int | str) -> None:
    assert Interval(every) == Interval("5ba")


def test_an_invalid_interval_names_its_argument() -> None:
    with pytest.raises(ConfigError, match=r"save_interval='5 epochs': unknown unit 'epochs'; did you mean 'ep'\?"):
        Interval.of("save_interval", "5 epochs")


def test_a_fraction_of_an_unknown_duration_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'every 0\.1dur' needs a known max_duration"):
        Interval("0.1dur").index(Timestamp(), None)


def test_intervals_are_immutable_hashable_and_compared_by_value() -> None:
    interval = Interval(100, TimeUnit.BATCH, at_end=True)
    assert interval == Interval("100ba", at_end=True) != Interval("100ba")
    assert len({interval, Interval(Time("100ba"), at_end=True)}) == 1
    assert eval(repr(interval)) == pickle.loads(pickle.dumps(interval)) == interval
    assert str(interval) == "every 100ba and at the end"
    assert str(Interval("1h")) == "every 3600sec"
    with pytest.raises(AttributeError):
        interval.at_end = False  # type: ignore[misc]


# The fraction of a duration


def test_the_elapsed_fraction_is_measured_in_the_unit_of_the_duration() -> None:
    now = Timestamp(epoch=1, batch=30, seconds=1800.0)
    assert elapsed_fraction(now, Time("40ba")) == 0.75
    assert elapsed_fraction(now, Time("2ep")) == 0.5
    assert elapsed_fraction(now, Time("1h")) == 0.5
    assert elapsed_fraction(now, Time("20ba")) == 1.5
    assert elapsed_fraction(now, None) is None


@pytest.mark.parametrize("duration", ["1dur", "0ep", "-1ba"])
def test_the_elapsed_fraction_of_an_invalid_duration_is_rejected(duration: str) -> None:
    with pytest.raises(ConfigError, match=f"max_duration cannot be '{duration}'"):
        elapsed_fraction(Timestamp(), Time(duration))


def test_the_examples_in_the_docstrings_run() -> None:
    failed, tried = doctest.testmod(callsheet.core.time)
    assert (failed, tried) == (0, 2)


def test_adding_a_time_to_a_timestamp_gives_a_time() -> None:
    now = Timestamp(batch=7, epoch=1)
    assert now + "3ba" == Time("10ba")
    assert now - Time("1ep") == Time("0ep")
    for wrong in (lambda: now + now, lambda: now * 2, lambda: 2 * now, lambda: now + 3):  # type: ignore[operator]  # wrong on purpose
        with pytest.raises(TypeError):
            wrong()
