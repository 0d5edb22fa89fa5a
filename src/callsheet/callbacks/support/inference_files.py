"""Writes files for inference: programs of `torch.export`, ONNX files, and Hugging Face folders."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as trees

from callsheet.errors import CheckpointError

Format = Literal["torch_export", "onnx", "huggingface"]
FORMATS: dict[Format, str] = {"torch_export": "model.pt2", "onnx": "model.onnx", "huggingface": "model"}
"""The default name of each format's file or folder."""


@dataclass(frozen=True)
class Call:
    """The positional and keyword arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> Call:
        """Make a `Call` from a tuple of positional arguments, a mapping of keyword arguments, or a single argument."""
        if isinstance(given, Mapping):
            return cls((), dict(given))
        return cls(given if isinstance(given, tuple) else (given,))

    def map_tensors(self, how: Callable[[Tensor], Tensor]) -> Call:
        """Return a copy of the call with the function `how` applied to every tensor."""
        args, kwargs = trees.tree_map_only(Tensor, how, (self.args, self.kwargs))
        return Call(args, kwargs)

    def small(self) -> Call:
        """Return a copy of the call, with only two samples in each tensor.

        A single sample is repeated, because an exporter would take a size of 1 for a constant.
        """
        tensors = [leaf for leaf in trees.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        samples = tensors[0].size(0) if tensors else 0

        def two(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if not tensor.dim() or tensor.size(0) != samples:
                return tensor.clone()
            return torch.cat([tensor, tensor]) if samples == 1 else tensor[:2].clone()

        return self.map_tensors(two)


def export_program(model: nn.Module, call: Call, dynamic_shapes: Any) -> ExportedProgram:
    """Return the model's forward pass as a program of `torch.export`.

    `model` is a copy on the CPU in evaluation mode, which may be changed.

    Args:
        call: arguments with tensors on the CPU.
        dynamic_shapes: `"batch"`, the first dimension of every tensor may vary; `"all"`, every dimension may vary, except those that the
            model fixes; `"none"`; or a value for `dynamic_shapes` of `torch.export.export`.

    Raises:
        CheckpointError: the model rejects the arguments, or torch cannot trace the model.
    """
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # type: ignore[union-attr]  # do not export the key-value cache as an output
    with _failing_as("the model does not accept the sample input"), torch.no_grad():
        outputs = model(*call.args, **call.kwargs)
    if isinstance(outputs, Mapping) and type(outputs) is not dict:
        _give_plain_outputs(model)
    if isinstance(dynamic_shapes, str):
        arguments = dict(inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments)
        dynamic_shapes = trees.tree_map(lambda leaf: _dimensions(leaf, dynamic_shapes), arguments)
    with _failing_as("torch.export cannot trace the model"):
        return torch.export.export(model, call.args, call.kwargs, dynamic_shapes=dynamic_shapes, strict=False)


def write_onnx(program: ExportedProgram, path: Path, **names: list[str] | None) -> None:
    """Write the program as an ONNX file. The weights of a large model go into `<name>.data` next to it."""
    with _failing_as("the model cannot be expressed in ONNX"):
        made = torch.onnx.export(program, dynamo=True, verbose=False, **names)  # type: ignore[arg-type]  # PyTorch < 2.7 has other types
    assert made is not None  # `torch.onnx.export` returns None only if it is given a file to write
    made.save(path)


def publish(draft: Path, target: Path) -> list[Path]:
    """Move the finished export from the folder `draft` into the folder that contains `target`. Return the moved files.

    A file, or a folder that did not exist, appears atomically. If the folder existed, its files with other names stay.
    """
    files = _files(draft)
    # Move the target last, so that the files that it needs are in place when it appears.
    for entry in sorted(draft.iterdir(), key=lambda entry: entry.name == target.name):
        is_there = entry.is_dir() and target.with_name(entry.name).exists()
        for old in _files(entry) if is_there else [entry]:
            new = target.parent / old.relative_to(draft)
            new.parent.mkdir(parents=True, exist_ok=True)
            os.replace(old, new)
    return [target.parent / file.relative_to(draft) for file in files]


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _dimensions(leaf: Any, dynamic: str) -> dict[int, Any] | None:
    if not isinstance(leaf, Tensor) or dynamic == "none":
        return None
    return dict.fromkeys(range(leaf.dim() if dynamic == "all" else min(1, leaf.dim())), Dim.AUTO)


def _give_plain_outputs(model: nn.Module) -> None:
    """Make the model return a plain dict of tensors, so that the program can be loaded without the class of the outputs."""
    forward = model.forward

    @functools.wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {name: value for name, value in forward(*args, **kwargs).items() if isinstance(value, Tensor)}

    model.forward = plain


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """While the `with` block runs, convert errors into a CheckpointError whose message begins with `what`."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return the text of an error's original cause, cut to a line or two, because exporters raise long messages."""
    if isinstance(error, CheckpointError):
        return str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"
