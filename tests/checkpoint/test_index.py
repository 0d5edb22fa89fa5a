from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from callsheet.checkpoint import FileSeal, read_checkpoint, write_checkpoint
from callsheet.checkpoint.index import _overlap, read_index
from callsheet.checkpoint.layout import KIND
from callsheet.checkpoint.local import LocalFolder
from callsheet.checkpoint.seal import write_seal
from callsheet.checkpoint.storage import measure
from callsheet.errors import CheckpointError

FILES = {name: FileSeal(200, "") for name in ("a", "b", "c")}


def chunk(file: str, offsets: list[Any], sizes: list[Any], **more: Any) -> dict[str, Any]:
    return {"file": file, "offsets": offsets, "sizes": sizes, **more}


GOOD: dict[str, Any] = {"dtype": "F32", "size": [4, 2], "chunks": [chunk("a", [0, 0], [3, 2]), chunk("b", [3, 0], [1, 2])]}


def with_chunks(*chunks: Any) -> dict[str, Any]:
    return GOOD | {"chunks": list(chunks)}


def test_a_valid_index_is_read() -> None:
    index = read_index(
        json.dumps({"w": GOOD, "n": {"dtype": "I64", "size": [0, 3], "chunks": []}}).encode(), FILES, "ck/index.json"
    )
    assert index.tensors["w"].size == (4, 2)
    assert index.tensors["n"].properties.dtype == torch.int64
    location = index.places["w", torch.Size([3, 0])]
    assert (location.file, location.dtype, location.size) == ("b", torch.float32, (1, 2))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (None, "not described"),
        ([], "not described"),
        ({}, "not described"),
        (GOOD | {"more": 1}, "not described"),
        (GOOD | {"dtype": 1}, "not described"),
        (GOOD | {"chunks": {}}, "not described"),
        (GOOD | {"dtype": "F128"}, "unknown dtype 'F128'"),
        (GOOD | {"dtype": "__import__"}, "unknown dtype"),
        (GOOD | {"size": [4, "2"]}, "is not a size"),
        (GOOD | {"size": [4, 2.0]}, "is not a size"),
        (GOOD | {"size": [4, True]}, "is not a size"),
        (GOOD | {"size": [-4, -2]}, "is not a size"),
        (GOOD | {"size": [1] * 65}, "is not a size"),
        (GOOD | {"size": [1 << 62, 2]}, "the size .* is too large"),
        (GOOD | {"size": [0, 1 << 70], "chunks": []}, "the size .* is too large"),
        (GOOD | {"size": [1 << 40], "chunks": [chunk("a", [0], [1 << 40])]}, "a is too small for its chunks"),
        (GOOD | {"size": [1 << 40], "chunks": []}, "gaps"),
        (GOOD | {"size": [4, 3]}, "gaps"),
        (with_chunks(), "gaps"),
        (with_chunks(1), "a chunk is not described"),
        (with_chunks({}), "a chunk is not described"),
        (with_chunks(chunk("a", [0, 0], [4, 2], key="x")), "a chunk is not described"),
        (with_chunks(chunk("a", [0], [4, 2])), "is not a size"),
        (with_chunks(chunk("a", [0, 0], [4])), "is not a size"),
        (with_chunks(chunk("a", [0, -1], [4, 2])), "is not a size"),
        (with_chunks(chunk("a", [1, 0], [4, 2])), "exceeds its size"),
        (with_chunks(chunk("../a", [0, 0], [4, 2])), "the manifest lists no file '../a'"),
        (with_chunks(chunk("/etc/passwd", [0, 0], [4, 2])), "the manifest lists no file '/etc/passwd'"),
        (with_chunks(chunk("d", [0, 0], [4, 2])), "the manifest lists no file 'd'"),
        (with_chunks(chunk("a", [0, 0], [3, 2])), "gaps"),
        (with_chunks(chunk("a", [0, 0], [3, 2]), chunk("a", [3, 0], [1, 2])), "two chunks are in a"),
        (with_chunks(chunk("a", [0, 0], [3, 2]), chunk("b", [2, 0], [2, 2])), "gaps or overlap"),
        (with_chunks(chunk("a", [0, 0], [2, 2]), chunk("b", [0, 0], [2, 2])), "gaps or overlap"),
        ({"dtype": "F32", "size": [], "chunks": [chunk("a", [], []), chunk("b", [], [])]}, "gaps or overlap"),
    ],
    ids=str,
)
def test_a_crafted_index_is_rejected_by_name(entry: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^ck/index\.json: model\.w: .*{why}.*; use another checkpoint$"):
        read_index(json.dumps({"good": GOOD, "model.w": entry}).encode(), FILES, "ck/index.json")


def test_tensors_cannot_overlap() -> None:
    document = {f"w{i}": {"dtype": "F64", "size": [6], "chunks": [chunk("a", [0], [6])]} for i in range(5)}
    with pytest.raises(CheckpointError, match=r"w4: a is too small"):
        read_index(json.dumps(document).encode(), FILES, "ck/index.json")


@pytest.mark.parametrize("content", [b"", b"[]", b"1", b"{", b'{"a": NaN}', b"[" * 100_000, b"\x80\x04"])
def test_content_that_is_not_an_index_is_rejected(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"ck/index\.json is no"):
        read_index(content, FILES, "ck/index.json")


boxes = st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 3))] * 2), min_size=1, max_size=6)


