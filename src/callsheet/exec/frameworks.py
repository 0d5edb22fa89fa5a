"""Adds callsheet's callbacks to the trainers of frameworks, such as Lightning's `Trainer`, when a script starts their training."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from callsheet.exec import accelerate_loops, ignite_engines
from callsheet.exec.messages import log_failure

if TYPE_CHECKING:
    from callsheet.exec.observation import Observation

logger = logging.getLogger("callsheet")

Around = Callable[..., Any]
"""A function that replaces a framework's training function. Its arguments: observation, training function, arguments."""


class Frameworks:
    """Wraps the training methods of frameworks, to add a host (the adapter that calls our callbacks) to their trainers.

    Args:
        observation: makes the callbacks and names of the runs.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._undo: list[Callable[[], None]] = []
        self.actions: Mapping[str, Callable[[ModuleType], None]] = {module: self._wrap for module, *_ in _WRAPPED_METHODS}
        """For the name of each framework's module, the function to call when the module is imported."""

    def remove(self) -> None:
        """Restore the frameworks' own training methods."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, module: ModuleType) -> None:
        for name, owner_name, method, around in _WRAPPED_METHODS:
            if name == module.__name__:
                self._wrap_method(module, owner_name, method, around)

    def _wrap_method(self, module: ModuleType, owner_name: str, method: str, around: Around) -> None:
        owner: Any = getattr(module, owner_name, None) if owner_name else module
        given = getattr(owner, method, None)
        if owner is None or given is None:
            name = f"{owner_name}.{method}" if owner_name else method
            logger.warning("callsheet exec: %s has no %s, so its trainers are not observed", module.__name__, name)
            return
        setattr(owner, method, _wrapper(self._observation, given, around))
        self._undo.append(lambda: setattr(owner, method, given))


def _wrapper(observation: Observation, given: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """Return a function that calls `around`, which calls `given` to train. If `around` fails, `given` still runs exactly once."""

    @wraps(given)
    def called(*args: Any, **options: Any) -> Any:
        results: list[Any] = []
        errors: list[BaseException] = []

        @wraps(given)
        def train(*args: Any, **options: Any) -> Any:
            try:
                results.append(given(*args, **options))
            except BaseException as error:
                errors.append(error)
                raise
            return results[0]

        try:
            return around(observation, train, *args, **options)
        except Exception as error:
            fault = error
        if errors:
            raise errors[0]
        log_failure("the trainer cannot be observed", fault)
        return results[0] if results else given(*args, **options)

    return called


def _with_list(bridge: str, callbacks_of: Callable[[Any], list[Any]]) -> Around:
    """Return a function that adds a host (callsheet's adapter) to a trainer's callbacks, trains, and removes the host again.

    Args:
        bridge: the module that has the framework's `host`.
        callbacks_of: returns the trainer's list of callbacks.
    """

    def around(observation: Observation, train: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
        callbacks = callbacks_of(trainer)
        hosted = _host(observation, callbacks, bridge)
        if hosted is not None:
            callbacks.append(hosted)
        try:
            return _run_training(observation, hosted, lambda: train(trainer, *args, **options))
        finally:
            callbacks[:] = [each for each in callbacks if each is not hosted]

    return around


def _with_argument(bridge: str) -> Around:
    """Return a function that adds a host (callsheet's adapter) to the argument `callbacks` of a training function, and then trains.

    Args:
        bridge: the module that has the framework's `host`.
    """

    def around(observation: Observation, train: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            arguments = inspect.signature(train).bind(*args, **options).arguments
            given = arguments.get("callbacks")
        except (TypeError, ValueError):  # the script's arguments are invalid, so `train` will raise the right error
            return train(*args, **options)
        if given is not None and not isinstance(given, (list, tuple)):  # Keras' `CallbackList`, for example, cannot be extended
            return train(*args, **options)
        hosted = _host(observation, given or (), bridge, has_interval=False)
        if hosted is None:
            return _run_training(observation, None, lambda: train(*args, **options))
        named = {**arguments, "callbacks": [*(given or ()), hosted]}
        return _run_training(observation, hosted, lambda: train(**named))

    return around


def _composer(observation: Observation, train: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    hosted = _host(observation, trainer.state.callbacks, "callsheet.bridges.composer", has_interval=False)
    if hosted is None:
        return _run_training(observation, None, lambda: train(trainer, *args, **options))
    try:
        hosted.begin(trainer)
        return _run_training(observation, hosted, lambda: train(trainer, *args, **options))
    finally:
        hosted.close(trainer.state, trainer.logger)
        trainer.state.callbacks[:] = [each for each in trainer.state.callbacks if each is not hosted]


def _ultralytics(observation: Observation, train: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    owners = [getattr(each, "__self__", each) for functions in trainer.callbacks.values() for each in functions]
    if getattr(trainer, "ddp", False):  # the trainer starts worker processes and trains in them
        if observation.is_observed_otherwise(owners):
            return train(trainer, *args, **options)
        with _workers_under_exec(observation):
            return _run_training(observation, None, lambda: train(trainer, *args, **options))
    hosted = _host(observation, owners, "callsheet.bridges.ultralytics", has_interval=False)
    if hosted is not None:
        hosted.attach(trainer)
    return _run_training(observation, hosted, lambda: train(trainer, *args, **options))


@contextmanager
def _workers_under_exec(observation: Observation) -> Iterator[None]:
    """Make Ultralytics start its DDP workers under `callsheet exec` while the `with` block runs."""
    module = importlib.import_module("ultralytics.engine.trainer")
    given = module.generate_ddp_command

    def under_exec(trainer: Any) -> tuple[list[str], str]:
        command, file = given(trainer)
        try:
            place = command.index(file)
            return [*command[:place], "-m", "callsheet.exec", *observation.options(), *command[place:]], file
        except Exception as error:
            log_failure("the workers cannot be observed", error)
            return command, file

    module.generate_ddp_command = under_exec  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if module.generate_ddp_command is under_exec:  # restore the function, unless another library has replaced it since
            module.generate_ddp_command = given  # type: ignore[attr-defined]


def _host(observation: Observation, callbacks: Sequence[Any], bridge: str, *, has_interval: bool = True) -> Any:
    """Return a new host (callsheet's adapter) for a trainer. Return None if the script uses callsheet itself or the host cannot be made.

    Args:
        callbacks: the callbacks that the script has given to its trainer.
        bridge: the module that has the framework's `host`.
        has_interval: whether the framework has a log interval of its own.
    """
    from callsheet.exec.log_pace import FIRST_INTERVAL_STEPS, LogPace

    try:
        if observation.is_observed_otherwise(callbacks):
            return None
        steps = observation.log_interval or FIRST_INTERVAL_STEPS
        options = {} if has_interval else {"log_interval": steps}
        made = importlib.import_module(bridge).host(
            observation.make(LogPace(steps)),
            strict=False,
            run_name=observation.next_name(),
            runs_folder=observation.runs_folder,
            **options,
        )
        made.only_observes = True
    except Exception as error:
        log_failure("the trainer cannot be observed", error)
        return None
    return made


def _run_training(observation: Observation, hosted: Any, train: Callable[[], Any]) -> Any:
    """Call `train()`. If it raises an error, end the host's run as failed, and raise the error again."""
    with observation.training():
        try:
            return train()
        except BaseException as error:
            if hosted is not None:
                hosted._fail(error)
            raise


_WRAPPED_METHODS: Sequence[tuple[str, str, str, Around]] = (
    (
        "transformers.trainer",
        "Trainer",
        "train",
        _with_list("callsheet.bridges.huggingface", lambda trainer: trainer.callback_handler.callbacks),
    ),
    (
        "lightning.pytorch.trainer.trainer",
        "Trainer",
        "fit",
        _with_list("callsheet.bridges.lightning", lambda trainer: trainer.callbacks),
    ),
    (
        "pytorch_lightning.trainer.trainer",
        "Trainer",
        "fit",
        _with_list("callsheet.bridges.lightning", lambda trainer: trainer.callbacks),
    ),
    ("composer.trainer.trainer", "Trainer", "fit", _composer),
    ("keras.src.backend.torch.trainer", "TorchTrainer", "fit", _with_argument("callsheet.bridges.keras")),
    ("torchtnt.framework.fit", "", "fit", _with_argument("callsheet.bridges.torchtnt")),
    ("torchtnt.framework.train", "", "train", _with_argument("callsheet.bridges.torchtnt")),
    ("ultralytics.engine.trainer", "BaseTrainer", "train", _ultralytics),
    ("ignite.engine.engine", "Engine", "run", ignite_engines.run_engine),
    ("accelerate.accelerator", "Accelerator", "prepare_optimizer", accelerate_loops.prepare_optimizer),
    ("accelerate.accelerator", "Accelerator", "log", accelerate_loops.log),
    ("accelerate.data_loader", "DataLoaderShard", "__iter__", accelerate_loops.iterate),
    ("accelerate.data_loader", "DataLoaderDispatcher", "__iter__", accelerate_loops.iterate),
    ("accelerate.data_loader", "SkipDataLoader", "__iter__", accelerate_loops.iterate),
)
"""Each method that is wrapped: its module; its class, or nothing for a function; its name; and the function that is called instead."""
