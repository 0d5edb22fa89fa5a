"""Draw the lifecycle table as nested boxes: a box is a span, a rounded box a single event. `generate.py` writes the picture."""

from __future__ import annotations

from dataclasses import dataclass, field

from callsheet.core.lifecycle import ANYWHERE_EVENTS, POINTS, SPANS, names_in

WIDTH = 660
PADDING = 11
TITLE = 25
LEAF = 30
GAP = 7

FILLS = ("#12222b", "#17303c", "#1c3d4c", "#214a5c", "#26566b", "#2b637b", "#306f8a", "#357c99")
"""The fill of a box at each depth."""

STYLE = """
.span{stroke:#5b8ea3;stroke-width:1}
.point{fill:#f2b134;stroke:none}
.name{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:13px;fill:#fff}
.on{fill:#241a00}
.note{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;font-size:13px;fill:#c5d4db}
"""


@dataclass
class Box:
    """A span with what may occur inside it, or a single event."""

    name: str
    rows: list[list[Box]] = field(default_factory=list)

    @property
    def is_leaf(self) -> bool:
        return not self.rows

    @property
    def height(self) -> int:
        if self.is_leaf:
            return LEAF
        return TITLE + sum(max(box.height for box in row) + GAP for row in self.rows) + PADDING - GAP


def nested(name: str, drawn: set[str]) -> Box:
    """Return the box of a span. Boxes without content stand side by side. What may occur in several spans is drawn only once."""
    drawn.add(name)
    box = Box(name)
    is_open = False  # whether the last row takes another box
    for child in names_in(SPANS[name].order) if name in SPANS else ():
        if child in drawn:
            continue
        inner = nested(child, drawn)
        if inner.is_leaf and is_open:
            box.rows[-1].append(inner)
        else:
            box.rows.append([inner])
        is_open = inner.is_leaf
    return box


def drawn_box(box: Box, x: float, y: float, width: float, depth: int) -> list[str]:
    """Return the lines that draw a box and everything inside it."""
    if box.name in POINTS:
        return [
            f'<rect class="point" x="{x:g}" y="{y:g}" width="{width:g}" height="{LEAF}" rx="15"/>',
            f'<text class="name on" x="{x + width / 2:g}" y="{y + 19.5:g}" text-anchor="middle">{box.name}</text>',
        ]
    fill = FILLS[min(depth, len(FILLS) - 1)]
    lines = [f'<rect class="span" x="{x:g}" y="{y:g}" width="{width:g}" height="{box.height}" rx="6" fill="{fill}"/>']
    if box.is_leaf:
        return [*lines, f'<text class="name" x="{x + width / 2:g}" y="{y + 19.5:g}" text-anchor="middle">{box.name}</text>']
    lines.append(f'<text class="name" x="{x + PADDING:g}" y="{y + 17.5:g}">{box.name}</text>')
    y += TITLE
    for row in box.rows:
        inner = (width - 2 * PADDING - GAP * (len(row) - 1)) / len(row)
        for i, each in enumerate(row):
            lines += drawn_box(each, x + PADDING + i * (inner + GAP), y, inner, depth + 1)
        y += max(each.height for each in row) + GAP
    return lines


def picture() -> str:
    """Return the lifecycle as an SVG image."""
    run = nested("run", set())
    anywhere = [name for name in POINTS if name in ANYWHERE_EVENTS]
    height = PADDING + run.height + 30 + LEAF + 14 + 3 * 20 + PADDING
    y = PADDING + run.height
    width = (WIDTH - 2 * PADDING - GAP * (len(anywhere) - 1)) / len(anywhere)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="The spans and events of a run">',
        "<title>The lifecycle: the spans and events of a run</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#0b161c"/>',
        *drawn_box(run, PADDING, PADDING, WIDTH - 2 * PADDING, 0),
        f'<text class="note" x="{2 * PADDING}" y="{y + 22}">anywhere:</text>',
    ]
    for i, name in enumerate(anywhere):
        lines += drawn_box(Box(name), PADDING + i * (width + GAP), y + 30, width, 0)
    y += 30 + LEAF + 14
    notes = (
        "A blue box is a span: it fires on_&lt;span&gt;_start and on_&lt;span&gt;_end.",
        "A yellow box is a single event.",
        "What follows a step in an epoch may also follow an epoch or a round.",
    )
    lines += [f'<text class="note" x="{2 * PADDING}" y="{y + 10 + 20 * i}">{note}</text>' for i, note in enumerate(notes)]
    return "\n".join([*lines, "</svg>"]) + "\n"
