"""The Hugging Face bridge: callsheet's callbacks in a transformers Trainer, and so in TRL and the tools built on it."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from callsheet.bridges.hosted_run import HostedRun, counts_of
from callsheet.bridges.narrator import Narrator
from callsheet.bridges.torch_hooks import BackwardWatch
from callsheet.callback import Callback
from callsheet.checkpoint import read_checkpoint, write_checkpoint
from callsheet.context import CheckpointInfo, Outcome
from callsheet.control import Request
from callsheet.errors import CheckpointError
from callsheet.manager import CallbackManager, normalize_callbacks

logger = logging.getLogger("callsheet")

NOT_TOLD = (
    *("on_test_start", "on_test_step_start", "on_test_forward_start", "on_test_forward_end", "on_test_step_end", "on_test_end"),
    *("on_predict_start", "on_predict_step_start", "on_predict_forward_start", "on_predict_forward_end", "on_predict_step_end"),
    "on_predict_end",
)
"""Events that the Trainer has no moment for."""

STATE = "callsheet"
"""The folder in a checkpoint of the Trainer in which the callbacks' states stand."""


def host(callbacks: CallbackManager | Callback | Iterable[Callback] | None, *, strict: bool = True) -> HuggingFaceHost:
    """The callbacks as one `transformers.TrainerCallback`, for `Trainer(callbacks=[host([...])])`.

    A run is one `trainer.train()`. The step is told from the Trainer's own events, the forward from the model, the loss from `backward`;
    a batch is what the model is called with. Records are made every `logging_steps`; what the Trainer logs besides is in them under its
    names. A stop, a save or an evaluation that a callback asks for is the Trainer's to carry out; the callbacks' states are saved in
    its checkpoints, and loaded where training goes on from one. An evaluation is told from its first forward on; that of a dictionary
    of datasets as one for each.

    What is not carried: gradient norms but in the records, the scheduler's step before `on_train_step_end`, the fetch of microbatches
    after the first, evaluations and predictions outside training, and exceptions, which the Trainer tells nobody: such a run ends, as
    failed, when the host is forgotten or the program ends.

    Args:
        strict: whether it is an error that somebody hears an event which is not told; else a warning.

    Raises:
        NotCarried: when training begins, or after the first step; see `strict`.
    """
    return HuggingFaceHost(callbacks, strict=strict)


_TOLD_ELSEWHERE = frozenset({"loss", "learning_rate", "epoch", "total_flos", "train_loss"})
"""What the Trainer logs, and records have by other names or from elsewhere."""


