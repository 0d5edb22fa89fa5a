"""Reads checkpoints, on any number of ranks and into any sharding."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from callsheet.checkpoint.folder import open_folder
from callsheet.checkpoint.index import Index, read_index
from callsheet.checkpoint.layout import KIND, SHARED_PREFIX, names_in, own
from callsheet.checkpoint.plain import parse, unflatten
from callsheet.checkpoint.ranks import RankGroup
from callsheet.checkpoint.seal import Seal, seal_of
from callsheet.checkpoint.storage import Folder, read_verified, verify
from callsheet.checkpoint.tensors import Entry, read_header, read_rows
from callsheet.errors import CheckpointError

Target = Callable[[str, torch.Size, torch.dtype], Tensor | None]
"""A function that selects the tensor into which a tensor of the shared state is read.

It is called with the tensor's name, size and dtype, and returns the tensor or DTensor to fill, or None for a new one.
"""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The content of a checkpoint.

    Attributes:
        shared: the state that all ranks share.
        local: the state of this rank.
        seal: the content of the manifest.
    """

    shared: Any
    local: Any
    seal: Seal

    @property
    def info(self) -> dict[str, Any]:
        """The data that was stored in the manifest when the checkpoint was written."""
        return self.seal.info

    @property
    def world_size(self) -> int:
        """How many ranks wrote the checkpoint."""
        return self.seal.world_size


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
    target: Target | None = None,
    device: torch.device | str = "cpu",
) -> Loaded:
    """Read a checkpoint. This is a collective over `group`.

    No code from the checkpoint's files is run.

    First the ranks divide the files among them and check their digests, and each rank checks its target tensors against the
    files. Tensors are filled only after these checks have succeeded on every rank.

    Args:
        path: a folder, or a URL such as `s3://bucket/run/step-100`.
        group: a gloo group; None for one process. It may have more or fewer ranks than those that wrote the checkpoint.
            If it has more, the additional ranks get the local state of rank 0.
        target: selects the tensor into which a tensor of the shared state is read. It is called with the tensor's name, size and
            dtype. The tensor or DTensor that it returns is filled in place, in its own dtype, and becomes part of the returned
            state. If it returns None, or if `target` is None, a new tensor is made.
        device: the device of new tensors.

    Returns:
        The shared state, this rank's own state, and the manifest.

    Raises:
        CheckpointError: the checkpoint is invalid for one of the ranks, or a target has another size. Raised on all ranks, with
            the reason.
        RankLost: a rank died, or did not answer within the group's timeout.
    """
    ranks = RankGroup(group)
    seal = ranks.exchange(lambda: _verify_files(open_folder(path), ranks), _the_same)
    reading = ranks.together(lambda: _Reading(open_folder(path), seal, ranks.rank, target, torch.device(device)))
    ranks.together(reading.fill)
    return Loaded(reading.shared, reading.local, seal)


def _verify_files(folder: Folder, ranks: RankGroup) -> Seal:
    """Return the manifest, after checking the digests of this rank's part of the files."""
    seal = seal_of(folder)
    if seal.kind != KIND or names_in(seal.files) is None:
        raise CheckpointError(
            f"{folder.path} is a {seal.kind!r}, not a {KIND!r} with its files; read it with the program that wrote it"
        )
    for name in sorted(seal.files, key=lambda name: -seal.files[name].size_bytes)[ranks.rank :: ranks.size]:
        verify(folder, name, seal.files[name])
    return seal


def _the_same(seals: list[Seal]) -> list[Seal]:
    # `info` is not compared, because it may contain a NaN, which does not equal itself.
    if any((seal.sealed_at, seal.files) != (seals[0].sealed_at, seals[0].files) for seal in seals):
        raise CheckpointError("the ranks see different checkpoints at this path; is it a folder that all of them share?")
    return seals


