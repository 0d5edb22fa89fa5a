"""Tensor files in the safetensors format. They are written one tensor at a time, and parts of them can be read.

The library's `save_file` and `safe_open` are not used. `save_file` needs all tensors in host memory at once, reports a full disk
only as text, makes files that only their owner can read, renames files, and writes dtypes (F8_E8M0, F4) that its own reader
rejects. `safe_open` reads only from this machine's disks.
"""

from __future__ import annotations

import cmath
import ctypes
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from callsheet.checkpoint.ranks import RankGroup
from callsheet.checkpoint.storage import FileSeal, Folder
from callsheet.errors import CheckpointError

DTYPES = {  # the dtypes that the safetensors library can read
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000  # bytes; the safetensors library has the same limit
# Tensors are checked, digested and written in pieces of this many bytes. Such a piece stays in the CPU cache.
# With smaller pieces, a write would wait for training more often: each operation on a piece takes the interpreter lock.
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Entry:
    """The description of one tensor in a safetensors file. `start` is the position of the tensor's first byte in the file."""

    dtype: torch.dtype
    size: tuple[int, ...]
    start: int


def write_tensors(
    folder: Folder,
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    data: Iterable[Tensor] | None = None,
    look: Callable[[str, Tensor], None] | None = None,
) -> FileSeal:
    """Write `tensors` durably to the new safetensors file `name`. Only one tensor at a time is copied to host memory.

    Args:
        metadata: strings for the file's header.
        data: an iterable of the tensors in the order of `file_order`, to use if each tensor should be made only when it is
            written.
        look: called with the name and each piece of a tensor before that piece is written. Pieces are flat and on the CPU.

    Raises `CheckpointError` if the disk reports an error. Each tensor must have been checked with `check_storable` before.
    """
    order = file_order(tensors)
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in order:
        start, end = end, end + tensors[key].numel() * tensors[key].itemsize
        entries[key] = {"dtype": DTYPES[tensors[key].dtype], "shape": list(tensors[key].shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little") + header
        for key, tensor in zip(order, (tensors[key] for key in order) if data is None else data, strict=True):
            host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            for piece in host.view(-1).split(_PIECE_BYTES // host.itemsize):
                if look is not None:
                    look(key, piece)
                yield memory_of(piece)

    return folder.write(name, chunks())


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors in the order in which a file holds them: by the size of their dtypes, the largest first.

    In this order, each tensor is aligned in a memory-mapped file.
    """
    return sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise `CheckpointError` if a tensor cannot be stored, for example because it is sparse, quantized, meta or of a subclass.

    For a DTensor, pass the local part.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise CheckpointError(f"{name}: a {type(tensor)} cannot be written to a tensor file; save a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "meta tensor" if tensor.is_meta else "quantized" if tensor.is_quantized else f"{tensor.layout} tensor"
        raise CheckpointError(f"{name}: a {kind} cannot be written to a tensor file; save a dense one with data")
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{name}: {tensor.dtype} cannot be written to a tensor file; save it as .view(torch.uint8) or cast it"
        )


def read_header(file: BinaryIO, size_bytes: int, source: str) -> dict[str, Entry]:
    """Return an `Entry` for each tensor in a safetensors file of `size_bytes` bytes. `source` is the file's name in error messages.

    Raises `CheckpointError` unless the entries fill the file without gaps and each has as many bytes as its dtype and size need.
    """
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"its header has {length} bytes")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found, end = {}, 0
        for key, entry in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
            dtype, size = DTYPE_OF[entry["dtype"]], tuple(entry["shape"])
            if not all(type(n) is int and n >= 0 for n in size):
                raise ValueError(f"{key} has size {size}")
            start, end = end, end + math.prod(size) * dtype.itemsize
            if entry["data_offsets"] != [start, end]:
                raise ValueError(f"{key} does not begin where the previous tensor ends")
            found[key] = Entry(dtype, size, 8 + length + start)
        if 8 + length + end != size_bytes:
            raise ValueError(f"its entries need {8 + length + end} bytes, and the file has {size_bytes}")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{source}: not a valid tensor file: {error!r}; use another checkpoint") from error
    return found


def read_rows(file: BinaryIO, entry: Entry, start: int, rows: Tensor) -> None:
    """Fill `rows` with rows of a tensor in a file, beginning at row `start`. `rows` must be contiguous and on the CPU.

    A tensor without dimensions is read whole.
    """
    file.seek(entry.start + start * math.prod(entry.size[1:]) * entry.dtype.itemsize)
    memory = memory_of(rows)
    while memory:
        got = file.readinto(memory)  # type: ignore[attr-defined]  # all files that callsheet opens have this method
        if not got:
            raise EOFError("the file ends too early")
        memory = memory[got:]


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them. The tensor must stay alive while the result is used."""
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the shard of a DTensor, or the whole of any other tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor], group: ProcessGroup | None = None) -> bool:
    """Return whether tensors are free of NaN and infinity.

    Each rank checks its own shard of a DTensor. This waits once for each device, whatever the number of tensors.

    Args:
        tensors: the tensors. Those that are neither floating-point nor complex count as finite.
        group: a gloo group. All its ranks must call this function, and the result covers the tensors of all ranks. If it is None,
            only this process's tensors are checked.
    """
    parts: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            part = local_part(tensor)
            parts[part.device].append(part.float() if part.itemsize == 1 else part)  # float8 supports neither sum nor isfinite
    return RankGroup(group).all(all(map(_are_finite, parts.values())))


def _are_finite(parts: list[Tensor]) -> bool:
    """Return whether all elements of these tensors, which must be on one device, are finite.

    If the sum is finite, all elements are, and computing it takes a tenth of the time of `isfinite`. The sum of finite numbers
    can overflow, so if the sum is not finite, `isfinite` decides.
    """
    sums = [part.sum(dtype=torch.float32 if part.itemsize == 2 else None) for part in parts]
    if len(sums) == 1 and cmath.isfinite(sums[0].item()):
        return True
    return _all_true([torch.isfinite(each) for each in sums]) or _all_true([torch.isfinite(part).all() for part in parts])


def _all_true(verdicts: list[Tensor]) -> bool:
    return bool(torch.stack(verdicts).all())
