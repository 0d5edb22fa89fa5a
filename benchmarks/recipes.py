"""Fine-tuning with a plain PyTorch loop, with a recipe and with the Trainer of transformers, on the same model, examples and
optimizer in one run; packed compared with padded rows; and each shipped recipe compared with a plain loop over its model, its
first batches and its loss.

In the first two, the model is a Llama of 0.36 million parameters, and a step has about 2,500 tokens of short conversations. A
turn is one epoch, without gradient clipping. Each loop runs on one thread, whose processor time is measured, and logs as little
as possible. For the Trainer of transformers, only the time between `on_train_begin` and `on_train_end` counts; for the recipe,
all of `fit()`.

    python benchmarks/recipes.py [--turns 7]
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from callsheet.cli.recipe import prepare_recipe
from callsheet.cli.shipped import RECIPES
from callsheet.recipes import Recipe
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.finetune import Finetune, FinetuneConfig
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.trainer.tasks import resolve_task
from timing import in_turns, machine

STEPS, BATCH = 10, 16
LONGEST = 384
PACKED_ROWS = 6
"""The batch size of packed rows that has about as many tokens as `BATCH` conversations."""


def write_conversations(path: Path) -> None:
    """Write the conversations of an epoch, of 30 to 370 tokens, most of them short."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(STEPS * BATCH):
            length = min(340, int(draw.expovariate(1 / 110)))
            asked, answered = (
                "".join(draw.choices("abcdefgh ", k=part)) for part in (10 + length // 3, 15 + length - length // 3)
            )
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            file.write(f"{json.dumps({'messages': messages})}\n")


class InOrder(Finetune):
    """A recipe that does not shuffle, so that all loops have the same batches: the padding depends on what is in a batch."""

    def train_data(self) -> Any:
        """Return a loader in the order of the file."""
        return self._loader("train", train=False)


def recipe(folder: Path, *, packing: bool = False) -> Finetune:
    """Return the fine-tuning recipe, before its data is read."""
    config = FinetuneConfig(
        run_name=f"run-{time.monotonic_ns()}",
        runs_folder=str(folder),
        train=Rows(str(folder / "train.jsonl")),
        model=LanguageModel(hidden_size=96, layers=3, heads=4, intermediate_size=256),
        sequence_length=LONGEST,
        packing=packing,
        batch_size=PACKED_ROWS if packing else BATCH,
        max_duration="1ep",
        clip_grad_norm=None,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        device="cpu",
        threads=1,
        samples=0,
    )
    return InOrder(config)


def parts(folder: Path) -> tuple[Finetune, Any, torch.optim.Optimizer]:
    """Return the recipe with its data, the model and the optimizer, for the loops that are not the recipe's."""
    job = recipe(folder)
    job.read_data()
    torch.manual_seed(0)
    model = job.make_model()
    return job, model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def tokens(job: Finetune) -> int:
    """Return the number of tokens of an epoch, without padding."""
    examples: Any = job.sets.examples["train"]
    return len(examples.ids)


def plain(folder: Path) -> float:
    """Return the seconds of an epoch of a hand-written loop."""
    job, model, optimizer = parts(folder)
    model.train()
    loader = job.train_data()
    began = time.thread_time()
    for batch in loader:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.thread_time() - began


def ours(folder: Path, *, packing: bool = False) -> float:
    """Return the seconds of an epoch of the recipe."""
    job = recipe(folder, packing=packing)
    job.setup()
    with job.trainer as trainer:
        began = time.thread_time()
        trainer.fit()
        return time.thread_time() - began


def packed(folder: Path) -> float:
    """Return the seconds of an epoch of the recipe with packed rows."""
    return ours(folder, packing=True)


def theirs(folder: Path) -> float:
    """Return the seconds of an epoch of the Trainer of transformers."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
        began = ended = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.thread_time()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.ended = time.thread_time()

    job, model, optimizer = parts(folder)
    model.config.use_cache = False
    loader: Any = job.train_data()
    clock = Clock()
    arguments = TrainingArguments(
        output_dir=str(folder / "theirs"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        dataloader_drop_last=True,
        remove_unused_columns=False,
    )

    class GivenLoader(Trainer):  # type: ignore[misc]  # as above
        def get_train_dataloader(self) -> Any:
            return loader

    trainer = GivenLoader(
        model,
        arguments,
        data_collator=loader.collate_fn,
        train_dataset=loader.dataset,
        optimizers=(optimizer, None),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.ended - clock.began


def shipped(name: str, folder: Path) -> Recipe[Any]:
    """Return a shipped recipe that trains on a few batches and does not evaluate."""
    overrides = ["--runs_folder", str(folder), "--run_name", f"{name}-{time.monotonic_ns()}", "--max_duration", f"{STEPS}ba"]
    overrides += ["--eval_interval", "null", "--threads", "1", "--device", "cpu", "--callbacks", "[]", "--loggers", "[]"]
    if name == "distill":  # one step of the teacher is enough, because its quality does not matter here
        overrides += ["--teacher_duration", "1ba", "--compare_with_hard_labels", "false"]
    if name in ("finetune", "distill"):
        overrides += ["--evaluate_first", "false"]
    job = prepare_recipe(name, overrides, command="train").job
    job.read_data()
    return job


class Comparison:
    """A recipe, and a plain loop over its model, its first batches and its loss."""

    def __init__(self, name: str, folder: Path) -> None:
        self._job = job = shipped(name, folder)
        self._batches = list(islice(job.train_data(), STEPS))
        job.train_data = lambda: self._batches  # type: ignore[method-assign]
        job.validation_data = dict  # type: ignore[method-assign]
        job.read_data = lambda: None  # type: ignore[method-assign]

    def plain(self) -> float:
        """Return the seconds of the plain loop."""
        job = self._job
        torch.manual_seed(job.config.seed)
        model = job.make_model()
        task = resolve_task(job.make_task(), model)
        for frozen in task.frozen_models:
            frozen.eval().requires_grad_(False)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = job.config.make_optimizer(parameters)
        scheduler = job.config.scheduler(optimizer) if job.config.scheduler is not None else None
        model.train()
        began = time.thread_time()
        for batch in self._batches:
            losses = task.loss(task.forward(model, batch), batch)
            loss: Any = losses["loss"] if isinstance(losses, Mapping) else losses
            loss.backward()
            if job.config.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, job.config.clip_grad_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        return time.thread_time() - began

    def ours(self) -> float:
        """Return the seconds of the recipe's `fit`."""
        job = self._job
        job.config.run_name = f"run-{time.monotonic_ns()}"
        job.setup()
        with job.trainer as trainer:
            began = time.thread_time()
            trainer.fit()
            return time.thread_time() - began


def compare_with_plain_loops(folder: Path, turns: int) -> None:
    """Print the time of each shipped recipe, and its ratio to that of the plain loop."""
    print(f"\nEach shipped recipe and a plain loop: medians over {turns} rounds of {STEPS} steps, one thread\n")
    print("| recipe | ms per step | time relative to the plain loop |\n| --- | --- | --- |")
    for name in RECIPES:
        compared = Comparison(name, folder)
        loops: dict[str, Callable[[], float]] = {"plain": compared.plain, "ours": compared.ours}
        in_turns(loops, 1)
        found = in_turns(loops, turns)
        ratio = statistics.median(a / b for a, b in zip(found["ours"], found["plain"], strict=True))
        print(f"| {name} | {statistics.median(found['ours']) / STEPS * 1e3:.1f} | {ratio:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    for name in ("callsheet", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_conversations(folder / "train.jsonl")
        loops: dict[str, Callable[[], float]] = {
            name: partial(loop, folder)
            for name, loop in (
                ("a plain loop", plain),
                ("callsheet", ours),
                ("transformers' Trainer", theirs),
                ("callsheet, packed", packed),
            )
        }
        in_turns(loops, 1)  # the first turn imports modules and fills caches
        figures = in_turns(loops, turns)
        job = recipe(folder)
        job.read_data()
        count = tokens(job)
    print(
        f"{machine()}; medians over {turns} rounds; a round has {STEPS} steps of {BATCH} conversations, together {count:,} tokens without padding; "
        "one thread; each ratio compares times of the same round\n"
    )
    print("| loop | ms per step | tokens per second | time relative to the plain loop |\n| --- | --- | --- | --- |")
    for name, found in figures.items():
        ratio = statistics.median(a / b for a, b in zip(found, figures["a plain loop"], strict=True))
        took = statistics.median(found)
        step = f"{took / STEPS * 1e3:.1f}" if "packed" not in name else ""
        print(f"| {name} | {step} | {count / took:,.0f} | {ratio:.3f} |")
    with tempfile.TemporaryDirectory() as made:
        compare_with_plain_loops(Path(made), turns)


if __name__ == "__main__":
    main()
