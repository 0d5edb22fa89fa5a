"""The Hugging Face bridge: callsheet's callbacks in a transformers Trainer, and so in TRL and the tools built on it."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any

from callsheet.extras import needed_by

with needed_by(__name__):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from callsheet.bridges.host_states import STATE, go_on_without, read_states, write_states

from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.huggingface.guests import GUEST_EVENTS, guest
from callsheet.bridges.huggingface.hooks import ALONE, SPEEDS, Datasets, ForwardHooks, by_dataset
from callsheet.bridges.torch_hooks import BackwardWatch
from callsheet.callback import Callback
from callsheet.context import Outcome
from callsheet.control import Request
from callsheet.manager import CallbackManager, normalize_callbacks

__all__ = ["GUEST_EVENTS", "NOT_TOLD", "STATE", "TOLD_AT", "HuggingFaceHost", "guest", "host"]

logger = logging.getLogger("callsheet")

NOT_TOLD = (
    *("on_test_start", "on_test_step_start", "on_test_forward_start", "on_test_forward_end", "on_test_step_end", "on_test_end"),
    *("on_predict_start", "on_predict_step_start", "on_predict_forward_start", "on_predict_forward_end", "on_predict_step_end"),
    *("on_predict_end", "on_preempt"),
)
"""Events that the Trainer has no moment for."""

TOLD_AT: Mapping[str, tuple[str, ...]] = {
    "on_train_begin": (
        *("on_run_start", "on_checkpoint_load_start", "on_checkpoint_load_end", "on_data_init_start", "on_data_init_end"),
        *("on_train_start", "on_round_start"),
    ),
    "on_epoch_begin": ("on_epoch_start",),
    "the model is called": (
        *("on_fetch_start", "on_fetch_end", "on_train_step_start", "on_forward_backward_start", "on_microbatch_start"),
        "on_forward_start",
    ),
    "the model has answered": ("on_forward_end", "on_loss_start"),
    "backward": ("on_loss_end", "on_backward_start", "on_backward_end"),
    "on_substep_end": ("on_microbatch_end",),
    "on_pre_optimizer_step": (
        *("on_forward_backward_end", "on_clip_gradients_start", "on_clip_gradients_end", "on_optimizer_step_start"),
    ),
    "on_optimizer_step": ("on_optimizer_step_end", "on_train_step_end"),
    "on_step_end": ("on_log", "on_checkpoint_due"),
    "the model is called in evaluation": ("on_eval_all_start", "on_eval_start", "on_eval_step_start", "on_eval_forward_start"),
    "the model has answered in evaluation": ("on_eval_forward_end",),
    "on_prediction_step": ("on_eval_step_end",),
    "on_evaluate": ("on_eval_end", "on_eval_all_end"),
    "on_save": ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published"),
    "on_epoch_end": ("on_epoch_end",),
    "on_train_end": ("on_round_end", "on_train_end", "on_run_end"),
    "an error of a callback": ("on_exception",),
}
"""The Trainer's moments, and ours that are told there; a step's last microbatch ends with `on_pre_optimizer_step`."""


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None, *, eval_names: Iterable[str] = (), strict: bool = True
) -> HuggingFaceHost:
    """The callbacks as one `transformers.TrainerCallback`, for `Trainer(callbacks=[host([...])])`.

    A run is one `trainer.train()`. The step is told from the Trainer's own events, the forward from the model, the loss from `backward`;
    a batch is what the model is called with. Records are made every `logging_steps`; what the Trainer logs besides is in them under its
    names. A stop, a save or an evaluation that a callback asks for is the Trainer's to carry out; the callbacks' states are saved in
    its checkpoints, and loaded where training goes on from one. An evaluation is told from its first forward on.

    What is not carried: gradient norms but in the records, the scheduler's step before `on_train_step_end`, the fetch of microbatches
    after the first, evaluations and predictions outside training, and exceptions, which the Trainer tells nobody: such a run ends, as
    failed, when the host is forgotten or the program ends.

    Args:
        eval_names: the names of the datasets, in their order, where `eval_dataset` is a dictionary. The Trainer tells a dataset's name
            when it is through: where they are not said, the first evaluation begins each as `validation`, and ends at what follows it.
        strict: whether it is an error that somebody hears an event which is not told; else a warning.

    Raises:
        NotCarried: when training begins, or after the first step; see `strict`.
    """
    return HuggingFaceHost(callbacks, eval_names=eval_names, strict=strict)


_TOLD_ELSEWHERE = frozenset({"loss", "learning_rate", "epoch", "total_flos", "train_loss"})
"""What the Trainer logs, and records have by other names or from elsewhere."""


_OF_EVALUATION = frozenset({"on_log", "on_prediction_step", "on_evaluate"})
"""What the Trainer tells between two datasets of an evaluation."""


def _in_a_run(method: Callable[..., None]) -> Callable[..., None]:
    """Called as the Trainer calls it, and given the run; nothing where there is none. An error of a callback fails the run."""

    @functools.wraps(method)
    def told(self: HuggingFaceHost, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        run = self._run
        if run is None:
            return
        self._asks.control = control
        try:
            if self._datasets.done and method.__name__ not in _OF_EVALUATION:
                self._end_evaluation(run)
            method(self, run, args, state, given)  # which is much, so that it is handed on as it is
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

    def __init__(
        self, callbacks: CallbackManager | Callback | Iterable[Callback] | None, *, eval_names: Iterable[str], strict: bool
    ) -> None:
        self.manager = normalize_callbacks(callbacks) or CallbackManager()
        self._strict = strict
        self._run: HostedRun | None = None
        self._asks = _Asks()
        self._datasets = Datasets(eval_names)
        self._hears_optimizer = True
        self._is_checked = False  # whether the first step has told what is heard
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
        run.state.evaluators = tuple(self._datasets.names)
        if isinstance(train_dataloader, Sized):
            run.state.epoch_batches = -(-len(train_dataloader) // args.gradient_accumulation_steps)
        self._skips = optimizer if hasattr(optimizer, "step_was_skipped") else None
        self._watch = watch = BackwardWatch(run.narrator, run.ctx, getattr(optimizer, "scaler", None))
        run.losses = watch.reader
        self._hooks = ForwardHooks(run, watch, self._datasets, model)
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
        self._datasets.done, self._is_checked = 0, False
        if not args.eval_on_start:  # else training begins when that is over
            run.narrator.start("round")

    @_in_a_run
    def on_train_end(self, run: HostedRun, *_: Any) -> None:
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
    def on_epoch_begin(self, run: HostedRun, *_: Any) -> None:
        """An epoch begins."""
        run.narrator.start("epoch")

    @_in_a_run
    def on_step_begin(self, run: HostedRun, *_: Any) -> None:
        """The first batch of a step comes; it is told once the model is called with it."""
        watch, narrator = self._watch, run.narrator
        if narrator.listen():
            self._hooks.listen(narrator.hears("forward"))
            watch.listen(narrator.is_loss_read)
            self._hears_optimizer = narrator.hears("clip_gradients") or narrator.hears("optimizer_step")
        watch.total, watch.is_on = None, True

    @_in_a_run
    def on_substep_end(self, run: HostedRun, *_: Any) -> None:
        """A batch is through, and its step is not."""
        run.narrator.end("microbatch")

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """The gradients are there, and clipped."""
        if self._hears_optimizer:
            self._begin_optimizer_step(args, state, control, **given)

    @_in_a_run
    def _begin_optimizer_step(self, run: HostedRun, *_: Any) -> None:
        narrator = run.narrator
        if not narrator.parts["train_step"].is_open:
            self._begin_step(run)
        if not narrator.parts["clip_gradients"].is_quiet:
            narrator.tell("clip_gradients")
        narrator.start("optimizer_step")

    @_in_a_run
    def on_optimizer_step(self, run: HostedRun, *_: Any) -> None:
        """The parameters have moved; the gradients are there for a moment, and the rate is that of the step."""
        narrator = run.narrator
        run.step_skipped = self._skips is not None and self._skips.step_was_skipped
        self._watch.is_on = False
        if not self._hears_optimizer:
            if not narrator.parts["train_step"].is_open:
                self._begin_step(run)
            if narrator.is_read:
                narrator.start("optimizer_step")
        if narrator.is_heard:
            narrator.end_step()  # and the optimizer's; else it ends with what follows it

    def _begin_step(self, run: HostedRun) -> None:
        """One in which the model was not called."""
        run.counted = (0, 0)
        run.narrator.start_step()

    @_in_a_run
    def on_step_end(self, run: HostedRun, *_: Any) -> None:
        """What may be between steps."""
        run.end_step()
        self._is_due_told = True
        if not self._is_checked:
            self._is_checked = True
            run.check_carried(strict=self._strict, logger=logger)
        if run.control.pending:
            self._stop_if_asked(run)

    @_in_a_run
    def on_epoch_end(self, run: HostedRun, args: TrainingArguments, state: TrainerState, given: Mapping[str, Any]) -> None:
        """The epoch is over, or left."""
        run.end_epoch(is_whole=state.epoch is not None and float(state.epoch).is_integer())
        self._is_due_told = True
        self._stop_if_asked(run)

    def _stop_if_asked(self, run: HostedRun) -> None:
        if run.control.stop_requested is not None:
            self._asks.control.should_training_stop = True

    # --- records, evaluations, checkpoints ---

    @_in_a_run
    def on_log(self, run: HostedRun, args: TrainingArguments, state: TrainerState, given: Mapping[str, Any]) -> None:
        """What the Trainer logs goes into the next record; the loss, the rate and evaluations are told in their own ways."""
        values = {name: value for name, value in (given.get("logs") or {}).items() if isinstance(value, (int, float))}
        if "grad_norm" in values:
            run.ctx.log({"train/grad_norm": values.pop("grad_norm")}, across="same")
        rest = {
            f"huggingface/{name}": value
            for name, value in values.items()
            if name not in _TOLD_ELSEWHERE and (not name.startswith("eval_") or name.endswith(SPEEDS))
        }
        if rest:
            run.ctx.log(rest, across="same")

    @_in_a_run
    def on_prediction_step(self, run: HostedRun, *_: Any) -> None:
        """A batch of an evaluation is through."""
        run.eval_narrator.end("eval_step")

    @_in_a_run
    def on_evaluate(self, run: HostedRun, args: TrainingArguments, state: TrainerState, given: Mapping[str, Any]) -> None:
        """A dataset is through, and with the last one the evaluation."""
        name, found = by_dataset(given.get("metrics") or {}, self._datasets.names)
        if not run.eval_narrator.is_open("eval"):  # the model was not called
            run.begin_evaluation(name or ALONE)
        run.end_dataset(name or ALONE, found)
        if self._datasets.end(name):
            self._end_evaluation(run)

    def _end_evaluation(self, run: HostedRun) -> None:
        self._datasets.done = 0
        run.end_evaluation()
        run.records.tally.settle(run.state)
        run.records.tell(run.ctx)
        self._is_due_told = False
        self._stop_if_asked(run)

    @_in_a_run
    def on_save(self, run: HostedRun, args: TrainingArguments, state: TrainerState, given: Mapping[str, Any]) -> None:
        """A checkpoint has been written: add the callbacks' states to it."""
        if not self._is_due_told:
            run.boundaries.tell_checkpoint_due("step")
        path = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        run.tell_checkpoint(str(path), lambda info: write_states(run, path, info))
        self._is_due_told = False

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        """Training goes on from a checkpoint of the Trainer: take back what stands in it."""
        run = self._run
        assert run is not None
        given = args.resume_from_checkpoint
        paths = [Path(given)] if isinstance(given, str) else []
        paths.append(Path(args.output_dir or "") / f"checkpoint-{state.global_step}")
        found = next((path for path in paths if (path / STATE).is_dir()), None)
        if found is not None:
            read_states(run, found, state.global_step)
            return
        logger.warning(
            "%s goes on from step %d, and no state of callbacks was found in %s", run.host, state.global_step, paths[-1]
        )
        go_on_without(run, state.global_step, int(state.epoch or 0))


def _end(run: HostedRun, watch: BackwardWatch, hooks: ForwardHooks) -> None:
    """Also when the program ends, or the host is forgotten: then training was left by an exception."""
    watch.remove()
    hooks.remove()
    run.lifetime.end(Outcome.FAILED)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str)) or value is None}
