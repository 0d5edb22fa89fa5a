"""The callbacks' states in a host's own checkpoints: what is kept there, and how it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callsheet.bridges.hosted_run import HostedRun
from callsheet.checkpoint import read_checkpoint, write_checkpoint
from callsheet.context import CheckpointInfo
from callsheet.errors import CheckpointError

STATE = "callsheet"
"""The folder in which they stand, where a checkpoint of the host is a folder."""


def own_state(run: HostedRun) -> dict[str, Any]:
    """Plain data and tensors: how far training is, the callbacks' states, and the record that has begun."""
    return {"state": run.state.state_dict(), "callbacks": run.manager.state_dict(), "records": run.records.state_dict()}


def take_back(run: HostedRun, own: Mapping[str, Any]) -> None:
    """Go on from what `own_state` gave."""
    run.state.load_state_dict(own["state"])
    run.manager.load_state_dict(own["callbacks"])
    run.records.load_state_dict(own["records"])
    run.ctx.step, run.ctx.epoch = run.state.timestamp.batch, run.state.timestamp.epoch


def go_on_without(run: HostedRun, step: int, epoch: int) -> None:
    """The host goes on from there, and no states were found."""
    run.state.timestamp = run.state.baseline = run.state.timestamp._replace(batch=step, epoch=epoch, epoch_in_round=epoch)
    run.ctx.step, run.ctx.epoch = step, epoch


def write_states(run: HostedRun, checkpoint: Path, info: CheckpointInfo, own: Mapping[str, Any] | None = None) -> None:
    """Add them to a checkpoint that is a folder: those of now, or `own`. A collective."""
    own = own_state(run) if own is None else own
    told = {"run": run.ctx.run.name, "step": info.step, "epoch": info.epoch, "kind": info.kind}
    local = {"callbacks": own["callbacks"], "records": own["records"]}
    write_checkpoint(checkpoint / STATE, {"state": own["state"]}, local, told, group=run.world.saving, overwrite=True)


def read_states(run: HostedRun, checkpoint: Path, step: int) -> CheckpointInfo:
    """Take back what `write_states` wrote. A collective.

    Raises:
        CheckpointError: they are damaged, or of another step than the one that the host goes on from.
    """
    loaded = read_checkpoint(checkpoint / STATE, group=run.world.saving)
    if loaded.info.get("step") != step:
        raise CheckpointError(
            f"{checkpoint / STATE} is of step {loaded.info.get('step')}, and {run.host} goes on from {step}; give it that checkpoint, or "
            "remove the folder to go on without the callbacks' states"
        )
    take_back(run, {"state": loaded.shared["state"], **loaded.local})
    info = loaded.info
    return CheckpointInfo(str(checkpoint), step, info["epoch"], info["kind"], size_bytes=loaded.seal.size_bytes)
