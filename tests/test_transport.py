"""Sending callbacks to other processes: they arrive unchanged or are rejected with the reason, and files of other users are rejected."""

from __future__ import annotations

import collections
import enum
import errno
import functools
import io
import itertools
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from callsheet import Background, Callback, RunInfo, Time, Timestamp
from callsheet.callbacks import EMA, CheckpointSaver, EarlyStopper, History, SystemMetricsMonitor
from callsheet.checkpoint.tensors import DTYPES
from callsheet.compat.instructlab import TrainerCallback
from callsheet.compat.instructlab.training import _SentCallback
from callsheet.core.control import Request
from callsheet.core.ranks import Ranks
from callsheet.lanes.snapshot import LaneMessage
from callsheet.launcher import worker
from callsheet.transport import Payload, TransportError, pack, unpack
from callsheet.transport.data import decode, encode
from callsheet.transport.fingerprint import differences, fingerprint
from callsheet.transport.payload import KEY_VARIABLE, PAYLOAD_VARIABLE, open_payload
from callsheet.transport.sealed import Key, PrivateFolder, read_private, seal, unseal, write_private
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

SECRETIVE = "the content of the payload"


class Colour(enum.Enum):
    RED = 1


@dataclass
class Options:
    rate: float
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Doubles:
    """A dataclass whose `__post_init__` changes its argument."""

    amount: int
    twice: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", 2 * self.amount)
        object.__setattr__(self, "amount", self.amount + 1)


class Mode(enum.Flag):
    FAST = 1
    SAFE = 2


class Keeps(Callback):
    """A callback with arguments of any type, and a state."""

    def __init__(self, given: Any = None, *, more: Any = None) -> None:
        self.given, self.more = given, more
        self.seen: Any = 0

    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


class HoldsCallback(Callback):
    """A callback with another callback as its argument."""

    def __init__(self, other: Callback) -> None:
        self.other = other


def at_the_top(ctx: Any, factor: float = 2.0) -> float:
    return factor


def arrived(payload: Payload) -> list[Callback]:
    """Return the callbacks that a process of the launch would receive."""
    with payload.post() as variables:
        return open_payload(dict(variables)).callbacks


# --- what arrives -----------------------------------------------------------------------------------------------------


@pytest.mark.test_all
def test_callbacks_arrive_with_equal_arguments_settings_and_states() -> None:
    """One payload with all kinds of things, through the real preflight check in a fresh interpreter and out of the real file."""
    shared: list[Any] = [1]
    history = History()
    plain = Keeps(
        {"a": (1, 2.5, None, True, b"\0\xff"), ("t", 1): {3, 4}, "@odd": [float("inf"), 2**70]},
        more=[Path("x/y"), Colour.RED, Time("3ep"), torch.float16, torch.device("cpu"), frozenset({"é"}), at_the_top, Options],
    )
    tensors = Keeps(torch.arange(6.0).reshape(2, 3), more=[numpy.arange(4, dtype="int16"), numpy.float32(1.5), torch.tensor([])])
    tensors.seen = {"weights": torch.randn(3, dtype=torch.bfloat16), "steps": [1, 2]}
    objects = Keeps(Options(0.5, ["n"]), more=functools.partial(at_the_top, factor=3.0))
    one, other = Keeps(shared, more={"again": shared}), Keeps(shared)
    words = Keeps()
    words.name, words.ranks, words.phase, words.snapshot_fields = "worded", {3, 7}, "report", ("loss",)
    stopper = EarlyStopper(monitor="validation/loss", patience="2ep")
    sent = [plain, tensors, objects, one, other, words, stopper, HoldsCallback(history), history, Background(Keeps(5), queue=7)]
    got: list[Any] = arrived(pack(sent))
    assert [type(callback) for callback in got] == [type(callback) for callback in sent]
    assert (got[0].given, got[0].more) == (plain.given, plain.more)
    assert torch.equal(got[1].given, tensors.given)
    assert got[1].more[0].dtype == numpy.int16
    assert (got[1].more[0] == tensors.more[0]).all()
    assert torch.equal(got[1].seen["weights"], tensors.seen["weights"])
    assert got[1].seen["weights"].dtype is torch.bfloat16
    assert got[2].given == Options(0.5, ["n"])
    assert got[2].more(None) == 3.0
    assert got[3].given is got[3].more["again"] is got[4].given  # objects that were shared are shared again
    assert (got[5].name, got[5].ranks, got[5].phase, got[5].snapshot_fields) == ("worded", {3, 7}, "report", ("loss",))
    assert (
        got[6]._is_resumed is False
    )  # a state equal to that of a new callback is not loaded, because loading would mean that the run is resumed
    assert got[7].other is got[8]
    assert (got[9].lane_options.queue, got[9].callback.given, got[9].name) == (7, 5, "Keeps")


@pytest.mark.test_all
def test_lambdas_closures_and_local_classes_arrive_if_pickles_are_allowed() -> None:
    counts: list[int] = []
    factor = 3

    class Local(Callback):
        def __init__(self, function: Callable[[int], int]) -> None:
            self.function = function

    def closure(x: int) -> int:
        counts.append(x)
        return factor * x

    sent = [Local(closure), Keeps(lambda: counts), Keeps({1: lambda: 5})]
    got: list[Any] = arrived(pack(sent, allow_pickle=True))
    assert got[0].function(2) == 6
    assert got[1].given() == [2]  # one pickle for all, so that two functions over one list still share it
    assert counts == []
    assert got[2].given[1]() == 5
    assert type(got[0]).__qualname__ == Local.__qualname__


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.tuples(inner, inner)
        | st.sets(st.integers() | st.text())
        | st.builds(Options, st.floats(allow_nan=False), st.lists(st.text()))
    ),
    max_leaves=20,
)