@given(boxes)
def test_overlaps_are_found(found: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    chunks = [ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(size for _, size in box)) for box in found]
    cells = [{(x, y) for x in range(a, a + b) for y in range(c, c + d)} for (a, b), (c, d) in found]
    assert _overlap(chunks) == any(a & b for a, b in itertools.combinations(cells, 2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "ck", {"w": torch.arange(4.0), "v": torch.ones(4)}, {"seed": torch.ones(2)}, {})
    return tmp_path / "ck"


def craft(path: Path, name: str, content: bytes) -> None:
    """Write a file into the folder, and a valid manifest for all files."""
    (path / name).write_bytes(content)
    (path / "manifest.json").unlink()
    folder = LocalFolder(path)
    write_seal(folder, {name: measure(folder, name) for name in folder.entries() if name != "checkpoint.txt"}, {}, kind=KIND)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"state.w": None}, r"state\.json: w: malformed state document: there is no tensor 'w'"),
        ({"local-00000.seed": None}, r"local-00000\.json: seed: malformed state document: there is no tensor 'seed'"),
        ({"state.w": ("state.x", {})}, "there is no tensor 'w'"),
        ({"state.w": ("state.w", {"dtype": "I32"})}, "state.w does not match the index"),
        ({"state.w": ("state.w", {"size": [2, 2]}), "chunk": ([0, 0], [2, 2])}, "state.w does not match the index"),
        ({"state.w": ("state.w", {"file": "state.json"})}, "state.json: not a valid tensor file"),
    ],
    ids=str,
)
def test_an_index_that_does_not_fit_the_files_is_rejected(path: Path, changed: dict[str, Any], why: str) -> None:
    index = json.loads((path / "index.json").read_text())
    offsets, sizes = changed.pop("chunk", ([0], [4]))
    for name, change in changed.items():
        entry = index.pop(name)
        if change is not None:
            more = dict(change[1])
            file = more.pop("file", "shard-00000.safetensors")
            index[change[0]] = entry | more | {"chunks": [chunk(file, offsets, sizes)]}
    craft(path, "index.json", json.dumps(index).encode())
    given = torch.zeros(4)
    with pytest.raises(CheckpointError, match=why):
        read_checkpoint(path, target=lambda name, *_: given if name == "v" else None)
    assert given.sum() == 0


def test_a_seal_that_counts_too_few_documents_is_rejected(path: Path) -> None:
    (path / "local-00000.json").unlink()
    craft(path, "state.json", (path / "state.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"its manifest lists no local-00000\.json"):
        read_checkpoint(path)
