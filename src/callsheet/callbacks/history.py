"""Keeps a run's metrics records and evaluations in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.errors import ConfigError, did_you_mean


class History(Callback):
    """Keep every metrics record and every evaluation of training in memory.

    `history["train/loss"]` lists the values of that metric in the records, in order, and `history.steps("train/loss")` their
    steps. `records` holds a pair of step and values for each record. `evaluations` holds a pair of step and results by dataset
    for each evaluation within training. The history is the same on all ranks. It survives a resume, and steps that are
    trained again appear only once. A new run begins with an empty history.

    Args:
        most: the number of records and of evaluations to keep, the newest ones; None keeps all. They are saved in every checkpoint.

    Raises:
        ConfigError: `most` is less than 1.
        KeyError: no record has the metric that was read; the message suggests the nearest name.

    Examples:
        >>> import torch
        >>> from callsheet import Trainer
        >>> history, data = History(), [(torch.ones(4, 2), torch.ones(4, 1))] * 6
        >>> with Trainer(
        ...     torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data, optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        ...     log_interval="2ba", callbacks=history,
        ... ) as trainer:
        ...     trainer.fit()
        >>> history.steps("train/loss")
        [2, 4, 6]
    """

    phase = "report"

    def __init__(self, *, most: int | None = None) -> None:
        if most is not None and most < 1:
            raise ConfigError(f"most={most}: keep at least one record, or all with None")
        self._most = most
        self.records: list[tuple[int, dict[str, float]]] = []
        """The step and the values of each metrics record."""
        self.evaluations: list[tuple[int, dict[str, dict[str, float]]]] = []
        """The step of each evaluation, and its results by dataset."""

    def __getitem__(self, name: str) -> list[float]:
        return [value for _, value in self._column(name)]

    def steps(self, name: str) -> list[int]:
        """Return the steps of the metrics records that have a value of the metric `name`.

        Args:
            name: the full name of the metric, such as `train/loss`.

        Raises:
            KeyError: no record has the metric; the message suggests the nearest name.
        """
        return [step for step, _ in self._column(name)]

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self.records, self.evaluations = [], []

    def on_log(self, ctx: Context) -> None:
        """Store the metrics record, with the values that callbacks have added to it."""
        self.records.append((ctx.record.step, dict(ctx.record.values)))
        self._forget_old()

    def on_eval_all_end(self, ctx: Context) -> None:
        if not ctx.standalone:
            self.evaluations.append((ctx.step, {name: dict(result) for name, result in ctx.eval_results.items()}))
            self._forget_old()

    def _forget_old(self) -> None:
        if self._most is not None:
            del self.records[: -self._most], self.evaluations[: -self._most]

    def _column(self, name: str) -> list[tuple[int, float]]:
        column = [(step, values[name]) for step, values in self.records if name in values]
        if not column:
            logged = list(dict.fromkeys(name for _, values in self.records for name in values))
            raise KeyError(f"no record has {name!r}{did_you_mean(name, logged)} (logged: {', '.join(logged) or 'nothing'})")
        return column

    def state_dict(self) -> Mapping[str, Any]:
        return {"records": list(self.records), "evaluations": list(self.evaluations)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.records = [(step, dict(values)) for step, values in state["records"]]
        self.evaluations = [(step, dict(results)) for step, results in state["evaluations"]]
        self._forget_old()
