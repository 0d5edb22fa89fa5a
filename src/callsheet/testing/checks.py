"""The checks of the conformance suite that need only one rank.

Each check takes the callback under test and a folder, and raises `Found`, or an exception of the run, if the callback does not pass.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import json
import signal
import threading
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any
from unittest import SkipTest

from torch import Tensor

from callsheet.checkpoint import flatten, unflatten
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.manager import CallbackManager
from callsheet.core.spec import CallbackSpec
from callsheet.errors import CheckpointError, ConfigError, RegistrationError
from callsheet.testing.leftovers import Surroundings, model_things, more_left, settings_left
from callsheet.testing.scene import (
    ACTING_PHASES,
    Found,
    MakesTrainer,
    Planted,
    Scene,
    Subject,
    difference_of_records,
    difference_of_states,
)
from callsheet.testing.small_run import SAVED_AT_STEP, STEPS, same_weights, small_batches, small_trainer, steps_of

_BROKEN_AT_STEP = SAVED_AT_STEP + 3
_HALF_DURATION = f"{STEPS // 2}ba"


def constructs(subject: Subject, folder: Path) -> None:
    """Check that the callback takes only keyword arguments, and can be rebuilt from its arguments (as JSON) and its state."""
    callback, other = subject.make(), subject.make()
    if callback is other:
        raise Found("the factory gave the same object twice", "make a new callback at each call")
    CallbackManager([callback])  # CallbackManager raises an error if `subject.make` does not return a callback
    kind = type(callback)
    by_place = [
        name
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD) and name != "self"
    ]
    if by_place and kind.__init__ is not object.__init__:
        raise Found(
            f"its options {', '.join(by_place)} can be given by position", "put a `*` before them: def __init__(self, *, ...)"
        )
    written, state = _as_json(callback)
    built = CallbackSpec.from_dict({**json.loads(written), "state": state}).build()
    again, state_again = _as_json(built)
    if again != written:
        raise Found(
            f"rebuilt from its spec {written} it has the spec {again}", "take only options that JSON and YAML can represent"
        )
    if differs := difference_of_states(subject, state, state_again):
        raise Found(
            f"rebuilt from its spec it has another state: {differs}", "make load_state_dict restore what state_dict returned"
        )


def registers(subject: Subject, folder: Path) -> None:
    """Check that a CallbackManager accepts the callback, and also two such callbacks with different names.

    If the callback has no state, the manager must also accept two callbacks without names.
    """
    CallbackManager([subject.make()])
    CallbackManager(_make_two(subject))
    if not _keeps_state(subject.make()):
        CallbackManager([subject.make(), subject.make()])


def two_work_in_one_run(subject: Subject, folder: Path) -> None:
    """Check that two callbacks of the tested class, with different names, work in one run.

    If they cannot work in one run, a ConfigError or RegistrationError that names both must be raised.
    """
    both = _make_two(subject)
    try:
        with Scene(subject, _new(folder), *both) as scene:
            scene.fit()
    except (ConfigError, RegistrationError) as error:
        if not all(label_of(callback) in str(error) for callback in both):
            raise


def fits_twice(subject: Subject, folder: Path) -> None:
    """Check that the callback still works when `fit` is called again after an evaluation.

    In another run, the used callback must act like a new one. In a single run, a callback must log no warning twice.
    """
    used, fresh = subject.make(), subject.make()
    with Scene(subject, _new(folder), used) as scene:
        scene.fit(_HALF_DURATION)
        if scene.trainer.state.evaluators:
            scene.trainer.evaluate()
        if subject.trainer is small_trainer:
            scene.trainer.test(small_batches())
            scene.trainer.predict(small_batches())
        scene.fit()
    with Scene(subject, _new(folder), used) as again:
        again.fit()
    with Scene(subject, _new(folder), fresh) as first:
        first.fit()
    for message, times in first.warnings.items():
        if times > 1:
            raise Found(f"in a run of {STEPS} steps it logs {times} times: {message}", "log a warning once")
    hint = "reset at on_checkpoint_load_start, before a state may be restored"
    _compare(subject, again, first, "a used callback in a new run, and a new one: ", hint)


def closes_twice(subject: Subject, folder: Path) -> None:
    """Check that a run can be closed twice, with or without training, and that resuming a missing checkpoint raises an error."""
    for trains in (False, True):
        with Scene(subject, _new(folder), subject.make()) as scene:
            if trains:
                scene.fit(_HALF_DURATION)
            scene.trainer.close()
            scene.trainer.close()
    try:
        with Scene(subject, folder, subject.make(), resume=str(folder / "nothing")):
            raise Found("a run was not rejected although its checkpoint does not exist", "do not swallow errors")
    except CheckpointError:
        pass


def lets_errors_out(subject: Subject, folder: Path) -> None:
    """Check that an exception in a run with the callback reaches the caller unchanged, and that the callback raises no further error."""
    _fails(subject, folder, "on_train_step_end", 3, KeyboardInterrupt())
    for event, step in (
        ("on_run_start", 0),
        ("on_data_init_start", 0),
        ("on_log", 2),
        ("on_forward_end", 3),
        ("on_checkpoint_save_start", SAVED_AT_STEP),
        ("on_eval_step_end", 4),
    ):
        _fails(subject, folder, event, step, Planted("on purpose"))


def is_preemptive(subject: Subject, folder: Path) -> None:
    """Check that a run with the callback can be stopped, and can be preempted and then resumed.

    A stop request ends the run. A preempted run saves a checkpoint, ends, and can be resumed.
    """

    def stop(ctx: Context) -> None:
        ctx.control.stop("for the test", replicated=True)

    with Scene(subject, _new(folder), subject.make(), at=("on_train_step_end", 5), act=stop) as scene:
        scene.fit()
    if len(scene.watch.losses) > 5:
        raise Found("training continues after a stop was requested", "leave the requests of other callbacks alone")
    if threading.current_thread() is not threading.main_thread():
        raise SkipTest("signals reach only the main thread, so nothing can be preempted here")

    def preempt(ctx: Context) -> None:
        signal.raise_signal(signal.SIGTERM)

    with Scene(subject, _new(folder), subject.make(), at=("on_train_step_end", 5), act=preempt) as scene:
        scene.fit()
    if not scene.moments.has_come:  # the run stopped before step 5, so it was not preempted, and there is nothing to check
        return
    if not scene.trainer.preempted or 5 not in scene.watch.checkpoints:
        raise Found(
            f"a preempted run ended as {scene.watch.outcome!r}, without its checkpoint",
            "leave the requests of other callbacks alone",
        )
    with Scene(subject, scene.folder, subject.make(), resume=scene.watch.checkpoints[5]) as resumed:
        resumed.fit()


def resumes(subject: Subject, folder: Path) -> None:
    """Check that a run that is saved and resumed gives bit for bit the same results as a run without interruption.

    It must also be possible to add a new callback to a resumed run.
    """
    with Scene(subject, _new(folder), subject.make()) as whole:
        whole.fit()
    _compare_resumed(subject, folder, whole)
    with Scene(subject, _new(folder), subject.make(), resume=_bare(subject.trainer).checkpoint) as joined:
        joined.fit()


def is_neutral(subject: Subject, folder: Path) -> None:
    """Check that training gives bit for bit the same results with the callback as without it.

    The callback must draw no random numbers unless it declares `draws_random`.

    Training is not compared for callbacks of the phases `change` and `decide`, whose purpose is to affect it.
    """
    callback = subject.make()
    with Scene(subject, _new(folder), callback, checking=True) as watched:
        watched.fit()
    if callback.phase in ACTING_PHASES:
        return
    what = _find_difference(watched, _bare(subject.trainer))
    # The cached run without callbacks may have had other settings of torch, so compare with a new run too.
    if what and _find_difference(watched, _train_bare(subject.trainer)):
        if not same_weights(_train_bare(subject.trainer).weights, _train_bare(subject.trainer).weights):
            raise ConfigError("two runs of the given trainer differ; give it a seed")
        hint = "leave model, gradients, fields and random states as they are, or say phase = 'change' or 'decide'"
        raise Found(f"{what} differ from a run without the callback", hint)


def leaves_nothing(subject: Subject, folder: Path) -> None:
    """Check that a run leaves no threads, processes, open files, handlers or hooks behind, even if it fails."""
    bare = _bare(subject.trainer)
    before = Surroundings.now()
    # The first run imports modules and fills caches, which stay in the process. So make one run that is not compared.
    _things_after(subject, folder, subject.make(), fails=False)
    settled = Surroundings.now()
    for fails in (False, True):
        callback = subject.make()
        things, model = _things_after(subject, folder, callback, fails=fails)
        left = [
            f"{name}: {value!r}, not {bare.things.get(name)!r}"
            for name, value in things.items()
            if value != bare.things.get(name) and not (callback.phase == "change" and name.startswith("the mode of"))
        ]
        del callback
        if bare.is_freed and not _is_gone(model):
            left.append("the model, which something that outlives trainer and callback still references")
        left += settings_left(before) + more_left(settled)
        if left:
            when = "a run that failed" if fails else "a run"
            raise Found(
                f"after {when} these are left: {', '.join(left)}",
                "undo at on_train_end what was done at on_train_start, and at on_exception",
            )


@dataclass(frozen=True)
class _Bare:
    """The results of a run without callbacks, for comparison with runs of the callback under test.

    `checkpoint` is the path of the checkpoint that the run saved after step `SAVED_AT_STEP`.
    """

    weights: dict[str, Tensor]
    losses: list[str]
    outcome: str
    things: dict[str, Any]
    is_freed: bool
    checkpoint: str


def _train_bare(trainer: MakesTrainer) -> _Bare:
    folder = TemporaryDirectory(prefix="conformance-")
    atexit.register(folder.cleanup)
    with Scene(Subject(_no_callback, trainer=trainer), Path(folder.name)) as scene:
        scene.fit()
    watch = scene.watch
    things, model = model_things(scene.trainer.model, scene.trainer.optimizer), weakref.ref(scene.trainer.model)
    weights = scene.weights
    del scene
    return _Bare(weights, watch.losses, watch.outcome, things, _is_gone(model), watch.checkpoints[SAVED_AT_STEP])


_bare = cache(_train_bare)
"""Return the results of a run without callbacks, for comparison. The run is made once for each function that makes a trainer."""


def _no_callback() -> Callback:
    raise NotImplementedError


def _find_difference(watched: Scene, bare: _Bare) -> str:
    """Return as text what differs between the run `watched` and the run without callbacks, or an empty text if nothing differs."""
    if watched.watch.losses != bare.losses:
        return "the losses of the steps"
    if not same_weights(watched.weights, bare.weights):
        return "the weights"
    return "the run's outcome, and what comes of it," if watched.watch.outcome != bare.outcome else ""


def _new(folder: Path) -> Path:
    return Path(mkdtemp(dir=folder))


def _as_json(callback: Callback) -> tuple[str, dict[str, Any]]:
    """Return the callback's class and arguments as JSON text, and its state as it would be read from a checkpoint."""
    data = CallbackSpec.of(callback).to_dict()
    state = data.pop("state", {})
    try:
        written = json.dumps(data, sort_keys=True)
    except (TypeError, ValueError) as error:
        hint = "take plain options (an import path for a function or an object), and make the objects in the callback"
        raise Found(f"its options cannot be written as JSON: {error}", hint) from error
    return written, unflatten(*flatten(state))


