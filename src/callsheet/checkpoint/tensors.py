"""The tensor file: safetensors, written one tensor at a time, read back by the library's own strict parser.

Why not the library's `save_file`: it wants every tensor in host memory at once, reports a full disk as a text, makes files that
only their owner may read, goes through a rename, and writes dtypes (F8_E8M0, F4) that its own reader then refuses.
"""

from __future__ import annotations

import ctypes
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch

from callsheet.checkpoint.disk import FileSeal, write_file
from callsheet.errors import CheckpointError

_DTYPES = {  # what `safetensors.torch.load` reads back
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


def write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> FileSeal:
    """Write `tensors` to the new safetensors file `folder/name`, synced; host memory for one tensor at a time is enough.

    Raises `CheckpointError` before anything is written for a tensor that the file cannot hold (sparse, quantized, meta, a
    subclass such as DTensor, complex128), and for what the disk refuses.
    """
    for key, tensor in tensors.items():
        _check(key, tensor)
    # Wide dtypes first, so that each tensor stands aligned for whoever maps the file.
    order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))
    entries, end = {}, 0
    for key in order:
        start, end = end, end + tensors[key].numel() * tensors[key].itemsize
        entries[key] = {"dtype": _DTYPES[tensors[key].dtype], "shape": list(tensors[key].shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little") + header
        for key in order:
            host = tensors[key].detach().resolve_conj().resolve_neg().cpu().contiguous()
            size = host.numel() * host.itemsize
            yield memoryview((ctypes.c_char * size).from_address(host.data_ptr())) if size else b""

    return write_file(folder, name, chunks())


def read_tensors(content: bytes, source: Path, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors in the bytes of a safetensors file, on `device`; `source` is named where they are none."""
    try:
        return {key: tensor.to(device) for key, tensor in safetensors.torch.load(content).items()}
    except (safetensors.SafetensorError, KeyError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{source}: not a tensor file that can be read: {error}; use another checkpoint") from error


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """True where no floating or complex tensor holds NaN or infinity; waits once for each device, whatever the number of tensors."""
    verdicts: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            wide = tensor.detach().float() if tensor.itemsize == 1 else tensor.detach()  # float8 knows no isfinite
            verdicts[tensor.device].append(torch.isfinite(wide).all())
    return all(bool(torch.stack(of_device).all()) for of_device in verdicts.values())


def _check(key: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(f"{key}: a {type(tensor)} cannot be written to a tensor file; save a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "meta tensor" if tensor.is_meta else "quantized" if tensor.is_quantized else f"{tensor.layout} tensor"
        raise CheckpointError(f"{key}: a {kind} cannot be written to a tensor file; save a dense one with data")
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{key}: {tensor.dtype} cannot be written to a tensor file; save it as .view(torch.uint8) or cast it"
        )
