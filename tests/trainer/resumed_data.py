"""Iterates random dataloaders without a stop and with one: the results must be equal, or a warning must say that they are not.

`make resume` runs many cases (`python -m trainer.resumed_data RESULT.md [--cases N]`). `test_resumed_data.py` and
`bridges/test_bare.py` run a few.
"""

from __future__ import annotations

import argparse
import collections
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from callsheet import Callback, Context, attach
from callsheet.checkpoint import flatten, unflatten
from callsheet.core.randomness import seed_all
from callsheet.errors import ConfigError
from callsheet.trainer.batches import TrainBatches
from callsheet.trainer.data import SeededDataset

SAMPLES, BATCH_SIZE, EPOCHS = 22, 4, 3
STEPS = -(-SAMPLES // BATCH_SIZE)

# --- data ---


def noisy(index: int) -> Tensor:
    """Return a sample with noise from Python's, torch's and NumPy's global generators."""
    return torch.tensor([index, random.random(), float(torch.rand(())), float(numpy.random.rand())], dtype=torch.float64)


class Items(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return noisy(index)


class ItemsOfEpoch(Items):
    """Items that depend on the epoch, which is set as an attribute: workers do not receive later changes of it."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        return noisy(index) + 100 * self.epoch


class ItemsWithGenerators(Items):
    """Items with noise from generators that are attributes of the dataset."""

    def __init__(self) -> None:
        self.rng, self.arrays, self.tensors = random.Random(1), numpy.random.default_rng(2), torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> Tensor:
        noise = self.rng.random() + self.arrays.random() + float(torch.rand((), generator=self.tensors))
        return torch.tensor([index, noise], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    """Yields this worker's share of the samples in random order."""

    def order(self) -> Iterable[int]:
        worker: Any = get_worker_info()
        part = list(range(worker.id, SAMPLES, worker.num_workers) if worker else range(SAMPLES))
        return random.sample(part, len(part))

    def __iter__(self) -> Iterator[Tensor]:
        for index in self.order():
            yield noisy(index)


class ShuffleBuffer(Stream):
    """Draws the order sample by sample from torch's global generator, which dropout uses too."""

    def order(self) -> Iterable[int]:
        left = sorted(super().order())
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class CountingStream(Stream):
    """Changes the order in each epoch, by a private counter."""

    def __init__(self) -> None:
        self.count = 0

    def order(self) -> Iterable[int]:
        self.count += 1
        part = sorted(super().order())
        return random.Random(self.count).sample(part, len(part))


class StreamOfEpoch(Stream):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> Iterable[int]:
        part = sorted(super().order())
        return random.Random(self.epoch).sample(part, len(part))


class StreamWithGenerator(Stream):
    def __init__(self) -> None:
        self.rng = numpy.random.RandomState(5)

    def order(self) -> Iterable[int]:
        part = sorted(super().order())
        return [part[i] for i in self.rng.permutation(len(part))]


class StatefulStream(Stream):
    """A stream whose position is in its state dict."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        worker: Any = get_worker_info()
        part = range(worker.id, SAMPLES, worker.num_workers) if worker else range(SAMPLES)
        while self.at < len(part):
            self.at += 1
            yield noisy(part[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


# --- orders ---


class Eager(Sampler[int]):
    """Draws the whole order when iteration starts, from the global random state."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


class LazyPython(Eager):
    """Draws index by index from Python's generator, which training does not use."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(SAMPLES))
        while left:
            yield left.pop(random.randrange(len(left)))


class LazyTorch(Eager):
    """Draws index by index from torch's global generator, which dropout uses too."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(SAMPLES))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class WithGenerator(Eager):
    def __init__(self) -> None:
        self.rng = random.Random(4)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(SAMPLES), SAMPLES))


class Counting(Eager):
    """Draws the order from a private epoch counter."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return iter(random.Random(self.count).sample(range(SAMPLES), SAMPLES))


class ShufflesItsList(Eager):
    def __init__(self) -> None:
        self.indices = list(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)


class OfEpoch(Eager):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(SAMPLES), SAMPLES))


class CountingWithState(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class StatefulSampler(Eager):
    """Keeps its position in the epoch in its state dict. At the epoch's end, the position is the end, not 0."""

    def __init__(self) -> None:
        self.epoch = self.at = 0
        self.is_resumed = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if not self.is_resumed:
            self.at = 0
        self.is_resumed = False
        for index in random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)[self.at :]:
            self.at += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.at, self.is_resumed = state["epoch"], state["at"], True


