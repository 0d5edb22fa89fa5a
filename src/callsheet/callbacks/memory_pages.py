"""Pages that show a snapshot of the device's memory, drawn in a process of their own."""

from __future__ import annotations

import pickle
from pathlib import Path

from torch.cuda import _memory_viz

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.lanes import LaneOptions
from callsheet.manager import CallbackManager

_ASKED_FOR, _KNOWN = "Active Cached Memory Timeline", "Active Cached Segment Timeline"
"""The view by segments, as torch's page asks for it, and as the script that it loads knows it: by the first name it stays blank."""


class MemoryPages(Callback):
    """Draws snapshots that are on disk. That takes seconds, in which it holds the interpreter, and several times the snapshot's memory."""

    lane = "process"
    lane_options = LaneOptions(deadline=120.0)

    def draw_memory(self, ctx: Context, path: Path, is_told: bool) -> None:
        """Write the pages of the snapshot in `path`, and give them to the loggers if `is_told`."""
        for page in render_memory(path):
            if is_told:
                ctx.log_file(f"memory/{page.name}", page)


class Drawing:
    """Has pages drawn while training goes on. The process is there from the first of them until `end`."""

    def __init__(self) -> None:
        self._manager = CallbackManager([MemoryPages()], costs="off")
        self._has_begun = False

    def begin(self, ctx: Context, path: Path) -> None:
        """Have the snapshot in `path` drawn, and give it to the loggers: rank 0's alone."""
        is_told = ctx.run.is_world_process_zero
        if is_told:
            ctx.log_file(f"memory/{path.name}", path)
        self._has_begun = True
        self._manager.notify_loggers("draw_memory", ctx, path=path.absolute(), is_told=is_told)

    def end(self, ctx: Context) -> None:
        """Wait until all is drawn, two minutes at most, and give it to the loggers."""
        if self._has_begun:
            self._has_begun = False
            self._manager.drain(ctx)
            self._manager.close()


def render_memory(path: Path) -> list[Path]:
    """Pages beside a snapshot of ours that show it over time: by tensors (`.html`), and by segments (`-segments.html`).

    Loading a pickle runs what it holds: only give it files that this machine wrote.
    """
    with open(path, "rb") as file:
        snapshot = pickle.load(file)
    pages = {path.with_suffix(".html"): False, path.with_name(f"{path.stem}-segments.html"): True}
    for page, is_of_segments in pages.items():
        drawn = _memory_viz.trace_plot(snapshot, plot_segments=is_of_segments)
        page.write_text(drawn.replace(_ASKED_FOR, _KNOWN), encoding="utf-8")
    return list(pages)