@given(PLAIN)
@settings(max_examples=150, deadline=None)
def test_any_tree_of_plain_values_is_equal_after_encoding_and_decoding(value: Any) -> None:
    back = decode(encode(value, allow_pickle=False))
    assert back == value
    assert differences(fingerprint({"it": value}), fingerprint({"it": back})) == []


@pytest.mark.test_all
@given(PLAIN, PLAIN)
@settings(max_examples=100, deadline=None)
def test_the_fingerprints_of_any_two_unequal_values_differ(one: Any, other: Any) -> None:
    for here, there in ((one, other), ([one, {"a": (other,)}], [one, {"a": (one,)}])):
        assert here == there or differences(fingerprint({"it": here}), fingerprint({"it": there}))


TENSORS = [torch.tensor([1, 0]).to(dtype) for dtype in DTYPES] + [
    torch.tensor(3.0),
    torch.zeros(0, 3),
    torch.arange(6).reshape(2, 3).T,
    torch.tensor([1 + 2j]).conj(),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}")
def test_every_tensor_that_safetensors_supports_is_equal_after_encoding_and_decoding(tensor: torch.Tensor) -> None:
    back = decode(encode({"a": tensor, "b": tensor}, allow_pickle=False))
    assert back["a"] is back["b"]
    assert (back["a"].dtype, back["a"].shape) == (tensor.dtype, tensor.shape)
    assert differences(fingerprint({"it": back}), fingerprint({"it": {"a": tensor, "b": tensor}})) == []
    if tensor.numel() > 1:
        other = tensor.clone()
        other[..., 0] = other[..., 1] if other.ndim == 1 else 7
        assert differences(fingerprint({"it": other}), fingerprint({"it": tensor}))


def test_the_fingerprints_of_views_of_one_memory_and_of_copies_differ() -> None:
    base = torch.arange(4.0)
    [line] = differences(fingerprint({"it": [base[:2], base[2:]]}), fingerprint({"it": [base[:2].clone(), base[2:].clone()]}))
    assert line == "it[1]: memory: here it is the same object as it[0], but not there"
    array = numpy.zeros(3)
    views = [torch.from_numpy(array), torch.from_numpy(array[:2])]
    [line] = differences(fingerprint({"it": views}), fingerprint({"it": decode(encode(views, allow_pickle=False))}))
    assert line == "it[1]: memory: here it is the same object as it[0], but not there"
    sparse = torch.eye(2).to_sparse()
    assert differences(fingerprint({"it": sparse}), fingerprint({"it": sparse})) == [
        "it: a torch.Tensor torch.float32 [2, 2] cpu without gradient, which cannot be inspected"
    ]


def test_equal_tensors_without_common_memory_have_equal_fingerprints() -> None:
    for make in (
        lambda: [torch.empty(0), torch.empty(0)],  # empty tensors have no memory that they could share
        lambda: torch.ones(2, device="meta"),
        lambda: torch.tensor([1 + 2j]).conj().imag,
    ):
        one = make()
        assert differences(fingerprint({"it": one}), fingerprint({"it": make()})) == []
    views = [torch.zeros(4)[:0], torch.zeros(4)[:0]]
    assert differences(fingerprint({"it": views}), fingerprint({"it": decode(encode(views, allow_pickle=False))})) == []


class KeepsInThread(Callback):
    """Keeps its arguments only in a thread, whose attributes are not compared."""

    def __init__(self, *, given: Any) -> None:
        self.thread = threading.Thread(target=print, args=(given,))


def test_arguments_are_compared_although_the_callback_does_not_store_them() -> None:
    one, other = KeepsInThread(given=[1]), KeepsInThread(given=[2])
    assert differences(fingerprint({"it": one}), fingerprint({"it": one})) == []
    assert differences(fingerprint({"it": one}), fingerprint({"it": other})) == ["it(given)[0]: an int with another value there"]


def test_a_changed_class_attribute_of_a_built_in_callback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint({"it": History()})
    monkeypatch.setattr(History, "phase", "measure")
    assert differences(fingerprint({"it": History()}), before) == ["it History.phase: a str with another value there"]


def test_a_closure_over_a_variable_without_a_value_has_a_fingerprint() -> None:
    def closure() -> Any:
        return later

    here = fingerprint({"it": closure})
    assert differences(here, fingerprint({"it": closure})) == []
    later = 1
    assert differences(here, fingerprint({"it": closure})) == ["it: closure[0]: missing here"]
    assert closure() == later


def test_keys_of_a_dict_are_compared_by_content() -> None:
    here, same = ({threading.Lock(): 1, ("a", re.compile("b")): 2} for _ in range(2))
    assert differences(fingerprint({"it": here}), fingerprint({"it": same})) == []
    other = {threading.Lock(): 1, ("a", re.compile("c")): 2}
    assert len(differences(fingerprint({"it": here}), fingerprint({"it": other}))) == 2


def test_partials_arrive_with_their_attributes_and_stay_shared() -> None:
    partial: Any = functools.partial(at_the_top, None, factor=3.0)
    partial.note = [1]
    one, other = decode(encode([partial, partial], allow_pickle=False))
    assert one is other
    assert (one.func, one.args, one.keywords, one.note) == (at_the_top, (None,), {"factor": 3.0}, [1])
    assert differences(fingerprint({"it": partial}), fingerprint({"it": one})) == []


