"""Composer's `InMemoryLogger`, which keeps all logged values in memory, with the times at which they were logged."""

from __future__ import annotations

from typing import Any

from callsheet.bridges.composer.names import LoggerDestination


class InMemoryLogger(LoggerDestination):
    """A logger that keeps all logged values in memory. It has the name and the attributes of Composer's `InMemoryLogger`.

    `data` has, by name, pairs of a `Timestamp` and a value. `most_recent_values` has the last value of each name, and
    `hyperparameters` the settings.
    """

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[Any, Any]]] = {}
        self.most_recent_values: dict[str, Any] = {}
        self.most_recent_timestamps: dict[str, Any] = {}
        self.hyperparameters: dict[str, Any] = {}
        self.tables: dict[str, Any] = {}
        self._state: Any = None

    def init(self, state: Any, logger: Any) -> None:
        """Store Composer's state object, whose timestamp is stored with each logged value."""
        self._state = state

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.hyperparameters.update(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        now = self._state.timestamp
        for name, value in metrics.items():
            self.data.setdefault(name, []).append((now, value))
        self.most_recent_values.update(metrics)
        self.most_recent_timestamps.update(dict.fromkeys(metrics, now))

    def log_table(self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None) -> None:
        self.tables[name] = {"columns": columns, "data": rows}

    def get_timeseries(self, metric: str) -> dict[str, list[Any]]:
        """Return a dict with a list of the metric's values, and a list of their times in each unit. Raise ValueError if there are none."""
        if metric not in self.data:
            raise ValueError(f"{metric!r} was not logged; there are {', '.join(self.data) or 'none'}")
        series: dict[str, list[Any]] = {metric: [value for _, value in self.data[metric]]}
        for now, _ in self.data[metric]:
            for unit, count in now.state_dict().items():
                series.setdefault(unit, []).append(count if isinstance(count, int) else count.total_seconds())
        return series
