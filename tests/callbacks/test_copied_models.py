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

    def __init__(self, every: int) -> None:
        self.every = every  # look only at steps whose number is a multiple of this, because each look takes long
        self.found: set[str] = set()
        self.times = 0

    def on_train_start(self, ctx: Context) -> None:
        self._look_at(ctx)
        self.head = ctx.model.head
        self.hook = ctx.model.body.register_forward_pre_hook(lambda *_: self._look_within_the_forward(ctx))

    def _look_at(self, ctx: Context) -> None:
        if self._is_left_out(ctx):
            return
        for name, module in ctx.model.named_children():  # skip `body`: it has this callback's own hook, which cannot be pickled
            if name != "body":
                self._look(f"{name} at {ctx.event}", module)
        self._hooks_in(f"the model at {ctx.event}", copy.deepcopy(ctx.model))

    on_microbatch_start = on_forward_start = on_forward_end = on_backward_end = on_train_step_end = on_eval_step_start = _look_at

    def _look_within_the_forward(self, ctx: Context) -> None:
        if not self._is_left_out(ctx):
            self._look("head within the forward", self.head)

    def _is_left_out(self, ctx: Context) -> bool:
        return ctx.step % self.every != 0

    def on_train_end(self, ctx: Context) -> None:
        self.hook.remove()
        self._look(f"the model at {ctx.event}", ctx.model)

    def _look(self, where: str, module: nn.Module) -> None:
        self.times += 1
        file = io.BytesIO()
        torch.save(module, file)  # an error in a hook would end the user's training
        if b"callsheet" in file.getvalue().replace(b"callsheet.testing.small_run", b""):  # the module of the model's class
            self.found.add(f"{where}: torch.save")
        self._hooks_in(where, copy.deepcopy(module))

    def _hooks_in(self, where: str, copied: nn.Module) -> None:
        for module in copied.modules():
            for name in HOOKS:
                hooks: list[Any] = list(vars(module).get(name, {}).values())
                if any("callsheet" in str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in hooks):
                    self.found.add(f"{where}: {name}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "every", [5, pytest.param(1, marks=pytest.mark.test_all)]
)  # both look at steps with and without a record
def test_a_copied_model_contains_nothing_of_a_built_in(
    built_in: str, every: int, subjects: Mapping[str, Subject], tmp_path: Path
) -> None:
    subject, copies = subjects[built_in], CopiesModel(every)
    with subject.trainer(tmp_path, CallbackManager([subject.make(), copies])) as trainer:
        trainer.fit()
    assert copies.found == set()
    assert copies.times > 10
