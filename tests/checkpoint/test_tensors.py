from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from callsheet.checkpoint import all_finite
from callsheet.checkpoint.local import LocalFolder
from callsheet.checkpoint.tensors import DTYPES, Entry, check_storable, read_header, read_rows, write_tensors
from callsheet.errors import CheckpointError


def written(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Write the tensors to a file, and return them as read back."""
    seal = write_tensors(LocalFolder(path), "t.safetensors", tensors)
    content = (path / "t.safetensors").read_bytes()
    assert seal.size_bytes == len(content)
    file, back = io.BytesIO(content), {}
    for name, entry in read_header(file, len(content), "t").items():
        back[name] = torch.empty(entry.size, dtype=entry.dtype)
        read_rows(file, entry, 0, back[name])
    return back


def test_every_dtype_is_read_back_also_by_safetensors(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.tensor([[0, 1, 2]]).to(dtype) for dtype in DTYPES}
    back, library = written(tmp_path, tensors), safetensors.torch.load_file(tmp_path / "t.safetensors")
    for name, tensor in tensors.items():
        for other in (back[name], library[name]):
            assert other.dtype == tensor.dtype
            assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))


def test_every_layout_is_read_back_with_its_values(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    z = torch.tensor([1 + 2j])
    tensors = {
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(3),
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "leaf": torch.nn.Parameter(base.clone()),
        "grad": torch.nn.Parameter(base.clone()) * 2,
    }
    back = written(tmp_path, tensors)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_a_file_without_tensors_is_read_back(tmp_path: Path) -> None:
    assert written(tmp_path, {}) == {}


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.ones(2).to(torch.float8_e8m0fnu), "float8_e8m0fnu"),  # the library can write it, but not read it
        (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine"),
    ],
    ids=["sparse", "meta", "complex128", "e8m0", "subclass"],
)
def test_tensors_that_the_format_does_not_support_are_rejected(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"ema\.w: .*{why}.* cannot be written to a tensor file; save"):
        check_storable("ema.w", tensor)


def test_selected_rows_are_read(tmp_path: Path) -> None:
    write_tensors(LocalFolder(tmp_path), "t", {"a": torch.arange(3), "b": torch.arange(12.0).reshape(4, 3)})
    with open(tmp_path / "t", "rb") as file:
        entry = read_header(file, (tmp_path / "t").stat().st_size, "t")["b"]
        rows = torch.empty(2, 3)
        read_rows(file, entry, 1, rows)
        assert torch.equal(rows, torch.arange(3.0, 9.0).reshape(2, 3))
        with pytest.raises(EOFError):
            read_rows(file, Entry(entry.dtype, entry.size, entry.start + 48), 0, rows)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_in_another_format_is_rejected(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"ck/t: not a valid tensor file"):
        read_header(io.BytesIO(content), len(content), "ck/t")


WHOLE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": 1},
        {"a": []},
        {"a": {}},
        {"a": WHOLE | {"dtype": "F4"}},
        {"a": WHOLE | {"dtype": []}},
        {"a": WHOLE | {"shape": [3]}},
        {"a": WHOLE | {"shape": [-2]}},
        {"a": WHOLE | {"shape": [2.0]}},
        {"a": WHOLE | {"shape": [True, 2]}},
        {"a": WHOLE | {"shape": 2}},
        {"a": WHOLE | {"shape": [1 << 62, 1 << 62]}},
        {"a": WHOLE | {"data_offsets": [0, 4]}},
        {"a": WHOLE | {"data_offsets": [4, 12]}},
        {"a": WHOLE | {"data_offsets": ["0", "8"]}},
        {"a": WHOLE, "b": WHOLE},
        {"a": WHOLE, "b": WHOLE | {"data_offsets": [8, 16]}},
        {"a": WHOLE, "b": WHOLE | {"data_offsets": [4, 12]}},
        {},
    ],
    ids=str,
)
def test_a_crafted_header_is_rejected(header: Any) -> None:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(CheckpointError, match="not a valid tensor file"):
        read_header(io.BytesIO(content), len(content), "t")


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([], True),
        ([torch.ones(2), torch.tensor([1, 2]), torch.tensor(True), torch.empty(0)], True),
        ([torch.ones(2), torch.tensor([1.0, float("nan")])], False),
        ([torch.tensor(float("-inf")).bfloat16()], False),
        ([torch.tensor(complex(0, float("inf")))], False),
        ([torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)], False),
        ([torch.ones(2).to(torch.float8_e5m2)], True),
        ([torch.full((2,), 3e38)], True),  # a sum would overflow
    ],
)
def test_all_finite_detects_nan_and_infinity(values: list[Any], finite: bool) -> None:
    assert all_finite(values) is finite
