"""Low-rank adapters: what is trained beside frozen weights, what a checkpoint holds of it, and how it is exported."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from callsheet import extras
from callsheet.checkpoint.ranks import RankGroup
from callsheet.errors import ConfigError

ALL_LINEAR = "all-linear"


@dataclass
class Lora:
    """Train two thin matrices beside each weight matrix, and leave that as it is (Hu et al. 2021, LoRA).

    Args:
        r: the rank: how thin they are.
        alpha: what they say is added `alpha / r` times.
        dropout: of what goes into them.
        targets: the names of the modules, such as `q_proj`; `all-linear` is every linear layer but the last.
        merge: whether the exported model has them added to its weights, and needs nothing further; False exports them alone, as a folder
            that peft loads over the model of `model.path`.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str | list[str] = ALL_LINEAR
    merge: bool = True

    def __post_init__(self) -> None:
        if self.r < 1 or self.alpha <= 0:
            raise ConfigError(f"lora.r={self.r}, lora.alpha={self.alpha}: give a rank of 1 or more, and more than 0")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"lora.dropout={self.dropout}: give a part of 1, from 0")
        if not self.targets:
            raise ConfigError(f"lora.targets is empty; name modules, such as q_proj, or give {ALL_LINEAR}")

    def add_to(self, model: Any) -> None:
        """Give a model of transformers its adapters, which alone are trained from now on, in fp32, and alone stand in its state.

        Raises:
            ConfigError: no module is called so, or is of a kind that has no adapters.
        """
        targets = self.targets
        if isinstance(targets, list):
            names = {name for path, _ in model.named_modules() for name in (path, path.rpartition(".")[2])}
            if missing := [target for target in targets if target not in names]:
                linear = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
                raise ConfigError(
                    f"lora.targets: the model has no module called {', '.join(missing)}; its linear layers are {', '.join(sorted(linear))}"
                )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what it does about the kinds of layers
                model.add_adapter(self._config())
        except ValueError as error:
            raise ConfigError(f"lora.targets={targets}: {error}") from error
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()  # steps are smaller than what bf16 tells apart
        model.register_state_dict_post_hook(_leave_out_frozen)
        model.register_load_state_dict_post_hook(_need_no_frozen)

    def export_merged(self, model: Any, path: str | Path, *, writes: bool, processor: Any = None) -> None:
        """Write the model with its adapters added to its weights as a Hugging Face folder; a collective, which ends when it is written.

        Args:
            writes: whether this rank does; it holds the whole weights in host memory meanwhile.
            processor: what is saved beside it.

        Raises:
            CheckpointError: on all ranks, where it cannot be written.
        """
        with _group() as group:
            ranks = RankGroup(group)
            tensors = ranks.together(lambda: {**_frozen(model), **model.state_dict()})
            turns = _gathered(tensors)

            def write() -> None:
                try:
                    if writes:  # merging writes into them
                        self._write(model, {name: tensor.to("cpu", copy=True) for name, tensor in turns}, path, processor)
                finally:
                    for _ in turns:  # what is left: the other ranks gather it too
                        pass

            ranks.together(write)

    def _write(self, model: Any, whole: dict[str, Tensor], path: str | Path, processor: Any) -> None:
        peft = extras.load("peft", extra="hf", wanted_by="lora")
        kind = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))  # not that of shards
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore", FutureWarning)  # of an old name that peft still asks transformers for
            twin = peft.get_peft_model(kind(copy.deepcopy(model.config)), self._config())
        twin.base_model.model.load_state_dict(whole, assign=True)
        twin.base_model.model.tie_weights()
        merged = twin.merge_and_unload()
        merged.generation_config = model.generation_config
        merged.save_pretrained(path)
        if processor is not None:
            processor.save_pretrained(path)

    def _config(self) -> Any:
        peft = extras.load("peft", extra="hf", wanted_by="lora")
        return peft.LoraConfig(
            task_type="CAUSAL_LM", r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=self.targets
        )


@contextmanager
def _group() -> Iterator[distributed.ProcessGroup | None]:
    """The ranks, to speak of the writing alone; None for a process that has no others."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        yield None
        return
    group = distributed.new_group(backend="gloo")
    try:
        yield group
    finally:
        distributed.destroy_process_group(group)


def _gathered(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


def _leave_out_frozen(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """They come from where they came from: a checkpoint of the adapters alone is a hundredth of the model's."""
    for name in _frozen(model):
        state.pop(prefix + name, None)


def _need_no_frozen(model: nn.Module, keys: Any) -> None:
    frozen = _frozen(model)
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]
