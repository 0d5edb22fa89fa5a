"""A model can be copied or pickled while a built-in observes it: the copy contains no objects of callsheet."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context
from callsheet.testing import Subject

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


class CopiesModel(Callback):
    """Copies and pickles the model at events of a step, and during its forward."""

    phase = "report"  # after other callbacks have registered their hooks

    def __init__(self, interval: int) -> None:
        self.interval = interval  # check only every `interval` steps, because a check is slow
        self.found: set[str] = set()
        self.checks = 0

    def on_train_start(self, ctx: Context) -> None:
        self._check_the_model_and_its_children(ctx)
        self.head = ctx.model.head
        self.hook = ctx.model.body.register_forward_pre_hook(lambda *_: self._check_during_the_forward(ctx))

    def _check_the_model_and_its_children(self, ctx: Context) -> None:
        if self._is_skipped(ctx):
            return
        for name, module in ctx.model.named_children():  # skip `body`: it has this callback's own hook, which cannot be pickled
            if name != "body":
                self._check_copies(f"{name} at {ctx.event}", module)
        self._check_hooks_of(f"the model at {ctx.event}", copy.deepcopy(ctx.model))

    on_microbatch_start = on_forward_start = on_forward_end = on_backward_end = on_train_step_end = on_eval_step_start = (
        _check_the_model_and_its_children
    )

    def _check_during_the_forward(self, ctx: Context) -> None:
        if not self._is_skipped(ctx):
            self._check_copies("head during the forward", self.head)

    def _is_skipped(self, ctx: Context) -> bool:
        return ctx.step % self.interval != 0

    def on_train_end(self, ctx: Context) -> None:
        self.hook.remove()
        self._check_copies(f"the model at {ctx.event}", ctx.model)

    def _check_copies(self, where: str, module: nn.Module) -> None:
        self.checks += 1
        file = io.BytesIO()
        torch.save(module, file)  # an error in a hook would end the user's training
        if b"callsheet" in file.getvalue().replace(b"callsheet.testing.small_run", b""):  # the module of the model's class
            self.found.add(f"{where}: torch.save")
        self._check_hooks_of(where, copy.deepcopy(module))

    def _check_hooks_of(self, where: str, copied: nn.Module) -> None:
        for module in copied.modules():
            for name in HOOKS:
                hooks: list[Any] = list(vars(module).get(name, {}).values())
                if any("callsheet" in str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in hooks):
                    self.found.add(f"{where}: {name}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "interval", [5, pytest.param(1, marks=pytest.mark.test_all)]
)  # both values check steps with and without a record
def test_a_copied_model_contains_no_objects_of_a_built_in(
    built_in: str, interval: int, subjects: Mapping[str, Subject], tmp_path: Path
) -> None:
    subject, copies = subjects[built_in], CopiesModel(interval)
    with subject.trainer(tmp_path, CallbackManager([subject.make(), copies])) as trainer:
        trainer.fit()
    assert copies.found == set()
    assert copies.checks > 10
