"""What a loop does not tell, heard from PyTorch itself: the model's forward, the loss's backward, the optimizer's step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from callsheet.bridges.copies import add_hook
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.context import Context

logger = logging.getLogger("callsheet")

_ORIGINAL_BACKWARD: Callable[..., None] = Tensor.backward
_watches: list[
    BackwardWatch
] = []  # the latest made last: it is asked first, so that a run within another's step has its own losses
_backward = _ORIGINAL_BACKWARD  # what stands behind ours
_stands = False  # whether ours does, as far as we know: somebody may stand before it by now, who calls it


class InertHooks:
    """The owner of hooks in a copy of a model: whoever calls the copy is not the loop, so all that it is asked is nothing, and no."""

    def __getattr__(self, name: str) -> InertHooks:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> None: ...


class NotCopied:
    """The owner of hooks in a model; it is not copied, nor pickled, with the model."""

    is_inert: bool = False
    """Whether who calls the model is not the loop, as with every copy."""

    def __reduce__(self) -> tuple[type[InertHooks], tuple[()]]:
        return InertHooks, ()


class Hook:
    """One of torch's hooks, registered only while it is wanted: a model with hooks is called more slowly. Copies of the owner have none.

    Args:
        register: the method of a model or an optimizer that registers it.
    """

    def __init__(self, register: Callable[..., Any]) -> None:
        self._register = register
        self._remove: Callable[[], None] = lambda: None
        self.stands = False
        """Whether it does."""

    def install(self, is_wanted: bool, function: Callable[..., Any]) -> None:
        """Put it up or take it away, if it is not so; the function is not kept here, whose owner keeps this."""
        if is_wanted and not self.stands:
            self._remove, self.stands = add_hook(self._register, function), True
        elif not is_wanted:
            self.remove()

    def remove(self) -> None:
        """Take it away, if it stands."""
        if self.stands:
            self._remove()
            self.stands = False


def start_forward(driver: LifecycleDriver, ctx: Context) -> None:
    """The loop calls the model within a microbatch. A forward that follows a backward begins the step's next microbatch: a loop may take
    several of what the host has told as one."""
    parts = driver.parts
    microbatch = parts["microbatch"]
    if microbatch.done == len(microbatch.sequence):
        if parts["backward"].is_open:
            return  # computed again for the backward, as with activation checkpointing
        given = ctx.microbatch if ctx.has("microbatch") else None
        driver.end("microbatch")
        ctx.microbatch = given
        driver.start("microbatch")
        if ctx.microbatch is not given:
            ctx.microbatch = given  # which the loop has had since the step began
            driver.say_once(
                "A callback has replaced ctx.microbatch in a loop that takes several microbatches of one batch. The loop has the batch "
                "already, so only what replaces the first microbatch of a step is used. Replace ctx.batch at on_fetch_end instead."
            )
    driver.start("forward")


class ModelHooks(NotCopied):
    """Tells the forward of a model in training, and its outputs, which a callback may replace; other calls of it are not the loop's.

    They stand in the model only between `listen(True)` and `listen(False)`.
    """

    def __init__(self, driver: LifecycleDriver, ctx: Context, model: nn.Module) -> None:
        self._driver = driver
        self._ctx = ctx
        self._microbatch = driver.parts["microbatch"]
        self._before, self._after = Hook(model.register_forward_pre_hook), Hook(model.register_forward_hook)

    def listen(self, has_listeners: bool) -> None:
        """Stand in the model, or leave it as it was."""
        self._before.install(has_listeners, self._begins)
        self._after.install(has_listeners, self._ends)

    def _begins(self, model: nn.Module, inputs: Any) -> None:
        try:
            if self._microbatch.is_open and model.training and torch.is_grad_enabled():
                start_forward(self._driver, self._ctx)
        except Exception as error:
            self._driver.give_up(error)

    def _ends(self, model: nn.Module, inputs: Any, outputs: Any) -> Any:
        driver = self._driver
        try:
            if driver.is_open("forward"):
                ctx = self._ctx
                ctx.outputs = outputs
                driver.start("loss")  # which ends the forward
                return ctx.outputs
        except Exception as error:
            driver.give_up(error)
        return outputs

    def remove(self) -> None:
        """Leave the model as it was."""
        self.listen(False)


class JudgingHooks(NotCopied):
    """Tells the forward of a model in evaluation or prediction, and its outputs, which a callback may replace.

    They stand in the model only between `listen(True)` and `listen(False)`.

    Args:
        kind: `eval`, `test` or `predict`.
    """

    def __init__(self, driver: LifecycleDriver, ctx: Context, model: nn.Module, *, kind: str = "eval") -> None:
        self._driver = driver
        self._ctx = ctx
        self._step, self._forward = f"{kind}_step", f"{kind}_forward"
        self._before, self._after = Hook(model.register_forward_pre_hook), Hook(model.register_forward_hook)

    def listen(self, has_listeners: bool) -> None:
        """Stand in the model, or leave it as it was."""
        self._before.install(has_listeners, self._begins)
        self._after.install(has_listeners, self._ends)

    def _begins(self, model: nn.Module, inputs: Any) -> None:
        try:
            if not model.training and self._driver.is_open(self._step):
                self._driver.start(self._forward)
        except Exception as error:
            self._driver.give_up(error)

    def _ends(self, model: nn.Module, inputs: Any, outputs: Any) -> Any:
        try:
            if self._driver.is_open(self._forward):
                self._ctx.outputs = outputs
                self._driver.end(self._forward)
                return self._ctx.outputs
        except Exception as error:
            self._driver.give_up(error)
        return outputs

    def remove(self) -> None:
        """Leave the model as it was."""
        self.listen(False)


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], around: Callable[..., Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of an optimizer's step, with `around` called in the closure's place and the closure before its arguments.

    None where the step has no closure. The arguments are as a step hook of torch's gets them, the optimizer first.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    given = partial(around, closure)
    return ((args[0], given, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": given})


class OptimizerHooks:
    """Tells the optimizer's step; all of the gradients are there when it begins.

    The forward and the backward of a closure belong to the step that the optimizer is given it in: the optimizer's step is told to
    begin behind the closure's first evaluation. Where the optimizer evaluates it several times, the last loss is the step's.

    Args:
        optimizers: those that the loop steps, the first one first and the last one last.
        asks: whether the host asks for `has_stepped` also where nobody reads what a step leaves.
        watch: where the loop's losses are summed.
    """

    def __init__(
        self, driver: LifecycleDriver, *optimizers: Optimizer, asks: bool = True, watch: BackwardWatch | None = None
    ) -> None:
        self._driver = driver
        self._step, self._clip, self._own = (driver.parts[name] for name in ("train_step", "clip_gradients", "optimizer_step"))
        self.has_stepped = False
        """Since this was last set to False."""
        self._asks = asks
        self._watch = watch
        self._is_given_closures = self._has_begun = False
        self._is_removed = False
        self._kept: Sequence[Hook] = ()  # torch is iterating over the hooks that these are among
        self._before = [Hook(each.register_step_pre_hook) for each in optimizers[:1]]
        self._after = [Hook(each.register_step_post_hook) for each in optimizers[-1:]]
        self.listen(True)

    def listen(self, is_read: bool) -> None:
        """Stand in the optimizer, as far as is needed for steps that somebody reads, or that nobody does."""
        for hook in self._before:
            hook.install(is_read or self._is_given_closures, self._begins)
        for hook in self._after:
            hook.install(is_read or self._asks, self._ends)

    def _begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if self._step.is_open:
                if (len(args) > 1 or kwargs) and (given := with_closure(args, kwargs, self._evaluate)) is not None:
                    self._is_given_closures, self._has_begun = True, False
                    if self._watch is not None:
                        self._watch.begin_closure()
                    return given
                self._begin()
        except Exception as error:
            self._fail(error, self._before, optimizer._optimizer_step_pre_hooks, self._begins)
        return None

    def _begin(self) -> None:
        if not self._clip.has_no_listeners:
            self._driver.tell("clip_gradients")  # whether or not the loop has clipped them
        own = self._own
        if not own.has_no_listeners:
            self._driver.start("optimizer_step")
        elif own.before_start is not None and self._driver.is_read:  # as the narrator would, without a call of it at every step
            own.before_start()

    def _evaluate(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the closure's place."""
        loss = closure(*args, **kwargs) if self._watch is None else self._watch.evaluate(closure, *args, **kwargs)
        try:
            if not self._has_begun:
                self._has_begun = True
                if self._step.is_open:
                    self._begin()
        except Exception as error:
            self._driver.give_up(error)
        return loss

    def _ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if self._step.is_open:
                self.has_stepped = True
                if len(args) > 1 or kwargs:
                    self._end_with_closure(args, kwargs)
                if not self._own.has_no_listeners:
                    self._driver.end("optimizer_step")
        except Exception as error:
            self._fail(error, self._after, optimizer._optimizer_step_post_hooks, self._ends)

    def _fail(
        self, error: Exception, ours: Sequence[Hook], hooks: dict[int, Callable[..., Any]], own: Callable[..., Any]
    ) -> None:
        """Give up inside one of the hooks, over which torch is iterating."""
        self._kept = ours
        try:
            self._driver.give_up(error)
        except BaseException:  # torch iterates no further
            if self._is_removed:
                for hook in ours:
                    hook.remove()
            raise
        else:
            for hook in ours:
                _remove_after_calls(hooks, own, hook.remove)
        finally:
            self._kept = ()

    def _end_with_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_given_closures:
            if not self._has_begun:  # the optimizer has not evaluated it
                self._begin()
        elif (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            # Nobody reads the steps, and there was no hook before this one. The loss in a checkpoint is the last all the same.
            self._is_given_closures = True
            for hook in self._before:
                hook.install(True, self._begins)

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        self._is_removed = True
        for hook in (*self._before, *self._after):
            if hook not in self._kept:
                hook.remove()


def _remove_after_calls(hooks: dict[int, Callable[..., Any]], own: Callable[..., Any], remove: Callable[[], None]) -> None:
    """Call `remove` when torch has called the last of `hooks`: until then it iterates over them, and a key may not be removed."""
    last = next(reversed(hooks))
    theirs = hooks[last]
    if theirs == own:
        remove()
        return

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return theirs(*args, **kwargs)
        finally:
            if last in hooks:
                hooks[last] = theirs
            remove()

    hooks[last] = called  # replacing a value is allowed


class BackwardWatch:
    """Tells the loss, which a callback may replace, and its backward.

    Torch has no hook that knows what `backward` was called on, so `Tensor.backward` is another function between `listen(True)`, which
    stands from the beginning, and `listen(False)`. Calls from other threads, and on what is no scalar, go through as they are.

    Args:
        scaler: the `torch.amp.GradScaler` by which the loop scales the loss, which is then told without the scale.
    """

    def __init__(self, driver: LifecycleDriver, ctx: Context, scaler: Any = None) -> None:
        self._driver = driver
        self._ctx = ctx
        self._scaler = scaler
        self._backward = driver.parts["backward"]
        self._thread = get_ident()
        self.is_on = False
        """Whether the loop is within a step."""
        self.total: Tensor | None = None
        """The sum of the losses since this was last set to None, detached."""
        self.is_in_closure = False
        """Whether an optimizer evaluates a closure, perhaps again: then a loss counts behind the step's backward, too."""
        self._before_closure: Tensor | None = None
        self._listens = False
        _watches.append(self)
        self.listen(True)

    @property
    def reader(self) -> Callable[[], Tensor | None]:
        """Gives the total; no function of Python's own, since every step calls it."""
        return partial(getattr, self, "total")

    def listen(self, is_read: bool) -> None:
        """To `backward`, where anybody reads the loss or hears of it, or to nothing: where no run does, it is left as it was."""
        self._listens = is_read
        if not is_read:
            self.total = None
        _stand(any(watch._listens for watch in _watches))

    def remove(self) -> None:
        """Listen no more; may be called twice."""
        if self in _watches:
            _watches.remove(self)
        self.listen(False)

    def begin_step(self) -> None:
        """No loss has been summed yet."""
        self.total = None

    def begin_closure(self) -> None:
        """The optimizer is given a closure: what was summed before is of the loop's own backwards."""
        self._before_closure = self.total

    def evaluate(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a closure of the optimizer's. The losses of an earlier evaluation in this step count no more, if this one has any."""
        earlier = self.total
        self.begin_step()
        was_on, self.is_in_closure, self.is_on = self.is_on, True, True
        try:
            return closure(*args, **kwargs)
        finally:
            self.is_in_closure, self.is_on = False, was_on
            if self.total is None:
                self.total = earlier
            elif self._before_closure is not None:
                try:
                    self.total = self._before_closure + self.total
                except Exception as error:
                    self._driver.give_up(error)

    def run(self, loss: Tensor, *args: Any, **options: Any) -> bool:
        """Tell it and go backward, where it is the loop's and somebody listens; whether it was."""
        if not self._listens or loss.dim() or get_ident() != self._thread:
            return False
        has_listeners, given = not self._backward.has_no_listeners, loss
        try:
            scaler, scale, told = self._scaler, None, loss
            if scaler is not None and scaler.is_enabled() and scaler._scale is not None:
                scale = scaler._scale
                told = loss / scale
            if has_listeners:
                driver, ctx = self._driver, self._ctx
                if self._backward.is_open:
                    return False
                if driver.is_open("microbatch"):
                    driver.start("loss")
                    ctx.loss = told
                    driver.start("backward")  # which ends the loss
                    if ctx.loss is not told:
                        told = ctx.loss
                        given = told if scale is None else told * scale
                elif not self.is_in_closure:
                    return False
            value = told.detach()
            self.total = value if self.total is None else self.total + value
        except Exception as error:
            self._driver.give_up(error)
            return False
        _backward(given, *args, **options)
        if has_listeners:
            try:
                self._driver.end("backward")
            except Exception as error:
                self._driver.give_up(error)
        return True


def _stand(is_wanted: bool) -> None:
    """Before what `backward` is by now, or not at all. Nobody is pushed aside: behind who stands before us we stay."""
    global _backward, _stands
    now: Any = Tensor.backward
    if is_wanted:
        if now is not _watched_backward and (not _stands or now is _ORIGINAL_BACKWARD):
            _backward = now
            Tensor.backward = _watched_backward  # type: ignore[method-assign]
        _stands = True
    elif now is _watched_backward:
        Tensor.backward, _stands = _backward, False  # type: ignore[method-assign]


def _watched_backward(self: Tensor, *args: Any, **options: Any) -> None:
    for watch in reversed(_watches):
        if watch.is_on and watch.run(self, *args, **options):
            return
    _backward(self, *args, **options)
