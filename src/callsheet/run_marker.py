"""Which folder is a run's: the one in which training has begun, which the file `run.json` says.

A folder that somebody else made, such as a logger at `on_run_start`, or a run that ended before its first step, is not a run: the next
start begins in it.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

MARKER = "run.json"


def mark_run(folder: Path, name: str) -> None:
    """Write the marker if the folder exists and has none; a run that writes nothing has no folder, and gets none."""
    path = folder / MARKER
    if folder.is_dir() and not path.exists():
        draft = path.with_name(f"{MARKER}.new")
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        draft.write_text(json.dumps({"format": 1, "run": name, "began": began}) + "\n", encoding="utf-8")
        os.replace(draft, path)


def is_marked(folder: Path) -> bool:
    """Whether training has begun in this folder."""
    return (folder / MARKER).exists()