def _make_two(subject: Subject) -> list[Callback]:
    both = [subject.make(), subject.make()]
    for callback, name in zip(both, ("one of them", "the other"), strict=True):
        callback.name = name
    return both


def _keeps_state(callback: Callback) -> bool:
    return type(callback).state_dict is not Callback.state_dict


def _fails(subject: Subject, folder: Path, event: str, step: int, error: BaseException) -> None:
    """Make a run in which `error` is raised at the given event and step, and check that the error reaches the caller."""

    def fail(ctx: Context) -> None:
        raise error

    caught: BaseException | None = None
    scene = Scene(subject, _new(folder), subject.make(), at=(event, step), act=fail)
    try:
        with scene:
            scene.fit()
    except (Planted, KeyboardInterrupt) as raised:
        caught = raised
    if scene.moments.has_come and caught is not error:
        raise Found(f"an exception that was raised at {event} came out as {caught!r}", "do not catch exceptions of other code")
    for note in getattr(error, "__notes__", ()):
        if "another error was raised" in note:
            raise Found(f"after an exception at {event}: {note}", "be ready for on_exception and on_run_end at any time")


def _compare_resumed(subject: Subject, folder: Path, whole: Scene) -> None:
    if SAVED_AT_STEP not in whole.watch.checkpoints:
        raise Found(
            f"the run ended before its checkpoint at step {SAVED_AT_STEP}",
            "give it options with which a run of 10 steps is not stopped",
        )

    def fail(ctx: Context) -> None:
        raise Planted("the run is interrupted")

    try:
        with Scene(subject, _new(folder), subject.make(), at=("on_train_step_start", _BROKEN_AT_STEP), act=fail) as broken:
            broken.fit()
    except Planted:
        pass
    path = broken.watch.checkpoints.get(SAVED_AT_STEP, "")
    if not Path(path).exists():
        raise Found("the checkpoint that another callback requested is gone", "delete only checkpoints that nothing else holds")
    with Scene(subject, broken.folder, subject.make(), resume=path) as resumed:
        resumed.fit()
    hint = "save what it needs in state_dict, and restore it; name values that vary anyway in Subject(varies=...)"
    _compare(subject, resumed, whole, "resumed, and uninterrupted: ", hint, after=SAVED_AT_STEP)


