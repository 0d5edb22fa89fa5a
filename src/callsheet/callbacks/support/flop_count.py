"""Determines the number of FLOPs in a step: the model reports it, or torch counts it in one step."""

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

_FLOPS_METHODS = ("flops_per_batch", "floating_point_ops")
"""Names of the method or number with which a model reports the FLOPs of a batch: Composer's name, then Hugging Face's name."""

_FIRST_COUNTED_STEP = 2
"""The number of the first step whose FLOPs can be counted. The first step of a process has the number 1.

The first step is not counted, because torch.compile may compile the model only during that step, and because code that is first
called while operations are counted would never be compiled.
"""

_HALF_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ATEN = torch.ops.aten
# Formulas that torch lacks: the FLOPs of scaled dot-product attention on the CPU.
_FLOP_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query.shape, key.shape, value.shape
    ),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
        sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    ),
}


class OperationCounter(TorchDispatchMode):
    """Adds up the FLOPs of the operations in a `with` block, by torch's formulas for matrix products, convolutions and attention.

    It does not count operations that activation checkpointing recomputes in the backward pass. Operations of a backward pass with
    `create_graph=True` look the same, and are not counted either. If a formula fails, `error` holds its message.
    """

    supports_higher_order_operators = True  # lets higher-order operators run unchanged, without counting them

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate this class
        self.flops: Counter[str] = Counter()
        """The FLOPs that were counted so far, by precision (such as `bf16`)."""
        self.error = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its FLOPs."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        formula = flop_registry.get(packet) or _FLOP_FORMULAS.get(packet)
        if formula is not None and not _is_computed_again():
            try:
                self.flops[_precision(packet, args)] += int(formula(*args, **kwargs, out_val=out))
            except Exception as error:  # an error in a FLOP formula must not stop training
                self.error = f"torch's formula for {packet} failed: {type(error).__name__}: {error}"
        return out


