"""What the Hugging Face Trainer does not tell of its batches: heard from the model; and what its evaluations say, by dataset."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.narrator import Narrator
from callsheet.bridges.torch_hooks import BackwardWatch, Hook, StaysBehind
from callsheet.trainer.tasks import counts_of

ALONE = "validation"
"""The name of a dataset that has none."""

SPEEDS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")
"""What an evaluation's metrics say beside what it found; each rank has its own."""


class Datasets:
    """The datasets of an evaluation: one, or those of a dictionary, whose names are learnt where nobody has said them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self.done = 0
        """How many of them are through, in an evaluation that is not over."""

    @property
    def next(self) -> str:
        """The name of the one that begins, as far as it is known."""
        return self.names[self.done] if self.done < len(self.names) else ALONE

    def end(self, name: str | None) -> bool:
        """It is through, None for one that is alone; whether it is known to be the last."""
        is_known = name in self.names
        if name is not None and self.names[self.done : self.done + 1] != [name]:
            if is_known:
                self.names.remove(name)
            self.names.insert(self.done, name)
        self.done += 1
        return name is None or (is_known and self.done == len(self.names))


class ForwardHooks(StaysBehind):
    """Hears the model being called: in training a microbatch, else a batch of an evaluation; and what it answers, where that is heard."""

    def __init__(self, run: HostedRun, watch: BackwardWatch, datasets: Datasets, model: nn.Module) -> None:
        self._run = weakref.proxy(run)
        self._watch = weakref.proxy(watch)
        self._datasets = datasets
        self._before = Hook(functools.partial(model.register_forward_pre_hook, with_kwargs=True))
        self._before.stand(True, self._begins)
        self._after = Hook(model.register_forward_hook)

    def listen(self, is_heard: bool) -> None:
        """To the model's answers, or not."""
        self._after.stand(is_heard, self._ends)

    def _begins(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.is_deaf:
            return None
        run, batch = self._run, kwargs if kwargs or not args else args[0]
        if not model.training:
            return self._evaluates(run.eval_narrator, batch, args, kwargs)
        if not self._watch.is_on or not torch.is_grad_enabled():
            return None
        narrator, ctx, (samples, tokens) = run.narrator, run.ctx, counts_of(batch)
        parts, ctx.batch = narrator.parts, batch
        if parts["train_step"].is_open:
            samples, tokens = samples + run.counted[0], tokens + run.counted[1]
        else:
            if not parts["fetch"].is_quiet:
                narrator.tell("fetch")
            narrator.start_step()
        run.counted = samples, tokens
        if not narrator.is_heard:
            return None
        given = ctx.batch
        if not parts["forward"].is_quiet:
            ctx.microbatch = given
            narrator.start("microbatch")
            narrator.start("forward")
            given = ctx.microbatch
        return (args, dict(given)) if given is not batch and isinstance(given, Mapping) else None

    def _ends(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        run = self._run
        if self.is_deaf:
            return outputs
        if not model.training:
            if run.eval_narrator.is_open("eval_forward"):
                run.eval_ctx.outputs = outputs
                run.eval_narrator.end("eval_forward")
                return run.eval_ctx.outputs
        elif run.narrator.parts["forward"].is_open:
            run.ctx.outputs = outputs
            run.narrator.start("loss")
            return run.ctx.outputs
        return outputs

    def _evaluates(self, narrator: Narrator, batch: Any, args: Any, kwargs: Any) -> Any:
        run = self._run
        if not narrator.is_open("eval"):
            run.begin_evaluation(self._datasets.next)
        narrator.end("eval_step")
        run.eval_ctx.batch = batch
        narrator.start("eval_forward")
        if not self._after.stands and run.hears_outputs("eval"):
            self.listen(True)
        given = run.eval_ctx.batch
        return (args, dict(given)) if given is not batch and isinstance(given, Mapping) else None

    def remove(self) -> None:
        """Leave the model as it was."""
        self._before.remove()
        self.listen(False)


def by_dataset(metrics: Mapping[str, Any], names: Iterable[str]) -> tuple[str | None, dict[str, float]]:
    """The name, and what was found: `eval_loss` is of a dataset that is alone, and has no name; `eval_<name>_loss` of one of a dictionary."""
    numbers = {name.removeprefix("eval_"): float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    numbers.pop("epoch", None)
    own = next((name.removesuffix("_loss") for name in numbers if name.endswith("_loss")), None)
    own = max((name for name in names if any(number.startswith(f"{name}_") for number in numbers)), key=len, default=own)
    if "loss" in numbers:
        own = None
    found = {name.removeprefix(f"{own}_") if own is not None else name: value for name, value in numbers.items()}
    return own, {name: value for name, value in found.items() if name not in SPEEDS}