def _compare(subject: Subject, one: Scene, other: Scene, what: str, hint: str, *, after: int = 0) -> None:
    if one.watch.losses != other.watch.losses[after:]:
        raise Found(f"{what}the losses of the steps differ", hint)
    records = [steps_of(scene.watch.records, after=after) for scene in (one, other)]
    if differs := difference_of_records(subject, *records):
        raise Found(f"{what}{differs}", hint)
    if not same_weights(one.weights, other.weights):
        raise Found(f"{what}the weights at the end differ", hint)
    for state, others in zip(one.states, other.states, strict=True):
        if differs := difference_of_states(subject, state, others):
            raise Found(f"{what}{differs}", hint)


def _things_after(
    subject: Subject, folder: Path, callback: Callback | None, *, fails: bool
) -> tuple[dict[str, Any], weakref.ref[Any]]:
    """Train once. Return what is still attached to the model after training, such as hooks, and a weak reference to the model."""

    def fail(ctx: Context) -> None:
        raise Planted("on purpose")

    callbacks = [callback] if callback is not None else []
    try:
        with Scene(
            subject, _new(folder), *callbacks, at=("on_forward_end", _BROKEN_AT_STEP), act=fail if fails else None
        ) as scene:
            scene.fit()
    except Planted:
        pass
    return model_things(scene.trainer.model, scene.trainer.optimizer), weakref.ref(scene.trainer.model)


def _is_gone(model: weakref.ref[Any]) -> bool:
    gc.collect()
    return model() is None
