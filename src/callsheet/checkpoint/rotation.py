"""Which checkpoints stay: the newest of those that were asked for under a name, and what anybody else asked for as well.

Everybody who asked for a checkpoint has a claim on it. It is deleted when the last claim is given up, so what was also asked for by
somebody who never gives anything up stays for good. The claims stand in `ctx.user_state`: a resume brings them back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from callsheet.checkpoint.folder import delete_later, open_folder
from callsheet.context import Context

_CLAIMS = "checkpoint_claims"  # in `ctx.user_state`, by checkpoint, oldest first: the names with a claim on it, and whether it is finite


def rotate(ctx: Context, by: str, keep: int | None) -> bool:
    """If `ctx.checkpoint` was asked for under the name `by`, claim it, and give up what exceeds `keep`; whether it was.

    Given up is what was not finite, which must not push out good ones, and then the oldest. `keep=None` gives nothing up.
    """
    info = ctx.checkpoint
    if info is None or by not in info.requested_by:
        return False
    claims: dict[str, dict[str, Any]] = ctx.user_state.setdefault(_CLAIMS, {})
    claims.setdefault(_name(ctx, info.path), {"by": list(info.requested_by), "is_finite": info.is_finite})
    held = held_by(ctx, by)
    while keep is not None and len(held) > keep:
        old = next((name for name in held if not claims[name]["is_finite"]), held[0])
        held.remove(old)
        claims[old]["by"].remove(by)
        if not claims[old]["by"]:
            del claims[old]
            _delete(ctx, old)
    return True


def held_by(ctx: Context, by: str) -> list[str]:
    """The checkpoints claimed under the name `by`, oldest first; what somebody deleted by hand does not count."""
    claims: dict[str, dict[str, Any]] = ctx.user_state.get(_CLAIMS, {})
    return [name for name, claim in claims.items() if by in claim["by"] and open_folder(_path(ctx, name)).is_folder()]


def forget(ctx: Context) -> None:
    """Drop all claims: they were made in another run."""
    ctx.user_state.pop(_CLAIMS, None)


def is_of_run(ctx: Context, path: str) -> bool:
    """Whether `path` is one of those that the run keeps."""
    return _name(ctx, path) != _whole(path)


def _name(ctx: Context, path: str) -> str:
    """The path from the run's checkpoints, so that they may move; whole where it leads elsewhere."""
    return _whole(path).removeprefix(f"{_whole(ctx.run.checkpoints)}/")


def _path(ctx: Context, name: str) -> str:
    return name if name == _whole(name) else f"{_whole(ctx.run.checkpoints)}/{name}"


def _whole(path: str | os.PathLike[str]) -> str:
    """The path from the root; a URL is one."""
    name = os.fspath(path)
    return name.rstrip("/") if "://" in name else Path(name).absolute().as_posix()


def _delete(ctx: Context, name: str) -> None:
    if ctx.run.is_world_process_zero:
        delete_later(_path(ctx, name))
