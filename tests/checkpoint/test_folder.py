from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import callsheet
from callsheet.checkpoint import (
    Seal,
    Unsealed,
    delete_checkpoint,
    find_checkpoints,
    newest,
    point_latest,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from callsheet.checkpoint.layout import KIND
from callsheet.checkpoint.local import LocalFolder
from callsheet.checkpoint.seal import write_seal
from callsheet.checkpoint.storage import measure
from callsheet.errors import CheckpointError

BAD: list[tuple[Any, dict[str, Any]]] = [
    ({"a": object()}, {}),
    ({"a": torch.ones(1).to_sparse()}, {}),
    ({"a": 2}, {"bad": object()}),
]
STATE = {"model": {"weight": torch.arange(4.0), "tied": [1, 2]}, "rng": random.Random(0).getstate(), "best": float("inf")}


FILES = {"checkpoint.txt", "state.json", "local-00000.json", "index.json", "shard-00000.safetensors", "manifest.json"}


def write(path: Path, state: Any, info: dict[str, Any], *, overwrite: bool = False) -> Seal:
    return write_checkpoint(path, state, None, info, overwrite=overwrite)


def read(path: Path) -> tuple[Any, dict[str, Any]]:
    loaded = read_checkpoint(path)
    assert loaded.local is None
    return loaded.shared, loaded.info


def seal_again(path: Path) -> None:
    """Write a valid manifest for the current files, which a test has modified."""
    (path / "manifest.json").unlink()
    folder = LocalFolder(path)
    write_seal(folder, {name: measure(folder, name) for name in FILES - {"checkpoint.txt", "manifest.json"}}, {}, kind=KIND)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


WRITE_AND_READ = """
from callsheet.checkpoint import read_checkpoint, write_checkpoint

def write(path, state, info, overwrite=False):
    write_checkpoint(path, state, None, info, overwrite=overwrite)

def read(path):
    loaded = read_checkpoint(path)
    return loaded.shared, loaded.info
"""


def run(script: str, *arguments: object) -> None:
    """Run a script in its own process, and fail with its output if it fails."""
    env = {**os.environ, "PYTHONPATH": str(Path(callsheet.__file__).parents[1])}
    command = [sys.executable, "-c", WRITE_AND_READ + script, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout


def test_a_checkpoint_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "step-3"
    seal = write_checkpoint(path, STATE, {"seed": torch.tensor(5), "rank": 0}, {"step": 3, "kind": "regular"})
    loaded = read_checkpoint(path)
    assert loaded.info == seal.info == {"step": 3, "kind": "regular"}
    assert loaded.local == {"seed": torch.tensor(5), "rank": 0}
    assert loaded.world_size == 1
    assert torch.equal(loaded.shared["model"].pop("weight"), STATE["model"]["weight"])  # type: ignore[index]
    assert loaded.shared == {"model": {"tied": [1, 2]}, "rng": STATE["rng"], "best": float("inf")}
    assert names(path) == FILES
    assert seal.size_bytes == sum((path / name).stat().st_size for name in FILES - {"checkpoint.txt", "manifest.json"})


def test_a_tensor_of_each_tree_may_have_the_same_name(tmp_path: Path) -> None:
    shared = {"a": torch.ones(1), "local-00000": {"a": torch.ones(1) * 3}}
    write_checkpoint(tmp_path / "ck", shared, {"a": torch.ones(1) * 2}, {})
    loaded = read_checkpoint(tmp_path / "ck")
    assert [loaded.shared["a"].item(), loaded.local["a"].item(), loaded.shared["local-00000"]["a"].item()] == [1, 2, 3]


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    weight = torch.ones(100)
    write(tmp_path / "ck", {"a": weight, "b": [weight.detach()]}, {})
    state, _ = read(tmp_path / "ck")
    assert state["a"] is state["b"][0]
    assert (tmp_path / "ck" / "shard-00000.safetensors").stat().st_size < 600


def test_targets_are_filled_in_place(tmp_path: Path) -> None:
    write(tmp_path / "ck", {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "more": torch.ones(2)}, {})
    requested: dict[str, tuple[torch.Size, torch.dtype]] = {}
    given = {"w": torch.nn.Parameter(torch.zeros(3, 2).double().T), "n": torch.tensor(0)}

    def target(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        requested[name] = size, dtype
        return given.get(name)

    state = read_checkpoint(tmp_path / "ck", target=target).shared
    assert requested == {
        "w": (torch.Size([2, 3]), torch.float32),
        "n": (torch.Size([]), torch.int64),
        "more": (torch.Size([2]), torch.float32),
    }
    assert state["w"] is given["w"]
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]  # in a tensor of another dtype with other strides
    assert (given["n"].item(), state["more"].tolist()) == (7, [1, 1])


def test_a_target_of_another_size_is_named_before_any_is_filled(tmp_path: Path) -> None:
    write(tmp_path / "ck", {"model": {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}}, {})
    for wrong, why in ((torch.zeros(2), r"of size \[2\]"), (torch.zeros(3, device="meta"), "on the meta device")):
        given = {"model.a": torch.zeros(2), "model.b": wrong}
        message = rf"model\.b: the checkpoint holds it in size \[3\], and the tensor to read it into is {why}"
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(tmp_path / "ck", target=lambda name, size, dtype, given=given: given.get(name))  # type: ignore[misc]
        assert given["model.a"].tolist() == [0, 0]


def test_a_training_step_after_a_resume_gives_the_same_weights(tmp_path: Path) -> None:
    def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = training()
    step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    write_checkpoint(tmp_path / "ck", state, {"rng": torch.get_rng_state()}, {})
    step(model, optimizer)

    other, other_optimizer = training()
    loaded = read_checkpoint(tmp_path / "ck")
    other.load_state_dict(loaded.shared["model"])
    other_optimizer.load_state_dict(loaded.shared["optimizer"])
    torch.set_rng_state(loaded.local["rng"])
    step(other, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_the_files_are_readable_by_other_users(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write(tmp_path / "ck", STATE, {})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ck").iterdir()} == {0o644}


def test_every_changed_or_missing_byte_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    write(path, {"w": torch.ones(2), "b": [1, "x"]}, {"step": 1})
    for name in sorted(FILES - {"checkpoint.txt"}):
        whole = (path / name).read_bytes()
        for i in range(len(whole)):
            for damaged in (whole[:i], whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :]):
                (path / name).write_bytes(damaged)
                with pytest.raises(CheckpointError, match="use another"):
                    read(path)
        (path / name).write_bytes(whole)
    read(path)


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("name", ["state.json", "local-00000.json", "index.json", "shard-00000.safetensors"])
def test_a_pickle_with_a_valid_manifest_is_rejected_and_not_executed(tmp_path: Path, name: str) -> None:
    path, mark = tmp_path / "ck", tmp_path / "ran"
    write(path, STATE, {})
    for content in (pickle.dumps(Bomb(mark)), b"[" * 100_000, b'{"a": NaN}', b'{"$tensor": "gone"}', b"\xff", b""):
        (path / name).write_bytes(content)
        seal_again(path)
        with pytest.raises(CheckpointError, match="use another checkpoint"):
            read(path)
    torch.save(Bomb(mark), path / name)
    seal_again(path)
    with pytest.raises(CheckpointError):
        read(path)
    assert not mark.exists()


def test_a_checkpoint_of_another_kind_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "shard").touch()
    folder = LocalFolder(tmp_path)
    write_seal(folder, {"shard": measure(folder, "shard")}, {}, kind="callsheet.checkpoint.dense")
    with pytest.raises(CheckpointError, match=r"is a 'callsheet\.checkpoint\.dense', not a"):
        read(tmp_path)


def test_a_sealed_checkpoint_is_overwritten_only_on_request(tmp_path: Path) -> None:
    write(tmp_path / "ck", {"a": 1}, {})
    with pytest.raises(CheckpointError, match="is already a sealed checkpoint; choose a new folder or pass overwrite=True"):
        write(tmp_path / "ck", {"a": 2}, {})
    for value in (2, 3, 4):
        write(tmp_path / "ck", {"a": value}, {"step": value}, overwrite=True)
        assert read(tmp_path / "ck") == ({"a": value}, {"step": value})
        assert len(names(tmp_path / "ck")) == 5


@pytest.mark.test_all
def test_an_overwrite_that_fails_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "ck", {"a": 1}, {"step": 1})
    before = names(tmp_path / "ck")
    for state, info in BAD:
        with pytest.raises(CheckpointError):
            write(tmp_path / "ck", state, info, overwrite=True)
        assert read(tmp_path / "ck") == ({"a": 1}, {"step": 1})
        assert names(tmp_path / "ck") == before


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    for state, info in BAD:
        with pytest.raises(CheckpointError):
            write(tmp_path / "ck", state, info)
        assert not (tmp_path / "ck").exists()


def test_files_of_a_killed_writer_are_cleared(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    write(path, STATE, {})
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:50])
    (path / "rank-7").mkdir()
    (path / "rank-7" / "shard").touch()
    write(path, {"a": 1}, {})
    assert read(path) == ({"a": 1}, {})
    assert len(names(path)) == 5


