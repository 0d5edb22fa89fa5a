"""The file `index.json`, which lists for each tensor the dtype, the full (not sharded) size, and the files that hold its parts.

    {"state.model.weight": {"dtype": "F32", "size": [8, 4], "chunks": [
        {"file": "shard-00000.safetensors", "offsets": [0, 0], "sizes": [4, 4]},
        {"file": "shard-00001.safetensors", "offsets": [4, 0], "sizes": [4, 4]}]}}

A chunk is stored in its file under the tensor's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from callsheet.checkpoint.plain import Json, parse
from callsheet.checkpoint.storage import FileSeal
from callsheet.checkpoint.tensors import DTYPE_OF, DTYPES
from callsheet.errors import CheckpointError

_MAX_DIMENSIONS = 64
_ELEMENTS_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """The file that holds a chunk (a part of a tensor), with the chunk's dtype and size."""

    file: str
    dtype: torch.dtype
    size: torch.Size


@dataclass(frozen=True, slots=True)
class Index:
    """The content of `index.json`: a description of each tensor, and the file that holds each chunk (a part of a tensor).

    A chunk is identified by the tensor's name and the chunk's offsets.
    """

    tensors: dict[str, TensorStorageMetadata]
    places: dict[tuple[str, torch.Size], ShardLocation]

    def metadata(self, names: Iterable[str]) -> Metadata:
        """Return the metadata of the tensors `names` in the form that torch's distributed checkpoint (DCP) uses."""
        return Metadata({name: self.tensors[name] for name in names})


def index_document(plans: Sequence[SavePlan], file_of: Callable[[int], str]) -> Json:
    """Return the content of `index.json`, made from the save plans of all ranks. `file_of` returns the file of a rank's tensors.

    Raise `CheckpointError` if a part of a tensor is missing.
    """
    tensors: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None  # callsheet's plans list only tensors, and the item of a tensor has `tensor_data`
            entry = {"dtype": DTYPES[data.properties.dtype], "size": list(data.size), "chunks": []}
            chunks = tensors.setdefault(item.index.fqn, entry)["chunks"]
            if math.prod(data.chunk.sizes):
                chunks.append({"file": file_of(rank), "offsets": list(data.chunk.offsets), "sizes": list(data.chunk.sizes)})
    for name, entry in tensors.items():
        if sum(math.prod(chunk["sizes"]) for chunk in entry["chunks"]) != math.prod(entry["size"]):
            raise CheckpointError(
                f"{name}: the ranks that save hold only a part of it; save with the group of all ranks that hold it"
            )
    return tensors


def read_index(content: bytes, files: Mapping[str, FileSeal], source: str) -> Index:
    """Parse `content`, the bytes of an index file named `source`. `files` are the files that the manifest lists.

    Raises `CheckpointError` if the chunks of a tensor do not cover it exactly or do not fit into those files. The message names
    the first such tensor.
    """
    index, room = Index({}, {}), {name: file.size_bytes for name, file in files.items()}
    document = parse(content, source)
    if not isinstance(document, dict):
        raise CheckpointError(f"{source} is not an index; use another checkpoint")
    for name, entry in document.items():
        try:
            _read_entry(index, room, name, entry)
        except ValueError as error:
            raise CheckpointError(f"{source}: {name}: {error}; use another checkpoint") from error
    return index


def _read_entry(index: Index, room: dict[str, int], name: str, entry: Json) -> None:
    match entry:
        case {"dtype": str(dtype_name), "size": list(whole), "chunks": list(described), **more} if not more:
            size = _size(whole, len(whole))
        case _:
            raise ValueError("it is not described by dtype, size and chunks")
    dtype = DTYPE_OF.get(dtype_name)
    if dtype is None:
        raise ValueError(f"unknown dtype {dtype_name!r}")
    chunks: list[ChunkStorageMetadata] = []
    seen: set[str] = set()
    for chunk in described:
        match chunk:
            case {"file": str(file), "offsets": list(first), "sizes": list(counts), **more} if not more:
                offsets, sizes = _size(first, len(size)), _size(counts, len(size))
            case _:
                raise ValueError("a chunk is not described by file, offsets and sizes")
        if file not in room:
            raise ValueError(f"the manifest lists no file {file!r}")
        if file in seen:
            raise ValueError(f"two chunks are in {file}")
        if any(start + count > end for start, count, end in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"the chunk at {list(offsets)} of {list(sizes)} exceeds its size {list(size)}")
        room[file] -= math.prod(sizes) * dtype.itemsize
        if room[file] < 0:
            raise ValueError(f"{file} is too small for its chunks")
        seen.add(file)
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        index.places[name, offsets] = ShardLocation(file, dtype, sizes)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size) or _overlap(chunks):
        raise ValueError("its chunks leave gaps or overlap")
    index.tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _size(values: list[Any], dimensions: int) -> torch.Size:
    if len(values) != dimensions or dimensions > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"{values} is not a size or offset in {dimensions} dimensions")
    if math.prod(max(n, 1) for n in values) >= _ELEMENTS_LIMIT:
        raise ValueError(f"the size {values} is too large")
    return torch.Size(values)


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Return whether any chunks of a tensor overlap.

    The chunks are sorted along the dimension with the most cuts, so that FSDP shards are compared only with their neighbours.
    """
    if len(chunks) < 2 or not chunks[0].offsets:
        return len(chunks) > 1
    cut = max(range(len(chunks[0].offsets)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    near: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[cut]):
        near = [other for other in near if other.offsets[cut] + other.sizes[cut] > chunk.offsets[cut]]
        if any(_meet(chunk, other) for other in near):
            return True
        near.append(chunk)
    return False


def _meet(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    spans = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(start < other + length and other < start + count for start, count, other, length in spans)
