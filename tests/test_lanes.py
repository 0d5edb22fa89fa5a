"""Lanes deliver all items in order, delay the end by at most their deadline, and are inert in a forked process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callsheet.core.lane_options import LaneOptions, Overflow
from callsheet.errors import ConfigError
from callsheet.lanes.queue import Lane, close, drain


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Yield an event that is set after the test, so that waiting threads continue."""
    event = threading.Event()
    yield event
    event.set()


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not true after {seconds} seconds"
        time.sleep(0.001)


def test_everything_is_delivered_in_order_on_one_other_thread() -> None:
    done: list[int] = []
    threads: set[int] = set()

    def work(item: int) -> None:
        done.append(item)
        threads.add(threading.get_ident())

    lane = Lane("test", work)
    for item in range(5000):
        lane.put(item)
    assert drain([lane], 10) == []
    assert done == list(range(5000))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    close([lane])


def test_items_put_just_before_drain_and_close_are_all_delivered() -> None:
    for _ in range(20):
        done: list[int] = []
        lane = Lane("test", done.append)
        for item in range(50):
            lane.put(item)
        assert drain([lane], 10) == []
        close([lane])
        assert done == list(range(50))


def test_a_lane_delivers_without_a_call_of_drain() -> None:
    done: list[int] = []
    lane = Lane("test", done.append)
    lane.put(1)
    until(lambda: done == [1])
    time.sleep(0.1)  # the dispatcher checks less often by now
    lane.put(2)
    until(lambda: done == [1, 2])
    close([lane])


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(st.integers(0, 3), max_size=60),
    queue=st.integers(1, 6),
    overflow=st.sampled_from(["block", "drop_oldest", "latest"]),
    fails=st.sets(st.integers(0, 59), max_size=10),
    sleeps=st.sets(st.integers(0, 59), max_size=5),
)
def test_all_items_are_delivered_in_order_or_counted_as_dropped(
    items: list[int], queue: int, overflow: Overflow, fails: set[int], sleeps: set[int]
) -> None:
    done: list[tuple[int, int]] = []

    def work(item: tuple[int, int]) -> None:
        done.append(item)
        if item[0] in sleeps:
            time.sleep(0.002)
        if item[0] in fails:
            raise (RuntimeError if item[0] % 2 else SystemExit)("out of order")

    logging.getLogger("callsheet").disabled = True
    try:
        lane = Lane("test", work, LaneOptions(queue, overflow), kind=lambda item: item[1])
        for number, kind in enumerate(items):
            lane.put((number, kind))
            assert lane.waiting <= max(queue, 4)  # there are four kinds
        assert drain([lane], 10) == []
        close([lane])
    finally:
        logging.getLogger("callsheet").disabled = False
    assert len(done) + lane.dropped == len(items)
    assert done == sorted(done)
    if overflow == "block":
        assert not lane.dropped
    for kind in set(items):  # the newest item of each kind was delivered
        last = max(number for number, other in enumerate(items) if other == kind)
        if overflow == "latest" or last == len(items) - 1:
            assert (last, kind) in done


def test_put_waits_while_the_queue_is_full(gate: threading.Event) -> None:
    begun = threading.Event()

    def work(item: int) -> None:
        begun.set()
        gate.wait(10)

    lane = Lane("test", work, LaneOptions(queue=2))
    lane.put(0)
    assert begun.wait(10)
    lane.put(1)
    lane.put(2)
    threading.Timer(0.2, gate.set).start()
    began = time.monotonic()
    lane.put(3)
    assert time.monotonic() - began > 0.1
    assert drain([lane], 10) == []
    assert lane.dropped == 0
    close([lane])