def test_a_folder_of_other_files_is_neither_cleared_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"holds files that do not belong to a checkpoint; choose a new folder"):
        write(tmp_path, STATE, {}, overwrite=True)
    with pytest.raises(CheckpointError, match="is not the folder of a checkpoint, so it is not deleted"):
        delete_checkpoint(tmp_path)
    assert names(tmp_path) == {"thesis.tex"}


def test_a_checkpoint_of_a_newer_version_is_not_treated_as_a_leftover(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    write(path, STATE, {})
    body = json.dumps({"format": 2})[1:].encode()
    (path / "manifest.json").write_bytes(b'{"sha256": "%s",%s' % (hashlib.sha256(body).hexdigest().encode(), body))
    before = names(path)
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="use a newer callsheet"):
            write(path, STATE, {}, overwrite=overwrite)
    assert names(path) == before


def test_checkpoints_are_found_newest_first_with_reasons_for_the_rest(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert find_checkpoints(root) == ([], [], [])
    assert newest(root) is None
    infos: dict[str, dict[str, Any]] = {
        "z": {"step": 9},
        "a": {"step": 10},
        "again": {"step": 10},
        "none": {},
        "odd": {"step": "x"},
    }
    for name, info in infos.items():
        write(root / name, {}, info)
    write(root / "killed", {}, {"step": 99})
    (root / "killed" / "manifest.json").unlink()
    write(root / "short", {}, {"step": 98})
    (root / "short" / "state.json").unlink()
    (root / "empty").mkdir()
    (root / "foreign").mkdir()
    (root / "foreign" / "thesis.tex").touch()
    (root / "best").symlink_to(root / "z")
    (root / "metrics.jsonl").touch()
    (root / "latest").write_text("killed\n")  # the `latest` hint is not trusted

    found = find_checkpoints(root)
    assert [checkpoint.name for checkpoint in found.checkpoints] == ["odd", "none", "again", "a", "z"]
    assert [checkpoint.step for checkpoint in found.checkpoints] == [-1, -1, 10, 10, 9]
    reasons = {Path(path).name: reason for path, reason in found.skipped}
    assert reasons.keys() == {"short", "foreign"}
    assert "its writer never finished" in reasons["foreign"]
    assert "state.json is missing" in reasons["short"]
    assert {Path(path).name for path in found.abandoned} == {"killed", "empty"}
    first = newest(root)
    assert first is not None
    assert first.path == str(root / "odd")


def test_a_root_that_is_not_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").touch()
    with pytest.raises(CheckpointError, match=r"cannot read .*root"):
        find_checkpoints(tmp_path / "root")


def test_delete_removes_complete_and_incomplete_checkpoints(tmp_path: Path) -> None:
    write(tmp_path / "whole", STATE, {})
    write(tmp_path / "left", STATE, {})
    (tmp_path / "left" / "manifest.json").unlink()
    delete_checkpoint(tmp_path / "whole")
    delete_checkpoint(tmp_path / "left")
    assert names(tmp_path) == set()


def test_delete_rejects_a_folder_that_is_not_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "ck", STATE, {})
    (tmp_path / "link").symlink_to(tmp_path / "ck")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("link", "empty", "file", "none"):
        with pytest.raises(CheckpointError, match="is not the folder of a checkpoint"):
            delete_checkpoint(tmp_path / name)
    assert names(tmp_path) == {"ck", "link", "empty", "file"}
    read_manifest(tmp_path / "ck")


