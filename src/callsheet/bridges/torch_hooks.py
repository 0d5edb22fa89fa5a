"""Hooks in PyTorch that report what a loop does not report: the model's forward pass, the loss's backward pass and the
optimizer's step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from callsheet.bridges.giving_up import is_for_user
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.versions import TESTED, span
from callsheet.core.context import Context
from callsheet.errors import NotSupported
from callsheet.run.copies import add_hook

logger = logging.getLogger("callsheet")

Mode = Literal["train", "eval", "test", "predict"]
"""The purpose for which a model is called."""

Function = TypeVar("Function", bound=Any)

_ORIGINAL_BACKWARD: Callable[..., None] = Tensor.backward
_watches: list[BackwardWatch] = []
"""All `BackwardWatch` objects, in the order of their creation.

The latest is called first, so that a run inside a step of another run gets its own losses.
"""
_backward = _ORIGINAL_BACKWARD  # the `Tensor.backward` that callsheet's wrapper replaces and calls
_is_installed = False  # whether callsheet's wrapper is installed, possibly below a wrapper of another library


class InertHooks:
    """An object whose methods do nothing. In copies of a model, it replaces the object whose methods are the model's hooks.

    The training loop does not call the copy, so its hooks have nothing to observe. Each method does nothing and returns None.
    """

    def __getattr__(self, name: str) -> InertHooks:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> None: ...


class NotCopied:
    """The base class of objects whose methods are hooks of a model. Copies of the model do not run these hooks.

    Copies and pickles of the model contain `InertHooks` instead.
    """

    __slots__ = ()

    is_inert: bool = False
    """Whether the hooks do nothing at the moment, like the hooks in a copy of the model."""

    def __reduce__(self) -> tuple[type[InertHooks], tuple[()]]:
        return InertHooks, ()


class Hook:
    """A PyTorch hook that is registered only while it is needed, because hooks slow a model down.

    Copies of the model do not have the hook.

    Args:
        register: the method of a model or an optimizer that registers the hook.
    """

    def __init__(self, register: Callable[..., Any]) -> None:
        self._register = register
        self._remove: Callable[[], None] = lambda: None
        self.is_registered = False
        """Whether the hook is registered."""

    def install(self, is_wanted: bool, function: Callable[..., Any]) -> None:
        """Register the hook if `is_wanted` is true, otherwise remove it. Do nothing if the hook is already in the wanted state.

        No reference to `function` is kept, to avoid a reference cycle: it is a method of an object that refers to this hook.
        """
        if is_wanted and not self.is_registered:
            self._remove, self.is_registered = add_hook(self._register, function), True
        elif not is_wanted:
            self.remove()

    def remove(self) -> None:
        """Remove the hook, if it is registered."""
        if self.is_registered:
            self._remove()
            self.is_registered = False


# Read torch's private flags, because `torch.jit.is_tracing` and `torch.compiler.is_compiling` cost four more calls per pass.
_is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]
_HAS_COMPILING_FLAG = hasattr(torch.compiler, "_is_compiling_flag")


def is_traced() -> bool:
    """Return whether torch is exporting or tracing the model. If so, hooks must do nothing, to stay out of the exported model.

    The hook must be decorated with `not_compiled`, so that Dynamo does not compile this function.
    """
    return (torch.compiler._is_compiling_flag if _HAS_COMPILING_FLAG else torch.compiler.is_compiling()) or _is_tracing()


def not_compiled(function: Function, *, recursive: bool = True) -> Function:
    """Decorate a function, so that Dynamo does not compile it.

    `torch.compiler.disable` does the same, but makes each call slower and imports Dynamo. In a version of torch without the private
    names that are used here, the function is returned unchanged, and a compiled step may have more graphs.

    Args:
        function: the function.
        recursive: whether the functions that this function calls are not compiled either.
    """
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError, TypeError):
        logger.debug("functions cannot be left out of compilation in torch %s", torch.__version__)
    return function


def untraced(hook: Function) -> Function:
    """Decorate an optimizer's hook, so that torch.compile does not compile the hook, but inserts a graph break there."""
    hook._torchdynamo_disable = True
    return not_compiled(hook)


