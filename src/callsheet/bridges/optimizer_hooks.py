"""Reports the optimizer's step, for a loop that does not report it, through PyTorch's hooks of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from torch.optim import Optimizer

from callsheet.bridges.backward_watch import BackwardWatch
from callsheet.bridges.giving_up import is_for_user
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.torch_hooks import Hook, NotCopied, untraced


class SkipsSteps(Protocol):
    """Protocol of the run to which `SteppedHooks` reports whether the optimizer has stepped."""

    driver: LifecycleDriver
    step_skipped: bool


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
        is_always_observed: whether the host reads `has_stepped` after every step, even if no callback or metrics record reads the
            step's results.
        watch: the object that sums the losses of the loop.
        ended: called after each step of the optimizer.
    """

    def __init__(
        self,
        driver: LifecycleDriver,
        *optimizers: Optimizer,
        is_always_observed: bool = True,
        watch: BackwardWatch | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._driver = driver
        self._step, self._clip, self._own = (driver.spans[name] for name in ("train_step", "clip_gradients", "optimizer_step"))
        self.has_stepped = False
        """Whether the optimizer has stepped within a training step since the host last set this attribute to False."""
        self.has_strayed = False
        """Whether the optimizer has stepped outside training steps since the host last set this attribute to False."""
        self._is_always_observed = is_always_observed
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
            hook.install(is_read or self._is_always_observed, self._ends)

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
            hook.install(is_read, self._end_step)

    @untraced
    def _end_step(self, *_: Any) -> None:
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