class RandomBatches(Sampler[list[int]]):
    """Yields batches of consecutive indices in random order."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(6)

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[list[int]]:
        for number in torch.randperm(STEPS, generator=self.generator).tolist():
            yield list(range(SAMPLES))[number * BATCH_SIZE : (number + 1) * BATCH_SIZE]


class RandomBatchesOfProcess(RandomBatches):
    """Draws the order of the batches from the global random state."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        for number in random.sample(range(STEPS), STEPS):
            yield list(range(SAMPLES))[number * BATCH_SIZE : (number + 1) * BATCH_SIZE]


ITEMS = {"items": Items, "items of epoch": ItemsOfEpoch, "items with generators": ItemsWithGenerators}
STREAMS = {
    "stream": Stream,
    "shuffle buffer": ShuffleBuffer,
    "counting stream": CountingStream,
    "stream of epoch": StreamOfEpoch,
    "stream with generator": StreamWithGenerator,
    "stateful stream": StatefulStream,
}
SAMPLERS: dict[str, Any] = {
    "eager": Eager,
    "lazy, Python": LazyPython,
    "lazy, torch": LazyTorch,
    "with generator": WithGenerator,
    "counting": Counting,
    "shuffles its list": ShufflesItsList,
    "of epoch": OfEpoch,
    "counting with state": CountingWithState,
    "placed": StatefulSampler,
}
BATCH_SAMPLERS: dict[str, Any] = {"own batches": RandomBatches, "own batches, process": RandomBatchesOfProcess}
ORDERS = ("shuffle", "shuffle, generator", *SAMPLERS, *BATCH_SAMPLERS)


@dataclass(frozen=True)
class Case:
    """A kind of data, and the position at which the run stops: after `place` batches of `epoch`."""

    data: str = "items"
    order: str = "shuffle"
    seeded: bool = False
    kind: str = "plain"
    workers: int = 0
    persistent: bool = False
    prefetch: int | None = None
    context: str | None = None
    batched: bool = True
    epoch: int = 2
    place: int = 2

    def __str__(self) -> str:
        workers = f"{self.workers} {'persistent ' if self.persistent else ''}workers" if self.workers else "no workers"
        more = [f"prefetch {self.prefetch}"] if self.prefetch else []
        more += [self.context] if self.context else []
        more += [] if self.batched else ["single samples"]
        data = f"{self.data}{', seeded' if self.seeded else ''}{'' if self.data in STREAMS else f', {self.order}'}"
        return f"{self.kind}: {data}; {', '.join([workers, *more])}; stopped in epoch {self.epoch} after {self.place}"

    def loader(self) -> Any:
        """Return a new loader, as a new process would create it."""
        options: dict[str, Any] = {"num_workers": self.workers, "persistent_workers": self.persistent}
        if self.workers:
            options |= {"prefetch_factor": self.prefetch, "multiprocessing_context": self.context}
        made = StatefulDataLoader if self.kind == "stateful" else DataLoader
        if self.data in STREAMS:
            return made(STREAMS[self.data](), batch_size=BATCH_SIZE if self.batched else None, **options)
        dataset: Any = ITEMS[self.data]()
        dataset = SeededDataset(dataset, 8) if self.seeded else dataset
        if self.order in BATCH_SAMPLERS:
            return made(dataset, batch_sampler=BATCH_SAMPLERS[self.order](), **options)
        options["batch_size"] = BATCH_SIZE if self.batched else None
        if self.order in SAMPLERS:
            return made(dataset, sampler=SAMPLERS[self.order](), **options)
        generator = torch.Generator().manual_seed(9) if self.order == "shuffle, generator" else None
        return made(dataset, shuffle=True, generator=generator, **options)