class Slotted(Callback):
    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = next(COUNT)


COUNT = itertools.count()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(re.compile("a"), re.compile("b"), id="patterns"),
        pytest.param(re, os, id="modules"),
        pytest.param(Options, Doubles, id="classes"),
        pytest.param(at_the_top, arrived, id="functions"),
        pytest.param(lambda: 1, lambda: 2, id="lambdas"),
        pytest.param((lambda n: lambda: n)(1), (lambda n: lambda: n)(2), id="closures"),
        pytest.param(lambda n=1: n, lambda n=2: n, id="defaults"),
        pytest.param(len, max, id="functions of C"),
        pytest.param([1].append, [1].extend, id="methods"),
        pytest.param([1].append, [2].append, id="methods of unequal objects"),
        pytest.param(Keeps(1).state_dict, Keeps(2).state_dict, id="methods of unequal callbacks"),
        pytest.param(functools.partial(at_the_top, factor=1.0), functools.partial(at_the_top, factor=2.0), id="partials"),
        pytest.param(torch.float16, torch.bfloat16, id="types of numbers"),
        pytest.param(collections.deque([1]), collections.deque([2]), id="deques"),
        pytest.param(collections.OrderedDict(a=1), collections.OrderedDict(a=2), id="dictionaries"),
        pytest.param(itertools.count(1), itertools.count(2), id="iterators"),
        pytest.param([*range(5000), 1], [*range(5000), 2], id="long lists"),
        pytest.param("a" * 5000, "a" * 4999 + "b", id="long texts"),
        pytest.param(Slotted(), Slotted(), id="slots"),
    ],
)
def test_the_fingerprints_of_unequal_objects_differ(one: Any, other: Any) -> None:
    assert differences(fingerprint({"it": one}), fingerprint({"it": one})) == []
    assert differences(fingerprint({"it": one}), fingerprint({"it": other}))


@pytest.mark.parametrize(
    "value",
    [Path("x"), Time("3ep"), (1, "a"), frozenset({1}), functools.partial(at_the_top, factor=2.0)],
    ids=lambda value: type(value).__name__,
)
def test_the_fingerprints_of_one_immutable_value_and_of_equal_ones_are_equal(value: Any) -> None:
    back = decode(encode([value, [value]], allow_pickle=False))
    assert differences(fingerprint({"it": [value, [value]]}), fingerprint({"it": back})) == []


def test_the_fingerprint_of_a_long_list_is_a_digest() -> None:
    one, other = list(range(5000)), list(range(5000))
    other[2500] = 7
    assert len(json.dumps(fingerprint({"it": one}))) < 200
    assert differences(fingerprint({"it": one}), fingerprint({"it": list(one)})) == []
    assert differences(fingerprint({"it": one}), fingerprint({"it": other})) == ["it: a list with another value there"]
    assert differences(fingerprint({"it": one}), fingerprint({"it": one[:10]})) == ["it: a list with another value there"]


def test_a_value_that_is_nested_too_deeply_is_rejected_with_its_path() -> None:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    with pytest.raises(TransportError, match=r"^it\[0\]\[0\].*: nested deeper than 100 levels, too deep to compare; flatten it"):
        fingerprint({"it": value})


class SavesWhatItHas(Callback):
    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


@pytest.mark.parametrize("levels", [500, 5000])
def test_an_encoded_value_that_is_nested_too_deeply_is_rejected_with_its_path(levels: int) -> None:
    value: Any = 1
    for i in range(97):
        value = [value] if i % 2 else (value,)
    assert decode(encode({"it": value}, allow_pickle=False)) == {"it": value}
    for _ in range(levels):
        value = [value]
    with pytest.raises(TransportError, match=r"^it\[0\](\[0\]){97}: nested deeper than 99 levels; flatten it$"):
        encode({"it": value}, allow_pickle=False)
    callback = SavesWhatItHas()
    callback.value = value
    with pytest.raises(
        TransportError, match=r"^it \(SavesWhatItHas\): its state\['value'\](\[0\])+: nested deeper than 99 levels"
    ):
        encode({"it": callback}, allow_pickle=False)


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclass(frozen=True)
class Box:
    content: Any


@pytest.mark.parametrize(
    ("nest", "levels"),
    [
        pytest.param(lambda value: [value], 99, id="lists"),
        pytest.param(lambda value: {"a": value}, 99, id="dicts"),
        pytest.param(lambda value: frozenset({value}), 49, id="sets"),
        pytest.param(Box, 33, id="dataclasses"),
        pytest.param(Pair, 33, id="named tuples"),
        pytest.param(lambda value: functools.partial(at_the_top, factor=value), 33, id="partials"),
    ],
)
def test_the_limits_of_nesting_are_those_of_the_docs(nest: Callable[[Any], Any], levels: int) -> None:
    value: Any = 1
    for _ in range(levels):
        value = nest(value)
    decode(encode(value, allow_pickle=False))
    with pytest.raises(TransportError, match=r"nested deeper than (99|100) levels; flatten"):
        encode(nest(value), allow_pickle=False)


