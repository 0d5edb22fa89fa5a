"""Reports each loss and its backward pass, for a loop that does not report them, by replacing `Tensor.backward`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor

from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.torch_hooks import not_compiled
from callsheet.bridges.versions import TESTED, span
from callsheet.core.context import Context
from callsheet.errors import NotSupported

_ORIGINAL_BACKWARD: Callable[..., None] = Tensor.backward
_watches: list[BackwardWatch] = []
"""All `BackwardWatch` objects, in the order of their creation.

The latest is called first, so that a run inside a step of another run gets its own losses.
"""
_backward = _ORIGINAL_BACKWARD  # the `Tensor.backward` that callsheet's wrapper replaces and calls
_is_installed = False  # whether callsheet's wrapper is installed, possibly below a wrapper of another library


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