def random_case(rng: random.Random, *, contexts: bool = False) -> Case:
    """Return any combination that torch allows."""
    kinds = [*ITEMS, *ITEMS, *STREAMS]
    # Torch cannot send a generator to a spawned worker.
    data = rng.choice([kind for kind in kinds if "generator" not in kind] if contexts else kinds)
    order = rng.choice(ORDERS)
    workers = rng.choice([0, 1, 2, 2])
    is_persistent = workers > 0 and (contexts or rng.random() < 0.6)  # spawned workers start slowly: start them once
    return Case(
        data=data,
        order="" if data in STREAMS else order,
        seeded=data in ITEMS and rng.random() < 0.4,
        kind=rng.choice(["plain", "plain", "stateful"]),
        workers=workers,
        persistent=is_persistent,
        prefetch=rng.choice([None, 1, 3]) if workers else None,
        context=rng.choice(["spawn", "forkserver"]) if contexts and workers else None,
        batched=order in BATCH_SAMPLERS or rng.random() < 0.85,
        epoch=rng.randint(1, EPOCHS),
        place=rng.choice([0, 1, 2, 3, STEPS - 1, STEPS]),
    )


# --- training ---


class Training:
    """A hand-written regression with dropout, which records its batches and losses."""

    def __init__(self, case: Case) -> None:
        self.batches = TrainBatches(seed=7)
        self.case = case
        self.weight = torch.ones((), dtype=torch.float64)
        self.seen: list[tuple[int, list[Any], str]] = []

    def train(self, epoch: int, until: int | None = None) -> None:
        """Train the rest of an epoch, or up to `until` batches of it."""
        taken = self.batches.epoch(epoch)
        while until is None or self.batches.taken < until:
            batch = next(taken, None)
            if batch is None:
                break
            loss = (self.weight * batch * (torch.rand(batch.shape) > 0.3)).square().mean()
            self.weight = self.weight - 1e-3 * loss / (1 + loss)
            self.seen.append((epoch, batch.tolist(), float(loss).hex()))
            self.batches.taken += 1
        if until is None:
            self.batches.end_epoch()


def undisturbed(case: Case) -> list[Any]:
    seed_all(1)
    training = Training(case)
    training.batches.load(case.loader)
    for epoch in range(1, EPOCHS + 1):
        training.train(epoch)
    return training.seen


def resumed(case: Case) -> list[Any]:
    """Train with a stop: afterwards, all objects are new and the random state is another one."""
    seed_all(1)
    first = Training(case)
    first.batches.load(case.loader)
    for epoch in range(1, case.epoch):
        first.train(epoch)
    if case.place:
        first.train(case.epoch, until=case.place)
    state = unflatten(*flatten(first.batches.state_dict()))  # as a checkpoint stores it
    seed_all(random.randrange(100, 1000))
    second = Training(case)
    second.weight, second.seen = first.weight, first.seen
    second.batches.load_state_dict(state)
    second.batches.load(case.loader)
    for epoch in range(case.epoch, EPOCHS + 1):
        second.train(epoch)
    return second.seen


# --- a hand-written loop, with attach ---


class Scale(nn.Module):
    """The regression with dropout of `Training`, as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.weight * batch * (torch.rand(batch.shape) > 0.3)).square().mean()


class Stop(Callback):
    """Saves a checkpoint and stops after the case's batch. For batch 0, it stops at the end of the previous epoch."""

    def __init__(self, case: Case) -> None:
        self.case, self.taken, self.has_stopped = case, 0, False

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.epoch == self.case.epoch:
            self.taken += 1
            if self.taken == self.case.place:
                self.stop(ctx)

    def on_epoch_end(self, ctx: Context) -> None:
        if self.case.place == 0 and ctx.epoch == self.case.epoch - 1:
            self.stop(ctx)

    def stop(self, ctx: Context) -> None:
        self.has_stopped = True
        ctx.control.save("the case")
        ctx.control.stop("the case")


