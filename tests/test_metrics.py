"""`MetricLog` reduces the values that are logged between two log boundaries to floats."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from callsheet.errors import ConfigError
from callsheet.run.metrics import MetricLog

NUMBERS = st.floats(-1e6, 1e6)


def test_an_empty_log_is_false_and_has_no_values() -> None:
    log = MetricLog()
    assert not log
    assert log.take() == {}
    log.log({"a/x": 0.0})
    assert log
    log.take()
    assert not log


@pytest.mark.parametrize(("over", "expected"), [("last", 6.0), ("mean", 3.0), ("sum", 9.0)])
@pytest.mark.parametrize("tensors", [False, True])
def test_several_values_are_reduced_to_one_float(over: Any, expected: float, tensors: bool) -> None:
    log = MetricLog()
    for value in (1.0, 2.0, 6.0):
        log.log({"a/x": torch.tensor(value) if tensors else value}, over=over)
    result = log.take()
    assert result == {"a/x": expected}
    assert type(result["a/x"]) is float


def test_the_default_reduction_is_the_last_value() -> None:
    log = MetricLog()
    log.log({"a/x": 1})
    log.log({"a/x": 2})
    assert log.take() == {"a/x": 2.0}


def test_take_clears_the_log() -> None:
    log = MetricLog()
    log.log({"a/x": 1.0, "a/y": 5.0}, over="mean")
    log.take()
    log.log({"a/x": 3.0}, over="mean")
    assert log.take() == {"a/x": 3.0}


def test_names_are_in_the_order_of_their_first_value() -> None:
    log = MetricLog()
    log.log({"b/x": 1, "a/x": torch.tensor(2.0)})
    log.log({"c/x": 1, "b/x": 1})
    assert list(log.take()) == ["b/x", "a/x", "c/x"]
    log.log({"a/x": 1, "b/x": 1})
    assert list(log.take()) == ["b/x", "a/x"]


@pytest.mark.parametrize("tensors", [False, True])
def test_a_mean_is_weighted(tensors: bool) -> None:
    log = MetricLog()
    for value, weight in ((1.0, 3), (5.0, 1)):
        log.log(
            {"a/x": torch.tensor(value) if tensors else value}, over="mean", weight=torch.tensor(weight) if tensors else weight
        )
    assert log.take() == {"a/x": 2.0}


def test_a_value_without_a_weight_has_weight_one() -> None:
    log = MetricLog()
    log.log({"a/x": 1.0}, over="mean", weight=3)
    log.log({"a/x": 5.0}, over="mean")
    assert log.take() == {"a/x": 2.0}


def test_a_weight_of_zero_leaves_a_value_out() -> None:
    log = MetricLog()
    log.log({"a/x": 1.0}, over="mean", weight=2)
    log.log({"a/x": 99.0}, over="mean", weight=0)
    assert log.take() == {"a/x": 1.0}


@pytest.mark.parametrize("tensors", [False, True])
def test_a_mean_with_a_total_weight_of_zero_is_left_out(tensors: bool) -> None:
    log = MetricLog()
    weight = torch.tensor(0) if tensors else 0
    log.log({"a/x": 1.0}, over="mean", weight=weight)
    log.log({"a/y": torch.tensor(2.0)}, over="mean", weight=weight)
    log.log({"a/z": 0.0}, over="mean")
    assert log.take() == {"a/z": 0.0}
    log.log({"a/x": 3.0}, over="mean", weight=weight + 1)
    assert log.take() == {"a/x": 3.0}


@given(st.lists(NUMBERS, min_size=1, max_size=700))
def test_many_values_give_the_exact_sum_mean_and_last_value(values: list[float]) -> None:
    log = MetricLog()
    for value in values:
        log.log({"a/sum": value}, over="sum")
        log.log({"a/mean": value}, over="mean")
        log.log({"a/last": value}, over="last")
    result = log.take()
    size = math.fsum(map(abs, values)) + 1
    assert abs(result["a/sum"] - math.fsum(values)) <= 1e-9 * size
    assert abs(result["a/mean"] - math.fsum(values) / len(values)) <= 1e-9 * size
    assert result["a/last"] == values[-1]


def test_memory_is_bounded_if_the_log_is_never_read() -> None:
    log = MetricLog()
    for _ in range(2000):
        log.log({"a/x": 1.0}, over="mean", weight=2)
    assert len(log._series["a/x"].values) < 300
    assert len(log._series["a/x"].weights) < 300
    assert log.take() == {"a/x": 1.0}


def test_numbers_and_tensors_can_be_logged_under_one_name() -> None:
    log = MetricLog()
    for value in (1, torch.tensor(2), torch.tensor(3.0), np.float32(6)):
        log.log({"a/x": value}, over="sum")
    assert log.take() == {"a/x": 12.0}


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        np.float64(2),
        np.int64(2),
        torch.tensor(2),
        torch.tensor([2.0]),
        torch.tensor([[2]]),
        torch.tensor(2.0, requires_grad=True),
    ],
)
def test_scalars_of_every_kind_are_logged_as_floats(value: Any) -> None:
    log = MetricLog()
    log.log({"a/x": value})
    assert log.take() == {"a/x": 2.0}


def test_booleans_are_logged_as_numbers() -> None:
    log = MetricLog()
    log.log({"a/x": True, "a/y": torch.tensor(True)})
    assert log.take() == {"a/x": 1.0, "a/y": 1.0}


def test_values_that_are_not_finite_are_kept() -> None:
    log = MetricLog()
    log.log({"a/x": math.inf, "a/y": torch.tensor(math.nan)})
    result = log.take()
    assert result["a/x"] == math.inf
    assert math.isnan(result["a/y"])


def test_logged_tensors_are_detached() -> None:
    log = MetricLog()
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    log.log({"train/loss": loss}, over="mean")
    assert not log._series["train/loss"].values[0].requires_grad


def test_large_counts_are_exact() -> None:
    log = MetricLog()
    log.log({"a/tokens": torch.tensor(2**40 + 1), "a/loss": torch.tensor(0.5)})
    assert log.take()["a/tokens"] == 2**40 + 1


def test_tensors_are_not_converted_before_take() -> None:
    log = MetricLog()
    log.log({"a/x": torch.tensor(1.0)}, over="sum")
    log.log({"a/x": torch.tensor(2.0)}, over="sum")
    assert all(isinstance(value, torch.Tensor) for value in log._series["a/x"].values)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), r"the metric 'a/x' is a tensor of shape \(2,\), not a scalar; log its mean"),
        (torch.ones(0), r"a tensor of shape \(0,\), not a scalar"),
        ("high", "the metric 'a/x' is 'high', not a number"),
        (None, "the metric 'a/x' is None, not a number"),
        ([1.0], "not a number"),
        (1j, "not a number"),
    ],
)
def test_a_value_that_is_not_a_scalar_is_rejected_when_it_is_logged(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MetricLog().log({"a/x": value})


def test_unknown_reductions_name_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown over 'man'; did you mean 'mean'\? \(one of last, mean, sum\)"):
        MetricLog().log({"a/x": 1}, over="man")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unknown across 'smae'; did you mean 'same'\? \(one of mean, sum, max, same\)"):
        MetricLog().log({"a/x": 1}, across="smae")  # type: ignore[arg-type]


def test_logging_a_name_with_another_reduction_is_rejected_also_after_take() -> None:
    log = MetricLog()
    log.log({"a/x": 1}, over="sum", across="max")
    log.take()
    with pytest.raises(
        ConfigError, match=r"'a/x' was logged with over='sum', across='max' before, and now with over='mean', across='max'"
    ):
        log.log({"a/x": 1}, over="mean", across="max")
    with pytest.raises(ConfigError, match="use one, or another name"):
        log.log({"a/x": 1}, over="sum", across="sum")
    log.log({"a/x": 1}, over="sum", across="max")
    assert log.take() == {"a/x": 1.0}


def test_clear_removes_the_values_but_keeps_the_reductions_of_the_names() -> None:
    log = MetricLog()
    log.log({"a/x": 1}, over="sum")
    log.clear()
    assert not log
    assert log.take() == {}
    with pytest.raises(ConfigError, match="over='sum'"):
        log.log({"a/x": 1}, over="mean")


def test_values_can_be_added_to_a_series_directly() -> None:
    log = MetricLog()
    series = log.series("a/x", "mean", "same")
    series.add(1.0)
    series.add(4.0, 2)
    assert log.series("a/x", "mean", "same") is series
    assert log.take() == {"a/x": 3.0}
    series.add(7.0)  # a series can also be used after take()
    assert log.take() == {"a/x": 7.0}


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 9)), min_size=2, max_size=20), st.data())
def test_values_logged_before_and_after_a_resume_give_the_record_of_an_uninterrupted_run(
    values: list[tuple[float, int]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(values)))
    unbroken, before, after = MetricLog(), MetricLog(), MetricLog()
    for place, (value, weight) in enumerate(values):
        if place == cut:
            after.load_state_dict(before.state_dict())
        for log in (unbroken, before if place < cut else after):
            for over in ("last", "mean", "sum"):
                log.log({f"a/{over}": value}, over=over, weight=weight)
            log.log({"a/tensor": torch.tensor(value)}, over="mean")
    if cut == len(values):
        after.load_state_dict(before.state_dict())
    assert after.take() == unbroken.take()


def test_a_state_dict_does_not_change_with_the_log_and_loading_it_replaces_all_values() -> None:
    log, other = MetricLog(), MetricLog()
    log.log({"a/x": 1.0}, over="sum")
    state = log.state_dict()
    log.log({"a/x": 5.0}, over="sum")
    other.log({"a/y": 1.0})
    other.load_state_dict(state)
    other.log({"a/x": 2.0}, over="sum")
    assert other.take() == {"a/x": 3.0}
    again = MetricLog()
    again.load_state_dict(state)
    assert again.take() == {"a/x": 1.0}


def test_half_precision_does_not_overflow_in_a_mean() -> None:
    log = MetricLog()
    for _ in range(250):
        log.log({"a/x": torch.tensor(300.0, dtype=torch.float16)}, over="mean")
    assert log.take() == {"a/x": 300.0}


@pytest.mark.parametrize("weight", [30_000, 30_000.0, torch.tensor(30_000), torch.tensor(30_000.0, dtype=torch.float16)])
@pytest.mark.parametrize(
    "value", [5.0, torch.tensor(5.0), torch.tensor(5.0, dtype=torch.float16), torch.tensor(5, dtype=torch.uint8)]
)
def test_a_weighted_mean_of_half_precision_does_not_overflow(value: Any, weight: Any) -> None:
    log = MetricLog()
    for _ in range(3):
        log.log({"a/x": value}, over="mean", weight=weight)
    assert log.take() == {"a/x": 5.0}


def test_half_precision_together_with_numbers_does_not_overflow() -> None:
    log = MetricLog()
    for value in (torch.tensor(60_000.0, dtype=torch.float16), torch.tensor(60_000.0, dtype=torch.float16), 1.0):
        log.log({"a/x": value}, over="sum")
    assert log.take() == {"a/x": 120_001.0}


def test_bfloat16_is_summed_in_higher_precision() -> None:
    log = MetricLog()
    value = torch.tensor(0.1, dtype=torch.bfloat16)
    for _ in range(1000):
        log.log({"a/x": value}, over="sum")
    assert log.take()["a/x"] == pytest.approx(1000 * value.item(), rel=1e-4)


@pytest.mark.parametrize("times", [1, 2])
def test_a_weight_may_be_a_numpy_number(times: int) -> None:
    log = MetricLog()
    for _ in range(times):
        log.log({"a/x": 3.0}, over="mean", weight=np.float64(2))
    assert log.take() == {"a/x": 3.0}


def test_a_tensor_is_not_copied_and_is_read_at_take() -> None:
    log = MetricLog()
    total = torch.tensor(5.0)
    log.log({"a/x": total})
    total.add_(2.0)
    assert log.take() == {"a/x": 7.0}
    total.zero_()
    assert log.take() == {}  # take() has released the tensor


def test_logging_numbers_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from callsheet.run.metrics import MetricLog\n"
        "log = MetricLog(); log.log({'a/x': 1, 'a/y': 2.5}, over='mean'); log.log({'a/x': 2}, over='mean')\n"
        "print(log.take(), 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "{'a/x': 1.5, 'a/y': 2.5} False\n", ran.stderr


NAMES = ("a", "b", "c", "d", "e")


@given(
    st.lists(
        st.tuples(
            st.permutations(NAMES),
            st.integers(1, len(NAMES)),
            st.booleans(),
            st.sampled_from([None, 2, 0]),
            st.sampled_from(["log", "log", "log", "take", "resume"]),
        ),
        max_size=15,
    ),
    st.sampled_from(["last", "mean", "sum"]),
)
def test_names_logged_in_one_tensor_have_the_values_of_names_logged_one_by_one(steps: list[Any], over: Any) -> None:
    alone, together = MetricLog(), MetricLog()
    for number, (names, count, in_one, weight, what) in enumerate(steps):
        names = tuple(sorted(names[:count]))
        values = torch.arange(count, dtype=torch.float64) + 10 * number
        weight = weight if over == "mean" else None
        each = dict(zip(names, values.tolist(), strict=True))
        alone.log(each, over=over, weight=weight)
        together.log({names: values} if in_one else each, over=over, weight=weight)
        if what == "take":
            assert (one := alone.take()) == (other := together.take())
            assert list(one) == list(other)
        elif what == "resume":
            state, together = together.state_dict(), MetricLog()
            together.load_state_dict(state)
    assert alone.take() == together.take()


def test_names_logged_in_one_tensor_stay_one_series_after_a_resume() -> None:
    log, resumed = MetricLog(), MetricLog()
    log.log({NAMES: torch.ones(5)}, over="mean")
    resumed.load_state_dict(log.state_dict())
    resumed.log({NAMES: torch.full((5,), 4.0)}, over="mean")
    assert list(resumed._series) == [NAMES]
    assert resumed.take() == dict.fromkeys(NAMES, 2.5)


@pytest.mark.parametrize("value", [torch.ones(4), torch.ones(5, 1), torch.tensor(1.0), 1.0, [1.0] * 5])
def test_a_tensor_without_exactly_one_number_for_each_name_is_rejected(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"the 5 metrics .* take a tensor of one dimension"):
        MetricLog().log({NAMES: value})


def test_a_name_in_a_tensor_cannot_be_logged_with_another_reduction() -> None:
    log = MetricLog()
    log.log({NAMES: torch.ones(5)}, over="mean")
    with pytest.raises(ConfigError, match="'c' was logged with over='mean'"):
        log.log({"c": 1.0}, over="sum")
    with pytest.raises(ConfigError, match="'b' was logged with over='mean'"):
        log.log({("x", "b"): torch.ones(2)}, over="sum")
    with pytest.raises(ConfigError, match="'a' was logged with over='mean'"):
        log.log({NAMES: torch.ones(5)}, across="max")


def test_latest_returns_the_last_values_of_a_family_until_take() -> None:
    log = MetricLog()
    log.log({"train/loss": 2.0, "validation/loss": 3.0}, over="mean", across="mean", weight=None)
    log.log({"train/loss": torch.tensor(1.0)}, over="mean", across="mean", weight=None)
    assert {name: float(value) for name, value in log.latest("train").items()} == {"train/loss": 1.0}
    assert log.latest("trai") == {}
    log.take()
    assert log.latest("train") == {}


def test_latest_returns_unweighted_values_also_after_many_values_and_a_resume() -> None:
    log = MetricLog()
    for _ in range(300):
        log.log({"train/accuracy": 0.5, "train/tokens": 3.0}, over="mean", weight=8)
    log.log({("train/a", "train/b"): torch.tensor([1.0, 2.0])}, over="sum")
    log.log({("train/a", "train/b"): torch.tensor([3.0, 4.0])}, over="sum")
    log.log({"train/a": 5.0}, over="sum")  # from here on, each of the two names has a series of its own
    resumed = MetricLog()
    resumed.load_state_dict(log.state_dict())
    for each in (log, resumed):
        assert each.latest("train") == {"train/accuracy": 0.5, "train/tokens": 3.0, "train/a": 5.0, "train/b": 4.0}
    assert resumed.take() == {"train/accuracy": 0.5, "train/tokens": 3.0, "train/a": 9.0, "train/b": 6.0}


def test_a_logged_tensor_is_detached_although_it_requires_a_gradient_later() -> None:
    log, total = MetricLog(), torch.zeros(())
    log.log({"train/total": total})
    total += torch.ones((), requires_grad=True)
    assert total.requires_grad
    latest = log.latest("train")["train/total"]
    assert isinstance(latest, torch.Tensor)
    assert not latest.requires_grad
    assert log.take()["train/total"] == 1.0
