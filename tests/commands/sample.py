"""A recipe and callbacks that tests name by their import path, and a function that reads a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from callsheet import Callback, Context, at
from callsheet.errors import ConfigError
from callsheet.recipes import Pretrain


class PretrainWithPredictions(Pretrain):
    """A pretraining recipe that predicts the length of a text and the model's loss on its bytes."""

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Return the length and the mean loss of each row."""
        for number, row in enumerate(rows, 1):
            if "text" not in row:
                raise ConfigError(f"row {number}: there is no column 'text'")
            ids = torch.tensor([list(row["text"].encode())])
            (outputs,) = self.trainer.predict([{"input_ids": ids, "labels": ids}])
            yield {"length": len(row["text"]), "loss": outputs.loss.item()}


class DoublesWeights(Callback):
    """Doubles the weights during evaluations."""

    phase = "change"

    @torch.no_grad()
    def on_eval_all_start(self, ctx: Context) -> None:
        for parameter in ctx.model.parameters():
            parameter.mul_(2)

    @at("restore")
    @torch.no_grad()
    def on_eval_all_end(self, ctx: Context) -> None:
        for parameter in ctx.model.parameters():
            parameter.div_(2)


class WritesEvents(Callback):
    """Writes every event to a file."""

    def on_event(self, ctx: Context) -> None:
        with Path("events.txt").open("a") as file:
            file.write(f"{ctx.event}\n")


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content and modification time of every file below the folder."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}
