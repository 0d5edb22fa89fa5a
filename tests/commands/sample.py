"""A recipe and callbacks that are named by their import path, and a look at a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from callsheet import Callback, Context, at
from callsheet.errors import ConfigError
from callsheet.recipes import Pretrain


class Asked(Pretrain):
    """Pretraining whose model can be asked: it says how long a text is, and how likely it finds its bytes."""

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The length and the mean loss."""
        for number, row in enumerate(rows, 1):
            if "text" not in row:
                raise ConfigError(f"row {number}: there is no column 'text'")
            ids = torch.tensor([list(row["text"].encode())])
            (outputs,) = self.trainer.predict([{"input_ids": ids, "labels": ids}])
            yield {"length": len(row["text"]), "loss": outputs.loss.item()}


class Shifted(Callback):
    """Evaluates other weights than are trained and saved."""

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


class Loud(Callback):
    """Leaves a trace of every event."""

    def on_event(self, ctx: Context) -> None:
        with Path("loud.txt").open("a") as file:
            file.write(f"{ctx.event}\n")


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below, with its content and when it was written."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}
