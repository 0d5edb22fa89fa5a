"""A checkpoint that many ranks write can be read by any number of ranks."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from callsheet.checkpoint import AsyncWriter, RankLost, all_finite, read_checkpoint, write_checkpoint
from callsheet.testing.ranks import RankProcesses, run_ranks

from .many_ranks import error_of, gloo_group, model_and_optimizer, state_of, step, whole


def targets(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[str, torch.Size, torch.dtype], Tensor | None]:
    """Return a function that gives the target of each tensor: the model's tensors, and new ones for the optimizer's state."""
    own, parameters = model.state_dict(), list(model.parameters())

    def target(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        part, _, rest = name.partition(".")
        if part == "model":
            return own[rest]  # type: ignore[no-any-return]
        words = rest.split(".")
        like = parameters[int(words[1])] if words[0] == "state" else None
        return torch.zeros_like(like, dtype=dtype) if like is not None and like.shape == size else None

    return target


def saved(path: str) -> Any:
    """Train two steps on these ranks, save a checkpoint, and return the whole state."""
    group = gloo_group()
    model, optimizer = model_and_optimizer(0, sharded=group is not None)
    step(model, optimizer)
    step(model, optimizer)
    state, rank = state_of(model, optimizer), group.rank() if group is not None else 0
    seal = write_checkpoint(path, state, {"rank": rank, "rng": torch.full((2,), rank)}, {"step": 2}, group=group)
    return whole(state), seal


def resumed(path: str, copy_to: str) -> Any:
    """Load a checkpoint of other ranks, into shards if there are several ranks, save it again, and return the whole state."""
    group = gloo_group()
    model, optimizer = model_and_optimizer(1, sharded=group is not None)
    loaded = read_checkpoint(path, group=group, target=targets(model, optimizer))
    assert all(loaded.shared["model"][name].data_ptr() == tensor.data_ptr() for name, tensor in own_parts(model).items())
    model.load_state_dict(loaded.shared["model"])
    optimizer.load_state_dict(loaded.shared["optimizer"])
    assert all(isinstance(state["exp_avg"], DTensor) == (group is not None) for state in optimizer.state.values())
    write_checkpoint(copy_to, state_of(model, optimizer), {}, {}, group=group)
    return whole(state_of(model, optimizer)), whole(loaded.local), loaded.world_size


def own_parts(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not isinstance(tensor, DTensor)}


@pytest.mark.test_all
def test_a_checkpoint_of_four_ranks_is_read_by_two_then_one_then_four(tmp_path: Path) -> None:
    first, seal = run_ranks(saved, 4, str(tmp_path / "4"))[0]
    assert seal.world_size == 4
    assert len([name for name in seal.files if name.startswith("shard")]) == 4
    for size, source, copy in ((2, "4", "2"), (1, "2", "1"), (4, "1", "again")):
        ends = run_ranks(resumed, size, str(tmp_path / source), str(tmp_path / copy))
        assert all(state == first for state, _, _ in ends), size
        if size == 2:
            assert [local for _, local, _ in ends] == [{"rank": r, "rng": ("torch.int64", [r, r])} for r in (0, 1)]
            assert ends[0][2] == 4
    assert whole(read_checkpoint(tmp_path / "again").shared) == first


def save_layouts(path: str) -> Any:
    """Save tensors that are sharded along two dimensions, replicated, or held by this rank only."""
    group = gloo_group()
    assert group is not None
    mesh = init_device_mesh("cpu", (2, 2))
    grid = torch.arange(35.0).reshape(7, 5)
    tied = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0), Shard(0)])  # rank 3 has no part of it, and cannot detect the tie
    shared: dict[str, Any] = {
        "grid": distribute_tensor(grid, mesh, [Shard(0), Shard(1)]),
        "rows": distribute_tensor(grid + 1, mesh, [Replicate(), Shard(0)]),
        "everywhere": [torch.full((50,), i) for i in range(8)],
        "empty": distribute_tensor(torch.empty(0, 2), mesh, [Replicate(), Shard(0)]),
        "number": torch.tensor(3),
        "tied": [tied.detach(), tied.detach()],
    }
    torch.manual_seed(0)
    mesh_of = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    linear = parallelize_module(nn.Linear(3, 7), mesh_of["tensor"], ColwiseParallel())
    fully_shard(linear, mesh=mesh_of["data"])
    shared["linear"] = weights = linear.state_dict()  # tensor-parallel, then sharded again
    local = {"everywhere": torch.tensor(group.rank())}
    write_checkpoint(path, shared, local, {}, group=group)
    given = {
        "grid": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1), Shard(0)]),
        "rows": distribute_tensor(torch.zeros(7, 5).double(), mesh, [Shard(1), Replicate()]),
    }
    loaded = read_checkpoint(path, group=group, target=lambda name, size, dtype: given.get(name))
    assert torch.equal(given["grid"].full_tensor(), grid)
    assert torch.equal(given["rows"].full_tensor(), (grid + 1).double())
    assert loaded.shared["everywhere"][5].tolist() == [5] * 50
    assert loaded.local == local
    assert torch.equal(loaded.shared["linear"]["weight"], weights["weight"].full_tensor())


def test_every_layout_is_resharded(tmp_path: Path) -> None:
    run_ranks(save_layouts, 4, str(tmp_path / "ck"))
    state = read_checkpoint(tmp_path / "ck").shared
    assert torch.equal(state["grid"], torch.arange(35.0).reshape(7, 5))
    assert state["empty"].shape == (0, 2)
    torch.manual_seed(0)
    assert whole(state["linear"]) == whole(dict(nn.Linear(3, 7).state_dict()))
    index = json.loads((tmp_path / "ck" / "index.json").read_text())
    assert len(index["state.grid"]["chunks"]) == 4
    assert [name for name in index if "tied" in name] == ["state.tied.0"]
    assert state["tied"][0] is state["tied"][1]
    files = [chunk["file"] for name, entry in index.items() if name.startswith("state.every") for chunk in entry["chunks"]]
    assert len(files) == 8  # each shard is written once
    assert len(set(files)) == 4  # all ranks write shards


def failing_writes(root: str) -> Any:
    group = gloo_group()
    assert group is not None
    rank, old, new = group.rank(), Path(root) / "old", Path(root) / "new"
    write_checkpoint(old, {"w": torch.ones(2)}, {"rank": rank}, {"step": 1}, group=group)
    before = sorted(os.listdir(old))

    def write(shared: Any, local: Any = None, info: Any = None) -> list[str]:
        recorded = []
        for path in (old, new):
            recorded.append(error_of(lambda: write_checkpoint(path, shared, local, info or {}, group=group, overwrite=True)))  # noqa: B023
            distributed.barrier(group)
            assert sorted(os.listdir(old)) == before
            assert not new.exists()
            assert read_checkpoint(old, group=group).local == {"rank": rank}
        assert len(set(recorded)) == 1 or str(new) in recorded[1]
        return recorded

    recorded = {
        "no plain data": write({"a": object()} if rank == 1 else {"a": 1}),
        "no plain data on any": write({"a": object()}),
        "no plain data of its own": write({}, {"b": object()} if rank == 1 else {}),
        "only there": write({"w": torch.ones(2)} if rank == 1 else {}),
        "another size": write({"w": torch.ones(2 + rank)}),
        "another dtype": write({"w": torch.ones(2, dtype=torch.int64 if rank else torch.float32)}),
        "info": write({}, {}, {"bad": object()}),
        "another path": [error_of(lambda: write_checkpoint(f"{root}/of-rank-{rank}", {}, {}, {}, group=group))],
    }
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, no_limit[1]))  # to the other ranks, its disk appears full
    recorded["disk"] = write({}, {"w": torch.ones(10_000)})
    return recorded


def test_a_failed_write_on_one_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(failing_writes, 2, str(tmp_path))
    assert first == second
    for name, message in {
        "no plain data": r"rank 1: a: a <class 'object'> is not plain data",
        "no plain data on any": r"ranks 0, 1: a: a <class 'object'> is not plain data",
        "no plain data of its own": r"rank 1: b: a <class 'object'> is not plain data",
        "only there": r"rank 0: state.w: rank 1 shares it, and rank 0 does not; put a rank's own state into `local`",
        "another size": r"state.w: it is torch.float32 of \[2\] on rank 0 and torch.float32 of \[3\] on rank 1",
        "another dtype": r"state.w: it is torch.float32 of \[2\] on rank 0 and torch.int64 of \[2\] on rank 1",
        "info": r"bad: a <class 'object'> is not plain data",
        "another path": r"rank 1: cannot write .*No such file or directory",
        "disk": r"rank 1: cannot write .*shard-00001.*File too large; raise the limit",
    }.items():
        for recorded in first[name]:
            assert re.search(message, recorded), (name, recorded)


def failing_reads(path: str) -> Any:
    group = gloo_group()
    assert group is not None
    rank = group.rank()
    weights = torch.arange(40_000.0)
    write_checkpoint(path, {"a": weights, "b": weights + 1}, {"rank": rank}, {"loss": float("nan")}, group=group)
    given = torch.zeros(40_000 + 2 * rank)
    recorded = [error_of(lambda: read_checkpoint(path, group=group, target=lambda name, *_: given if name == "b" else None))]
    assert given.sum() == 0  # also on ranks where it would have fitted
    recorded.append(error_of(lambda: read_checkpoint(path if rank == 0 else f"{path}-not-there", group=group)))
    given = torch.zeros(40_000)
    for name in ("shard-00000.safetensors", "shard-00001.safetensors", "state.json", "local-00001.json", "index.json"):
        with open(Path(path) / name, "r+b") as file:
            distributed.barrier(group)
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            distributed.barrier(group)
            if rank == 0:
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
                file.flush()
            distributed.barrier(group)
            recorded.append(error_of(lambda: read_checkpoint(path, group=group, target=lambda name, *_: given)))
            assert given.sum() == 0
            if rank == 0:
                file.seek(-1, os.SEEK_END)
                file.write(last)
    distributed.barrier(group)
    assert read_checkpoint(path, group=group).local == {"rank": rank}
    return recorded


def test_all_ranks_reject_a_damaged_checkpoint_before_any_tensor_is_filled(tmp_path: Path) -> None:
    first, second = run_ranks(failing_reads, 2, str(tmp_path / "ck"))
    assert first == second
    size, elsewhere, *damaged = first
    assert re.search(r"rank 1: state.b: the checkpoint holds it in size \[40000\], and .* of size \[40002\]", size)
    assert "rank 1" in elsewhere
    assert "is not a checkpoint" in elsewhere
    assert all("was changed or damaged after it was sealed" in recorded for recorded in damaged)


def finite() -> list[bool]:
    group = gloo_group()
    mesh = init_device_mesh("cpu", (2,))
    bad = torch.ones(4)
    bad[3] = float("nan")  # in rank 1's shard
    shards = [distribute_tensor(values, mesh, [Shard(0)]) for values in (torch.ones(4), torch.ones(1), bad)]
    return [all_finite([shard], group) for shard in shards] + [all_finite([shards[2]])]


def test_whether_shards_are_finite_is_the_same_on_all_ranks() -> None:
    assert run_ranks(finite, 2) == [[True, True, False, True], [True, True, False, False]]


def in_the_background(root: str) -> Any:
    group = gloo_group()
    assert group is not None
    model, optimizer = model_and_optimizer(0, sharded=True)
    step(model, optimizer)
    writer = AsyncWriter(group)
    wholes = []
    for number in range(3):
        state, counter = state_of(model, optimizer), torch.tensor(number)
        wholes.append(whole(state))
        writer.begin(f"{root}/{number}", state, {"rank": group.rank(), "number": counter}, {"step": number})
        counter.fill_(-1)
        step(model, optimizer)
    writer.begin(f"{root}/bad", {"a": object()} if group.rank() == 1 else {}, {}, {})
    recorded = error_of(writer.result)
    assert writer.is_done
    writer.begin(f"{root}/bad", {"a": object()} if group.rank() == 1 else {}, {}, {})
    assert error_of(writer.close) == recorded
    writer.close()
    loaded = read_checkpoint(f"{root}/2", group=group)
    assert (loaded.local, loaded.info) == ({"rank": group.rank(), "number": torch.tensor(2)}, {"step": 2})
    return wholes, recorded


def test_many_ranks_write_in_the_background(tmp_path: Path) -> None:
    (wholes, recorded), (others, recorded_by_others) = run_ranks(in_the_background, 2, str(tmp_path))
    assert wholes == others
    assert [whole(read_checkpoint(tmp_path / str(number)).shared) for number in range(3)] == wholes
    assert (
        recorded == recorded_by_others == "rank 1: a: a <class 'object'> is not plain data" + recorded.partition("plain data")[2]
    )
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


def killed_while_writing(root: str) -> Any:
    group = gloo_group(seconds=3)
    assert group is not None
    write_checkpoint(f"{root}/ck", {"step": 1}, {}, {}, group=group)
    writer = AsyncWriter(group)
    if group.rank() == 1:

        def die(event: str, arguments: Any) -> None:
            if event == "open" and "shard-00001" in str(arguments[0]):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
    began = time.monotonic()
    writer.begin(f"{root}/ck", {"step": 2}, {"w": torch.ones(2)}, {}, overwrite=True)
    try:
        writer.result(60)
    except RankLost as error:
        return str(error), time.monotonic() - began
    raise AssertionError("written")


def test_a_rank_that_is_killed_while_it_writes_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    with RankProcesses(killed_while_writing, 3, str(tmp_path)) as ranks:
        ends = ranks.wait(60)
    assert [end.exitcode for end in ends] == [0, -signal.SIGKILL, 0], ends
    for end in (ends[0], ends[2]):
        message, seconds = end.value
        assert f"rank {end.rank} lost the other ranks of the checkpoint; has one of them died?" in message
        assert seconds < 10
    assert read_checkpoint(tmp_path / "ck").shared == {"step": 1}
    # The folder is not cleared, because a lost rank may still write to it.
    assert "local-00000.2.json" in os.listdir(tmp_path / "ck")
    write_checkpoint(tmp_path / "ck", {"step": 3}, {}, {}, overwrite=True)
    assert len(os.listdir(tmp_path / "ck")) == 5  # leftover files are cleared
