from __future__ import annotations

import base64
import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.support import memory_pages
from callsheet.callbacks.support.memory_pages import Drawing, render_memory
from callsheet.loggers import Logger

FRAME = {"filename": "train.py", "line": 12, "name": "forward"}
SNAPSHOT: dict[str, Any] = {  # in the form of torch.cuda.memory._snapshot: one segment, half of it in use
    "segments": [
        {
            "device": 0,
            "address": 4096,
            "total_size": 2048,
            "allocated_size": 1024,
            "active_size": 1024,
            "requested_size": 1000,
            "stream": 0,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": [FRAME]},
                {"address": 5120, "size": 1024, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 4096, "size": 2048, "stream": 0, "time_us": 1, "frames": [FRAME]},
            {"action": "alloc", "addr": 4096, "size": 1024, "stream": 0, "time_us": 2, "frames": [FRAME]},
        ]
    ],
    "allocator_settings": {},
    "external_annotations": [],
}


PAGES = ("memory.html", "memory-segments.html")


def shown_in(page: Path) -> tuple[str, Any]:
    """Return the view that a page opens, and the snapshot that it contains."""
    text = page.read_text()
    found = re.search(r"const local_files = (\[.*\])\nadd_local_files\(local_files, '([^']+)'\)", text)
    assert found is not None, text[:500]
    return found[2], pickle.loads(base64.b64decode(json.loads(found[1])[0]["base64"]))


class DrawsSnapshot(Callback):
    """Renders a snapshot at the second step, as `MemorySnapshot` does on a device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drawing = Drawing()

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 2:
            self.drawing.begin(ctx, self.path)

    def on_run_end(self, ctx: Context) -> None:
        self.drawing.end(ctx)


class RecordsFiles(Logger):
    """Records the names of the files that are logged."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        assert path.is_file()
        self.names.append(name)


def fit(folder: Path, *callbacks: Callback) -> None:
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        [(torch.ones(2, 2), torch.ones(2, 1))] * 4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        callbacks=callbacks,
        runs_folder=folder,
        device="cpu",
    ) as trainer:
        trainer.fit()


@pytest.mark.test_all
def test_a_snapshot_is_rendered_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draws_here(path: Path) -> list[Path]:
        raise AssertionError("in the training process")

    monkeypatch.setattr(memory_pages, "render_memory", draws_here)
    path, files = tmp_path / "memory.pickle", RecordsFiles()
    path.write_bytes(pickle.dumps(SNAPSHOT))
    fit(tmp_path, DrawsSnapshot(path), files)
    assert files.names == ["memory/memory.pickle", *(f"memory/{name}" for name in PAGES)]
    assert shown_in(tmp_path / PAGES[0])[1] == SNAPSHOT


@pytest.mark.test_all
def test_a_damaged_snapshot_is_reported_and_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, files = tmp_path / "memory.pickle", RecordsFiles()
    path.write_bytes(b"torn")
    with caplog.at_level(logging.ERROR, "callsheet"):
        fit(tmp_path, DrawsSnapshot(path), files)
    assert files.names == ["memory/memory.pickle"]
    assert "Callback MemoryPages" in caplog.text
    assert "failed at draw_memory, step 2" in caplog.text


def test_a_stored_snapshot_is_rendered(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    pages = render_memory(path)
    assert [page.name for page in pages] == list(PAGES)
    assert [shown_in(page)[0] for page in pages] == ["Active Memory Timeline", "Active Cached Segment Timeline"]
    for page in pages:
        assert shown_in(page)[1] == SNAPSHOT
