"""Registers and removes hooks of PyTorch, and keeps them out of copies, exports and compiled code of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from callsheet.run.copies import add_hook

logger = logging.getLogger("callsheet")

Function = TypeVar("Function", bound=Any)


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
