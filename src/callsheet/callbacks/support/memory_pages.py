"""Renders a snapshot of the device's memory as HTML pages, in another process."""

from __future__ import annotations

import pickle
from pathlib import Path

from torch.cuda import _memory_viz

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.lane_options import LaneOptions
from callsheet.core.manager import CallbackManager

_VIEW_IN_HTML, _VIEW_IN_SCRIPT = "Active Cached Memory Timeline", "Active Cached Segment Timeline"
"""The two names of the view by memory segments: in the HTML that torch writes, and in the script that the HTML page loads.

The first name is replaced by the second, because otherwise the page would stay blank.
"""


class MemoryPages(Callback):
    """A callback that renders memory snapshots as HTML pages in a separate process.

    Rendering holds the interpreter lock for seconds, and needs several times the snapshot's size in memory.
    """

    lane = "process"
    lane_options = LaneOptions(deadline=120.0)

    def draw_memory(self, ctx: Context, path: Path, is_logged: bool) -> None:
        """Render the memory snapshot at `path` as HTML pages, and log them if `is_logged`."""
        for page in render_memory(path):
            if is_logged:
                ctx.log_file(f"memory/{page.name}", page)


class Drawing:
    """Renders memory snapshots as HTML pages in another process, which runs from the first snapshot until `end`."""

    def __init__(self) -> None:
        self._manager = CallbackManager([MemoryPages()], costs="off")
        self._has_begun = False

    def begin(self, ctx: Context, path: Path) -> None:
        """Start rendering the snapshot at `path`. On rank 0, log the snapshot and later its pages."""
        is_logged = ctx.run.is_world_process_zero
        if is_logged:
            ctx.log_file(f"memory/{path.name}", path)
        self._has_begun = True
        self._manager.notify_loggers("draw_memory", ctx, path=path.absolute(), is_logged=is_logged)

    def end(self, ctx: Context) -> None:
        """Wait up to two minutes until all pages are written and logged."""
        if self._has_begun:
            self._has_begun = False
            self._manager.drain(ctx)
            self._manager.close()


def render_memory(path: Path) -> list[Path]:
    """Render a memory snapshot as two HTML pages, which are written to the snapshot's folder. Return the paths of the pages.

    One page shows the memory by tensors (`.html`), the other by the allocator's segments (`-segments.html`).

    Loading a pickle executes code that it contains: only pass files that this machine wrote.
    """
    with open(path, "rb") as file:
        snapshot = pickle.load(file)
    pages = {path.with_suffix(".html"): False, path.with_name(f"{path.stem}-segments.html"): True}
    for page, is_of_segments in pages.items():
        drawn = _memory_viz.trace_plot(snapshot, plot_segments=is_of_segments)
        page.write_text(drawn.replace(_VIEW_IN_HTML, _VIEW_IN_SCRIPT), encoding="utf-8")
    return list(pages)