class _Reading:
    """Reads one rank's tensors and JSON documents of a checkpoint. It first plans and checks what to read, and then reads it."""

    def __init__(self, folder: Folder, seal: Seal, rank: int, target: Target | None, device: torch.device) -> None:
        names = names_in(seal.files)
        assert names is not None  # `_verify_files` has checked the names
        self._folder = folder
        self._seal = seal
        rank = rank if rank < seal.world_size else 0
        index = read_index(self._content(names.index), seal.files, f"{folder.path}/{names.index}")
        self._tensors: dict[str, Tensor] = {}
        for name, described in index.tensors.items():
            size, dtype = described.size, described.properties.dtype
            if name.startswith(SHARED_PREFIX):
                found = target(name.removeprefix(SHARED_PREFIX), size, dtype) if target is not None else None
                self._tensors[name] = (
                    torch.empty(size, dtype=dtype, device=device) if found is None else _fitting(name, found, size)
                )
            elif name.startswith(own(rank)):
                self._tensors[name] = torch.empty(size, dtype=dtype, device=device)
        self.shared = self._tree(names.state, SHARED_PREFIX)
        self.local = self._tree(names.local(rank), own(rank))
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(self._tensors, index.metadata(self._tensors))
        self._items = self._plan_reads(index)

    @torch.no_grad()
    def fill(self) -> None:
        """Read the planned parts of tensors from the files."""
        for name, items in self._items.items():
            with self._folder.open(name) as file:
                for item, entry in sorted(items, key=lambda found: found[1].start):
                    _fill(file, entry, item, self._planner.resolve_tensor(item).detach())

    def _content(self, name: str) -> bytes:
        if name not in self._seal.files:
            raise CheckpointError(f"{self._folder.path} is not valid: its manifest lists no {name}; use another checkpoint")
        return read_verified(self._folder, name, self._seal.files[name])

    def _tree(self, name: str, prefix: str) -> Any:
        found = {key.removeprefix(prefix): tensor for key, tensor in self._tensors.items() if key.startswith(prefix)}
        try:
            return unflatten(parse(self._content(name), f"{self._folder.path}/{name}"), found)
        except CheckpointError as error:
            raise CheckpointError(f"{self._folder.path}/{name}: {error}") from error

    def _plan_reads(self, index: Index) -> dict[str, list[tuple[ReadItem, Entry]]]:
        """Return which parts of tensors this rank must read from each file.

        DCP's planner derives the parts from the saved chunks. They are checked against the headers of the files.
        """
        items: dict[str, list[tuple[ReadItem, Entry]]] = defaultdict(list)
        headers: dict[str, dict[str, Entry]] = {}
        for item in self._planner.create_local_plan().items:
            name, offsets = item.storage_index.fqn, item.storage_index.offset
            assert offsets is not None  # every planned item is a tensor, so it has offsets
            place = index.places[name, offsets]
            source = f"{self._folder.path}/{place.file}"
            if place.file not in headers:
                with self._folder.open(place.file) as file:
                    headers[place.file] = read_header(file, self._seal.files[place.file].size_bytes, source)
            entry = headers[place.file].get(name)
            if entry is None or (entry.dtype, entry.size) != (place.dtype, place.size):
                raise CheckpointError(f"{source}: {name} does not match the index; use another checkpoint")
            items[place.file].append((item, entry))
        return items


def _fill(file: BinaryIO, entry: Entry, item: ReadItem, destination: Tensor) -> None:
    """Read a part of a tensor, which `item` describes, from the file into `destination`.

    Whole rows are read: directly into `destination` if possible, otherwise into a buffer from which the part is copied.
    """
    start, count = (item.storage_offsets[0], item.lengths[0]) if entry.size else (0, 1)
    size = torch.Size((count, *entry.size[1:]) if entry.size else ())
    is_direct = destination.shape == size and destination.dtype == entry.dtype and destination.is_contiguous()
    if is_direct and destination.device.type == "cpu":
        read_rows(file, entry, start, destination)
        return
    rows = torch.empty(size, dtype=entry.dtype)
    read_rows(file, entry, start, rows)
    for dimension in range(1, len(size)):
        rows = rows.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
    destination.copy_(rows)


def _fitting(name: str, tensor: Tensor, size: torch.Size) -> Tensor:
    if tensor.shape != size or tensor.is_meta:
        wrong = "on the meta device" if tensor.is_meta else f"of size {list(tensor.shape)}"
        raise CheckpointError(f"{name}: the checkpoint holds it in size {list(size)}, and the tensor to read it into is {wrong}")
    return tensor
