"""Writes checkpoints. All ranks work together to write one."""

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
from callsheet.checkpoint.folder import clear, open_folder, prepare_folder, remove
from callsheet.checkpoint.index import index_document
from callsheet.checkpoint.layout import FILE_NAMES, KIND, MARKER, SHARED_PREFIX, Names, names_in, own
from callsheet.checkpoint.plain import Json, dump
from callsheet.checkpoint.ranks import RankGroup, RankLost
from callsheet.checkpoint.seal import MANIFEST, Seal, write_seal
from callsheet.checkpoint.storage import FileSeal, Folder
from callsheet.checkpoint.tensors import write_tensors
from callsheet.errors import CheckpointError

_MARKER_TEXT = f"A checkpoint of callsheet. Without a valid {MANIFEST} it was left by a killed process, and may be deleted.\n"

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
    """Write a checkpoint and seal it with a manifest. This is a collective over `group`.

    What a killed writer left at `path` is removed first. With `overwrite`, the existing checkpoint can be read until the new one
    is sealed, and is then removed.

    Args:
        path: a folder, or a URL such as `s3://bucket/run/step-100`; the same storage on all ranks.
        shared: the state that is the same on all ranks. Each of its tensors is written once; for a DTensor, every rank writes its
            own shard.
        local: the state that belongs to this rank only.
        info: the data for the manifest; only that of rank 0 is used.
        group: a gloo group; None for one process.
        overwrite: whether to replace a checkpoint that exists at `path`.
        check_owner: called on rank 0 before anything is removed, and again before the checkpoint is committed. It raises if
            another process has taken over the run; nothing is written or removed after that.
        is_good: called with the name and the flat pieces of every tensor while it is written, for each piece on one rank only.
            `info` then gets the entry `is_finite`. It is True if all calls on all ranks returned True and `info` did not already
            say False.

    Returns:
        The content of the manifest.

    Raises:
        CheckpointError: the state is not plain data, `path` holds other files or a checkpoint (unless `overwrite`), or the disk
            reports an error. Raised on all ranks if one of them fails. Nothing of the new checkpoint is left then.
        RankLost: a rank is lost. Files of the new checkpoint may be left; the next writer of `path` removes them.
    """
    ranks = RankGroup(group)
    return Writing(path, ranks, overwrite, check_owner, is_good).run(lambda: Draft.of(shared, local, info, ranks.rank))


class Writing:
    """Writes this rank's part of one checkpoint. On rank 0, it also decides what each rank writes, and writes the manifest."""

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
        self._index: Json  # this and the following attributes are used only on rank 0
        self._old: Seal | None = None
        self._is_to_clear = False

    def run(self, draft: Callable[[], Draft]) -> Seal:
        """Write and seal the checkpoint (its manifest is the seal). This is a collective.

        An error that `draft` raises on one rank is raised on all ranks.
        """
        try:
            names, mine = self._ranks.exchange(lambda: self._plan(draft), self._assign)
            return self._ranks.exchange(lambda: self._write(names, mine), self._seal)
        except RankLost:
            raise  # do not clean up, since other ranks may still be writing
        except BaseException:
            if self._is_to_clear:
                with contextlib.suppress(CheckpointError):  # report the first error, and not one from cleaning up
                    self._check_owner()  # raises if another process has taken over the folder
                    remove(self._folder) if self._old is None else clear(self._folder)
            raise

    def _plan(self, draft: Callable[[], Draft]) -> SavePlan:
        self._folder = open_folder(self._path)
        self._draft = draft()
        return self._draft.plan()

    def _assign(self, plans: Sequence[SavePlan]) -> list[tuple[Names, list[str]]]:
        """On rank 0, choose the file names and decide which tensors each rank writes.

        If several ranks hold a tensor, torch's distributed checkpoint (DCP) chooses the one that writes it.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        assigned, _ = planner.create_global_plan(_fitting(plans))
        self._check_owner()
        self._old = prepare_folder(self._folder, self._overwrite)
        self._is_to_clear = True
        names = next(names for names in FILE_NAMES if self._old is None or names_in(self._old.files) != names)
        self._index = index_document(assigned, names.shard)
        if MARKER not in self._folder.entries():
            self._folder.write(MARKER, [_MARKER_TEXT.encode()])
        return [(names, [item.index.fqn for item in plan.items if _holds_any(item)]) for plan in assigned]

    def _write(self, names: Names, mine: list[str]) -> tuple[dict[str, FileSeal], bool]:
        """Write this rank's files. Return their sizes and digests, and whether `is_good` accepted every piece of their tensors."""
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
        """Call `is_good` with a piece of a tensor that is being written, unless `is_good` has rejected an earlier piece."""
        if self._is_good is not None and not self._is_bad_here:
            self._is_bad_here = not self._is_good(name.removeprefix(SHARED_PREFIX).removeprefix(own(self._ranks.rank)), piece)

    def _seal(self, written: Sequence[tuple[dict[str, FileSeal], bool]]) -> list[Seal]:
        """On rank 0, write the manifest for the files that all ranks have written."""
        files = {name: file for by_rank, _ in written for name, file in sorted(by_rank.items())}
        info, replaces = self._draft.info, self._old is not None
        if self._is_good is not None:
            info["is_finite"] = info.get("is_finite", True) and all(are_good for _, are_good in written)
        self._check_owner()
        sealed = write_seal(self._folder, files, info, kind=KIND, world_size=self._ranks.size, replace=replaces)
        self._is_to_clear = False
        # The new checkpoint is committed. If the rest of the old checkpoint cannot be removed now, the next writer removes it.
        with contextlib.suppress(CheckpointError):
            clear(self._folder)
        return [sealed] * self._ranks.size


def _fitting(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Remove from the ranks' save plans the tensors of the shared state that rank 0 does not have. Return the new plans.

    Raise `CheckpointError` if the shared states of the ranks differ.

    Rank 0's state decides which tensors the checkpoint has, because the JSON document is made from it. The plan of another rank may
    contain more names: a rank with empty shards cannot detect that two DTensors are tied, and plans both.
    """
    shared = {item.index.fqn: _data(item) for item in plans[0].items}

    def fits(item: WriteItem, rank: int) -> bool:
        name, here = item.index.fqn, _data(item)
        there = here if name.startswith(own(rank)) else shared.get(name)
        if there is None and _holds_any(item):
            raise CheckpointError(f"{name}: rank {rank} shares it, and rank 0 does not; put a rank's own state into `local`")
        if there is not None and (there.size, there.properties.dtype) != (here.size, here.properties.dtype):
            kinds = [f"{data.properties.dtype} of {list(data.size)}" for data in (there, here)]
            raise CheckpointError(
                f"{name}: it is {kinds[0]} on rank 0 and {kinds[1]} on rank {rank}; put a rank's own state into `local`"
            )
        return there is not None

    return [replace(plan, items=[item for item in plan.items if fits(item, rank)]) for rank, plan in enumerate(plans)]


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # callsheet's plans list only tensors, and the item of a tensor has `tensor_data`
    return item.tensor_data


def _holds_any(item: WriteItem) -> bool:
    return math.prod(_data(item).chunk.sizes) > 0