def test_dataclasses_and_enums_are_equal_after_encoding_and_decoding() -> None:
    made = Doubles(3)
    assert (made.amount, made.twice) == (4, 6)
    assert decode(encode(made, allow_pickle=False)) == made
    assert decode(encode(Mode.SAFE, allow_pickle=False)) is Mode.SAFE
    with pytest.raises(TransportError, match=r"it is a test_transport\.Mode; give plain data"):
        encode([Mode.FAST | Mode.SAFE], allow_pickle=False)
    assert decode(encode("\ud800", allow_pickle=False)) == "\ud800"


def test_named_tuples_are_equal_after_encoding_and_decoding() -> None:
    request, seen = Request("stop", "enough", "Stopper", resumable=True), ["it"]
    for made in (
        request,
        Ranks(1, 1, 0, 2),
        RunInfo("run", ranks=Ranks(1, 1, 0, 2)),
        Timestamp(batch=3),
        LaneMessage("log", {"values": seen}),
    ):
        back = decode(encode(made, allow_pickle=False))
        assert back == made
        assert type(back) is type(made)
    back, same = decode(encode((LaneMessage("log", {"values": seen}), seen), allow_pickle=False))
    assert back.arguments["values"] is same


def test_containers_that_contain_themselves_still_do_after_encoding_and_decoding() -> None:
    ring: list[Any] = [1]
    ring.append({"ring": ring})
    back = decode(encode(ring, allow_pickle=False))
    assert back[1]["ring"] is back
    options: Any = Options(1.0)
    options.names.append(options)
    back = decode(encode(options, allow_pickle=False))
    assert back.names == [back]


# --- what the sender rejects -----------------------------------------------------------------------------------


class ByPosition(Callback):
    def __init__(self, first: int, /) -> None:
        self.first = first


class Several(Callback):
    def __init__(self, *files: str) -> None:
        self.files = files


def renamed() -> None: ...


renamed.__qualname__ = "nothing"


def rejected_values() -> Iterator[tuple[str, Any, str]]:
    yield (
        "lambda",
        lambda: 1,
        r"callbacks\[0\] \(Keeps\): its argument given: it is a lambda, which has no import path; .* or set allow_pickle=True",
    )
    yield "renamed", renamed, "test_transport.nothing is not the object with that import path; give the object that is"
    yield "file", open(os.devnull), "it is an open file, which stays in this process; give its path, and open it in on_run_start"  # noqa: SIM115
    yield "lock", threading.Lock(), "it is a lock, which stays in this process; make one in the constructor"
    yield "rlock", threading.RLock(), "it is a lock"
    yield "event", threading.Event(), "it is a lock"
    yield "thread", threading.Thread(), r"it is a threading.Thread, which stays in this process"
    yield "socket", socket.socket(), "it is a socket.socket, which stays in this process"
    yield "generator", (i for i in range(3)), "it is a generator, which stays in this process"
    yield "module", os, "it is a module, which stays in this process"
    yield "object", object(), "it is a object; give plain data or something that has an import path, or set allow_pickle=True"
    yield "subclass", collections.OrderedDict(a=1), "it is a collections.OrderedDict; give plain data"
    yield "deep", {"a": [1, {"b": threading.Lock()}]}, r"its argument given\['a'\]\[1\]\['b'\]: it is a lock"
    yield "method", Options(1.0).names.append, "it is a builtin_function_or_method"
    yield "parameter", torch.nn.Parameter(torch.ones(1)), "it is a torch.nn.parameter.Parameter"
    yield "key", {Colour.RED: 1}, "it is a dict"


@pytest.mark.parametrize(("value", "reason"), [pytest.param(value, reason, id=name) for name, value, reason in rejected_values()])
def test_a_value_that_cannot_be_sent_is_rejected_with_its_path_the_reason_and_a_hint(value: Any, reason: str) -> None:
    began = time.monotonic()
    with pytest.raises(TransportError, match=reason):
        pack([Keeps(value)])
    assert time.monotonic() - began < 60  # no interpreter was started
    if isinstance(value, io.IOBase | socket.socket):
        value.close()


def test_classes_that_cannot_be_sent_are_rejected() -> None:
    class Local(Callback): ...

    with pytest.raises(
        TransportError, match="Local is made inside a function, where it has no import path; define it at the top level"
    ):
        pack([Local()])
    with pytest.raises(TransportError, match="takes first by position only"):
        pack([ByPosition(1)])
    with pytest.raises(TransportError, match=r"takes \*files, which a CallbackSpec cannot hold"):
        pack([Several("a")])
    with pytest.raises(TypeError, match="is a class"):
        pack([Keeps])  # type: ignore[list-item]
    stateful = Keeps()
    stateful.seen = threading.Lock()
    with pytest.raises(TransportError, match=r"callbacks\[0\] \(Keeps\): its state\['seen'\]: it is a lock"):
        pack([stateful])


def test_functions_with_files_locks_or_callbacks_in_them_are_rejected_although_pickles_are_allowed(tmp_path: Path) -> None:
    history, lock = History(), threading.Lock()
    with open(tmp_path / "file", "w+") as file:
        with pytest.raises(TransportError, match="holds an open file"):
            pack([Keeps(lambda: file)], allow_pickle=True)
        with pytest.raises(TransportError, match="it is an open file"):
            pack([Keeps(file)], allow_pickle=True)
    with pytest.raises(
        TransportError, match="refers to the callback History, which is sent as well: the receiver would get two copies"
    ):
        pack([Keeps(lambda: history), history], allow_pickle=True)
    with pytest.raises(TransportError, match=r"its argument given: cloudpickle cannot send it: .*lock"):
        pack([Keeps(lambda: lock)], allow_pickle=True)


