from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet.checkpoint import FileSeal, Seal, Unsealed, read_manifest, seal, storage
from callsheet.checkpoint.local import LocalFolder
from callsheet.errors import CheckpointError

KIND = "test"


def read_seal(path: Path) -> Seal:
    return seal.seal_of(LocalFolder(path))


def write_seal(path: Path, files: dict[str, FileSeal], info: dict[str, Any], **more: Any) -> Seal:
    return seal.write_seal(LocalFolder(path), files, info, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two sealed files."""
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "shard").write_bytes(b"shard")
    local = LocalFolder(folder)
    files = {"a": local.write("a", [b"con", memoryview(b"tent")]), "shard": storage.measure(local, "shard")}
    write_seal(folder, files, {"step": 7}, kind=KIND, world_size=2)
    return folder


def craft(folder: Path, **changes: Any) -> None:
    """Write a manifest with the given changes and a valid digest of its own."""
    content = {key: value for key, value in json.loads((folder / "manifest.json").read_bytes()).items() if key != "sha256"}
    body = json.dumps(content | changes)[1:].encode()
    (folder / "manifest.json").write_bytes(b'{"sha256": "%s",%s' % (hashlib.sha256(body).hexdigest().encode(), body))


def test_a_seal_is_read_back(folder: Path) -> None:
    sealed = read_seal(folder)
    assert sealed == read_manifest(folder)
    assert sealed.kind == KIND
    assert sealed.info == {"step": 7}
    assert sealed.files["a"] == FileSeal(7, hashlib.sha256(b"content").hexdigest())
    assert sealed.size_bytes == 12
    assert sealed.world_size == 2
    assert storage.read_verified(LocalFolder(folder), "a", sealed.files["a"]) == b"content"
    storage.verify(LocalFolder(folder), "shard", sealed.files["shard"])


def test_a_manifest_is_strict_json(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content["format"] == 1
    assert content["files"]["a"]["size_bytes"] == 7


def test_info_is_plain_data_without_tensors(folder: Path) -> None:
    info = {"loss": math.inf, "epoch": (1, 2), "best": {3: "x"}}
    assert write_seal(folder, {}, info, kind=KIND, replace=True).info == info
    assert read_seal(folder).info == info
    for wrong, message in [
        (torch.ones(1), r"info\.a: .* hold a tensor.* \.item"),
        (object(), "a: a <class 'object'> is not plain"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            write_seal(folder, {}, {"a": wrong}, kind=KIND, replace=True)
    assert read_seal(folder).info == info


def test_sealing_twice_is_rejected(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is already sealed; write to a new folder"):
        write_seal(folder, {}, {}, kind=KIND)
    assert read_seal(folder).info == {"step": 7}


def test_sealing_missing_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12")
    for name, message in [("b", "b is missing"), ("a", "a has 2 bytes, not 3")]:
        with pytest.raises(CheckpointError, match=message):
            write_seal(tmp_path, {name: FileSeal(3, "")}, {}, kind=KIND)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_without_a_manifest_is_not_a_checkpoint(folder: Path) -> None:
    for where in (folder / "none", folder / "a"):
        with pytest.raises(Unsealed, match=r"is not a checkpoint: it has no manifest\.json"):
            read_seal(where)
    (folder / "manifest.json").unlink()
    with pytest.raises(Unsealed, match="its writer never finished"):
        read_seal(folder)


def test_every_truncation_of_the_manifest_is_rejected(folder: Path) -> None:
    manifest = folder / "manifest.json"
    whole = manifest.read_bytes()
    for size in range(len(whole)):
        manifest.write_bytes(whole[:size])
        with pytest.raises(Unsealed, match="truncated or was changed"):
            read_seal(folder)


def test_every_changed_bit_of_the_manifest_is_rejected(folder: Path) -> None:
    manifest = folder / "manifest.json"
    whole = manifest.read_bytes()
    for i in range(len(whole) * 8):
        changed = bytearray(whole)
        changed[i // 8] ^= 1 << i % 8
        manifest.write_bytes(changed)
        with pytest.raises(Unsealed, match="truncated or was changed"):
            read_seal(folder)
    for more in (b" ", b"\n", b"{}"):
        manifest.write_bytes(whole + more)
        with pytest.raises(Unsealed):
            read_seal(folder)


def test_a_newer_format_is_named_and_not_treated_as_a_leftover(folder: Path) -> None:
    craft(folder, format=2)
    with pytest.raises(
        CheckpointError, match=r"has format 2, and this version of callsheet reads up to 1; use a newer callsheet"
    ) as rejection:
        read_seal(folder)
    assert not isinstance(rejection.value, Unsealed)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "", ".", "..", "a/../../x", "a//b", "a/b", "./a", "C:\\x", "a\\b", "x\0"]
)
def test_a_file_name_outside_the_folder_is_rejected(folder: Path, name: str) -> None:
    (folder.parent / "x").write_bytes(b"outside")
    craft(folder, files={name: {"size_bytes": 7, "sha256": hashlib.sha256(b"outside").hexdigest()}})
    with pytest.raises(CheckpointError, match="is not the name of a file inside a checkpoint"):
        read_seal(folder)
    with pytest.raises(CheckpointError, match="inside a checkpoint"):
        storage.read_verified(LocalFolder(folder), name, FileSeal(7, ""))
    with pytest.raises(CheckpointError, match="inside a checkpoint"):
        write_seal(folder, {name: FileSeal(7, "")}, {}, kind=KIND, replace=True)
    with pytest.raises(CheckpointError, match="inside a checkpoint"):
        LocalFolder(folder).write(name, [b""])
    with pytest.raises(CheckpointError, match="inside a checkpoint"):
        LocalFolder(folder).replace(name, b"")


def test_a_link_is_rejected(folder: Path) -> None:
    sealed = read_seal(folder)
    (folder / "a").rename(folder.parent / "outside")
    (folder / "a").symlink_to(folder.parent / "outside")
    with pytest.raises(CheckpointError, match="a is not a regular file"):
        read_seal(folder)
    with pytest.raises(CheckpointError, match="a checkpoint may not contain links"):  # created after the seal was read
        storage.verify(LocalFolder(folder), "a", sealed.files["a"])


def test_a_manifest_that_is_a_link_or_a_pipe_is_rejected_without_waiting(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "outside")
    (folder / "manifest.json").symlink_to(folder.parent / "outside")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_seal(folder)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_seal(folder)


def test_a_missing_or_different_file_is_rejected(folder: Path) -> None:
    sealed = read_seal(folder)
    (folder / "a").write_bytes(b"conTent")
    assert read_seal(folder) == sealed  # the size matches; readers check the digest
    for read in (storage.read_verified, storage.verify):
        with pytest.raises(CheckpointError, match="was changed or damaged after it was sealed"):
            read(LocalFolder(folder), "a", sealed.files["a"])
    (folder / "a").write_bytes(b"content and more")
    with pytest.raises(CheckpointError, match="a has 16 bytes, not 7"):
        read_seal(folder)
    (folder / "a").unlink()
    with pytest.raises(CheckpointError, match="a is missing"):
        read_seal(folder)
    (folder / "a").mkdir()
    with pytest.raises(CheckpointError, match="a is not a regular file"):
        read_seal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []},
        {"files": {"a": 1}},
        {"files": {"a": {}}},
        {"files": {"a": {"size_bytes": "x", "sha256": ""}}},
        {"info": []},
        {"info": {"$tensor": "x"}},
        {"sealed_at": None},
        {"format": True},
        {"format": None},
        {"format": 0},
        {"world_size": 0},
        {"world_size": 1 << 40},
        {"world_size": "2"},
        {"world_size": True},
        {"files": {"a": {"size_bytes": -1, "sha256": ""}}},
    ],
)
def test_a_crafted_manifest_is_rejected(folder: Path, changes: dict[str, Any]) -> None:
    craft(folder, **changes)
    with pytest.raises(CheckpointError):
        read_seal(folder)


def test_a_manifest_too_deep_to_read_is_rejected(folder: Path) -> None:
    body = b'"format": 1, "info": ' + b"[" * 100_000
    (folder / "manifest.json").write_bytes(b'{"sha256": "%s",%s' % (hashlib.sha256(body).hexdigest().encode(), body))
    with pytest.raises(CheckpointError, match="malformed"):
        read_seal(folder)


def test_a_pickle_instead_of_a_manifest_is_not_executed(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(folder / "ran"),))

    (folder / "manifest.json").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(Unsealed):
        read_seal(folder)
    assert not (folder / "ran").exists()


def test_an_existing_file_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*/a: File exists"):
        LocalFolder(folder).write("a", [b"other"])
    assert (folder / "a").read_bytes() == b"content"


def test_a_writer_that_fails_deletes_its_incomplete_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        LocalFolder(tmp_path).write("a", (bytes([1 // n]) for n in (1, 0)))
    assert not list(tmp_path.iterdir())