def attached(case: Case, folder: str, callbacks: list[Callback], resume: str | None = None) -> list[Any]:
    model, seen = Scale(), []
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=1e-9), case.loader()
    owners: list[Any] = [getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    with attach(model=model, optimizer=optimizer, callbacks=callbacks, run_name="run", runs_folder=folder, resume=resume) as run:
        for epoch in run.epochs(EPOCHS):
            for owner in owners:
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(epoch)
            for batch in run.steps(loader):
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append((epoch, batch.tolist(), loss.item().hex()))
    return seen


def undisturbed_attached(case: Case) -> list[Any]:
    seed_all(1)
    with tempfile.TemporaryDirectory() as folder:
        return attached(case, folder, [])


def resumed_attached(case: Case) -> list[Any]:
    seed_all(1)
    with tempfile.TemporaryDirectory() as folder:
        first = attached(case, folder, [stop := Stop(case)])
        if not stop.has_stopped:  # the epoch has fewer batches
            return first
        seed_all(random.randrange(100, 1000))
        return first + attached(case, folder, [], resume="auto")


class Warnings(logging.Handler):
    """Collects callsheet's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "training ended at" not in record.getMessage():  # the cases stop their runs
            self.messages.append(record.getMessage())


@dataclass
class Result:
    """The result of a case: `exact`, `warned`, `rejected`, or `SILENT`: a difference without a warning, which is a bug."""

    outcome: str
    message: str = ""


TRAINER = (undisturbed, resumed)
ATTACH = (undisturbed_attached, resumed_attached)


def result_of(case: Case, loops: tuple[Callable[[Case], list[Any]], Callable[[Case], list[Any]]] = TRAINER) -> Result:
    """Return the result of a case: `loops` are the functions that train without a stop and with one."""
    handler, logger = Warnings(), logging.getLogger("callsheet")
    logger.addHandler(handler)
    try:
        wanted = loops[0](case)
        found = loops[1](case)
    except ConfigError as error:
        return Result("rejected", str(error))
    finally:
        logger.removeHandler(handler)
    if found == wanted and not handler.messages:
        return Result("exact")
    if handler.messages:
        return Result("warned, exact" if found == wanted else "warned", " | ".join(handler.messages))
    return Result("SILENT")


HEAD = """# Resumed in any epoch, with any dataloader

`make resume` measured this table with {cases} random dataloaders (seed {seed}). Each is used for {epochs} epochs without a stop, and again with a stop after which
everything is rebuilt from the checkpoint. The samples, their augmentation, and the losses of a training with dropout are compared bit
for bit. *Warned*: a warning names what cannot be restored. *Silent*: a difference without a warning.

"""


def table(results: list[tuple[Case, Result]]) -> str:
    """Return a table of how often each result occurred for each kind of dataloader, and the list of those with warnings."""
    outcomes = ("exact", "warned, exact", "warned", "rejected", "SILENT")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case, result in results:
        workers = "persistent workers" if case.persistent else "workers" if case.workers else "no workers"
        counts[f"{case.kind}, {workers}, {'iterable' if case.data in STREAMS else 'indices'}"][result.outcome] += 1
    lines = ["| dataloader | " + " | ".join(outcomes) + " |", "| --- |" + " --- |" * len(outcomes)]
    for name, count in sorted(counts.items()):
        lines.append(f"| {name} | " + " | ".join(str(count[outcome]) for outcome in outcomes) + " |")
    warned = collections.Counter(
        f"{case.kind}, {case.data if case.data in STREAMS else case.order}"
        for case, result in results
        if "warned" in result.outcome
    )
    lines += ["", "Warnings: " + "; ".join(f"{name} ({count})" for name, count in sorted(warned.items())) + "."]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("callsheet").propagate = False
    text, began, silent = HEAD.format(cases=given.cases, seed=given.seed, epochs=EPOCHS), time.monotonic(), 0
    for title, ways in (("The Trainer's batches", TRAINER), ("A loop of one's own with `attach`", ATTACH)):
        rng, results = random.Random(given.seed), []
        for number in range(given.cases):
            case = random_case(rng, contexts=number % 40 == 39)
            results.append((case, result_of(case, ways)))
            if results[-1][1].outcome == "SILENT":
                silent += 1
                print(f"SILENT with {title}: {case!r}", flush=True)
        text += f"**{title}**\n\n{table(results)}\n"
        print(f"{title}: {len(results)} cases, {silent} silent so far, after {time.monotonic() - began:.0f} s", flush=True)
    given.result.write_text(text.rstrip("\n") + "\n")
    print(f"the tables are in {given.result}")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