# --- the preflight check -------------------------------------------------------------------------------------------------------------


class Innocent(Callback):
    """Its constructor creates objects that cannot be sent, and each process creates its own."""

    shade = Colour.RED

    def __init__(self, names: set[str], file: str) -> None:
        self.names = names
        self.lock, self.event, self.condition = threading.Lock(), threading.Event(), threading.Condition()
        self.thread = threading.Thread(target=self.names.copy, daemon=True)
        self.thread.start()
        self.file = open(file, "a")  # noqa: SIM115
        self.logger = logging.getLogger("innocent")
        self.waiting: collections.deque[int] = collections.deque([1, 2], maxlen=5)
        self.by_default: Any = collections.defaultdict(list, a=[1])
        self.numbers, self.generator = numpy.random.default_rng(3), torch.Generator().manual_seed(5)
        self.random, self.count = random.Random(7), itertools.count(3)
        self.text, self.view = io.StringIO("abc"), memoryview(b"abc")
        self.model, self.pattern = torch.nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False), re.compile("a+")
        torch.nn.init.ones_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        self.methods = [self.names.add, self.state_dict, at_the_top, len]
        self.self_again = self
        self.socket = socket.socket()


class Changed(Callback):
    """Changed after it was made, in each of the ways that neither arguments nor state hold."""

    limit = 3

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.value: Any = 1
        self.gone = 1
        self.tensor = torch.zeros(3)
        self.items = {"a": [1, {"deep": 2}]}
        self.drawn = random.SystemRandom().random()
        self.halfway = (i for i in range(5))
        self.one: list[int] = []
        self.other = self.one
        self.ignored = 0


class HalfState(Keeps):
    """Has a state of which it loads only half."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = {"a": state["seen"]["a"]}


@pytest.mark.test_all
def test_attributes_that_each_process_creates_itself_are_accepted(tmp_path: Path) -> None:
    callbacks: list[Callback] = [
        Innocent({f"name {i}" for i in range(50)}, str(tmp_path / "file"))
    ]  # the order of a set differs by process
    ema, monitor = EMA(), SystemMetricsMonitor()
    ema.state_dict()
    monitor.transport_ignore = ("_process",)
    callbacks += [ema, monitor, CheckpointSaver(save_interval="10ba")]
    names = [type(callback).__name__ for callback in arrived(pack(callbacks))]
    assert names == ["Innocent", "EMA", "SystemMetricsMonitor", "CheckpointSaver"]


class Timed(TrainerCallback):
    """A callback of InstructLab with an attribute that differs between processes."""

    transport_ignore = ("began",)

    def __init__(self) -> None:
        self.began = self.token = random.SystemRandom().random()


class Slots:
    """An object without a `__dict__`, with an attribute that differs between processes."""

    __slots__ = ("began", "token")
    transport_ignore: tuple[str, ...] = ("began",)

    def __init__(self) -> None:
        self.began = self.token = random.SystemRandom().random()


class OfAnotherFramework:
    """An object whose class has a method with the name that callsheet reads."""

    def transport_ignore(self) -> None: ...


def test_a_method_called_transport_ignore_is_no_list_of_names() -> None:
    assert fingerprint({"a": OfAnotherFramework()}) == fingerprint({"a": OfAnotherFramework()})


class SlotsAndMore(Slots):
    """An object with slots and a `__dict__`."""

    transport_ignore = ("began", "more")

    def __init__(self) -> None:
        super().__init__()
        self.more = self.other = self.token


def _random() -> float:
    return random.SystemRandom().random()


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    """A frozen dataclass with slots, whose state is a list."""

    began: float = field(default_factory=_random)
    token: float = field(default_factory=_random)
    transport_ignore: ClassVar[tuple[str, ...]] = ("began",)


def test_ignored_attributes_of_other_objects_are_not_compared() -> None:
    def compared(make: Callable[[], object]) -> list[str]:
        return differences(*(fingerprint({"it": make()}) for _ in range(2)))

    assert compared(lambda: _SentCallback.of(Timed())) == ["it.foreign.token: a float with another value there"]
    assert compared(FrozenSlots) == ["it.token: a float with another value there"]
    assert compared(Slots) == ["it.token: a float with another value there"]
    assert compared(SlotsAndMore) == [f"it.{name}: a float with another value there" for name in ("other", "token")]


@pytest.mark.test_all
def test_changes_that_would_be_lost_are_named() -> None:
    changed = Changed([1])
    changed.value = "another"
    del changed.gone
    changed.tensor[1] = 5
    changed.items["a"][1]["deep"] = 3  # type: ignore[index]
    changed.other = []
    changed.extra = threading.Lock()  # type: ignore[attr-defined]
    changed.transport_ignore = ("ignored",)
    changed.ignored = 5
    half = HalfState()
    half.seen = {"a": 1, "b": 2}
    Changed.limit = 4
    Changed.on_log = at_the_top  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(TransportError) as caught:
            pack([half, changed])
    finally:
        Changed.limit = 3
        del Changed.on_log
    lines = {line.strip() for line in str(caught.value).splitlines()}
    who = "callbacks[1] (Changed)"
    assert {
        "callbacks[0] (HalfState).seen['b']: missing there",
        f"{who}.value: a str here, an int there",
        f"{who}.gone: missing here",
        f"{who}.items['a'][1]['deep']: an int with another value there",
        f"{who}.drawn: a float with another value there",
        f"{who}.halfway: a generator, which cannot be inspected",
        f"{who}.other: there it is the same object as callbacks[1].one, but not here",
        f"{who}.extra: missing there",
        f"{who} Changed.limit: an int with another value there",
        f"{who} Changed.on_log: missing there",
    } <= lines
    assert any(line.startswith(f"{who}.tensor: content: ") for line in lines)
    assert "ignored" not in "".join(line for line in lines if line.startswith("callbacks"))
    # The message shows no values.
    assert "another" not in "".join(line for line in lines if ".value" in line).replace("another value", "")
    assert "state_dict" in str(caught.value)
    assert "on_run_start" in str(caught.value)


class FailsElsewhere(Callback):
    def __init__(self, pid: int) -> None:
        if os.getpid() != pid:
            raise RuntimeError("only in one process")


class Exits(Callback):
    def __init__(self, pid: int) -> None:
        if os.getpid() != pid:
            print("a last word", flush=True)
            os._exit(7)


@pytest.mark.test_all
def test_a_callback_that_cannot_be_rebuilt_is_rejected_with_its_error() -> None:
    with pytest.raises(
        TransportError,
        match=r"rebuilt in a fresh interpreter.*RuntimeError: only in one process\n  at .*test_transport.py:\d+: raise",
    ):
        pack([FailsElsewhere(os.getpid())])
    with pytest.raises(TransportError, match=r"exited with code 7 before anything was rebuilt; its last output:\n  a last word"):
        pack([Exits(os.getpid())])


# --- where a script's own classes are found --------------------------------------------------------------------------------

SCRIPT = """
import sys
from callsheet import Callback
from callsheet.transport import TransportError, pack, payload

