"""A loop that fires a run's events without training, for tests of callbacks.

It fires the events of a whole run with given losses, and carries out the requests of callbacks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.bridges.hosted_run import HostedRun
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.control import Request
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo, Outcome
from callsheet.errors import ConfigError

ROWS, INPUTS = 4, 2
"""The shape of each batch: its number of rows, and the number of inputs in each row."""


class FakeLoop:
    """Fires every event of a run in the lifecycle's order, without training, to test what a callback decides.

    Each step's loss is the next item of `losses`, and each evaluation's result the next item of `validation`. Every gradient
    equals the loss, and a plain SGD with learning rate 0.1 applies it, so that the values of a monitor can be computed by hand.
    Requests to stop, save and evaluate are carried out; a checkpoint is kept in memory. There are no data, no scheduler and no
    other ranks.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        losses: the mean loss of each step. There are as many steps as losses.
        steps_per_epoch: None means that all steps are in one epoch.
        microbatches: the number of microbatches in each step.
        validation: the losses of the evaluations in order, by dataset; the last one is repeated.
        eval_every: steps between two evaluations; None evaluates at the end of each epoch.
        log_interval: how often a metrics record is made.
        test_loss: the loss of a test after training; None for no test.
        predictions: the number of batches predicted after training.
        model: the model that callbacks see; None is a `Linear(2, 1)` of zeros.
        folder: the folder that contains the run's folder, for callbacks that write.
        resume: a checkpoint of an earlier loop, one of the values of its `saved`.
        raises: exceptions that the model raises in its forward pass, by the step's number.

    Raises:
        ConfigError: there are no losses, or a dataset has none.

    Examples:
        >>> from callsheet.callbacks import EarlyStopper
        >>> loop = FakeLoop(EarlyStopper(monitor="validation/loss"), [1.0] * 9, steps_per_epoch=3, validation={"validation": [2, 1, 3]})
        >>> loop.run().steps
        9
    """

    def __init__(
        self,
        callbacks: CallbackManager | Callback | Iterable[Callback],
        losses: Sequence[float],
        *,
        steps_per_epoch: int | None = None,
        microbatches: int = 1,
        validation: Mapping[str, Sequence[float]] | None = None,
        eval_every: int | None = None,
        log_interval: int = 1,
        test_loss: float | None = None,
        predictions: int = 0,
        model: nn.Module | None = None,
        folder: str | Path = "runs",
        resume: Mapping[str, Any] | None = None,
        raises: Mapping[int, BaseException] | None = None,
    ) -> None:
        if not losses:
            raise ConfigError("losses=[]: give the loss of each step, at least one")
        if empty := [name for name, found in (validation or {}).items() if not found]:
            raise ConfigError(f"validation={{{empty[0]!r}: []}}: give the loss of at least one evaluation")
        self._losses = [float(loss) for loss in losses]
        self._steps_per_epoch = steps_per_epoch or len(losses)
        self._microbatches = microbatches
        self._validation = {name: list(found) for name, found in (validation or {}).items()}
        self._eval_every = eval_every
        self._test_loss = test_loss
        self._predictions = predictions
        self._resume = resume
        self._raises = dict(raises or {})
        self.model = model if model is not None else _zeros()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._step_loss: Tensor | None = None
        self._wants_evaluation = self._wants_checkpoint = False
        self._evaluations = 0
        self._run = HostedRun(
            callbacks,
            model=self.model,
            optimizer=self._optimizer,
            host="the fake loop",
            run_name="fake",
            runs_folder=folder,
            max_duration=f"{len(losses)}ba",
            log_interval=log_interval,
            able=("stop", "save", *(["evaluate"] if self._validation else [])),
            saves=self._ask_for_checkpoint,
        )
        self._run.evaluation.request = self._ask_for_evaluation
        self._run.checkpoints.loads = self._load
        self._run.losses = lambda: self._step_loss
        self.saved: dict[int, dict[str, Any]] = {}
        """The checkpoints, by the step after which they were made. Pass a checkpoint to another `FakeLoop` as `resume`."""

    @property
    def ctx(self) -> Context:
        """The context that the callbacks receive."""
        return self._run.ctx

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None before its end."""
        return self._run.ctx.run.outcome

    @property
    def steps(self) -> int:
        """The number of steps that were run, including those before a resume."""
        return self._run.state.timestamp.batch

    @property
    def stopped_because(self) -> str:
        """The reason that a callback gave when it requested to stop; empty if no callback did."""
        request = self._run.control.stop_requested
        return request.why if request is not None else ""

    def run(self) -> FakeLoop:
        """Fire the events of the whole run.

        Returns:
            The loop itself.

        Raises:
            BaseException: what a callback raised, or one of `raises`; `on_exception` is fired before that.
        """
        run = self._run
        try:
            run.begin()
            self._train()
            run.driver.end("train")
            if self._test_loss is not None:
                self._test(self._test_loss)
            if self._predictions:
                self._predict()
            run.finish()
        except BaseException as error:
            run.fail(error)
            raise
        return self

    def _train(self) -> None:
        run = self._run
        while not run.boundaries.is_over:
            run.driver.start("epoch")
            while True:
                self._step(self._losses[self.steps])
                run.end_step()
                is_whole = self.steps % self._steps_per_epoch == 0
                self._carry_out(eval_is_due=self._eval_every is not None and self.steps % self._eval_every == 0)
                if is_whole or run.boundaries.is_over:
                    break
            run.end_epoch(is_whole=is_whole)
            self._carry_out(eval_is_due=self._eval_every is None and is_whole)

    def _step(self, loss: float) -> None:
        driver, ctx = self._run.driver, self._run.ctx
        driver.start("fetch")
        ctx.batch = torch.zeros(ROWS, INPUTS)
        driver.end("fetch")
        driver.start_step()
        self._run.counted = (ROWS, 0)
        self._optimizer.zero_grad()
        parts = []
        for _ in range(self._microbatches):
            driver.start("microbatch")
            ctx.microbatch = ctx.batch
            driver.start("forward")
            if error := self._raises.get(self.steps + 1):
                raise error
            ctx.outputs = torch.full((ROWS, 1), loss)
            driver.end("forward")
            driver.start("loss")
            ctx.loss = torch.tensor(loss)
            driver.end("loss")
            parts.append(ctx.loss.detach())
            driver.start("backward")
            for parameter in self.model.parameters():
                added = torch.full_like(parameter, float(parts[-1]) / self._microbatches)
                parameter.grad = added if parameter.grad is None else parameter.grad + added
            driver.end("microbatch")
        self._step_loss = torch.stack(parts).mean()
        driver.start("clip_gradients")
        driver.end("clip_gradients")
        driver.start("optimizer_step")
        self._optimizer.step()
        driver.end("optimizer_step")

    # --- evaluations and checkpoints between steps ---

    def _ask_for_checkpoint(self, requests: tuple[Request, ...]) -> None:
        self._wants_checkpoint = True

    def _ask_for_evaluation(self) -> None:
        self._wants_evaluation = True

    def _carry_out(self, *, eval_is_due: bool) -> None:
        if self._wants_evaluation or (eval_is_due and self._validation):
            self._wants_evaluation = False
            self._evaluate()
        if self._wants_checkpoint:
            self._wants_checkpoint = False
            self._run.fire_checkpoint(f"step {self.steps}", self._save)

    def _evaluate(self) -> None:
        run, evaluations = self._run, self._run.eval
        ctx, driver = evaluations.ctx, evaluations.driver
        self.model.eval()
        for name, found in self._validation.items():
            loss = found[min(self._evaluations, len(found) - 1)]
            evaluations.begin(name)
            driver.start("eval_step")
            ctx.batch = torch.zeros(ROWS, INPUTS)
            driver.start("eval_forward")
            ctx.outputs = torch.full((ROWS, 1), float(loss))
            driver.end("eval_step")
            evaluations.end_dataset(name, {"loss": loss})
        evaluations.end()
        self.model.train()
        self._evaluations += 1
        run.records.tally.update_timestamp(run.state)
        run.records.fire_log(run.ctx)
        run.boundaries.fire_checkpoint_due("step")

    def _save(self, info: CheckpointInfo) -> None:
        parts: dict[str, Any] = {"state": self._run.state, "callbacks": self._run.callback_states, "records": self._run.records}
        parts |= {"model": self.model, "optimizer": self._optimizer}
        self.saved[info.step] = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
        self.saved[info.step] |= {"evaluations": self._evaluations, "info": info}

    def _load(self) -> CheckpointInfo | None:
        if self._resume is None:
            return None
        run, parts = self._run, copy.deepcopy(dict(self._resume))
        self._evaluations = parts["evaluations"]
        for name, part in (("state", run.state), ("model", self.model), ("optimizer", self._optimizer)):
            part.load_state_dict(parts[name])
        run.manager.load_state_dict(parts["callbacks"])
        run.records.load_state_dict(parts["records"])
        info: CheckpointInfo = parts["info"]
        return info

    # --- test and prediction after training ---

    def _test(self, loss: float) -> None:
        ctx, driver = self._run.eval.ctx, self._run.eval.driver
        ctx.step, ctx.epoch = self._run.ctx.step, self._run.ctx.epoch
        self._batch_of("test", loss)
        ctx.eval_losses = {"loss": torch.tensor(loss)}
        ctx.log({"test/loss": loss}, across="same")
        driver.end("test")
        self._run.records.fire_log(self._run.ctx)

    def _predict(self) -> None:
        for _ in range(self._predictions):
            self._batch_of("predict", 0.0)
        self._run.eval.driver.end("predict")

    def _batch_of(self, loop: str, output: float) -> None:
        ctx, driver = self._run.eval.ctx, self._run.eval.driver
        driver.start(f"{loop}_step")
        ctx.batch = torch.zeros(ROWS, INPUTS)
        driver.start(f"{loop}_forward")
        ctx.outputs = torch.full((ROWS, 1), output)
        driver.end(f"{loop}_step")


def _zeros() -> nn.Module:
    model = nn.Linear(INPUTS, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model
