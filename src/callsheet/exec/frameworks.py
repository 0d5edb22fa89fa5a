"""Attaches the hosts of frameworks to the trainers that a script makes."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from callsheet.bridges.host_base import HostBase
from callsheet.exec.messages import log_failure

if TYPE_CHECKING:
    from callsheet.exec.observation import Observation

logger = logging.getLogger("callsheet")

USES_CALLSHEET = "this script uses callsheet itself, so it runs as it is"

Around = Callable[..., Any]
"""Called instead of a trainer's method, with the observation, the method, and the method's arguments."""


def _with_list(bridge: str, callbacks_of: Callable[[Any], list[Any]]) -> Around:
    """Return the function for a trainer that has a list of callbacks.

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
            return _trained(observation, hosted, lambda: train(trainer, *args, **options))
        finally:
            callbacks[:] = [each for each in callbacks if each is not hosted]

    return around


def _keras(observation: Observation, fit: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
    given = options.get("callbacks")
    if given is not None and not isinstance(given, (list, tuple)):  # a `CallbackList`, to which nothing can be added here
        return fit(model, *args, **options)
    hosted = _host(observation, given or (), "callsheet.bridges.keras", log_interval=observation.log_interval)
    if hosted is not None:
        options["callbacks"] = [*(given or ()), hosted]
    return _trained(observation, hosted, lambda: fit(model, *args, **options))


def _host(observation: Observation, callbacks: Sequence[Any], bridge: str, **options: Any) -> Any:
    """Return a new host, or None if the script has one itself, or none can be made."""
    if any(isinstance(each, HostBase) for each in callbacks):
        observation.say_once(USES_CALLSHEET)
        return None
    try:
        if observation.is_observed_otherwise():
            return None
        host = importlib.import_module(bridge).host
        made = host(
            observation.make(), strict=False, run_name=observation.next_name(), runs_folder=observation.runs_folder, **options
        )
        made.contains_errors = True
    except Exception as error:
        log_failure(logger, "the trainer cannot be observed", error)
        return None
    return made


def _trained(observation: Observation, hosted: Any, train: Callable[[], Any]) -> Any:
    """Let the trainer train. If an error ends that, end the run as failed."""
    with observation.training():
        try:
            return train()
        except BaseException as error:
            if hosted is not None:
                hosted._fail(error)
            raise


_METHODS: dict[str, tuple[tuple[str, str, Around], ...]] = {
    "transformers.trainer": (
        ("Trainer", "train", _with_list("callsheet.bridges.huggingface", lambda trainer: trainer.callback_handler.callbacks)),
    ),
    "lightning.pytorch.trainer.trainer": (
        ("Trainer", "fit", _with_list("callsheet.bridges.lightning", lambda trainer: trainer.callbacks)),
    ),
    "keras.src.backend.torch.trainer": (("TorchTrainer", "fit", _keras),),
}
"""By module: the class, the method that trains, and the function that is called instead."""


class Frameworks(MetaPathFinder):
    """Wraps the methods that train, in the frameworks that are imported or will be."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Wrap the methods of imported frameworks, and watch the imports."""
        for name in _METHODS:
            if name in sys.modules:
                self._wrap(sys.modules[name])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Restore the methods, and no longer watch the imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._undo:
            self._undo.pop()()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that the other finders find for one of the frameworks' modules, with a loader that wraps the methods."""
        if name not in _METHODS:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _WrappingLoader(spec.loader, self._wrap)
                return spec
        return None

    def _wrap(self, module: ModuleType) -> None:
        for owner_name, method, around in _METHODS[module.__name__]:
            owner = getattr(module, owner_name, None)
            given = getattr(owner, method, None)
            if owner is None or given is None:
                logger.warning(
                    "callsheet exec: %s has no %s.%s, so its trainers are not observed", module.__name__, owner_name, method
                )
                continue
            wrapper = _wrapper(self._observation, given, around)
            setattr(owner, method, wrapper)
            self._undo.append(lambda owner=owner, method=method, given=given: setattr(owner, method, given))  # type: ignore[misc]


def _wrapper(observation: Observation, given: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @wraps(given)
    def called(*args: Any, **options: Any) -> Any:
        return around(observation, given, *args, **options)

    return called


class _WrappingLoader(Loader):
    """Loads a module with the loader it has, and then calls a function with the module."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
