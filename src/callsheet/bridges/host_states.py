"""Writes the states of callsheet's callbacks into another framework's checkpoints, and loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callsheet.bridges.hosted_run import HostedRun
from callsheet.checkpoint import read_checkpoint, write_checkpoint
from callsheet.core.run_state import CheckpointInfo
from callsheet.errors import CheckpointError

STATE = "callsheet"
"""The name of the folder with the callbacks' states inside a framework's checkpoint, if this checkpoint is a folder."""


def own_state(run: HostedRun) -> dict[str, Any]:
    """Return what callsheet adds to a checkpoint: the run's progress, callbacks' states and values for the next metrics record."""
    return {"state": run.state.state_dict(), "callbacks": run.callback_states.state_dict(), "records": run.records.state_dict()}


def restore_states(run: HostedRun, own: Mapping[str, Any]) -> None:
    """Restore the run's progress and the callbacks' states from what `own_state` returned."""
    run.state.load_state_dict(own["state"])
    run.callback_states.load_state_dict(own["callbacks"])
    run.records.load_state_dict(own["records"])
    run.ctx.step, run.ctx.epoch = run.state.timestamp.batch, run.state.timestamp.epoch


def resume_without_states(run: HostedRun, step: int, epoch: int) -> None:
    """Set the run's step and epoch, because the framework has resumed from a checkpoint that has no states of callbacks."""
    run.state.timestamp = run.state.baseline = run.state.timestamp._replace(batch=step, epoch=epoch, epoch_in_round=epoch)
    run.ctx.step, run.ctx.epoch = step, epoch


def write_states(run: HostedRun, checkpoint: Path, info: CheckpointInfo, own: Mapping[str, Any] | None = None) -> None:
    """Write the callbacks' states (`own`, or if None the current states) into the folder `checkpoint`. All ranks must call this."""
    own = own_state(run) if own is None else own
    described = {"run": run.ctx.run.name, "step": info.step, "epoch": info.epoch, "kind": info.kind}
    local = {"callbacks": own["callbacks"], "records": own["records"]}
    write_checkpoint(checkpoint / STATE, {"state": own["state"]}, local, described, group=run.groups.saving, overwrite=True)


def read_states(run: HostedRun, checkpoint: Path, step: int) -> CheckpointInfo:
    """Restore the callbacks' states that `write_states` wrote. All ranks must call this.

    Raises:
        CheckpointError: the states are damaged, or of another step than the one that the host resumes from.
    """
    loaded = read_checkpoint(checkpoint / STATE, group=run.groups.saving)
    if loaded.info.get("step") != step:
        raise CheckpointError(
            f"{checkpoint / STATE} is of step {loaded.info.get('step')}, and {run.host} resumes from step {step}; resume from the checkpoint "
            "of that step, or remove the folder to resume without the callbacks' states"
        )
    restore_states(run, {"state": loaded.shared["state"], **loaded.local})
    info = loaded.info
    return CheckpointInfo(str(checkpoint), step, info["epoch"], info["kind"], size_bytes=loaded.seal.size_bytes)