def start_forward(driver: LifecycleDriver, ctx: Context) -> None:
    """Fire the start of the forward pass. The host calls this when the loop calls the model within a microbatch.

    A forward pass after a backward pass begins the step's next microbatch, because a loop may split what the host has reported as
    one microbatch.
    """
    spans = driver.spans
    microbatch = spans["microbatch"]
    if microbatch.done == len(microbatch.sequence):
        if spans["backward"].is_open:
            return  # not a new microbatch: activation checkpointing repeats a forward pass during the backward pass
        given = ctx.microbatch if ctx.has("microbatch") else None
        driver.end("microbatch")
        ctx.microbatch = given
        driver.start("microbatch")
        if ctx.microbatch is not given:
            ctx.microbatch = given  # the loop already uses this microbatch, so a callback can no longer replace it
            driver.warn_once(
                "A callback has replaced ctx.microbatch in a loop that takes several microbatches of one batch. The loop has the batch "
                "already, so only what replaces the first microbatch of a step is used. Replace ctx.batch at on_fetch_end instead."
            )
    driver.start("forward")


def value_of(loss: Tensor) -> Tensor | None:
    """Return a copy of a loss as a detached scalar tensor. A copy is needed because the loop may change the loss in place.

    If the loss is a DTensor, return the value on this rank without calling a collective, or None if this rank has only a part.
    """
    if type(loss) is Tensor:
        value = loss.data  # faster than `detach`
    elif hasattr(value := loss.detach(), "placements"):
        whole: Any = value
        if not all(each.is_replicate() for each in whole.placements):
            return None
        value = whole.to_local()
    value = value.clone()
    return value.reshape(()) if value.dim() else value


class SkipsSteps(Protocol):
    """Protocol of the run to which `SteppedHooks` reports whether the optimizer has stepped."""

    driver: LifecycleDriver
    step_skipped: bool


