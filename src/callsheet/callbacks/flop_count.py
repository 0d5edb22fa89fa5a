"""How many FLOPs a step has: the model's own word, or what torch counts in one step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from callsheet.errors import ConfigError

_SAYS = ("flops_per_batch", "floating_point_ops")
"""Methods, or numbers, by which models tell the FLOPs of a batch: Composer's, and Hugging Face's."""

_FIRST_COUNTED = 2
"""The step of a process. In its first one it is seen whether anything is compiled: what is first called while operations are
counted, torch leaves uncompiled for good."""

_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ATEN = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {  # of the CPU's attention, for which torch has none
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query.shape, key.shape, value.shape
    ),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
        sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    ),
}


class OperationCounter(TorchDispatchMode):
    """Adds up the FLOPs of what runs while it is entered, by torch's formulas: products of matrices, convolutions and attention.

    What activation checkpointing computes again in a backward is left out, and with it a gradient that is to be differentiated. A
    formula that fails leaves its message in `error`.
    """

    supports_higher_order_operators = True  # they run as they are, and count nothing

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's modes have no types
        self.flops: Counter[str] = Counter()
        """By precision."""
        self.error = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        formula = flop_registry.get(packet) or _FORMULAS.get(packet)
        if formula is not None and not _is_computed_again():
            try:
                self.flops[_precision(packet, args)] += int(formula(*args, **kwargs, out_val=out))
            except Exception as error:  # the operation has run, and training goes on; whoever reads the counts reads this
                self.error = f"torch's formula for {packet} failed: {type(error).__name__}: {error}"
        return out


class StepFlops:
    """The FLOPs of one rank's steps, forward and backward.

    They are what the model says of each batch. A model that says nothing is counted, in one step of a process, and other steps
    are taken to have as many FLOPs for each number in their batches' first tensor (or in `input_ids`): a token, a pixel.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        """FLOPs for each number in a batch."""
        self.precision = ""
        """In which most of them were counted."""
        self.trouble = ""
        """Why there is nothing to tell, once that is known."""
        self.is_guessing = False
        """Whether `guess` is to be called at the next forward's end."""
        self.is_done = True
        """Whether nothing is left to be found out in this process."""
        self.counter: OperationCounter | None = None
        """What counts the step in hand."""
        self.by_tokens = False
        """Whether the numbers in the batches are the tokens that the run counts anyway: then neither batches nor steps need be told."""
        self._waiting: Any = 0  # of steps since the last record: their FLOPs, where the model says them, else the numbers in them
        self.begin_run(None)

    def begin_run(self, model: Any, *, needs_precision: bool = False) -> None:
        """Training begins, or goes on, in this process; with None it has ended."""
        self.stop()
        self._says = said_by(model)
        self.by_tokens &= self._says is None
        self._needs_precision = needs_precision
        self.is_done = not (needs_precision or self._needs_rate)
        self._steps = 0
        self._fetched: Any = 0  # like `_waiting`, of the next step
        self._numbers: Any = 0  # of the one in hand
        self.trouble = ""
        self.is_guessing = False

    @property
    def is_settled(self) -> bool:
        """Whether only batches are to be told from now on, and neither steps nor forwards."""
        return self.is_done and self.counter is None and not self.is_guessing

    def fetched(self, batch: Any) -> None:
        """A batch of the next step has come."""
        if self._says is None:
            self._fetched += numbers_in(batch)
            return
        said = self._says(batch) if callable(self._says) else self._says
        if not isinstance(said, (Real, Tensor)):
            raise ConfigError(f"the model says that a batch has {said!r} FLOPs; let its {' or '.join(_SAYS)} give a number")
        self._fetched = self._fetched + said

    def begin_step(self) -> None:
        """Before the step's first forward."""
        self._steps += 1
        self._numbers, self._fetched = self._fetched if self._says is not None else self._fetched or 1, 0
        self._waiting = self._waiting + self._numbers
        if self.is_done or self._steps < _FIRST_COUNTED:
            return
        if has_compiled():
            self.is_done = True
            self.is_guessing = self._needs_precision
            if self._needs_rate:
                self.trouble = "torch.compile has been used in this process, and what is compiled cannot be counted"
        elif _get_current_dispatch_mode() is None:  # else another one counts this step, and they would be left in the wrong order
            self.is_done = True
            self.counter = OperationCounter()
            self.counter.__enter__()  # type: ignore[no-untyped-call]

    def end_step(self) -> None:
        """After the step's last backward, if it was counted."""
        counter = self.stop()
        if counter is not None:
            self._take(counter)

    def take(self, tokens: float) -> tuple[float | None, float | None]:
        """What was done since the last call, in which the run has counted so many tokens for this rank.

        The FLOPs, which waits for them where the model says them in a tensor, or None while they are not known; and the numbers in the
        batches, or None where that may yet change what they are.
        """
        waiting, self._waiting = float(self._waiting) if not self.by_tokens else tokens, 0
        numbers = waiting if self._says is None and self.is_settled and self.rate is not None else None
        flops = waiting if self._says is not None else self.rate * waiting if self.rate is not None else None
        return flops, numbers

    def stop(self) -> OperationCounter | None:
        """Count no more, also after an exception; returns what counted, if anything did."""
        counter, self.counter = self.counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return counter

    def guess(self, model: Any, outputs: Any) -> None:
        """Take the precision from what can be seen of a step that cannot be counted: half where outputs or parameters are."""
        self.is_guessing = False
        seen = [*tensors_in(outputs), *(model.parameters() if isinstance(model, nn.Module) else ())]
        halves = [_HALF[tensor.dtype] for tensor in seen if tensor.dtype in _HALF]
        self.precision = halves[0] if halves else _full_precision(is_convolution=False)

    @property
    def _needs_rate(self) -> bool:
        return self._says is None and self.rate is None

    def _take(self, counter: OperationCounter) -> None:
        total = sum(counter.flops.values())
        if total and not counter.error:
            self.precision = counter.flops.most_common(1)[0][0]
            if self._needs_rate:
                self.rate = total / self._numbers
        elif self._needs_rate:
            self.trouble = counter.error or "torch has a formula for none of the model's operations"

    def state_dict(self) -> dict[str, Any]:
        """What was counted."""
        waiting = float(self._waiting)
        return {"rate": self.rate, "precision": self.precision, "waiting": waiting, "by_tokens": self.by_tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.rate, self.precision, self._waiting = state["rate"], state["precision"], state["waiting"]
        self.by_tokens = state.get("by_tokens", False)


def said_by(model: Any) -> Any:
    """What tells the FLOPs of a batch: the model's method, or number; None where it has none. Wrappers are looked through."""
    while model is not None:
        for name in _SAYS:
            if (says := getattr(model, name, None)) is not None:
                return says
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        else:
            model = model._modules.get("_orig_mod") if isinstance(model, nn.Module) else None  # of torch.compile
    return None


def has_compiled() -> bool:
    """Whether torch.compile has been at work in this process, to any effect."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


def numbers_in(batch: Any) -> int:
    """How many numbers stand in a batch's `input_ids`, or in its first tensor; 0 where it has none."""
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Tensor):  # the usual cases, without more ado
        return batch[0].numel()
    if isinstance(batch, (dict, Mapping)) and isinstance(ids := batch.get("input_ids"), Tensor):
        return ids.numel()
    return next((tensor.numel() for tensor in tensors_in(batch)), 0)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)


def _is_computed_again() -> bool:
    """Whether the operation is a forward's inside a backward, which alone has gradients on there."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def _precision(packet: Any, args: Any) -> str:
    """In which precision an operation multiplies."""
    first = next(tensors_in(args))
    if first.dtype in _HALF:
        return _HALF[first.dtype]
    if first.itemsize == 1 and first.is_floating_point():
        return "fp8"
    if first.dtype is not torch.float32:
        return str(first.dtype).removeprefix("torch.")
    return _full_precision(is_convolution="conv" in str(packet)) if first.is_cuda else "fp32"


def _full_precision(*, is_convolution: bool) -> str:
    """`tf32` where torch may round to that what a CUDA device multiplies in 32 bits, else `fp32`."""
    if not torch.cuda.is_available():
        return "fp32"
    backends: Any = torch.backends
    new = getattr(backends.cudnn, "conv", None) if is_convolution else backends.cuda.matmul
    if isinstance(setting := getattr(new, "fp32_precision", None), str):
        return "tf32" if setting == "tf32" else "fp32"
    return "tf32" if (backends.cudnn if is_convolution else backends.cuda.matmul).allow_tf32 else "fp32"  # torch before 2.9