class Mine(Callback):
    def __init__(self, function):
        self.function = function

def helper():
    return {"name": __name__}

{more}

if {guard}:
    class Late(Callback): ...
    try:
        sent = pack([{what}])
    except TransportError as error:
        print("rejected:", error)
        sys.exit()
    with sent.post() as variables:
        [got] = payload.open_payload(dict(variables)).callbacks
    print("arrived:", type(got) is {kind}, got.function is helper)
"""


def output_of(*command: str, cwd: Path, stdin: str | None = None) -> str:
    done = subprocess.run([python(), *command], capture_output=True, text=True, cwd=cwd, input=stdin, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def script(*, what: str = "Mine(helper)", kind: str = "Mine", guard: str = '__name__ == "__main__"', more: str = "") -> str:
    return SCRIPT.replace("{what}", what).replace("{kind}", kind).replace("{guard}", guard).replace("{more}", more)


@pytest.mark.slow
def test_callbacks_of_classes_that_the_script_defines_arrive(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(script())
    assert output_of("run.py", cwd=tmp_path) == "arrived: True True"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "job.py").write_text(script())
    assert output_of("-m", "package.job", cwd=tmp_path).startswith("arrived:")


@pytest.mark.slow
def test_a_class_that_the_script_s_import_would_not_define_is_rejected_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(script(what="Late()"))
    recorded = output_of("late.py", cwd=tmp_path)
    assert (
        "late.py has no 'Late' when it is imported: define it at the top level, outside `if __name__ == '__main__'`" in recorded
    )
    (tmp_path / "broken.py").write_text(script(more="if __name__ != '__main__': raise OSError('no such thing here')"))
    assert "OSError: no such thing here\n  at " in output_of("broken.py", cwd=tmp_path)
    (tmp_path / "unguarded.py").write_text(script(guard="True").replace("    except TransportError", "    except KeyError"))
    done = subprocess.run([python(), "unguarded.py"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "pack() was called while a new process imports the script: put the call under" in done.stderr


@pytest.mark.slow
def test_a_class_without_a_script_is_rejected_unless_pickles_are_allowed(tmp_path: Path) -> None:
    recorded = output_of("-c", script(), cwd=tmp_path)
    assert recorded.startswith("rejected: callbacks[0] (Mine): Mine is defined in a notebook or at a prompt")
    assert "allow_pickle=True" in recorded
    allowed = script().replace("Mine(helper)]", "Mine(helper)], allow_pickle=True")
    assert output_of("-", cwd=tmp_path, stdin=allowed).startswith("arrived: True")  # the receiver has the same class


@pytest.mark.slow
def test_pickled_functions_of_a_script_share_its_classes_and_globals(tmp_path: Path) -> None:
    text = script(what="Mine(lambda: (Mine, helper, STORE))", more="STORE = [1]")
    text = text.replace("STORE))])", "STORE))], allow_pickle=True)").replace(
        "got.function is helper", "got.function()[0] is Mine"
    )
    (tmp_path / "run.py").write_text(text)
    assert output_of("run.py", cwd=tmp_path) == "arrived: True True"


# --- the file ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def posted() -> Iterator[tuple[dict[str, str], Path]]:
    """A payload file as during a launch, created without the slow preflight check."""
    around = encode({"python": sys.version.split()[0], "sys_path": [], "argv": [], "launcher": os.getpid()}, allow_pickle=False)
    values = encode({"callbacks": [Keeps(SECRETIVE)]}, allow_pickle=False)
    content = b"".join(len(part).to_bytes(8, "little") + part for part in (around, values))
    with Payload(("Keeps",), content).post() as variables:
        yield variables, Path(variables[PAYLOAD_VARIABLE])


def rejection(variables: Mapping[str, str]) -> str:
    """Return the message with which `unpack` rejects a payload. Check that it has neither the key nor the content."""
    with pytest.raises(TransportError) as caught:
        open_payload(dict(variables))
    recorded = "".join(map(str, [caught.value, caught.value.__cause__, caught.value.__context__]))
    assert SECRETIVE not in recorded
    if variables.get(KEY_VARIABLE):
        assert variables[KEY_VARIABLE][32:] not in recorded
    return str(caught.value)


def test_only_this_user_can_read_the_file_and_it_is_deleted_with_the_launch(posted: tuple[dict[str, str], Path]) -> None:
    _, path = posted
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with PrivateFolder() as folder:
        assert path.exists()  # it belongs to a launch that is still running
        assert folder.path.exists()
    assert not folder.path.exists()
    before = os.umask(0)
    try:
        write_private(path.with_name("another"), b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.with_name("another").stat().st_mode) == 0o600


def test_a_payload_is_unpacked_once_and_its_variables_are_removed(
    posted: tuple[dict[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, _ = posted
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    [got] = unpack()
    assert isinstance(got, Keeps)
    assert got.given == SECRETIVE
    assert not {KEY_VARIABLE, PAYLOAD_VARIABLE} & os.environ.keys()
    with pytest.raises(TransportError, match=r"nothing was sent to this process: CALLSHEET_PAYLOAD is not in its environment"):
        unpack()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_payload_with_any_changed_bit_or_length_fails_verification(data: st.DataObject) -> None:
    key = Key.new()
    sealed = seal(key, "payload", b"0123456789" * 20)
    at, bit = data.draw(st.integers(0, len(sealed) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(sealed)
    flipped[at] ^= 1 << bit
    for wrong in (bytes(flipped), sealed[:at], sealed + b"\0", sealed[at:]):
        if wrong != sealed:
            with pytest.raises(TransportError):
                unseal(key, "payload", wrong, "it")
    assert unseal(key, "payload", sealed, "it") == b"0123456789" * 20


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def test_a_changed_or_cut_payload_is_rejected_before_it_is_decoded(posted: tuple[dict[str, str], Path]) -> None:
    variables, path = posted
    whole = path.read_bytes()
    changed(path, lambda raw: raw.replace(b"Keeps", b"Keepz"))
    assert "was changed or cut short after it was signed" in rejection(variables)
    path.write_bytes(whole.replace(b"sealed 1", b"sealed 2"))
    assert "was changed or cut short" in rejection(variables)
    path.write_bytes(whole[:-50])
    assert "was changed or cut short" in rejection(variables)
    path.write_bytes(whole[:40])
    assert "is cut short: 40 bytes" in rejection(variables)
    path.write_bytes(b"")
    assert "is cut short" in rejection(variables)


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


def test_no_code_of_a_payload_with_a_wrong_signature_is_executed(posted: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    variables, path = posted
    touched = tmp_path / "touched"
    pickled = pickle.dumps([Bomb(touched)])
    parts = (b'{"value": {"@pickle": 0}, "script": ""}', b"\x02\0\0\0\0\0\0\0{}", pickled)
    content = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    key = Key.read(variables[KEY_VARIABLE])
    path.write_bytes(seal(Key(key.launch, b"\0" * 32), "payload", content))  # the launch's number is not secret
    assert "was changed" in rejection(variables)
    assert not touched.exists()
    decode(content)  # decoding the content would execute the code
    assert touched.exists()


def test_a_payload_of_another_launch_is_rejected(posted: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    variables, path = posted
    earlier = path.read_bytes()
    key = Key.read(variables[KEY_VARIABLE])
    for other in (Key.new(), Key(Key.new().launch, key.secret)):  # also if two launches have the same secret
        with PrivateFolder() as folder:
            write_private(folder.path / "payload", earlier)
            recorded = rejection({PAYLOAD_VARIABLE: str(folder.path / "payload"), KEY_VARIABLE: other.text()})
            assert "does not belong to this launch, but to an earlier one" in recorded
    path.write_bytes(seal(key, "result", b"x"))
    assert "is not a payload" in rejection(variables)
    path.unlink()
    assert "it does not exist: the launch that it belongs to has ended" in rejection(variables)
    assert "CALLSHEET_PAYLOAD_KEY is not in its environment" in rejection({PAYLOAD_VARIABLE: str(path)})
    recorded = rejection({PAYLOAD_VARIABLE: str(path), KEY_VARIABLE: "no key at all, but the secret of another program"})
    assert "is not one that callsheet made" in recorded
    assert "no key at all" not in recorded
    assert "secret=" not in repr(key)


def test_a_file_or_folder_that_other_users_can_read_or_write_is_rejected(posted: tuple[dict[str, str], Path]) -> None:
    variables, path = posted
    for mode in (0o644, 0o620, 0o602, 0o640):
        path.chmod(mode)
        assert f"can be read or written by others (mode {mode:o})" in rejection(variables)
    path.chmod(0o600)
    for mode in (0o755, 0o770, 0o701):
        path.parent.chmod(mode)
        assert f"{path.parent} can be read or written by others (mode {mode:o})" in rejection(variables)
    path.parent.chmod(0o700)
    assert open_payload(dict(variables)).callbacks


def test_links_pipes_folders_and_too_large_files_are_rejected(posted: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    variables, path = posted
    real = path.with_name("real")
    path.rename(real)
    path.symlink_to(real)
    assert "it is a symbolic link" in rejection(variables)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert "is not a regular file" in rejection(variables)  # reading it does not wait for a writer
    path.unlink()
    path.mkdir(0o700)
    assert "is not a regular file" in rejection(variables)
    path.rmdir()
    real.rename(path)
    link = tmp_path / "folder"
    link.symlink_to(path.parent)
    assert "it is a symbolic link" in rejection({**variables, PAYLOAD_VARIABLE: str(link / path.name)})
    with pytest.raises(TransportError, match="is larger than 10 bytes"):
        read_private(path, largest=10)
    assert "it does not exist" in rejection({**variables, PAYLOAD_VARIABLE: str(tmp_path / "nowhere" / "payload")})


def test_a_file_or_folder_of_another_user_is_rejected(
    posted: tuple[dict[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root can change a file's owner, so this process becomes another user."""
    variables, path = posted
    us = os.geteuid()
    users: list[int] = []
    monkeypatch.setattr(os, "geteuid", lambda: users.pop(0) if users else us + 1)
    assert f"{path.parent} belongs to user {us}, and this process runs as user {us + 1}" in rejection(variables)
    users.append(us)  # the folder belongs to this user, and the file in it does not
    assert f"{path} belongs to user {us}, and this process runs as user {us + 1}" in rejection(variables)
    monkeypatch.setattr(os, "geteuid", lambda: us)
    assert open_payload(dict(variables)).callbacks


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_or_folder_whose_owner_was_changed_is_rejected(posted: tuple[dict[str, str], Path]) -> None:
    variables, path = posted
    os.chown(path, 12345, -1)
    assert f"{path} belongs to user 12345, and this process runs as user 0" in rejection(variables)
    os.chown(path, 0, -1)
    os.chown(path.parent, 12345, -1)
    assert f"{path.parent} belongs to user 12345" in rejection(variables)
    os.chown(path.parent, 0, -1)


