"""Checkpoint rotation: decides which checkpoints to keep, and deletes the others.

Every callback that requested a checkpoint has a claim on it, under its own name, and keeps only its newest claims. A checkpoint
is deleted when its last claim is dropped. So a checkpoint that was also requested by a callback which never drops claims is never
deleted. The claims are in `ctx.user_state`, so a resume restores them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from callsheet.checkpoint.folder import delete_later, open_folder
from callsheet.core.context import Context

# `ctx.user_state` has, under this key, a dict of the kept checkpoints, oldest first.
# For each checkpoint, the dict has the callbacks that keep it, and whether its weights and loss are finite.
_CLAIMS_KEY = "checkpoint_claims"


def rotate(ctx: Context, by: str, keep: int | None) -> bool:
    """Keep `ctx.checkpoint` if the callback named `by` requested it. If so, keep at most `keep` checkpoints for this callback.

    Return whether the callback requested the checkpoint. The callback's other checkpoints are released, which means that they are no
    longer kept for this callback. A checkpoint that every callback has released is deleted.

    Checkpoints that are not finite are released first, so that they do not push out good ones. After them, the oldest are
    released. With `keep=None` no checkpoint is released.
    """
    info = ctx.checkpoint
    if info is None or by not in info.requested_by:
        return False
    claims: dict[str, dict[str, Any]] = ctx.user_state.setdefault(_CLAIMS_KEY, {})
    claim = claims.setdefault(_name(ctx, info.path), {"by": list(info.requested_by), "is_finite": info.is_finite})
    if by not in claim["by"]:  # the checkpoint of this step was written again, for another request
        claim["by"].append(by)
    held = checkpoints_kept_for(ctx, by)
    while keep is not None and len(held) > keep:
        old = next((name for name in held if not claims[name]["is_finite"]), held[0])
        held.remove(old)
        claims[old]["by"].remove(by)
        if not claims[old]["by"]:
            del claims[old]
            _delete(ctx, old)
    return True


def checkpoints_kept_for(ctx: Context, by: str) -> list[str]:
    """Return the paths of the checkpoints that are kept for the callback named `by`, oldest first.

    Checkpoints that were deleted by hand are left out.
    """
    claims: dict[str, dict[str, Any]] = ctx.user_state.get(_CLAIMS_KEY, {})
    return [name for name, claim in claims.items() if by in claim["by"] and open_folder(_path(ctx, name)).is_folder()]


def forget(ctx: Context) -> None:
    """Forget which callbacks keep which checkpoints, because the loaded checkpoint belongs to another run."""
    ctx.user_state.pop(_CLAIMS_KEY, None)


def is_of_run(ctx: Context, path: str) -> bool:
    """Return whether the checkpoint `path` is in the run's checkpoint folder."""
    return _name(ctx, path) != _whole(path)


def _name(ctx: Context, path: str) -> str:
    """Return the path relative to the run's checkpoint folder, so that it remains valid if the folder is moved.

    A path outside the folder is returned as absolute.
    """
    return _whole(path).removeprefix(f"{_whole(ctx.run.checkpoints)}/")


def _path(ctx: Context, name: str) -> str:
    return name if name == _whole(name) else f"{_whole(ctx.run.checkpoints)}/{name}"


def _whole(path: str | os.PathLike[str]) -> str:
    """Return `path` as an absolute path. Return a URL unchanged."""
    name = os.fspath(path)
    return name.rstrip("/") if "://" in name else Path(name).absolute().as_posix()


def _delete(ctx: Context, name: str) -> None:
    if ctx.run.is_world_process_zero:
        delete_later(_path(ctx, name))
