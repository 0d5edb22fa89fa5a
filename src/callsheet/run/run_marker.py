"""The file `run.json`, a marker which says that training has begun in a folder.

A folder without the marker is not a run, and the next run may begin in it. Examples are a folder that a logger made at
`on_run_start`, and the folder of a run that ended before its first step.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

MARKER = "run.json"


def mark_run(folder: Path, name: str) -> None:
    """Write the marker file `run.json` to the folder, unless the folder does not exist or has the file already."""
    path = folder / MARKER
    if folder.is_dir() and not path.exists():
        draft = path.with_name(f"{MARKER}.new")
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        draft.write_text(json.dumps({"format": 1, "run": name, "began": began}) + "\n", encoding="utf-8")
        os.replace(draft, path)


def is_marked(folder: Path) -> bool:
    """Return whether the folder has the file `run.json`, which says that training has begun in it."""
    return (folder / MARKER).exists()
