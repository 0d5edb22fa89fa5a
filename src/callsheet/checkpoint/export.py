"""Exports the full weights of a model, which may be sharded over the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from callsheet.checkpoint.folder import open_folder
from callsheet.checkpoint.local import LocalFolder
from callsheet.checkpoint.ranks import RankGroup
from callsheet.checkpoint.storage import FileSeal
from callsheet.checkpoint.tensors import check_storable, file_order, local_part, write_tensors
from callsheet.errors import CheckpointError


def export_weights(
    model: nn.Module, path: str | os.PathLike[str], *, group: ProcessGroup | None = None, overwrite: bool = False
) -> FileSeal:
    """Write the model's full state to one safetensors file. All ranks of `group` must call this; rank 0 writes the file.

    Shards are gathered one tensor at a time, on their device, so no rank holds more than one full tensor. Tied weights are stored
    once, and the header lists their other names, as in `safetensors.torch.save_model`; `safetensors.torch.load_model` reads the
    file.

    Args:
        model: the model, which may be sharded.
        path: the file to write, or its URL, such as `s3://bucket/model.safetensors`.
        group: a gloo group; None for one process.
        overwrite: whether to replace an existing file.

    Returns:
        The file's size and digest, on all ranks.

    Raises:
        CheckpointError: the file exists (unless `overwrite`), cannot be written, or cannot hold a tensor. Raised on all ranks.
    """
    ranks = RankGroup(group)
    tensors, tied = ranks.together(lambda: _weights(model))
    turns = _gather_tensors(tensors, file_order(tensors))

    def write() -> FileSeal | None:
        try:
            if ranks.rank != 0:
                return None
            folder, name = open_folder(path).parent(), os.path.basename(os.fspath(path))
            folder.make()
            if open_folder(path).is_folder():
                raise CheckpointError(
                    f"{os.fspath(path)} is a folder; give a file for the weights, such as {name}/model.safetensors"
                )
            is_there = name in folder.entries()
            if is_there and not overwrite:
                raise CheckpointError(f"{os.fspath(path)} already exists; choose a new path or pass overwrite=True")
            data = (tensor for _, tensor in turns)
            # Write a draft beside an existing local file, so that the old weights stay until the new file is complete.
            # A remote store needs no draft, because a file appears there only when it is closed.
            is_beside = is_there and isinstance(folder, LocalFolder)
            draft = f"{name}.new" if is_beside else name
            if draft in folder.entries():
                folder.remove(draft)
            seal = write_tensors(folder, draft, tensors, metadata={"format": "pt", **tied}, data=data)
            if is_beside:
                os.replace(f"{os.fspath(path)}.new", path)
            return seal
        finally:
            for _ in turns:  # even if writing has failed, take part in the remaining collectives
                pass

    seal = ranks.exchange(write, lambda written: [written[0]] * ranks.size)
    assert seal is not None  # `exchange` gives all ranks the seal (size and checksum) from rank 0, which wrote the file
    return seal


def export_huggingface(
    model: nn.Module, path: str | os.PathLike[str], *, group: ProcessGroup | None = None, processor: Any = None
) -> None:
    """Write a model of Hugging Face's transformers to a folder, from which `from_pretrained` can load it.

    All ranks of `group` must call this; rank 0 writes the files.

    Rank 0 holds the full weights in host memory. Existing files with the same names are overwritten.

    Args:
        model: a model of transformers, which may be sharded.
        path: a folder of this machine.
        group: a gloo group; None for one process.
        processor: the model's tokenizer or processor, saved with it.

    Raises:
        CheckpointError: the model is not one of transformers, the path is a URL, or the folder cannot be written. Raised on all
            ranks.
    """
    ranks = RankGroup(group)
    tensors, tied = ranks.together(lambda: _of_transformers(model, path))
    turns = _gather_tensors(tensors, list(tensors))

    def write() -> None:
        try:
            if ranks.rank == 0:
                whole = {name: tensor.cpu() for name, tensor in turns}
                whole |= {name: whole[kept] for name, kept in tied.items()}
                model.save_pretrained(os.fspath(path), state_dict=whole)  # type: ignore[operator]  # `_of_transformers` has checked this
                if processor is not None:
                    processor.save_pretrained(os.fspath(path))
        finally:
            for _ in turns:  # even if writing has failed, take part in the remaining collectives
                pass

    ranks.together(write)


def _of_transformers(model: nn.Module, path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not hasattr(model, "save_pretrained"):
        raise CheckpointError(
            f"a {type(model).__name__} is not a model of transformers: it has no save_pretrained; use export_weights"
        )
    if not isinstance(open_folder(path), LocalFolder):
        raise CheckpointError(
            f"{os.fspath(path)}: transformers writes only to folders of this machine; export to one, and copy it"
        )
    return _weights(model)


@torch.no_grad()
def _weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of the model's state by name, and the names of tied tensors.

    For each additional name of a tied tensor, the second dict holds the name under which the tensor is stored.

    Tensors are tied if they are the same object. Memory addresses would not show this for shards, because a shard may be empty.
    """
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    name_of: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name}: a {type(tensor)} in the model's state is not a tensor; leave it out of its state_dict"
            )
        check_storable(name, local_part(tensor))
        kept = name_of.setdefault(id(tensor), name)
        if kept == name:
            tensors[name] = tensor
        else:
            tied[name] = kept
    return tensors, tied


def _gather_tensors(tensors: Mapping[str, Tensor], order: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name in order:
        tensor = tensors[name].detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
