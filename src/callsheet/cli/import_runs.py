"""`callsheet import`: convert runs of other tools (TensorBoard, W&B, ...) into run folders of callsheet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from callsheet.core.working import working
from callsheet.errors import ConfigError
from callsheet.report.imports import Imported, SourceKind, importing
from callsheet.report.lines import printable


def import_runs(
    sources: Sequence[str],
    *,
    to: str = "runs",
    kind: SourceKind | None = None,
    name: str | None = None,
    rename: Sequence[str] = (),
) -> None:
    """Import runs of other tools. Print a line for each run as soon as its folder is complete.

    Raises:
        ConfigError: an argument is invalid, nothing is recognized, or a folder would be overwritten.
        MissingPackage: the package that reads the files is not installed.
    """
    names = dict(_pair(text) for text in rename)
    with working(f"importing from {', '.join(sources)}", is_shown=sys.stderr.isatty()):
        for imported in importing(sources, Path(to), kind=kind, name=name, rename=names):
            with suppress(BrokenPipeError):
                print(printable(_line(imported)), flush=True)
            for warning in imported.warnings:
                print(printable(f"callsheet: {warning}"), file=sys.stderr)


def _pair(text: str) -> tuple[str, str]:
    old, separator, new = text.partition("=")
    if not separator:
        raise ConfigError(f"--rename {text} has no '='; give OLD=NEW, such as val/loss=validation/loss")
    return old, new


def _line(imported: Imported) -> str:
    counts = [
        (imported.records, "record"),
        (imported.metrics, "metric"),
        *([(imported.images, "image")] if imported.images else []),
    ]
    left_out = ", ".join(f"{what} ({count:,})" for what, count in imported.left_out.items())
    had = ", ".join(f"{count:,} {what}{'' if count == 1 else 's'}" for count, what in counts)
    return f"{imported.folder}: {had}, from {imported.kind}" + (f"; left out: {left_out}" if left_out else "")
