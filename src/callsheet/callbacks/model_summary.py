"""Prints a table of the model's modules and parameters before training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode

from callsheet.callbacks.support.flop_count import has_compiled
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.ranks import RankGate
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

Row = list[Any]


class ModelSummary(Callback):
    """Print a table of the model's modules and their parameters, once, on rank 0, and log the table as `model/summary`.

    The columns are `module`, `type`, `parameters` and `trainable`; with `flops`, there are also the FLOPs of a forward pass (of
    one microbatch, on rank 0; a multiplication and an addition count as two). A row counts a parameter of its module once, even
    if several submodules share it; of sharded parameters, the full size is counted. The last row is the whole model. If the
    callback has a `name`, the table has that name.

    Args:
        depth: how many levels of modules; 0 is the model alone.
        flops: whether to count, with torch's counter, the FLOPs of the second microbatch's forward pass. That pass takes longer,
            and the table is printed after it. Compiled code cannot be counted; the table then says 0, and a warning says why.
        prints: whether to print the table on standard output.

    Raises:
        ConfigError: an argument is invalid.
    """

    phase = "report"
    ranks: RankGate = "zero"
    required_fields = ("model",)

    def __init__(self, *, depth: int = 2, flops: bool = False, prints: bool = True) -> None:
        if depth < 0:
            raise ConfigError(f"depth={depth}: give 0 or more")
        self._depth = depth
        self._flops = flops
        self._prints = prints
        self._is_shown = False
        self._forwards = 0
        self._counter: FlopCounterMode | None = None

    def on_run_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run, so that each run shows the table once."""
        self._is_shown, self._forwards = False, 0

    def on_train_start(self, ctx: Context) -> None:
        """Show the table, unless the FLOPs of a forward pass must be counted first."""
        if not self._flops:
            self._show(ctx, {})

    def on_forward_start(self, ctx: Context) -> None:
        """Start counting FLOPs if this is the second forward pass.

        FLOPs of the first pass are not counted, because torch.compile never compiles code that is first called while torch counts
        FLOPs.
        """
        if not self._flops or self._is_shown:
            return
        self._forwards += 1
        if self._forwards == 2 and has_compiled():
            logger.warning("ModelSummary counts no FLOPs: torch.compile is in use, and torch cannot count compiled code")
            self._show(ctx, {})
        elif self._forwards == 2:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_forward_end(self, ctx: Context) -> None:
        """Show the table with the counted FLOPs."""
        if self._counter is not None:
            counts = self._stop_counting()
            self._show(
                ctx, {name.partition(".")[2]: sum(by_kind.values()) for name, by_kind in counts.items() if name != "Global"}
            )

    def on_train_end(self, ctx: Context) -> None:
        """Show the table without FLOPs if training ended before the second forward pass, in which FLOPs are counted."""
        self._show(ctx, {})

    def on_exception(self, ctx: Context) -> None:
        """Stop counting FLOPs."""
        if self._counter is not None:
            self._stop_counting()

    def _stop_counting(self) -> Mapping[str, Mapping[Any, int]]:
        counter, self._counter = self._counter, None
        assert counter is not None
        counter.__exit__(None, None, None)
        return counter.get_flop_counts()

    def _show(self, ctx: Context, flops: Mapping[str, int]) -> None:
        if self._is_shown:
            return
        self._is_shown = True
        columns = ["module", "type", "parameters", "trainable", *(["flops"] if self._flops else [])]
        modules = ctx.model if isinstance(ctx.model, list) else [ctx.model]
        rows = [row for model in modules for row in self._rows(model, flops)]
        ctx.log_table(self.name or "model/summary", columns, rows)
        if self._prints:
            print(_format_table(columns, rows), flush=True)

    def _rows(self, model: nn.Module, flops: Mapping[str, int]) -> list[Row]:
        below = [(name, module) for name, module in model.named_modules() if name and name.count(".") < self._depth]
        return [self._row(name, module, flops) for name, module in [*below, ("", model)]]

    def _row(self, name: str, module: nn.Module, flops: Mapping[str, int]) -> Row:
        parameters = list(module.parameters())
        counted = [flops.get(name, 0)] if self._flops else []
        trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in parameters)
        # FSDP makes a subclass of the module's class. Show the module's own class.
        kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
        return [name or "(model)", kind.__name__, total, trainable, *counted]


def _format_table(columns: list[str], rows: list[Row]) -> str:
    """Return the table as text, with numbers aligned to the right."""
    cells = [columns, *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0].rstrip(), rule, *(line.rstrip() for line in lines[1:-1]), rule, lines[-1].rstrip()])