def test_the_latest_hint_names_a_sealed_checkpoint(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, STATE, {})
        point_latest(tmp_path / name)
        assert (tmp_path / "latest").read_text() == f"{name}\n"
    delete_checkpoint(tmp_path / "a")
    with pytest.raises(Unsealed):
        point_latest(tmp_path / "a")
    assert (tmp_path / "latest").read_text() == "b\n"
    assert names(tmp_path) == {"b", "latest"}


def test_a_path_that_cannot_be_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "ck"):
        with pytest.raises(CheckpointError, match=f"cannot write {path}: .*; choose") as rejection:
            write(path, STATE, {})
        assert isinstance(rejection.value.__cause__, OSError)


NO_PERMISSION = """
import errno, os, sys
from pathlib import Path
from callsheet.errors import CheckpointError

root = Path(sys.argv[1])
root.chmod(0o500)
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    write(root / "ck", {"a": 1}, {})
except CheckpointError as error:
    assert error.__cause__.errno == errno.EACCES, error.__cause__
    assert str(error) == f"cannot write {root / 'ck'}: Permission denied; check the permissions", error
else:
    raise AssertionError("written")
"""


@pytest.mark.test_all
def test_nothing_is_written_to_a_folder_without_write_permission(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    run(NO_PERMISSION, tmp_path / "root")
    assert not list((tmp_path / "root").iterdir())


LIMITED_FILES = """
import errno, resource, sys
from pathlib import Path
import torch
from callsheet.errors import CheckpointError

root = Path(sys.argv[1])
no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
write(root / "old", {"old": 1}, {"step": 1})

def check_rejected(name, limit, state, info):
    for path, overwrite in ((root / "new", False), (root / "old", True)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, no_limit[1]))
        try:
            write(path, state, info, overwrite=overwrite)
        except CheckpointError as error:
            assert error.__cause__.errno == errno.EFBIG, error.__cause__
            assert str(error).startswith(f"cannot write {path}/{name}"), error
        else:
            raise AssertionError("written")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
        assert not (root / "new").exists()
        assert read(root / "old") == ({"old": 1}, {"step": 1})
        assert len(list((root / "old").iterdir())) == 5

check_rejected("state", 2000, {"x": "x" * 100_000}, {})
check_rejected("shard-00000", 2000, {"x": torch.ones(100_000)}, {})
check_rejected("manifest.json", 2500, {}, {"x": "x" * 100_000})
"""


@pytest.mark.test_all
def test_a_truncated_write_leaves_nothing_and_the_old_checkpoint_intact(tmp_path: Path) -> None:
    run(LIMITED_FILES, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "callsheet-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs more rights than these tests have")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_an_error_and_keeps_the_old_checkpoint(small_disk: Path) -> None:
    write(small_disk / "old", {"w": torch.ones(1000)}, {"step": 1})
    for path in (small_disk / "new", small_disk / "old"):
        with pytest.raises(CheckpointError, match=f"cannot write {path}.*: No space left on device; free space") as rejection:
            write(path, {"w": torch.ones(100_000)}, {}, overwrite=True)
        assert isinstance(rejection.value.__cause__, OSError)
        assert rejection.value.__cause__.errno == errno.ENOSPC
    assert names(small_disk) == {"old"}
    assert read(small_disk / "old")[1] == {"step": 1}
    write(small_disk / "new", {"w": torch.ones(20_000)}, {})  # the incomplete write has been deleted


KILLED_BEFORE_EVERY_CALL = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from callsheet.checkpoint import Unsealed, delete_checkpoint, find_checkpoints, point_latest

root = Path(sys.argv[1])
path = root / "ck"
CALLS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.listdir", "os.scandir"}

def publish(step):
    write(path, {"step": step, "w": torch.full((8,), step)}, {"step": step}, overwrite=True)
    point_latest(path)

def killed_before_call(nth, act):
    pid = os.fork()
    if pid == 0:
        left = nth
        def hook(event, arguments):
            nonlocal left
            if event in CALLS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        try:
            act()
        except BaseException:
            os._exit(3)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0

def stored_step():
    try:
        state, info = read(path)
    except Unsealed:
        assert not find_checkpoints(root).checkpoints
        return None
    assert state["w"].tolist() == [state["step"]] * 8 and info["step"] == state["step"]
    return state["step"]

def all_kills(before, act, allowed):
    seen, nth = set(), 1
    while True:
        shutil.rmtree(path, ignore_errors=True)
        before()
        killed = killed_before_call(nth, act)
        seen.add(stored_step())
        if not killed:
            break
        publish(9)  # whatever was left, the next writer gets through
        assert stored_step() == 9 and len(list(path.iterdir())) == 6
        nth += 1
    assert seen == allowed and nth > 8, (seen, nth)

all_kills(lambda: None, lambda: publish(1), {None, 1})
all_kills(lambda: publish(1), lambda: publish(2), {1, 2})  # never a moment without one
all_kills(lambda: publish(1), lambda: delete_checkpoint(path), {None, 1})
"""


@pytest.mark.test_all
def test_a_kill_before_any_call_leaves_a_complete_checkpoint_or_none(tmp_path: Path) -> None:
    run(KILLED_BEFORE_EVERY_CALL, tmp_path)


KILLED_AT_RANDOM = """
import itertools, os, random, select, signal, sys
from pathlib import Path
import torch
from callsheet.checkpoint import find_checkpoints

root = Path(sys.argv[1])
state = {"w": torch.ones(1 << 18), "more": list(range(1000))}
torch.set_num_threads(1)
chance = random.Random(0)
sealed = 0
for trial in range(10):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for step in itertools.count():
                write(root / f"{trial}" / f"step-{step % 5}", state | {"step": step}, {"step": step}, overwrite=True)
        finally:
            os.write(write_end, b"failed")
            os._exit(3)
    os.close(write_end)
    failed, _, _ = select.select([read_end], [], [], chance.uniform(0, 0.1))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL and not failed
    os.close(read_end)
    found = find_checkpoints(root / f"{trial}")
    for checkpoint in found.checkpoints:
        back, info = read(checkpoint.path)
        assert torch.equal(back["w"], state["w"]) and back["step"] == info["step"] == checkpoint.step
    assert all("is not a checkpoint" in reason for _, reason in found.skipped), found.skipped
    assert len(found.skipped) + len(found.abandoned) <= 1
    sealed += len(found.checkpoints)
assert sealed
"""


@pytest.mark.test_all
def test_a_kill_at_any_time_leaves_complete_checkpoints_or_none(tmp_path: Path) -> None:
    run(KILLED_AT_RANDOM, tmp_path)
