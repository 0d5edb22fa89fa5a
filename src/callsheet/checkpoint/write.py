"""Checkpoints written, by all ranks together."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from callsheet.checkpoint.draft import Draft
from callsheet.checkpoint.folder import clear, cleared, open_folder, remove
from callsheet.checkpoint.index import index_document
from callsheet.checkpoint.layout import KIND, MARKER, NAMES, SHARED, Names, names_in, own
from callsheet.checkpoint.plain import Json, dump
from callsheet.checkpoint.ranks import RankGroup, RankLost
from callsheet.checkpoint.seal import MANIFEST, Seal, write_seal
from callsheet.checkpoint.storage import FileSeal, Folder
from callsheet.checkpoint.tensors import write_tensors
from callsheet.errors import CheckpointError

_NOTE = f"A checkpoint of callsheet. Without a {MANIFEST} that holds, it is what a killed process left, and may be deleted.\n"

Check = Callable[[str, Tensor], bool]


def write_checkpoint(
    path: str | os.PathLike[str],
    shared: object,
    local: object,
    info: Mapping[str, Any],
    *,
    group: ProcessGroup | None = None,
    overwrite: bool = False,
    check_owner: Callable[[], None] | None = None,
    is_good: Check | None = None,
) -> Seal:
    """Write a checkpoint to the folder `path`, and seal it with `info`; a collective over `group`.

    What a killed writer left at `path` is cleared first. A checkpoint that stands there is refused, or with `overwrite` stays readable
    until the new one is sealed, and goes then.

    Args:
        path: a folder, or a URL such as `s3://bucket/run/step-100`; the same place on all ranks.
        shared: a tree that is the same on all ranks. Each of its tensors is written once, of a DTensor by every rank its shard.
        local: this rank's own tree.
        info: told by the seal; rank 0's.
        group: a gloo group; None for one process.
        check_owner: called on rank 0 before anything is cleared, and again before the checkpoint is committed; it raises if another
            process has taken over the run. Nothing is written or removed after that.
        is_good: called with the name and flat pieces of every shared tensor as it is written, each on one rank alone. `info` then gets
            the entry `is_finite`: True where every call returned True, on all ranks, and `info` did not hold False itself.

    Raises `CheckpointError` on all ranks where one of them fails: the state is not plain data, `path` holds anything else, the disk
    refuses. Nothing of the new checkpoint is left then. `RankLost` where a rank is: what it left is cleared by the next writer.
    """
    ranks = RankGroup(group)
    return Writing(path, ranks, overwrite, check_owner, is_good).run(lambda: Draft.of(shared, local, info, ranks.rank))


class Writing:
    """One checkpoint in the making, as one rank sees it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        ranks: RankGroup,
        overwrite: bool,
        check_owner: Callable[[], None] | None = None,
        is_good: Check | None = None,
    ) -> None:
        self._path = path
        self._ranks = ranks
        self._overwrite = overwrite
        self._check_owner = check_owner or (lambda: None)
        self._is_good = is_good
        self._is_bad_here = False
        self._draft: Draft
        self._folder: Folder
        self._index: Json  # this and what follows is rank 0's
        self._old: Seal | None = None
        self._is_to_clear = False

    def run(self, draft: Callable[[], Draft]) -> Seal:
        """Write and seal; a collective. What `draft` raises on one rank is told to all."""
        try:
            names, mine = self._ranks.exchange(lambda: self._plan(draft), self._assign)
            return self._ranks.exchange(lambda: self._write(names, mine), self._seal)
        except RankLost:
            raise  # others may be writing still
        except BaseException:
            if self._is_to_clear:
                with contextlib.suppress(CheckpointError):  # the first error is the one to tell
                    self._check_owner()  # what stands there may be somebody else's by now
                    remove(self._folder) if self._old is None else clear(self._folder)
            raise

    def _plan(self, draft: Callable[[], Draft]) -> SavePlan:
        self._folder = open_folder(self._path)
        self._draft = draft()
        return self._draft.plan()

    def _assign(self, plans: Sequence[SavePlan]) -> list[tuple[Names, list[str]]]:
        """Rank 0: under which names to write, and for every rank which tensors: DCP spreads over the ranks what several hold."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        assigned, _ = planner.create_global_plan(_fitting(plans))
        self._check_owner()
        self._old = cleared(self._folder, self._overwrite)
        self._is_to_clear = True
        names = next(names for names in NAMES if self._old is None or names_in(self._old.files) != names)
        self._index = index_document(assigned, names.shard)
        if MARKER not in self._folder.entries():
            self._folder.write(MARKER, [_NOTE.encode()])
        return [(names, [item.index.fqn for item in plan.items if _holds_any(item)]) for plan in assigned]

    def _write(self, names: Names, mine: list[str]) -> tuple[dict[str, FileSeal], bool]:
        """Write this rank's files; return them, and whether what it wrote was good."""
        rank, draft, folder = self._ranks.rank, self._draft, self._folder
        files = {names.local(rank): folder.write(names.local(rank), [dump(draft.local)])}
        if mine:
            look = self._look if self._is_good is not None else None
            files[names.shard(rank)] = write_tensors(
                folder, names.shard(rank), {name: draft.parts[name] for name in mine}, look=look
            )
        if rank == 0:
            files[names.state] = folder.write(names.state, [dump(draft.state)])
            files[names.index] = folder.write(names.index, [dump(self._index)])
        return files, not self._is_bad_here

    def _look(self, name: str, piece: Tensor) -> None:
        """Check a piece of what is written, until one is not good."""
        if self._is_good is not None and not self._is_bad_here and name.startswith(SHARED):
            self._is_bad_here = not self._is_good(name.removeprefix(SHARED), piece)

    def _seal(self, written: Sequence[tuple[dict[str, FileSeal], bool]]) -> list[Seal]:
        """Rank 0: publish what all have written."""
        files = {name: file for by_rank, _ in written for name, file in sorted(by_rank.items())}
        info, replaces = self._draft.info, self._old is not None
        if self._is_good is not None:
            info["is_finite"] = info.get("is_finite", True) and all(are_good for _, are_good in written)
        self._check_owner()
        sealed = write_seal(self._folder, files, info, kind=KIND, world_size=self._ranks.size, replace=replaces)
        self._is_to_clear = False
        with contextlib.suppress(CheckpointError):  # it is published; what stays of the old one is cleared by the next writer
            clear(self._folder)
        return [sealed] * self._ranks.size