def _in_a_run(method: Callable[..., None]) -> Callable[..., None]:
    """Called as the Trainer calls it, and given the run; nothing where there is none. An error of a callback fails the run."""

    @functools.wraps(method)
    def told(self: HuggingFaceHost, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        run = self._run
        if run is None:
            return
        self._asks.control = control
        try:
            method(self, run=run, args=args, state=state, **given)
        except BaseException as error:
            self._fail(error)
            raise

    return told


class _Asks:
    """Asks the Trainer for what callbacks ask for. Not the host's own methods: the run has to be forgotten with the host."""

    def __init__(self) -> None:
        self.control = TrainerControl()
        """The latest that the Trainer has given."""

    def save(self, requests: tuple[Request, ...]) -> None:
        self.control.should_save = True

    def evaluate(self) -> None:
        self.control.should_evaluate = True


class HuggingFaceHost(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """See `host`."""

    def __init__(self, callbacks: CallbackManager | Callback | Iterable[Callback] | None, *, strict: bool) -> None:
        self.manager = normalize_callbacks(callbacks) or CallbackManager()
        self._strict = strict
        self._run: HostedRun | None = None
        self._asks = _Asks()
        self._is_due_told = False  # since the last step or epoch, and before an evaluation
        self._skips: Any = None

    # --- the run ---

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, optimizer: Any = None,
        lr_scheduler: Any = None, train_dataloader: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """Begin a run."""
        if self._run is not None:  # one that an exception had left
            self._let_go()
        output = Path(args.output_dir or "runs/huggingface").absolute()
        self._run = run = HostedRun(
            self.manager,
            model=model,
            optimizer=getattr(optimizer, "optimizer", optimizer),
            scheduler=getattr(lr_scheduler, "scheduler", lr_scheduler),
            host="the Hugging Face Trainer",
            run_name=output.name,
            runs_folder=output.parent,
            config=_plain(args.to_sanitized_dict()),
            max_duration=f"{state.max_steps}ba" if state.max_steps > 0 else None,
            log_interval=f"{state.logging_steps}ba" if str(args.logging_strategy.value) == "steps" else "1ep",
            device=args.device,
            able=("stop", "save", "evaluate"),
            saves=self._asks.save,
            evaluates=None,
        )
        run.evaluation.asks = self._asks.evaluate
        self._skips = optimizer if hasattr(optimizer, "step_was_skipped") else None
        self._watch = watch = BackwardWatch(run.narrator, run.ctx, getattr(optimizer, "scaler", None))
        run.losses = lambda: watch.total
        self._hooks = _Forward(self, run, model)
        self._ends = weakref.finalize(self, _end, run, self._watch, self._hooks)
        try:
            run.refuse(NOT_TOLD, strict=self._strict, logger=logger)
            run.begin()
            if state.global_step:
                self._resume(args, state)
        except BaseException as error:
            self._fail(error)
            raise
        self._asks.control = control
        run.narrator.start("round")

    @_in_a_run
    def on_train_end(self, run: HostedRun, **_: Any) -> None:
        """End it."""
        run.finish()
        self._let_go()

    def _fail(self, error: BaseException) -> None:
        if self._run is not None:
            self._run.fail(error)
            self._let_go()

    def _let_go(self) -> None:
        self._ends()
        self._run = None

    # --- epochs and steps ---

    @_in_a_run
    def on_epoch_begin(self, run: HostedRun, **_: Any) -> None:
        """An epoch begins."""
        run.narrator.start("epoch")

    @_in_a_run
    def on_step_begin(self, run: HostedRun, **_: Any) -> None:
        """The first batch of a step comes; it is told once the model is called with it."""
        run.narrator.listen()
        run.counted = (0, 0)
        self._watch.total, self._watch.is_on = None, True

    @_in_a_run
    def on_substep_end(self, run: HostedRun, **_: Any) -> None:
        """A batch is through, and its step is not."""
        run.narrator.end("microbatch")

    @_in_a_run
    def on_pre_optimizer_step(self, run: HostedRun, **_: Any) -> None:
        """The gradients are there, and clipped."""
        run.narrator.start("train_step")
        run.narrator.start("clip_gradients")
        run.narrator.end("clip_gradients")
        run.narrator.start("optimizer_step")

    @_in_a_run
    def on_optimizer_step(self, run: HostedRun, **_: Any) -> None:
        """The parameters have moved; the gradients are there for a moment."""
        run.step_skipped = bool(self._skips is not None and self._skips.step_was_skipped)
        run.narrator.end("optimizer_step")
        self._watch.is_on = False
        run.narrator.end("train_step")

    @_in_a_run
    def on_step_end(self, run: HostedRun, **_: Any) -> None:
        """What may be between steps."""
        is_first = run.state.timestamp.batch == run.state.baseline.batch + 1
        run.end_step()
        self._is_due_told = True
        if is_first:
            run.check_carried(strict=self._strict, logger=logger)
        self._stop_if_asked(run)

    @_in_a_run
    def on_epoch_end(self, run: HostedRun, state: TrainerState, **_: Any) -> None:
        """The epoch is over, or left."""
        run.end_epoch(is_whole=state.epoch is not None and float(state.epoch).is_integer())
        self._is_due_told = True
        self._stop_if_asked(run)

    def _stop_if_asked(self, run: HostedRun) -> None:
        if run.control.stop_requested is not None:
            self._asks.control.should_training_stop = True

    # --- records, evaluations, checkpoints ---

    @_in_a_run
    def on_log(self, run: HostedRun, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """What the Trainer logs goes into the next record; the loss, the rate and evaluations are told in their own ways."""
        values = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        if "grad_norm" in values:
            run.ctx.log({"train/grad_norm": values.pop("grad_norm")}, across="same")
        rest = {f"huggingface/{name}": values[name] for name in values.keys() - _TOLD_ELSEWHERE if not name.startswith("eval_")}
        if rest:
            run.ctx.log(rest, across="same")

    @_in_a_run
    def on_prediction_step(self, run: HostedRun, **_: Any) -> None:
        """A batch of an evaluation is through."""
        run.eval_narrator.end("eval_step")

    @_in_a_run
    def on_evaluate(self, run: HostedRun, metrics: Mapping[str, Any] | None = None, **_: Any) -> None:
        """An evaluation is over."""
        for name, found in _by_dataset(metrics or {}).items():
            if not run.eval_narrator.is_open("eval_all"):  # the model was not called
                run.begin_evaluation(name)
            run.end_dataset(name, found)
        run.end_evaluation()
        run.records.tally.settle(run.state)
        run.records.tell(run.ctx)
        self._is_due_told = False
        self._stop_if_asked(run)

    @_in_a_run
    def on_save(self, run: HostedRun, args: TrainingArguments, state: TrainerState, **_: Any) -> None:
        """A checkpoint has been written: add the callbacks' states to it."""
        if not self._is_due_told:
            run.boundaries.tell_checkpoint_due("step")
        path = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        run.tell_checkpoint(str(path), lambda info: self._write(run, path, info))
        self._is_due_told = False

    def _write(self, run: HostedRun, path: Path, info: CheckpointInfo) -> None:
        told = {"run": run.ctx.run.name, "step": info.step, "epoch": info.epoch, "kind": info.kind}
        local = {"callbacks": run.manager.state_dict(), "records": run.records.state_dict()}
        write_checkpoint(path / STATE, {"state": run.state.state_dict()}, local, told, group=run.world.saving, overwrite=True)

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        """Training goes on from a checkpoint of the Trainer: take back what stands in it."""
        run = self._run
        assert run is not None
        given = args.resume_from_checkpoint
        paths = [Path(given)] if isinstance(given, str) else []
        paths.append(Path(args.output_dir or "") / f"checkpoint-{state.global_step}")
        found = next((path / STATE for path in paths if (path / STATE).is_dir()), None)
        if found is None:
            logger.warning(
                "%s goes on from step %d, and no state of callbacks was found in %s", run.host, state.global_step, paths[-1]
            )
            run.state.timestamp = run.state.baseline = run.state.timestamp._replace(
                batch=state.global_step, epoch=int(state.epoch or 0), epoch_in_round=int(state.epoch or 0)
            )
        else:
            loaded = read_checkpoint(found, group=run.world.saving)
            if loaded.info.get("step") != state.global_step:
                raise CheckpointError(
                    f"{found} is of step {loaded.info.get('step')}, and the Trainer goes on from {state.global_step}"
                )
            run.state.load_state_dict(loaded.shared["state"])
            run.manager.load_state_dict(loaded.local["callbacks"])
            run.records.load_state_dict(loaded.local["records"])
        run.ctx.step, run.ctx.epoch = run.state.timestamp.batch, run.state.timestamp.epoch


class _Forward:
    """Hears the model being called: in training a microbatch, else a batch of an evaluation."""

    def __init__(self, host: HuggingFaceHost, run: HostedRun, model: nn.Module) -> None:
        self._run = weakref.proxy(run)
        self._watch = weakref.proxy(host._watch)
        self._model = model
        self._handles = [
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ends),
        ]

    def _begins(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        run, batch = self._run, kwargs if kwargs or not args else args[0]
        if not model.training:
            return self._evaluates(run.eval_narrator, batch, args, kwargs)
        if not torch.is_grad_enabled() or not self._watch.is_on:
            return None
        narrator, ctx = run.narrator, run.ctx
        samples, tokens = counts_of(batch)
        run.counted = (run.counted[0] + samples, run.counted[1] + tokens)
        ctx.batch = batch
        if not narrator.is_open("train_step"):
            narrator.start("fetch")
            narrator.end("fetch")
            narrator.start("train_step")
        if narrator.hears("forward"):
            ctx.microbatch = ctx.batch
            narrator.start("microbatch")
            narrator.start("forward")
            given = ctx.microbatch
        else:
            given = ctx.batch
        return (args, dict(given)) if given is not batch and isinstance(given, Mapping) else None

    def _ends(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        run = self._run
        if not model.training:
            if run.eval_narrator.is_open("eval_forward"):
                run.eval_ctx.outputs = outputs
                run.eval_narrator.end("eval_forward")
                return run.eval_ctx.outputs
        elif run.narrator.is_open("forward"):
            run.ctx.outputs = outputs
            run.narrator.start("loss")
            return run.ctx.outputs
        return outputs

    def _evaluates(self, narrator: Narrator, batch: Any, args: Any, kwargs: Any) -> Any:
        run = self._run
        if not narrator.is_open("eval_all"):
            run.begin_evaluation("validation")
        narrator.end("eval_step")
        run.eval_ctx.batch = batch
        narrator.start("eval_forward")
        given = run.eval_ctx.batch
        return (args, dict(given)) if given is not batch and isinstance(given, Mapping) else None

    def remove(self) -> None:
        """Leave the model as it was."""
        while self._handles:
            self._handles.pop().remove()


def _end(run: HostedRun, watch: BackwardWatch, hooks: _Forward) -> None:
    """Also when the program ends, or the host is forgotten: then training was left by an exception."""
    watch.remove()
    hooks.remove()
    run.lifetime.end(Outcome.FAILED)


def _by_dataset(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """`eval_loss` is the validation's loss, `eval_<name>_loss` that of a dataset of a dictionary."""
    numbers = {name.removeprefix("eval_"): float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    numbers.pop("epoch", None)
    own = next((name.removesuffix("_loss") for name in numbers if name.endswith("_loss")), "")
    if "loss" in numbers or not own:
        return {"validation": numbers}
    return {own: {name.removeprefix(f"{own}_"): value for name, value in numbers.items()}}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str)) or value is None}
