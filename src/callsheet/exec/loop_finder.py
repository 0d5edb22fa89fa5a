"""Recognizes the training loop of a script: the first optimizer that steps, and the model whose parameters it updates."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from callsheet.bridges.backward_watch import value_of
from callsheet.bridges.torch_hooks import not_compiled, untraced
from callsheet.errors import is_from_signal_handler
from callsheet.exec.messages import log_failure, warn
from callsheet.run.copies import without_additions
from callsheet.trainer.tasks import counts_of

if TYPE_CHECKING:
    from callsheet.exec.bare_loop import BareLoop
    from callsheet.exec.observation import Observation

STEPS_OF_A_NEW_LOOP = 20
"""After so many steps of other optimizers, without a step of the observed optimizer, the loop of a new optimizer is observed instead.

A script may train several models one after the other, such as the folds of a cross-validation. In one loop with several optimizers,
such as that of a GAN, the observed optimizer steps more often than that.
"""


MAX_LOOPS = 20
"""The largest number of observed loops in a script. The search also stops if the models of so many optimizers are not found.

Some scripts make a new model and optimizer thousands of times, as in federated learning. A run for each would make the script slow.
"""


class _Fetched(NamedTuple):
    """The latest batch of a dataloader. `batch` is None after the end of the data. It is also None while a loop is observed."""

    batch: Any
    loader: weakref.ref[Any]
    iterator: weakref.ref[Any]


class LoopFinder:
    """Wraps the functions of torch that every loop calls, to recognize and observe loops. One loop is observed at a time.

    Wrapped are `Tensor.backward` (only until the first optimizer steps), the dataloaders' iteration, `GradScaler.step`,
    `clip_grad_norm_`, `zero_grad`, `Module.eval` and the function in which TorchScript compiles a module. No wrapper raises an error
    of its own.

    Args:
        observation: creates a `BareLoop` for each recognized loop. If this fails, no further loop is observed.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._loop: BareLoop | None = None
        self._is_over = False
        self.is_paused = False
        """Whether a framework's trainer is training now. A host observes this trainer, so no loop is searched in the meantime."""
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.Lock()  # held while a loop is recognized, so that two threads do not recognize two loops
        self._found = self._not_found = 0  # number of recognized loops, and number of optimizers whose model was not found
        # How many steps other optimizers have made since the observed optimizer's last step, and the number of that last step.
        self._others = self._others_since = 0
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers whose loop was observed or cannot be observed
        self._loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the dataloader of each iterator
        # A reference to the iterator that yielded the observed loop's last batch; `_nothing` if no loop is observed.
        self._training_iterator: Callable[[], Any] = _nothing
        self._latest: _Fetched | None = None  # the last batch that was fetched, but not by the observed loop
        self._loss: Tensor | None = None  # the sum of the losses since the last `zero_grad`, until the first loop is recognized
        self._counted: _Fetched | None = None  # the last batch whose samples are in `_counts`
        self._counts = (0, 0)  # number of samples and tokens of the losses in `_loss`
        self._is_limit_logged = False  # whether it was logged that further loops are not observed
        self._is_in_backward = False
        self._is_inside_loader = False  # whether a dataloader of a framework is fetching from the torch dataloader inside it
        self._scaler: Any = None

    def install(self) -> None:
        """Wrap the functions of torch that a training loop calls, such as `Tensor.backward` and `Optimizer.zero_grad`."""
        self._restore_backward = self._wrap(Tensor, "backward", self._backward)
        self._wrap(DataLoader, "__iter__", self._iterate)
        self._replace("__next__", self._fetching(_BaseDataLoaderIter.__next__), _BaseDataLoaderIter)
        self._wrap(torch.amp.GradScaler, "step", self._step_scaler)
        self._replace("zero_grad", self._zeroing(Optimizer.zero_grad), Optimizer)
        self._wrap(nn.Module, "zero_grad", self._zero_grad)
        self._wrap(nn.Module, "eval", self._eval)
        self._wrap(torch.nn.utils.clip_grad, "clip_grad_norm_", self._clip, also=torch.nn.utils)
        # `torch.jit.script` and `torch.jit.trace` inspect their caller, so wrap `create_script_module`, which they call.
        if hasattr(getattr(torch.jit, "_recursive", None), "create_script_module"):  # private: not in all versions of torch
            self._wrap(torch.jit._recursive, "create_script_module", self._script)
        self._undo.append(register_optimizer_step_pre_hook(self._steps).remove)

    def stop(self) -> None:
        """Stop recognizing loops. This is called in a child process that the script has forked."""
        self._is_over, self._loop, self._training_iterator = True, None, _nothing

    def remove(self) -> None:
        """Restore torch's original functions."""
        self._is_over = True
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any], *, also: Any = None) -> Callable[[], None]:
        """Replace `owner.name` by a function that calls `around`. Return a function that restores the original function.

        `also` is another object that has the same function under this name.
        """
        given = getattr(owner, name)

        @wraps(given)
        def wrapper(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():  # call torch directly, because Dynamo must not trace callsheet's code
                return given(*args, **options)
            return around(given, *args, **options)

        return self._replace(name, wrapper, owner, *([also] if also is not None else []))

    def _replace(self, name: str, ours: Callable[..., Any], *owners: Any) -> Callable[[], None]:
        """Replace the function `name`, which all `owners` have, by `ours`. Return a function that restores the original function."""
        given = getattr(owners[0], name)

        def restore() -> None:
            for each in owners:
                if getattr(each, name) is ours:  # restore the function, unless another library has wrapped it since
                    setattr(each, name, given)

        for each in owners:
            setattr(each, name, ours)
        self._undo.append(restore)
        return restore

    # --- the wrappers: each is called with the function of torch and its arguments ---

    @not_compiled
    def _backward(self, given: Callable[..., Any], loss: Tensor, *args: Any, **options: Any) -> Any:
        # Observe only the outer call: under `torch.set_default_device`, for example, `Tensor.backward` calls itself again.
        if self._is_over or self._is_in_backward or loss.numel() != 1:
            return given(loss, *args, **options)
        self._is_in_backward = True
        try:
            given(loss, *args, **options)
            if (value := value_of(loss)) is not None:
                self._loss = value if self._loss is None else self._loss + value
            self._count()
        finally:
            self._is_in_backward = False
        return None

    def _count(self) -> None:
        """Count the samples and tokens of the latest batch, unless they were counted already."""
        latest = self._latest
        if latest is None or latest.batch is None or latest is self._counted:
            return
        try:
            samples, tokens = counts_of(latest.batch)
            self._counted, self._counts = latest, (self._counts[0] + samples, self._counts[1] + tokens)
        except Exception as error:
            self._is_over = True
            if is_from_signal_handler(error):
                raise
            log_failure("the loop cannot be observed", error)

    def batches(self, given: Callable[[Any], Any], loader: Any) -> Iterator[Any]:
        """Yield the batches of `loader`, a framework's dataloader. `given(loader)` returns an iterator that fetches them from a torch dataloader.

        Each batch is observed when the script gets it, because the framework may fetch batches ahead.
        """
        iterator, fetch = self._iterate(given, loader), self._fetching(self._fetch_outside)
        try:
            while True:
                try:
                    batch = fetch(iterator)
                except StopIteration:
                    return
                yield batch
        finally:
            iterator.close()

    def _fetch_outside(self, iterator: Any) -> Any:
        self._is_inside_loader = True
        try:
            return next(iterator)
        finally:
            self._is_inside_loader = False

    def _iterate(self, given: Callable[..., Any], loader: Any) -> Any:
        if self._is_inside_loader:
            return given(loader)
        loop = self._loop
        if loop is not None:
            loop.watch_calls()
            if loop.is_of_training(loader):
                loop.loader_begins()
        iterator = given(loader)
        self._loaders[iterator] = weakref.ref(loader)
        return iterator

    def _fetching(self, given: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that fetches a batch with `given`. It is a closure, because a method would be slower."""

        @partial(not_compiled, recursive=False)
        @wraps(given)
        def fetch(iterator: Any) -> Any:
            if self._training_iterator() is iterator:
                return self._loop.fetch(given, iterator)  # type: ignore[union-attr]
            if self._is_over or self.is_paused or self._is_inside_loader:
                return given(iterator)
            return self._fetch_from_other(given, iterator)

        return fetch

    def _fetch_from_other(self, given: Callable[[Any], Any], iterator: Any) -> Any:
        """Fetch a batch from an iterator. Whether the observed loop trains on the batches of this iterator is not known yet."""
        loop, reference = self._loop, self._loaders.get(iterator)
        # In `for batch in DataLoader(...)`, only the iterator stays alive, so the iterator identifies the data.
        loader = iterator if reference is None or reference() is None else reference()
        if loop is not None and loop.is_of_training(loader):
            self._training_iterator = weakref.ref(iterator)
            return loop.fetch(given, iterator)
        try:
            batch = given(iterator)
        except StopIteration:
            if self._latest is not None and self._latest.iterator() is iterator:
                self._latest = self._latest._replace(batch=None)
            raise
        if torch.is_grad_enabled():
            self._latest = _Fetched(batch if loop is None else None, weakref.ref(loader), weakref.ref(iterator))
            if loop is not None:
                loop.other_fetched(loader, batch)
        return batch

    @partial(not_compiled, recursive=False)
    def _step_scaler(self, given: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        self._scaler = scaler
        found = given(scaler, optimizer, *args, **options)
        if self._loop is not None and self._loop.optimizer is optimizer:
            self._loop.scaler_has_stepped(scaler)
        return found

    def _zeroing(self, given: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `given` (`Optimizer.zero_grad`), and notifies the observed loop if the loop's gradients are zeroed."""

        @partial(not_compiled, recursive=False)
        @wraps(given)
        def zero_grad(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
            if (loop := self._loop) is None or loop.watch.total is not None:
                self._discard_gradients(optimizer)
            return given(optimizer, *args, **options) if args or options else given(optimizer)

        return zero_grad

    @not_compiled
    def _zero_grad(self, given: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> Any:
        self._discard_gradients(module)
        return given(module, *args, **options)

    @not_compiled
    def _discard_gradients(self, owner: Optimizer | nn.Module) -> None:
        loop = self._loop
        if loop is None:
            self._loss, self._counts, self._counted = None, (0, 0), None
        elif loop.watch.total is not None and (owner is loop.optimizer or _first_of(owner) in loop.parameters):
            loop.gradients_are_discarded()

    @partial(not_compiled, recursive=False)
    def _eval(self, given: Callable[..., Any], module: nn.Module) -> Any:
        if self._loop is not None:
            self._loop.watch_calls()
        return given(module)

    @partial(not_compiled, recursive=False)
    def _clip(self, given: Callable[..., Any], parameters: Any, *args: Any, **options: Any) -> Any:
        if self._loop is None:
            return given(parameters, *args, **options)
        if not isinstance(parameters, (Tensor, list, tuple)):
            parameters = list(parameters)  # make a list, because a generator can be read only once
        first = parameters if isinstance(parameters, Tensor) else next(iter(parameters), None)
        if first not in self._loop.parameters:
            return given(parameters, *args, **options)
        return self._loop.clip(lambda: given(parameters, *args, **options))

    def _script(self, given: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> Any:
        # TorchScript would compile callsheet's hooks with the module, so leave the hooks out.
        with without_additions(*nn.Module.modules(module)):
            return given(module, *args, **options)

    # --- recognizing a loop ---

    @untraced
    def _steps(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before an optimizer's step. Recognize the loop at the first step, and report later steps to the loop."""
        loop = self._loop
        if loop is not None and loop.optimizer is optimizer:
            if (loop.unreported.counts is None and not loop.step.is_open) or len(args) > 1 or kwargs:
                loop.optimizer_begins(args, kwargs)
            return
        if self._is_over or self.is_paused or not self._lock.acquire(blocking=False):
            return
        try:
            if loop is not None:
                loop.other_optimizer_steps()
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._recognize(optimizer, has_closure=closure is not None)
        except Exception as error:
            self._is_over = True
            if is_from_signal_handler(error):
                raise
            log_failure("the loop cannot be observed", error)
        finally:
            self._lock.release()

    def _recognize(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        before = self._loop
        if optimizer in self._seen or (before is not None and not self._count_other_step()):
            return
        self._seen.add(optimizer)
        if self._found >= MAX_LOOPS or self._not_found >= MAX_LOOPS:
            if not self._is_limit_logged and self._found:
                self._is_limit_logged = True
                warn(f"{MAX_LOOPS} loops of this script were observed; further ones are not")
            return
        model = model_of(optimizer)
        if model is None:
            self._not_found += 1
            if before is None:
                self._observation.say_once(
                    f"no torch.nn.Module was found that has the parameters of {type(optimizer).__name__}, so its loop is not observed; the "
                    "script continues. Put them into a module, or use callsheet.attach"
                )
            return
        if before is None:
            self._restore_backward()
        else:
            warn(
                f"other optimizers have stepped {STEPS_OF_A_NEW_LOOP} times since the observed one, so the loop of a new "
                f"{type(optimizer).__name__} is observed from now on"
            )
        loss, latest, counted, self._loss, self._latest, self._counted = self._loss, self._latest, self._counted, None, None, None
        counts, self._counts = self._counts, (0, 0)
        # The first step used the last batch for which a loss was computed. Any later batch was fetched ahead.
        used = latest if counted is None else counted
        scaler = self._scaler
        if loss is not None and scaler is not None and scaler.is_enabled() and scaler._scale is not None:
            loss = loss / scaler._scale
        loop = self._observation.begin_loop(model, optimizer, scaler, used.loader() if used is not None else None)
        self._is_over = loop is None
        if loop is not None:
            self._found += 1
            self._loop, self._training_iterator = loop, _nothing
            loop.begin(loss, used.batch if used is not None else None, counts=counts, has_closure=has_closure)
            if counted is None or latest is None or latest is counted:
                return
            # `weakref.ref` returns the same object for the same iterator, so references can be compared even if the iterator was deleted.
            is_same_iteration, loader = latest.iterator is counted.iterator, latest.loader()
            if latest.batch is not None and loader is not None:
                loop.keep_early_batch(loader, latest.batch, is_same_iteration=is_same_iteration)
            elif latest.batch is None and is_same_iteration:
                loop.end_iteration()

    def _count_other_step(self) -> bool:
        """Count a step of an optimizer that is not observed. Return whether there were enough such steps to assume a new loop."""
        loop = self._loop
        if loop is not None and self._others_since != loop.steps:
            self._others, self._others_since = 0, loop.steps
        self._others += 1
        if self._others < STEPS_OF_A_NEW_LOOP or (loop is not None and loop.guard.has_failed):
            return False
        self._others = 0
        return True


def _nothing() -> None:
    """Return None, like a weak reference to an object that no longer exists."""


def _first_of(owner: Any) -> Any:
    """Return the first parameter of the optimizer or module, or None."""
    if isinstance(owner, nn.Module):
        return next(nn.Module.parameters(owner), None)
    return next((each for group in owner.param_groups for each in group["params"]), None)


def model_of(optimizer: Optimizer) -> nn.Module | None:
    """Return the module that the loop calls: the root module whose parameters are most nearly those of the optimizer.

    A root module is inside no other module. Return the one with the most parameters of the optimizer. If several have equally many,
    return the one with the fewest other parameters, or the oldest of these. Return None if no module has any of the parameters.
    """
    wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
    best = _best_roots(wanted)
    if len(best) > 1:
        # A module in `best` may be garbage that Python has not freed yet, such as a module that `torch.jit.script` has converted.
        best.clear()
        gc.collect()
        best = _best_roots(wanted)
    return best[0] if best else None


def _best_roots(wanted: set[int]) -> list[nn.Module]:
    """Return the root modules with the most parameters from `wanted`, a set of ids.

    If several have equally many, return those with the fewest other parameters.
    """
    best: list[nn.Module] = []
    best_score = (0, 0)
    for module in _roots():
        parameters = {id(each) for each in nn.Module.parameters(module)}  # not `module.parameters`, which a script may override
        score = (len(wanted & parameters), -len(parameters))
        if score[0] and (not best or score >= best_score):
            best = [*best, module] if score == best_score else [module]
            best_score = score
    return best


def _roots() -> Iterator[nn.Module]:
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in each.__dict__]
    inside = {id(child) for module in modules for child in module._modules.values() if child is not None}
    yield from (module for module in modules if id(module) not in inside)