def test_put_drops_items_if_a_full_queue_makes_no_progress_until_the_deadline(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    lane = Lane("Stuck", lambda item: gate.wait(30), LaneOptions(queue=2, deadline=0.2))
    began = time.monotonic()
    for item in range(10):
        lane.put(item)
    assert 0.2 < time.monotonic() - began < 10
    assert lane.dropped >= 6
    assert caplog.text.count("The lane of Stuck has made no progress") == 1
    close([lane])


@pytest.mark.parametrize("lanes", [1, 5])
def test_hung_lanes_delay_the_end_by_one_deadline_in_total(lanes: int, gate: threading.Event) -> None:
    stuck = [Lane(f"stuck {number}", lambda item: gate.wait(30)) for number in range(lanes)]
    done: list[int] = []
    well = Lane("well", done.append)
    for lane in stuck:
        lane.put(1)
        lane.put(2)
    until(lambda: all(lane.waiting == 1 for lane in stuck))
    well.put(1)
    began = time.monotonic()
    left = drain([*stuck, well], 1.0)
    assert 1.0 <= time.monotonic() - began < 4  # it would be five if the lanes were waited for one after the other
    assert [str(each) for each in left] == [f"stuck {number}: 1 waiting, and one has not returned" for number in range(lanes)]
    assert done == [1]
    close([*stuck, well])


def test_system_exit_ends_neither_the_lane_nor_the_process(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 1:
            raise SystemExit(3)
        done.append(item)

    lane = Lane("Quitter", work)
    for item in range(4):
        lane.put(item)
    assert drain([lane], 10) == []
    assert done == [0, 2, 3]
    assert "An error in the lane of Quitter: SystemExit: 3" in caplog.text
    close([lane])


def test_a_closed_lane_ignores_new_items() -> None:
    done: list[int] = []
    lane = Lane("test", done.append)
    close([lane])
    lane.put(1)
    assert lane.waiting == 0
    assert drain([lane], 1) == []
    close([lane])
    assert done == []


def test_the_thread_ends_when_the_lane_is_closed() -> None:
    ended = threading.Event()
    lane = Lane("brief", lambda item: None, finish=ended.set)
    lane.put(1)
    assert drain([lane], 10) == []
    close([lane])
    assert ended.wait(10)
    until(lambda: not any(thread.name == "callsheet-lane-brief" for thread in threading.enumerate()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child_the_parent_s_lanes_are_inert_and_empty(gate: threading.Event) -> None:
    begun = threading.Event()

    def work(item: int) -> None:
        begun.set()
        gate.wait(10)

    lane = Lane("test", work)
    for item in range(10):
        lane.put(item)
    assert begun.wait(10)
    child = os.fork()
    if not child:  # this branch raises no assertion error: the child would run the rest of the tests
        lane.put(1)
        fine = lane.is_inert and lane.waiting == 0 and drain([lane], 5) == []
        done: list[int] = []
        own = Lane("of the child", done.append)
        own.put(1)
        fine = fine and drain([own], 5) == [] and done == [1]
        os._exit(0 if fine else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert lane.waiting == 9  # the parent's lane still has its items
    gate.set()
    assert drain([lane], 10) == []
    close([lane])


def test_a_callback_that_uses_much_processor_time_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("callsheet.lanes.load_warnings._BUSY_CHECK_SECONDS", 0.05)

    def burn(item: int) -> None:
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass

    busy, idle = Lane("Burner", burn), Lane("Sleeper", lambda item: time.sleep(0.03))
    for _ in range(5):
        for lane in (busy, idle):
            lane.put(1)
            assert drain([lane], 10) == []
    close([busy, idle])
    named = [record.getMessage() for record in caplog.records if "processor time" in record.getMessage()]
    assert len(named) == 1
    assert named[0].startswith("Callback Burner used ")
    assert "callsheet.Process" in named[0]


def test_the_number_of_waiting_items_is_bounded_by_the_queue(gate: threading.Event) -> None:
    lane = Lane("test", lambda item: gate.wait(30), LaneOptions(queue=100, overflow="drop_oldest"))
    for item in range(100_000):
        lane.put(item)
    assert lane.waiting <= 100
    assert lane.dropped >= 99_800
    close([lane])


@pytest.mark.parametrize("wrong", [{"queue": 0}, {"queue": 1.5}, {"queue": True}, {"overflow": "drop"}, {"deadline": 0}])
def test_invalid_lane_options_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LaneOptions(**wrong)  # type: ignore[arg-type]  # that is what is tested


class Odd:
    """Raises an error if it is compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]  # that is what is tested


@pytest.mark.parametrize("overflow", ["drop_oldest", "latest"])
def test_items_are_distinguished_by_identity_and_not_by_equality(overflow: Overflow, gate: threading.Event) -> None:
    begun, done = threading.Event(), []

    def work(item: object) -> None:
        begun.set()
        gate.wait(10)
        done.append(item)

    lane = Lane("test", work, LaneOptions(queue=2, overflow=overflow), kind=lambda item: "one")
    items = [Odd() for _ in range(6)]
    for item in items:
        lane.put(item)
        assert begun.wait(10)
    gate.set()
    assert drain([lane], 10) == []
    assert done[0] is items[0]
    assert done[-1] is items[-1]
    assert len(done) + lane.dropped == 6
    close([lane])


@pytest.mark.test_all
def test_a_busy_callback_is_logged_although_its_queue_is_never_empty(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("callsheet.lanes.load_warnings._BUSY_CHECK_SECONDS", 0.05)

    def burn(item: int) -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    lane = Lane("Burner", burn, LaneOptions(queue=100, overflow="drop_oldest"))
    for item in range(100):
        lane.put(item)
    until(lambda: "Callback Burner used" in caplog.text)
    assert lane.waiting
    close([lane])


@pytest.mark.parametrize("overflow", ["block", "drop_oldest", "latest"])
def test_a_lane_has_room_for_direct_appends_only_while_its_thread_is_running(overflow: Overflow, gate: threading.Event) -> None:
    lane = Lane("test", lambda item: gate.wait(10), LaneOptions(queue=8, overflow=overflow, deadline=1.0))
    assert lane.room == 0  # the lane has no thread yet
    lane.put(0)
    until(lambda: lane.waiting == 0)  # the item is being handled
    assert lane.room == (0 if overflow == "latest" else 4)  # `latest` has to look at the waiting items; else half of the queue
    gate.set()
    close([lane])
    assert lane.room == 0
    lane.put(1)
    assert lane.waiting == 0