class ForwardHooks(NotCopied):
    """Reports a model's forward pass to the lifecycle driver, with the model's outputs, which a callback may replace.

    In training, only calls within a microbatch are reported; otherwise, only calls within a step of the evaluation, test or prediction. The
    hooks are registered only between `listen(True)` and `listen(False)`.

    Args:
        mode: the purpose of the calls of the model.
    """

    def __init__(self, driver: LifecycleDriver, ctx: Context, model: nn.Module, mode: Mode = "train") -> None:
        self._driver = driver
        self._ctx = ctx
        self._is_training = mode == "train"
        around, forward = ("microbatch", "forward") if self._is_training else (f"{mode}_step", f"{mode}_forward")
        self._around, self._forward = driver.spans[around], driver.spans[forward]
        self._before, self._after = Hook(model.register_forward_pre_hook), Hook(model.register_forward_hook)
        self._is_traced = False  # whether torch traces the current forward pass

    def listen(self, has_listeners: bool) -> None:
        """Register the hooks in the model if `has_listeners` is true, otherwise remove the hooks."""
        self._before.install(has_listeners, self._begins)
        self._after.install(has_listeners, self._ends)

    @not_compiled
    def _begins(self, model: nn.Module, inputs: Any) -> None:
        self._is_traced = is_traced()
        if self._is_traced:
            return
        try:
            if self._around.is_open:
                if self._is_training:
                    if model.training and torch.is_grad_enabled():
                        start_forward(self._driver, self._ctx)
                elif not model.training:
                    self._driver.start(self._forward.name)
        except Exception as error:
            self._driver.give_up(error)

    @not_compiled
    def _ends(self, model: nn.Module, inputs: Any, outputs: Any) -> Any:
        if self._is_traced:
            return outputs
        try:
            if self._forward.is_open:
                driver, ctx = self._driver, self._ctx
                ctx.outputs = outputs
                if self._is_training:
                    driver.start("loss")  # starting the loss span also ends the forward span
                else:
                    driver.end(self._forward.name)
                return ctx.outputs
        except Exception as error:
            self._driver.give_up(error)
        return outputs

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self.listen(False)


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], around: Callable[..., Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of an optimizer's step with its closure replaced by a function that calls `around(closure, ...)`.

    The arguments have the form in which torch passes them to a step hook, with the optimizer first. If they contain no closure,
    return None.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    given = partial(around, closure)
    return ((args[0], given, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": given})


class OptimizerHooks(NotCopied):
    """Reports when the optimizer's step begins, after all gradients have been computed, and when it ends.

    With a closure, `on_optimizer_step_start` is fired after the closure's first evaluation, so that the forward and backward pass
    of the closure come before it. If the optimizer evaluates the closure several times, the last loss is the loss of the step.

    Args:
        optimizers: the optimizers, in the order in which the loop steps them.
        asks: whether the host reads `has_stepped` after every step, even if no callback or metrics record reads the step's
            results.
        watch: the object that sums the losses of the loop.
        ended: called after each step of the optimizer.
    """

    def __init__(
        self,
        driver: LifecycleDriver,
        *optimizers: Optimizer,
        asks: bool = True,
        watch: BackwardWatch | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._driver = driver
        self._step, self._clip, self._own = (driver.spans[name] for name in ("train_step", "clip_gradients", "optimizer_step"))
        self.has_stepped = False
        """Whether the optimizer has stepped within a training step since the host last set this attribute to False."""
        self.has_strayed = False
        """Whether the optimizer has stepped outside training steps since the host last set this attribute to False."""
        self._asks = asks
        self._watch = watch
        self._ended = ended
        self._is_given_closures = False  # whether the loop passes a closure to the optimizer
        self._has_begun = False  # whether the start of this optimizer step was reported; used only if the step has a closure
        self._is_removed = False
        self._kept: Sequence[Hook] = ()  # hooks that cannot be removed now, because torch is iterating over them
        self._before = [Hook(each.register_step_pre_hook) for each in optimizers[:1]]
        self._after = [Hook(each.register_step_post_hook) for each in optimizers[-1:]]
        self.listen(True)

    def listen(self, is_read: bool) -> None:
        """Register the needed hooks. `is_read` is true if callbacks or metrics records use results of steps, such as the loss."""
        for hook in self._before:
            hook.install(is_read or self._is_given_closures, self._begins)
        for hook in self._after:
            hook.install(is_read or self._asks, self._ends)

    def expect_closures(self) -> None:
        """Register the hook that wraps the optimizer's closure. Called only when the loop is known to pass closures."""
        self._is_given_closures = True
        for hook in self._before:
            hook.install(True, self._begins)

    @untraced
    def _begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if self._step.is_open:
                if (len(args) > 1 or kwargs) and (given := with_closure(args, kwargs, self._evaluate)) is not None:
                    self._is_given_closures, self._has_begun = True, False
                    if self._watch is not None:
                        self._watch.begin_closure()
                    return given
                self._report_start()
        except Exception as error:
            self._fail(error, self._before, getattr(optimizer, "_optimizer_step_pre_hooks", {}), self._begins)
        return None

    def _report_start(self) -> None:
        if not self._clip.has_no_listeners:
            self._driver.start_and_end("clip_gradients")  # `clip_gradients` is fired even if the loop does not clip
        own = self._own
        if not own.has_no_listeners:
            self._driver.start("optimizer_step")
        elif own.before_start is not None and self._driver.is_read:
            own.before_start()  # does the same as `driver.start`, but faster

    def _evaluate(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's closure. After the closure's first call in a step, report the start of the optimizer's step."""
        loss = closure(*args, **kwargs) if self._watch is None else self._watch.evaluate(closure, *args, **kwargs)
        try:
            if not self._has_begun:
                self._has_begun = True
                if self._step.is_open:
                    self._report_start()
        except Exception as error:
            self._driver.give_up(error)
        return loss

    @untraced
    def _ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if self._step.is_open:
                self.has_stepped = True
                if len(args) > 1 or kwargs:
                    self._end_with_closure(args, kwargs)
                if not self._own.has_no_listeners:
                    self._driver.end("optimizer_step")
                if self._ended is not None:
                    self._ended()
            else:
                self.has_strayed = True
        except Exception as error:
            self._fail(error, self._after, getattr(optimizer, "_optimizer_step_post_hooks", {}), self._ends)

    def _fail(
        self, error: Exception, ours: Sequence[Hook], hooks: dict[int, Callable[..., Any]], own: Callable[..., Any]
    ) -> None:
        """End the run because of an error inside one of the hooks.

        Torch is iterating over its hooks of this kind, so callsheet's hooks are removed only after torch has called the last hook.

        Args:
            ours: our hooks of this kind.
            hooks: all hooks of this kind that the optimizer has, as torch keeps them. Empty if they are not known: ours then stay
                registered, and do nothing.
            own: the function that failed.
        """
        self._kept = ours
        try:
            self._driver.give_up(error)
        except BaseException:  # the error has ended torch's iteration over the hooks, so they can be removed now
            if self._is_removed:
                for hook in ours:
                    hook.remove()
            raise
        else:
            for hook in ours if hooks else ():
                _remove_after_calls(hooks, own, hook.remove)
        finally:
            self._kept = ()

    def _end_with_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_given_closures:
            if not self._has_begun:  # the optimizer has not called the closure, so the start was not reported yet
                self._report_start()
        elif (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            # This is the first step with a closure, and the hook that wraps a closure was not registered, because nothing listens.
            # Register the hook for the next steps, because checkpoints need the last step's loss.
            self.expect_closures()

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        self._is_removed = True
        for hook in (*self._before, *self._after):
            if hook not in self._kept:
                hook.remove()


class SteppedHooks:
    """Reports the end of the optimizer's step, for frameworks that report only the start of this step.

    Until the end is reported, the optimizer's step counts as skipped.

    An error in a hook is stored in `fault`, and the host raises the error at the end of the training step. Giving up at once would
    remove the hooks while torch iterates over them.

    Args:
        run: the run. Its `step_skipped` is True when a step begins.
        optimizers: the optimizers. The first of them to step ends the step.
        ended: called when the step has ended.
    """

    def __init__(self, run: SkipsSteps, optimizers: Iterable[Optimizer], ended: Callable[[], None] | None = None) -> None:
        self._run = run
        self._ended = ended
        self._own = run.driver.spans["optimizer_step"]
        self._hooks = [Hook(each.register_step_post_hook) for each in optimizers]
        self.is_observed = not self._hooks
        """Whether the hooks are registered, so that they show which steps were skipped.

        Also True if there is no optimizer, because then every step counts as skipped.
        """
        self.has_begun = True
        """Whether the optimizer's step has begun."""
        self.fault: Exception | None = None
        """The first error of the host that occurred in a hook."""

    def listen(self, is_read: bool) -> None:
        """Register the hooks if callbacks or metrics records use the results of steps (`is_read`); otherwise remove the hooks."""
        self.is_observed = is_read or not self._hooks
        for hook in self._hooks:
            hook.install(is_read, self._stepped)

    @untraced
    def _stepped(self, *_: Any) -> None:
        run = self._run
        try:
            if run.step_skipped:
                run.step_skipped = False
                if self.has_begun and self._ended is not None:
                    self._ended()
                if not self._own.has_no_listeners:
                    run.driver.end("optimizer_step")
        except Exception as error:
            if is_for_user(error):
                run.driver.give_up(error)
            self.fault = error

    def remove(self) -> None:
        """Remove the hooks from the optimizers."""
        self.listen(False)


def _remove_after_calls(hooks: dict[int, Callable[..., Any]], own: Callable[..., Any], remove: Callable[[], None]) -> None:
    """Call `remove` as soon as torch has called the last of these `hooks`.

    Until then, torch iterates over the dict, so no key may be removed from it.
    """
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

    hooks[last] = called  # replacing a value is allowed while torch iterates over the dict


class BackwardWatch:
    """Reports each loss and its backward pass to the lifecycle driver. A callback may replace the loss.

    Torch has no hook that shows on which tensor `backward` was called. So this object replaces `Tensor.backward` at its creation,
    until `listen(False)` is called, and again after `listen(True)`. Calls from other threads, and on tensors with several
    elements, are not reported.

    Args:
        scaler: the `torch.amp.GradScaler` that scales the loss. The reported loss is not scaled.

    Raises:
        NotSupported: the scale of the scaler cannot be read.
    """

    def __init__(self, driver: LifecycleDriver, ctx: Context, scaler: Any = None) -> None:
        if scaler is not None and scaler.is_enabled() and not hasattr(scaler, "_scale"):
            raise NotSupported(
                f"the loss scaler {type(scaler).__module__}.{type(scaler).__qualname__} has no _scale, so callbacks would get scaled losses; "
                f"install one of the tested versions of torch, {span(TESTED['torch'])}, or train without a loss scaler"
            )
        self._driver = driver
        self._ctx = ctx
        self._scaler = scaler
        self._microbatch, self._loss, self._backward = (driver.spans[name] for name in ("microbatch", "loss", "backward"))
        self._thread = get_ident()
        self.is_on = False
        """Whether the loop is within a step."""
        self.total: Tensor | None = None
        """The sum of the detached losses since `total` was last set to None."""
        self.is_in_closure = False
        """Whether an optimizer is calling its closure. If so, losses are summed even after the step's first backward pass."""
        self._before_closure: Tensor | None = None
        self._before: Callable[[], None] | None = None  # called before each backward pass that is reported
        self._listens = self._is_running = False
        _watches.append(self)
        self.listen(True)

    @property
    def reader(self) -> Callable[[], Tensor | None]:
        """A function that returns `total`, the sum of the losses. The function is a `partial`, because a method would be slower."""
        return partial(getattr, self, "total")

    def listen(self, is_read: bool) -> None:
        """Wrap `Tensor.backward` if losses are read (`is_read`). Otherwise remove the wrapper, unless another run needs it."""
        self._listens = is_read
        if not is_read:
            self.total = None
        _install(any(watch._listens for watch in _watches))

    def remove(self) -> None:
        """Stop watching backward passes. This method may be called twice."""
        if self in _watches:
            _watches.remove(self)
        self.listen(False)

    def begin_step(self) -> None:
        """Reset the sum of the losses."""
        self.total = None

    def begin_closure(self) -> None:
        """Store the sum of the losses before the optimizer calls its closure. `evaluate` adds this sum to the closure's loss."""
        self._before_closure = self.total

    def evaluate(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's closure. The losses of this call replace the losses of an earlier call in the same step."""
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

    def run(self, loss: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Fire the events of `loss`, and run its backward pass with the given arguments. Return False if the pass was not run.

        Do nothing if `loss` has several elements, or if this is not the training thread.
        """
        if not self._listens or self._is_running or loss.numel() != 1 or get_ident() != self._thread:
            return False
        if self._before is not None:
            self._before()
        has_listeners, given = not self._backward.has_no_listeners, loss
        try:
            scaler, scale, unscaled = self._scaler, None, loss
            if scaler is not None and scaler.is_enabled() and scaler._scale is not None:
                scale = scaler._scale
                unscaled = loss / scale
            if has_listeners:
                driver, ctx = self._driver, self._ctx
                if self._backward.is_open:
                    return False
                if self._microbatch.is_open:
                    if self._microbatch.done <= self._loss.index:  # the loss was not reported yet
                        driver.start("loss")
                    ctx.loss = unscaled
                    driver.start("backward")  # starting the backward span also ends the loss span
                    if ctx.loss is not unscaled:
                        unscaled = ctx.loss
                        given = unscaled if scale is None else unscaled * scale
                elif not self.is_in_closure:
                    return False
            # The first case is the usual one; it does the same as `value_of`, but without a function call.
            value = unscaled.data.clone() if type(unscaled) is Tensor and not unscaled.ndim else value_of(unscaled)
            before = self.total
            if value is None:
                self._driver.warn_once("Each rank has only a part of the loss, which is a DTensor, so the loss is not recorded")
            else:
                self.total = value if before is None else before + value
        except Exception as error:
            self._driver.give_up(error)
            return False
        # Under a torch function mode, `_backward` calls this method again; the inner call must do nothing.
        self._is_running = True
        try:
            _backward(given, *args, **options)
        except BaseException:  # after an error such as running out of memory, the loop may try again, so forget this loss
            self.total = before
            if has_listeners:
                self._driver.end("backward")
            raise
        finally:
            self._is_running = False
        if has_listeners:
            try:
                self._driver.end("backward")
            except Exception as error:
                self._driver.give_up(error)
        return True


def _install(is_wanted: bool) -> None:
    """Wrap `Tensor.backward`, or remove the wrapper. Leave callsheet's wrapper in place if another library has since wrapped it."""
    global _backward, _is_installed
    now: Any = Tensor.backward
    if is_wanted:
        if now is not _watched_backward and (not _is_installed or now is _ORIGINAL_BACKWARD):
            _backward = now
            Tensor.backward = _watched_backward  # type: ignore[method-assign]
        _is_installed = True
    elif now is _watched_backward:
        Tensor.backward, _is_installed = _backward, False  # type: ignore[method-assign]


@not_compiled
def _watched_backward(self: Tensor, *args: Any, **options: Any) -> None:
    for watch in reversed(_watches):
        if watch.is_on and watch.run(self, args, options):
            return
    _backward(self, *args, **options)