def test_the_file_that_was_checked_is_the_file_that_is_read(posted: tuple[dict[str, str], Path]) -> None:
    """A link and the file are swapped as fast as possible: each reading gives the payload or is rejected, and never gives the other file."""
    _, path = posted
    bait = path.with_name("bait")
    write_private(bait, b"bait")
    bait.chmod(0o644)
    whole, over = path.read_bytes(), threading.Event()

    def swap() -> None:
        for i in itertools.count():
            if over.is_set():
                return
            new = path.with_name(f"new-{i % 2}")
            new.unlink(missing_ok=True)
            if i % 2:
                new.symlink_to(bait)
            else:
                write_private(new, whole)
            new.rename(path)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        found = set()
        for _ in range(300):
            try:
                found.add(read_private(path).decode("latin-1"))
            except TransportError as error:
                found.add(str(error).partition(": ")[2])
        assert found <= {whole.decode("latin-1"), "it is a symbolic link, or not of the expected type"}
    finally:
        over.set()
        swapping.join()


@pytest.mark.test_all
def test_the_folder_is_removed_after_an_error_and_after_a_kill_by_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyError), PrivateFolder() as folder:
        raise KeyError
    assert not folder.path.exists()
    code = (
        "import os, signal\nfrom callsheet.transport.sealed import PrivateFolder\n"
        "with PrivateFolder() as folder:\n    print(folder.path, flush=True)\n    signal.pause()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    foreign = tmp_path / "callsheet-launch-without-a-lock"
    foreign.mkdir()
    with PrivateFolder():
        assert left.exists()  # its owner still runs
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert left.exists()
    with PrivateFolder():
        assert not left.exists()
    assert foreign.exists()
    shutil.rmtree(foreign)


@pytest.mark.parametrize("where", ["open", "flock", "rename"])
def test_a_folder_that_cannot_be_locked_is_removed(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could not be determined, so it would never be removed."""
    import fcntl

    module = fcntl if where == "flock" else os
    real = getattr(module, where)

    def fails(what: Any, *others: Any, **options: Any) -> Any:
        if isinstance(what, int) or str(what).endswith("lock.new"):
            raise OSError(errno.ENOLCK, "no locks available")
        return real(what, *others, **options)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(module, where, fails)
        with pytest.raises(OSError, match="no locks available"):
            PrivateFolder()
    assert list(tmp_path.iterdir()) == []
    with PrivateFolder() as folder:
        assert folder.path.exists()


def test_a_launcher_whose_pid_belongs_to_another_user_s_process_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def rejected(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, f"process {pid} is not yours, not even for {number}")

    assert worker._is_there(os.getpid())
    monkeypatch.setattr(os, "kill", rejected)
    assert not worker._is_there(os.getpid())


def test_the_repr_of_a_payload_does_not_show_its_content(posted: tuple[dict[str, str], Path]) -> None:
    payload = Payload(("Keeps",), SECRETIVE.encode())
    assert repr(payload) == "Payload(names=('Keeps',))"
    assert SECRETIVE not in str(vars(payload) if hasattr(payload, "__dict__") else payload)


def test_a_payload_above_the_size_limit_is_rejected() -> None:
    with pytest.raises(
        TransportError,
        match=r"^the callbacks and arguments together: \d+ bytes, more than the limit of 134217728; save large data to a file, and send the",
    ):
        pack([Keeps(torch.zeros(2**25 + 2**20))])
    with pytest.raises(TransportError, match=r"^the value: \d+ bytes, more than the limit of 134217728"):
        encode("x" * (2**27 + 1), allow_pickle=False)
    # The size is checked before a copy is made: a copy of this tensor needs 2 TiB.
    with pytest.raises(TransportError, match=r"^the value: 2199023255552 bytes, more than"):
        encode(torch.zeros(1).expand(2**39), allow_pickle=False)
