from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import callsheet
from callsheet.checkpoint import AsyncWriter, find_checkpoints, read_checkpoint
from callsheet.errors import CheckpointError


class SlowFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store whose writes wait until an event is set."""

    protocol = "slow"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    may_continue = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("slow://", "memory://")))

    def open(self, *args: Any, **more: Any) -> Any:
        assert self.may_continue.wait(60)
        return super().open(*args, **more)


@pytest.fixture
def slow() -> Iterator[threading.Event]:
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    SlowFileSystem.may_continue.clear()
    yield SlowFileSystem.may_continue
    SlowFileSystem.may_continue.set()
    SlowFileSystem.store.clear()


def test_training_continues_during_a_write_without_changing_the_checkpoint(slow: threading.Event) -> None:
    state: dict[str, Any] = {"w": torch.ones(3), "view": torch.arange(6.0).reshape(2, 3).T, "list": [1], "bytes": b"x"}
    info = {"losses": [1.0]}
    writer = AsyncWriter()
    writer.begin("slow://run/ck", state, {"seed": torch.tensor(1)}, info)
    state["w"].zero_()
    state["view"].zero_()
    state["list"].append(2)
    info["losses"].append(0.0)
    is_done = [writer.is_done]
    with pytest.raises(TimeoutError):
        writer.result(timeout=0.01)
    slow.set()
    seal = writer.result(60)
    assert [*is_done, writer.is_done] == [False, True]
    assert writer.result() == seal
    loaded = read_checkpoint("slow://run/ck")
    assert loaded.info == seal.info == {"losses": [1.0]}
    assert loaded.shared["w"].tolist() == [1, 1, 1]
    assert loaded.shared["view"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (loaded.shared["list"], loaded.local["seed"].item()) == ([1], 1)
    writer.close()


def test_a_save_waits_for_the_previous_one_and_reuses_its_buffers(slow: threading.Event) -> None:
    writer, weight = AsyncWriter(), torch.zeros(1000)
    writer.begin("slow://run/0", {"w": weight}, {}, {})
    begun = threading.Event()

    def second() -> None:
        writer.begin("slow://run/1", {"w": weight + 1, "more": torch.ones(1)}, {}, {})
        begun.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not begun.wait(0.05)  # it does not overwrite buffers that are being written
    slow.set()
    thread.join(60)
    writer.begin("slow://run/2", {"w": torch.full((7,), 2.0)}, {}, {})  # a tensor of another size with the same name
    writer.close()
    writer.close()
    assert [read_checkpoint(f"slow://run/{n}").shared["w"].tolist() for n in range(3)] == [[0.0] * 1000, [1.0] * 1000, [2.0] * 7]


def test_a_failure_is_raised_by_the_result_or_the_next_call(tmp_path: Path) -> None:
    writer = AsyncWriter()
    with pytest.raises(CheckpointError, match="no checkpoint has been begun"):
        writer.result()
    for _ in range(2):
        writer.begin(tmp_path / "ck", {"a": object()}, {}, {})
        with pytest.raises(CheckpointError, match="a: a <class 'object'> is not plain data"):
            writer.result()
    writer.begin(tmp_path / "ck", {"a": 1}, {}, {"bad": object()})
    with pytest.raises(CheckpointError, match="bad: a <class 'object'>"):  # the result was not awaited
        writer.begin(tmp_path / "ck", {"a": 1}, {}, {})
    (tmp_path / "file").touch()
    writer.begin(tmp_path / "file", {"a": 1}, {}, {})
    with pytest.raises(CheckpointError, match=r"cannot write .*/file: File exists"):
        writer.close()
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_only_the_writing_thread_is_limited_to_one_torch_thread() -> None:
    def num_threads() -> int:
        return torch.get_num_threads()

    def in_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(num_threads).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        writer = AsyncWriter()
        assert (num_threads(), in_a_new_thread(), writer._thread.submit(num_threads).result()) == (3, 3, 1)
        writer.close()
    finally:
        torch.set_num_threads(before)


EXITS = """
import sys, torch
from callsheet.checkpoint import AsyncWriter
writer = AsyncWriter()
for step in range(3):
    writer.begin(f"{sys.argv[1]}/{step}", {"w": torch.full((1 << 20,), step)}, {}, {"step": step})
if len(sys.argv) > 2:
    raise SystemExit(int(sys.argv[2]))
"""


@pytest.mark.test_all
@pytest.mark.parametrize("code", [[], ["3"]], ids=["end", "exit"])
def test_a_process_completes_its_write_before_it_ends(tmp_path: Path, code: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(callsheet.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", EXITS, str(tmp_path), *code], env=env, check=False, timeout=120)
    assert done.returncode == int(code[0] if code else 0)
    found = find_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in found.checkpoints] == [2, 1, 0]
    assert [read_checkpoint(checkpoint.path).shared["w"][-1].item() for checkpoint in found.checkpoints] == [2, 1, 0]
