from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from callsheet.checkpoint import all_finite, read_tensors, write_tensors
from callsheet.checkpoint.tensors import _DTYPES
from callsheet.errors import CheckpointError


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    record = write_tensors(folder, "t.safetensors", tensors)
    content = (folder / "t.safetensors").read_bytes()
    assert record.size_bytes == len(content)
    return read_tensors(content, folder)


def test_every_dtype_comes_back_also_through_the_library(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.tensor([[0, 1, 2]]).to(dtype) for dtype in _DTYPES}
    back, library = written(tmp_path, tensors), safetensors.torch.load_file(tmp_path / "t.safetensors")
    for name, tensor in tensors.items():
        for other in (back[name], library[name]):
            assert other.dtype == tensor.dtype
            assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))


def test_every_layout_comes_back_by_value(tmp_path: Path) -> None:
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


def test_no_tensor_at_all(tmp_path: Path) -> None:
    assert written(tmp_path, {}) == {}


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.ones(2).to(torch.float8_e8m0fnu), "float8_e8m0fnu"),  # the library writes it, and cannot read it
        (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine"),
    ],
    ids=["sparse", "meta", "complex128", "e8m0", "subclass"],
)
def test_what_the_file_cannot_hold_is_refused_before_it_is_written(tmp_path: Path, tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"ema\.w: .*{why}.* cannot be written to a tensor file; save"):
        write_tensors(tmp_path, "t.safetensors", {"a": torch.ones(1), "ema.w": tensor})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"ck/t: not a tensor file"):
        read_tensors(content, Path("ck/t"))


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
def test_all_finite(values: list[Any], finite: bool) -> None:
    assert all_finite(values) is finite
