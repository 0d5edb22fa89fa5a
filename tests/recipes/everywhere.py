"""Callbacks that do not depend on the job: they work in any recipe, any Trainer, and any loop that fires the lifecycle's events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet import Callback, Context
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, FIELDS


class RecordsEvents(Callback):
    """Records every event with its step, its epoch and the available fields."""

    phase = "report"

    def __init__(self) -> None:
        self.recorded: list[tuple[str, int, int, tuple[str, ...]]] = []

    def on_event(self, ctx: Context) -> None:
        fields = tuple(name for name in FIELDS if name not in ALWAYS_AVAILABLE and ctx.has(name))
        self.recorded.append((str(ctx.event), ctx.step, ctx.epoch, fields))


class Report(Callback):
    """Collects what a report needs: losses, records, evaluations and checkpoints. Logs the number of its steps as `everywhere/steps`."""

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.records: list[tuple[int, dict[str, float]]] = []
        self.evaluations: list[tuple[int, dict[str, dict[str, float]]]] = []
        self.tests: list[dict[str, float]] = []
        self.checkpoints: list[tuple[int, dict[str, float]]] = []
        self.outcome = ""

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += 1
        self.losses.append(ctx.loss_dict["loss"].item())
        assert ctx.grad_norm is not None
        self.norms.append(ctx.grad_norm.item())
        ctx.log({"everywhere/steps": self.steps}, across="same")
        ctx.user_state["everywhere/steps"] = self.steps

    def on_log(self, ctx: Context) -> None:
        self.records.append((ctx.record.step, dict(ctx.record.values)))

    def on_eval_all_end(self, ctx: Context) -> None:
        self.evaluations.append((ctx.step, {name: dict(result) for name, result in ctx.eval_results.items()}))

    def on_test_end(self, ctx: Context) -> None:
        self.tests.append({name: loss.item() for name, loss in ctx.eval_losses.items()})

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        self.checkpoints.append((ctx.checkpoint.step, dict(ctx.checkpoint.val_losses)))

    def on_run_end(self, ctx: Context) -> None:
        self.outcome = str(ctx.run.outcome)

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