class StepFlops:
    """Counts the FLOPs of one rank's training steps, forward and backward.

    If the model reports the FLOPs of a batch, they are used. Otherwise one step of the process is counted. Other steps are assumed to
    have the same FLOPs for each number (a token, a pixel) in the first tensor, or the `input_ids`, of their batches.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        """The FLOPs of a step for each element (such as a token or a pixel) in the step's batches; None if not known yet."""
        self.precision = ""
        """The precision, such as `bf16`, in which most of the counted FLOPs were computed; empty if not known yet."""
        self.trouble = ""
        """The reason why the FLOPs cannot be counted; empty if no reason is known."""
        self.is_guessing = False
        """Whether `guess` should be called at the end of the next forward pass."""
        self.is_done = True
        """Whether no further step must be measured, because FLOPs and precision are known or cannot be counted."""
        self.counter: OperationCounter | None = None
        """The counter of the current step's operations; None if the current step is not counted."""
        self.by_tokens = False
        """Whether the elements of the batches turned out to be the tokens that the run counts anyway.

        If so, `add_batch` and `begin_step` need not be called.
        """
        # The work of the steps since the last record: FLOPs if the model reports them, otherwise the number of batch elements.
        self._waiting: Any = 0
        self.begin_run(None)

    def begin_run(self, model: Any, *, needs_precision: bool = False) -> None:
        """Prepare for training `model` in this process.

        If `model` is None, the run has ended, so the reference to its model is dropped.
        """
        self.stop()
        self._reported = flops_reported_by(model)
        self.by_tokens &= self._reported is None
        self._needs_precision = needs_precision
        self.is_done = not (needs_precision or self._needs_rate)
        self._steps = 0
        self._fetched: Any = 0  # the next step's FLOPs; if the model does not report FLOPs, its number of batch elements
        self._numbers: Any = 0  # the current step's FLOPs; if the model does not report FLOPs, its number of batch elements
        self.trouble = ""
        self.is_guessing = False

    @property
    def is_settled(self) -> bool:
        """Whether all measurements are done. After that, only `add_batch` and `begin_step` need to be called in each step."""
        return self.is_done and self.counter is None and not self.is_guessing

    def add_batch(self, batch: Any) -> None:
        """Add a fetched batch to the next step's total: its FLOPs if the model reports them, otherwise its number of elements."""
        if self._reported is None:
            self._fetched += numbers_in(batch)
            return
        flops = self._reported(batch) if callable(self._reported) else self._reported
        if not isinstance(flops, (Real, Tensor)):
            raise ConfigError(
                f"the model reports {flops!r} as the FLOPs of a batch; let its {' or '.join(_FLOPS_METHODS)} return a number"
            )
        self._fetched = self._fetched + flops

    def begin_step(self) -> None:
        """Begin a step, just before the step's first forward pass. Start counting FLOPs if this is the step to count."""
        self._steps += 1
        self._numbers, self._fetched = self._fetched if self._reported is not None else self._fetched or 1, 0
        self._waiting = self._waiting + self._numbers
        if self.is_done or self._steps < _FIRST_COUNTED_STEP:
            return
        if has_compiled():
            self.is_done = True
            self.is_guessing = self._needs_precision
            if self._needs_rate:
                self.trouble = "torch.compile has been used in this process, and compiled code cannot be counted"
        elif _get_current_dispatch_mode() is None:
            # Count only if no other dispatch mode is active. Modes must be exited in the reverse of the order in which they were
            # entered, and another mode may be exited before this one.
            self.is_done = True
            self.counter = OperationCounter()
            self.counter.__enter__()  # type: ignore[no-untyped-call]

    def end_step(self) -> None:
        """Stop counting after the step's last backward pass, and store the counted FLOPs."""
        counter = self.stop()
        if counter is not None:
            self._take(counter)

    def take(self, tokens: float) -> tuple[float | None, float | None]:
        """Return the FLOPs of the steps since the last call, and the number of elements (tokens, pixels) in their batches.

        `tokens` is the number of tokens that the run counted for this rank since the last call.

        The FLOPs are None as long as they are not known. If the model returns the FLOPs as a tensor, this method waits for the
        device. The number of elements is None until a step was counted, or if the model reports its FLOPs.
        """
        waiting, self._waiting = float(self._waiting) if not self.by_tokens else tokens, 0
        numbers = waiting if self._reported is None and self.is_settled and self.rate is not None else None
        flops = waiting if self._reported is not None else self.rate * waiting if self.rate is not None else None
        return flops, numbers

    def stop(self) -> OperationCounter | None:
        """Stop counting, also after an exception. Return the counter, if there was one."""
        counter, self.counter = self.counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return counter

    def guess(self, model: Any, outputs: Any) -> None:
        """Guess the precision of a step whose FLOPs cannot be counted, from the dtypes of outputs and parameters.

        The guess is float16 or bfloat16 if an output or a parameter has that dtype.
        """
        self.is_guessing = False
        seen = [*tensors_in(outputs), *(model.parameters() if isinstance(model, nn.Module) else ())]
        halves = [_HALF_PRECISIONS[tensor.dtype] for tensor in seen if tensor.dtype in _HALF_PRECISIONS]
        self.precision = halves[0] if halves else _full_precision(is_convolution=False)

    @property
    def _needs_rate(self) -> bool:
        return self._reported is None and self.rate is None

    def _take(self, counter: OperationCounter) -> None:
        total = sum(counter.flops.values())
        if total and not counter.error:
            self.precision = counter.flops.most_common(1)[0][0]
            if self._needs_rate:
                self.rate = total / self._numbers
        elif self._needs_rate:
            self.trouble = counter.error or "torch has no formula for any of the model's operations"

    def state_dict(self) -> dict[str, Any]:
        """Return the measured FLOPs and precision, so that a resumed run need not count again."""
        waiting = float(self._waiting)
        return {"rate": self.rate, "precision": self.precision, "waiting": waiting, "by_tokens": self.by_tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rate, self.precision, self._waiting = state["rate"], state["precision"], state["waiting"]
        self.by_tokens = state.get("by_tokens", False)


def flops_reported_by(model: Any) -> Any:
    """Return the method or number with which the model reports the FLOPs of a batch; None if the model has neither.

    If the model is a wrapper, such as DDP, the method or number may belong to the wrapped model.
    """
    while model is not None:
        for name in _FLOPS_METHODS:
            if (reported := getattr(model, name, None)) is not None:
                return reported
        is_parallel = isinstance(model, (DistributedDataParallel, DataParallel))
        model = getattr(model, "module" if is_parallel else "_orig_mod", None)  # torch.compile's wrapper has `_orig_mod`
    return None


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


def numbers_in(batch: Any) -> int:
    """Return how many elements `input_ids` or the first tensor of a batch has; 0 if it has neither."""
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Tensor):  # a fast path for the usual case
        return batch[0].numel()
    if isinstance(batch, (dict, Mapping)) and isinstance(ids := batch.get("input_ids"), Tensor):
        return ids.numel()
    return next((tensor.numel() for tensor in tensors_in(batch)), 0)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)


def _is_computed_again() -> bool:
    """Return whether the current operation belongs to a recomputation by activation checkpointing.

    Inside a backward pass, only recomputed operations have gradients enabled.
    """
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def _precision(packet: Any, args: Any) -> str:
    """Return the precision in which an operation multiplies, such as `bf16`."""
    first = next(tensors_in(args))
    if first.dtype in _HALF_PRECISIONS:
        return _HALF_PRECISIONS[first.dtype]
    if first.itemsize == 1 and first.is_floating_point():
        return "fp8"
    if first.dtype is not torch.float32:
        return str(first.dtype).removeprefix("torch.")
    return _full_precision(is_convolution="conv" in str(packet)) if first.is_cuda else "fp32"


def _full_precision(*, is_convolution: bool) -> str:
    """Return `tf32` if torch may use TF32 for 32-bit operations on CUDA devices, otherwise `fp32`."""
    if not torch.cuda.is_available():
        return "fp32"
    backends: Any = torch.backends
    new = getattr(backends.cudnn, "conv", None) if is_convolution else backends.cuda.matmul
    if isinstance(setting := getattr(new, "fp32_precision", None), str):
        return "tf32" if setting == "tf32" else "fp32"
    # PyTorch before 2.9 has `allow_tf32` instead of `fp32_precision`.
    return "tf32" if (backends.cudnn if is_convolution else backends.cuda.matmul).allow_tf32 else "fp32"