def _fitting(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans, without the names by which only other ranks know a tensor; `CheckpointError` where the shared trees differ.

    The document is rank 0's. Of tied DTensors a rank with an empty shard cannot see that they are tied, and plans them all.
    """
    shared = {item.index.fqn: _data(item) for item in plans[0].items}

    def fits(item: WriteItem, rank: int) -> bool:
        name, here = item.index.fqn, _data(item)
        there = here if name.startswith(own(rank)) else shared.get(name)
        if there is None and _holds_any(item):
            raise CheckpointError(f"{name}: rank {rank} shares it, and rank 0 does not; put into `local` what is a rank's own")
        if there is not None and (there.size, there.properties.dtype) != (here.size, here.properties.dtype):
            kinds = [f"{data.properties.dtype} of {list(data.size)}" for data in (there, here)]
            raise CheckpointError(
                f"{name}: it is {kinds[0]} on rank 0 and {kinds[1]} on rank {rank}; put into `local` what is a rank's own"
            )
        return there is not None

    return [replace(plan, items=[item for item in plan.items if fits(item, rank)]) for rank, plan in enumerate(plans)]


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # nothing but tensors is ever planned here
    return item.tensor_data


def _holds_any(item: WriteItem) -> bool:
    return math.prod(_data(item).chunk.sizes) > 0
