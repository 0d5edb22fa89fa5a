from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from callsheet.checkpoint import (
    Unsealed,
    delete_checkpoint,
    find_checkpoints,
    newest,
    open_folder,
    point_latest,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from callsheet.checkpoint.local import LocalFolder
from callsheet.errors import CheckpointError
from callsheet.testing.ranks import run_ranks

from .many_ranks import gloo_group, whole

ROOT = "memory://bucket/run"


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def names(memory: Any, url: str) -> set[str]:
    return {path.rpartition("/")[2] for path in memory.find(url)}


def write(path: str, step: int, **more: Any) -> None:
    write_checkpoint(path, {"step": step, "w": torch.full((8,), step)}, {"own": step}, {"step": step}, **more)


def stored_step(path: str) -> int | None:
    """Return the step of the complete checkpoint at the path, or None."""
    try:
        loaded = read_checkpoint(path)
    except Unsealed:
        return None
    assert loaded.shared["w"].tolist() == [loaded.shared["step"]] * 8
    assert loaded.local["own"] == loaded.info["step"] == loaded.shared["step"]
    return int(loaded.info["step"])


def test_a_checkpoint_in_a_store_is_written_overwritten_found_and_deleted(memory: Any) -> None:
    assert find_checkpoints(ROOT) == ([], [], [])
    for step in (1, 2):
        write(f"{ROOT}/step-{step}", step)
        point_latest(f"{ROOT}/step-{step}")
    with pytest.raises(CheckpointError, match=r"memory://bucket/run/step-1 is already a sealed checkpoint"):
        write(f"{ROOT}/step-1", 3)
    for step in (3, 4):
        write(f"{ROOT}/step-1/", step, overwrite=True)
        assert stored_step(f"{ROOT}/step-1") == step
    assert len(names(memory, f"{ROOT}/step-1")) == 6
    memory.pipe_file(f"{ROOT}/killed/checkpoint.txt", b"")
    memory.pipe_file(f"{ROOT}/metrics.jsonl", b"")
    found = find_checkpoints(ROOT)
    assert [(checkpoint.path, checkpoint.name, checkpoint.step) for checkpoint in found.checkpoints] == [
        (f"{ROOT}/step-1", "step-1", 4),
        (f"{ROOT}/step-2", "step-2", 2),
    ]
    assert (found.skipped, found.abandoned) == ([], [f"{ROOT}/killed"])
    first = newest(ROOT)
    assert first is not None
    assert first.step == read_manifest(first.path).info["step"] == 4
    assert memory.cat_file(f"{ROOT}/latest") == b"step-2\n"
    for name in ("step-1", "step-2", "killed"):
        delete_checkpoint(f"{ROOT}/{name}")
    assert memory.find(ROOT) == ["/bucket/run/latest", "/bucket/run/metrics.jsonl"]
    with pytest.raises(CheckpointError, match="is not the folder of a checkpoint"):
        delete_checkpoint(ROOT)


def test_a_store_folder_with_other_files_is_not_changed(memory: Any) -> None:
    memory.pipe_file(f"{ROOT}/thesis.tex", b"")
    with pytest.raises(CheckpointError, match="holds files that do not belong to a checkpoint"):
        write(ROOT, 1, overwrite=True)
    assert names(memory, ROOT) == {"thesis.tex"}


def test_every_changed_byte_in_a_store_is_rejected(memory: Any) -> None:
    path = f"{ROOT}/ck"
    write(path, 1)
    for name in sorted(names(memory, path) - {"checkpoint.txt"}):
        content = memory.cat_file(f"{path}/{name}")
        for i in range(0, len(content), 7):
            memory.pipe_file(f"{path}/{name}", content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
            with pytest.raises(CheckpointError, match="use another"):
                read_checkpoint(path)
        memory.pipe_file(f"{path}/{name}", content)
    assert stored_step(path) == 1


def test_file_urls_are_opened_and_unknown_protocols_are_rejected() -> None:
    local = open_folder("file:///tmp/run")
    assert isinstance(local, LocalFolder)
    assert local.path == "/tmp/run"
    with pytest.raises(CheckpointError, match=r"cannot open nonsense://x: ValueError: Protocol not known"):
        open_folder("nonsense://x")
    with pytest.raises(CheckpointError, match="cannot open"):
        write("nonsense://x", 1)


class DyingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A memory file system in which the nth change fails, and all later ones too if the machine is dead."""

    protocol = "dying"
    left = 1 << 30
    is_dead_after = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("dying://", "memory://")))

    def _change(self) -> None:
        type(self).left -= 1
        if self.left == 0 or (self.left < 0 and self.is_dead_after):
            raise OSError("the store is gone")

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode == "wb":
            self._change()
        file = super().open(path, mode, **more)
        if mode == "wb":
            put = file.write

            def write(chunk: Any) -> Any:
                self._change()
                return put(chunk)

            file.write = write
        return file

    def pipe_file(self, *args: Any, **more: Any) -> None:
        self._change()
        with super().open(args[0], "wb") as file:
            file.write(args[1])

    def rm(self, *args: Any, **more: Any) -> None:
        self._change()
        super().rm(*args, **more)

    def rm_file(self, path: str) -> None:
        self._change()
        super().rm_file(path)

    def makedirs(self, *args: Any, **more: Any) -> None:
        self._change()
        super().makedirs(*args, **more)


@pytest.mark.parametrize("is_dead_after", [True, False], ids=["killed", "fails once"])
@pytest.mark.parametrize("first", [None, 1])
def test_a_store_that_fails_at_any_change_has_a_complete_checkpoint_or_none(first: int | None, is_dead_after: bool) -> None:
    fsspec.register_implementation("dying", DyingFileSystem, clobber=True)
    DyingFileSystem.is_dead_after = is_dead_after
    seen = set()
    for nth in itertools.count(1):
        DyingFileSystem.left = 1 << 30
        MemoryFileSystem.store.clear()
        if first is not None:
            write("memory://ck", first)
        DyingFileSystem.left = nth
        try:
            write("dying://ck", 2, overwrite=True)
            is_over = DyingFileSystem.left > 0
        except CheckpointError as error:
            assert "OSError: the store is gone" in str(error)  # noqa: PT017 - the write may also succeed
            is_over = False
        seen.add(stored_step("memory://ck"))
        if is_over:
            break
        write("memory://ck", 9, overwrite=True)  # the next writer succeeds, whatever files were left
        assert stored_step("memory://ck") == 9
        assert len(fsspec.filesystem("memory").find("ck")) == 6
    assert seen == {first, 2}
    assert nth > 12


class SharedFileSystem(LocalFileSystem):  # type: ignore[misc]
    """A store that several processes share."""

    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(path.removeprefix("shared://")))


def in_a_store(url: str) -> Any:
    fsspec.register_implementation("shared", SharedFileSystem, clobber=True)
    group = gloo_group()
    assert group is not None
    shared = {"a": torch.arange(3), "b": torch.ones(2), "c": torch.ones(4)}
    for step in range(3):
        seal = write_checkpoint(url, shared, {"rank": group.rank()}, {"step": step}, group=group, overwrite=True)
    loaded = read_checkpoint(url, group=group)
    assert loaded.local == {"rank": group.rank()}
    assert whole(loaded.shared) == whole(shared)
    return sorted(seal.files)


def test_many_ranks_write_to_a_store_and_read_from_it(tmp_path: Path) -> None:
    files = run_ranks(in_a_store, 2, f"shared://{tmp_path}/run/ck")
    shards = ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert files == [["index.json", "local-00000.json", "local-00001.json", *shards, "state.json"]] * 2
    assert read_checkpoint(tmp_path / "run" / "ck").info == {"step": 2}
