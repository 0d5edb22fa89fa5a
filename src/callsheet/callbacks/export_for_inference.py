"""Exports the trained model to a file for inference."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from callsheet.callbacks.support.inference_files import FORMATS, Call, Format, export_program, publish, reason, write_onnx
from callsheet.checkpoint import export_huggingface
from callsheet.checkpoint.whole_copy import whole_copy
from callsheet.core.callback import Callback, at, label_of, one_of
from callsheet.core.context import Context
from callsheet.core.optional import load
from callsheet.core.randomness import random_state, restore_random_state
from callsheet.errors import CheckpointError, ConfigError
from callsheet.run.copies import add_hook

logger = logging.getLogger("callsheet")

SHAPES = ("batch", "all", "none")


class ExportForInferenceCallback(Callback):
    """Export the model for inference when training ends, to `export/model.pt2` in the run's folder or to `save_path`.

    The export is a copy in evaluation mode on the CPU, with the weights at the end of training. If an `EMA` is listed before this
    callback, the copy has the averaged weights. The file gets its final name only when it is complete, and then replaces an
    earlier export. Loggers receive it as `export/<file>`. Nothing is written when the run fails or is preempted. Each call of
    `fit` exports again.

    If the model is sharded, all ranks take part in gathering it, and rank 0 holds the whole model in host memory. The other ranks
    wait until rank 0 has written the export, so the Trainer's `timeout_seconds` must be longer than the export takes. The trained
    model is not changed.

    Args:
        save_format: `"torch_export"`, a program that `torch.export.load` reads and that returns the model's outputs (those of a Hugging
            Face model as a dictionary of tensors); `"onnx"`, which needs `callsheet[onnx]`; `"huggingface"`, a folder for
            `from_pretrained`.
        save_path: the file, or the folder for `"huggingface"`.
        sample_input: the input for the export: a tensor, a tuple of arguments, or a dictionary of keyword arguments. None takes two
            samples of the model's first input in training, without `labels`. A compiled model needs a sample, because its input
            cannot be recorded.
        dynamic_shapes: which sizes may differ from the sample: `"batch"`, the first dimension of every tensor; `"all"`, every
            dimension (then sequences may have any length), except those that the model fixes; `"none"`; or a value for the
            argument of the same name of `torch.export.export`.
        input_names: for `"onnx"`: names for the inputs, in order.
        output_names: for `"onnx"`: names for the outputs, in order.
        processor: for `"huggingface"`: the tokenizer or processor to save with the model.

    Raises:
        ConfigError: an argument is invalid; when training starts, `save_format` is `"huggingface"` and the model is not a
            transformers model; at the first metrics record, the model is compiled and no sample was given.
        CheckpointError: the export failed, on all ranks; training is complete, and its checkpoints are intact.
        MissingPackage: when training starts, the packages for ONNX are not installed.
    """

    collective = True  # all ranks must call the handlers, since gathering a sharded model is a collective operation
    required_fields = ("model",)
    writes_to_run_folder = True

    def __init__(
        self,
        *,
        save_format: Format = "torch_export",
        save_path: str | os.PathLike[str] | None = None,
        sample_input: Any = None,
        dynamic_shapes: Any = "batch",
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        processor: Any = None,
    ) -> None:
        self._format = one_of("save_format", save_format, tuple(FORMATS))
        if isinstance(dynamic_shapes, str):
            one_of("dynamic_shapes", dynamic_shapes, SHAPES)
        if save_format != "onnx" and (input_names or output_names):
            raise ConfigError(f"input_names and output_names are for save_format='onnx', not {save_format!r}; leave them out")
        if save_format != "huggingface" and processor is not None:
            raise ConfigError(f"processor= is for save_format='huggingface', not {save_format!r}; leave it out")
        if save_path is not None and "://" in os.fspath(save_path):
            raise ConfigError(f"save_path={os.fspath(save_path)!r} is a URL; give a local path, and copy the file from there")
        self._save_path = Path(save_path) if save_path is not None else None
        self._given = Call.of(sample_input) if sample_input is not None else None
        self._shapes = dynamic_shapes
        self._names = {
            "input_names": list(input_names) if input_names else None,
            "output_names": list(output_names) if output_names else None,
        }
        self._processor = processor
        self._sample = self._given
        self._remove_hook: Callable[[], None] | None = None
        self._first = 0
        self._is_leaving = False

    def on_run_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self._sample, self._is_leaving = self._given, False
        if self._save_path is None and ctx.run.folder is None:
            raise ConfigError(f"the run has no folder to export to; give {label_of(self)} a save_path=")

    def on_train_start(self, ctx: Context) -> None:
        """Check that the format can be written, and register a hook that records an example of the model's input."""
        if self._format == "onnx":
            for package in ("onnx", "onnxscript"):
                load(package, extra="onnx", wanted_by=label_of(self))
        if self._format == "huggingface":
            if not hasattr(ctx.model, "save_pretrained"):
                kind = type(ctx.model).__name__
                raise ConfigError(f"{label_of(self)}: {kind} is not a transformers model; choose another save_format")
        elif self._sample is None:
            self._first = ctx.step
            register = partial(ctx.model.register_forward_pre_hook, with_kwargs=True, prepend=True)
            self._remove_hook = add_hook(register, self._take)

    def _take(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Record nothing while torch.compile traces the model, so that the code below does not become part of the compiled model.
        if torch.compiler.is_compiling():
            return
        call = Call(args, {name: value for name, value in kwargs.items() if name != "labels"})
        self._sample = call.small() if self._shapes != "none" else call.map_tensors(lambda tensor: tensor.detach().clone())
        self._unhook()

    def on_log(self, ctx: Context) -> None:
        """Raise ConfigError if no input was recorded although steps were trained, which happens if the model is compiled.

        A compiled model runs no hooks, so there is no sample of its input, and the export at the end would fail.
        """
        if self._remove_hook is not None and ctx.step > self._first:
            raise ConfigError(f"{label_of(self)} cannot see what a compiled model is called with; give it a sample_input=")

    def on_preempt(self, ctx: Context) -> None:
        """Set a flag, so that this process skips the export, because the resumed run will export the model."""
        self._is_leaving = True

    def on_exception(self, ctx: Context) -> None:
        self._unhook()

    @at("restore")  # run in the last phase, after an EMA callback has put its average into the model
    def on_train_end(self, ctx: Context) -> None:
        self._unhook()
        if self._is_leaving:
            return
        if self._sample is None and self._format != "huggingface":
            logger.warning(
                "%s exports nothing: no step was trained, so it has seen no input; give it a sample_input=", label_of(self)
            )
            return
        random = random_state()
        error, written = None, []
        try:
            copied = whole_copy(ctx.model, keep=ctx.run.is_world_process_zero)
            if copied is not None:
                written = self._write(ctx, copied.eval().requires_grad_(False))
        except Exception as raised:  # raise the error after `gather` below, because the other ranks wait there
            error = raised
        restore_random_state(random)
        if failed := next(filter(None, ctx.gather(reason(error) if error is not None else None)), None):
            raise CheckpointError(
                f"{label_of(self)}: the model could not be exported as {self._format}: {failed} (training is complete, and its checkpoints are intact)"
            ) from error
        for file in written:
            ctx.log_file(f"export/{file.relative_to(self._target(ctx).parent).as_posix()}", file)

    def _write(self, ctx: Context, model: nn.Module) -> list[Path]:
        target = self._target(ctx)
        if not ctx.run.may_write(target):
            return []
        draft = target.with_name(f".{target.name}.new")
        shutil.rmtree(draft, ignore_errors=True)  # a process that was killed may have left its draft folder
        draft.mkdir(parents=True)
        path = draft / target.name
        try:
            if self._format == "huggingface":
                export_huggingface(model, path, processor=self._processor)
            else:
                assert self._sample is not None
                program = export_program(model, self._sample.map_tensors(lambda tensor: tensor.detach().cpu()), self._shapes)
                if self._format == "onnx":
                    write_onnx(program, path, **self._names)
                else:
                    torch.export.save(program, path)
            return publish(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _target(self, ctx: Context) -> Path:
        return self._save_path or Path(ctx.run.folder or "", "export", FORMATS[self._format])

    def _unhook(self) -> None:
        if self._remove_hook is not None:
            self._remove_hook()
            self._remove_hook = None
