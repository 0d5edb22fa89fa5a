from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from callsheet.checkpoint import flatten, unflatten
from callsheet.errors import CheckpointError

TAGS = ["$tensor", "$tuple", "$dict", "$counter", "$float", "$int", "$bytes", "$array", "$scalar", "$", "$unknown"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]

text = st.text(st.characters(), max_size=5) | st.sampled_from([*TAGS, "a.b", "__metadata__", ""])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary(max_size=5)
keys = scalars | st.tuples(scalars, scalars)
tensors = st.builds(
    lambda shape, dtype: torch.full(shape, 3).to(dtype), st.lists(st.integers(0, 2), max_size=3), st.sampled_from(DTYPES)
)
arrays = st.builds(
    lambda shape, dtype: np.ones(shape, dtype),
    st.lists(st.integers(0, 2), max_size=2),
    st.sampled_from(["f4", ">i2", "?", "M8[s]"]),
)
leaves = scalars | tensors | arrays | st.builds(np.float32, st.floats(width=32))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(text, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def through_json(tree: object) -> Any:
    document, found = flatten(tree)
    return unflatten(json.loads(json.dumps(document, allow_nan=False)), found)


def same(a: Any, b: Any) -> bool:
    """Return whether two trees have equal values and types. NaN equals NaN, and -0.0 differs from 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return same(list(a.keys()), list(b.keys())) and same(list(a.values()), list(b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


@given(trees)
def test_a_tree_is_restored(tree: Any) -> None:
    assert same(through_json(tree), tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tuple": [1]},
        {"$dict": []},
        {"a": {"$float": "inf", "b": 1}},
        {1: "int", "1": "str"},
        {None: 0, (1, "x", (b"",)): 1, 2.5: 2, math.inf: 3},
        [math.inf, -math.inf, -0.0, 2**63, -(2**63), -(2**63) - 1, 10**5000],
        "\ud800",
        random.Random(1).getstate(),
        np.random.RandomState(1).get_state(),
        np.random.default_rng(1).bit_generator.state,
        torch.get_rng_state(),
        [],
        (),
        {},
        [[], [()], {}],
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_unusual_values_are_restored(tree: Any) -> None:
    assert same(through_json(tree), tree)


def test_tensors_are_named_by_their_path_and_not_copied() -> None:
    weight = torch.ones(2)
    document, found = flatten({"model": {"layers": [{"weight": weight}]}})
    assert found == {"model.layers.0.weight": weight}
    assert found["model.layers.0.weight"] is weight
    assert document == {"model": {"layers": [{"weight": {"$tensor": "model.layers.0.weight"}}]}}


def test_names_that_could_collide_stay_distinct() -> None:
    tree = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "__metadata__": torch.tensor(3), "\ud800": torch.tensor(4)}
    document, found = flatten(tree)
    assert len(found) == 4
    assert "__metadata__" not in found
    assert all(name.encode() for name in found)
    assert same(unflatten(document, found), tree)


def test_tied_tensors_are_stored_once_and_restored_as_tied() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(3, 2)
            self.head = torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

    document, found = flatten(Tied().state_dict())  # two detached views of one storage
    assert list(found) == ["embed.weight"]
    back = unflatten(document, found)
    assert back["embed.weight"] is back["head.weight"]


def test_views_that_differ_are_not_tied() -> None:
    base = torch.tensor([[1 + 1j, 2], [3, 4]])
    tree = [base, base.T, base[0], base.conj(), torch.view_as_real(base), torch.empty(0), torch.empty(0)]
    assert len(flatten(tree)[1]) == len(tree)
    assert same(through_json(tree), tree)


def state_after_a_step(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": torch.tensor(0.1)}),
    ],
)
def test_optimizer_states_are_restored(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    model = torch.nn.Linear(3, 2)
    state = state_after_a_step(kind(model.parameters(), **options), model)
    back = through_json(state)
    assert same(back, state)
    kind(model.parameters(), **options).load_state_dict(back)


def test_scheduler_states_are_restored() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    multi = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])  # stores its milestones in a Counter
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # its state contains inf
    for state in (multi.state_dict(), plateau.state_dict()):
        assert same(through_json(state), state)
    assert type(through_json(multi.state_dict())["milestones"]) is Counter


def test_an_ordered_dict_is_restored_as_a_dict() -> None:
    assert same(through_json(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("value", [object(), {1}, Pair(1, 2), 1j, bytearray(), Path(), torch.float32, lambda: 0, int])
def test_values_that_are_not_plain_are_rejected_with_path_and_type(value: object) -> None:
    with pytest.raises(
        CheckpointError, match=r"callbacks\.EarlyStopper\.best: a <class '.*'> is not plain data; .* turn it into"
    ):
        flatten({"callbacks": {"EarlyStopper": {"best": value}}})


@pytest.mark.parametrize("array", [np.array([None]), np.array(["x"]), np.zeros(1, "i4,i4"), np.str_("x")])
def test_numpy_objects_are_rejected(array: object) -> None:
    with pytest.raises(CheckpointError, match="rng: a NumPy"):
        flatten({"rng": array})


def test_array_subclasses_are_rejected_because_masks_would_be_lost() -> None:
    with pytest.raises(CheckpointError, match="is not plain data"):
        flatten(np.ma.masked_array([1], [True]))


def test_keys_must_be_plain() -> None:
    with pytest.raises(CheckpointError, match=r"optimizer: a key of <class 'torch\.Tensor'>"):
        flatten({"optimizer": {torch.ones(1): 1}})


def test_a_tree_that_contains_itself_is_rejected() -> None:
    inner: list[Any] = []
    inner.append({"again": inner})
    with pytest.raises(CheckpointError, match=r"a\.0\.again: the list contains itself"):
        flatten({"a": inner})
    twice = [1]
    assert through_json([twice, twice]) == [[1], [1]]


def test_a_tree_that_is_nested_too_deeply_is_rejected() -> None:
    deep: list[Any] = []
    for _ in range(99):
        deep = [deep]
    assert same(through_json(deep), deep)
    assert same(through_json({1: through_json(deep)[0]}), {1: deep[0]})
    with pytest.raises(CheckpointError, match="nested deeper than 100 levels"):
        flatten([deep])
    document: Any = 0
    for _ in range(300):
        document = {"$dict": [["a", document]]}
    with pytest.raises(CheckpointError, match="nested too deep"):
        unflatten(document, {})


@pytest.mark.parametrize(
    "document",
    [
        {"$tensor": "gone"},
        {"$tensor": 1},
        {"$tuple": {}},
        {"$tuple": [], "more": 1},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$dict": [[{"$tensor": "here"}, 1]]},
        {"$float": "1e400"},
        {"$int": "zz"},
        {"$bytes": "?"},
        {"$array": ["|O8", [1], "AAAAAAAAAAA="]},
        {"$array": ["<f4", [2], "AAAAAA=="]},
        {"$array": ["<f4", [-1], "AAAAAA=="]},
        {"$array": ["<f4", ["1"], "AAAAAA=="]},
        {"$array": ["<f3", [0], ""]},
        {"$array": ["<f4", [0] * 100, ""]},
        {"$scalar": ["<f4", ""]},
        {"$object": "os.system"},
        {"$": 1},
        object(),
    ],
)
def test_a_malformed_document_is_rejected_with_its_path(document: Any) -> None:
    with pytest.raises(CheckpointError, match=r"a\.1: malformed state document: .*; use another checkpoint"):
        unflatten({"a": [0, document]}, {"here": torch.ones(1)})


json_documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["inf", "<f4", "AAAA", "0x1", "t"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*TAGS, "a"]), inner, max_size=2),
    max_leaves=10,
)


@given(json_documents)
def test_any_document_is_read_or_rejected(document: Any) -> None:
    try:
        tree = unflatten(document, {"t": torch.ones(1)})
    except CheckpointError:
        return
    assert same(through_json(tree), tree)
