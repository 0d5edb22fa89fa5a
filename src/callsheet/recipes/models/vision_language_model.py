"""A vision-language model and its processor from a folder, from the hub, or from a configuration with random weights."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.core.randomness import random_state, restore_random_state
from callsheet.errors import ConfigError
from callsheet.recipes.models.byte_processor import byte_processor
from callsheet.recipes.models.language_model import LanguageModel, freeze, load_pretrained

logger = logging.getLogger("callsheet")

BYTE_PROCESSOR = "bytes"
"""The name of the processor that needs no file."""

TOWERS = {
    "vision_tower": ("vision_tower", "visual", "vision_model", "vision_encoder"),
    "projector": ("multi_modal_projector", "connector", "aligner", "visual.merger", "mm_projector", "embed_vision", "qformer"),
    "language_model": ("language_model", "text_model"),
}
"""The words that `freeze` accepts, such as `projector`, and the names of the modules that each word selects.

The modules are attributes of the model, or of its attribute `model`.
"""


@dataclass
class VisionLanguageModel(LanguageModel):
    """A vision-language model, its processor, and the source of its weights.

    Weights are read only from safetensors; no code from a repository is run.

    Without `path` and `config` the model is a Llava: a vision tower like CLIP's, a projector of two layers, and a Llama.
    The arguments that are not described here are those of `LanguageModel`.

    Args:
        config: values of a transformers configuration. For a model with random weights, the values must include `model_type`. For
            a model with a `path`, they override the values of its own configuration. If `path` and `config` are both None, the
            model is a Llava.
        processor: the processor's folder or name, or `bytes` for a processor that needs no file and takes images of `image_size`.
            With None, a model with a `path` uses its own processor, and a model without a `path` uses `bytes`.
        image_size: the width and height of an image of the Llava, in pixels.
        patch_size: the width and height of a patch of an image of the Llava, in pixels; `image_size` must be a multiple of
            `patch_size`.
        vision_hidden_size: the width of the Llava's vision tower. The vision tower has as many attention heads as the Llama:
            `heads`.
        vision_layers: the number of blocks of the Llava's vision tower.
        freeze: the parts that are not trained: `vision_tower`, `projector` or `language_model`, or patterns of parameter names.

    Raises:
        ConfigError: an argument is invalid.
    """

    processor: str | None = None
    image_size: int = 8
    patch_size: int = 2
    vision_hidden_size: int = 48
    vision_layers: int = 2
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    intermediate_size: int = 128

    def check(self) -> None:
        super().check()
        if self.path is None and self.config is None:
            for name, value, divisor in (
                ("image_size", self.image_size, self.patch_size),
                ("vision_hidden_size", self.vision_hidden_size, self.heads),
            ):
                if value < 1 or divisor < 1 or value % divisor:
                    raise ConfigError(f"model.{name}={value} is not a multiple of {divisor}; give one")

    def make_processor(self) -> Any:
        """Return the processor of images and text.

        Raises:
            ConfigError: the processor cannot be found.
        """
        name = self.processor or self.path or BYTE_PROCESSOR
        if name == BYTE_PROCESSOR:
            return byte_processor(self.image_size, self.patch_size)
        from transformers import AutoProcessor

        processor = load_pretrained(AutoProcessor, name, "processor", revision=self.revision if name == self.path else None)
        missing = [part for part in ("image_processor", "tokenizer") if getattr(processor, part, None) is None]
        if missing:
            raise ConfigError(
                f"the processor of {name!r} is a {type(processor).__name__}, without {' and '.join(missing)}; "
                "name a folder with one for images and text as model.processor"
            )
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token
        return processor

    def make_model(self, processor: Any, longest: int) -> nn.Module:
        """Build the model for the tokens and images that `processor` produces.

        Args:
            processor: what `make_processor` returned.
            longest: the maximum number of tokens of a sequence, including those of its images.

        Returns:
            The model on the CPU, with the parameters frozen that `freeze` names.

        Raises:
            ConfigError: the model cannot be loaded or made, or does not fit the processor or the length.
        """
        from transformers import AutoModelForImageTextToText

        image_token = image_token_id(processor)
        model: Any = self.build(
            AutoModelForImageTextToText,
            vocabulary=len(processor.tokenizer),
            longest=longest,
            **({"image_token_id": image_token} if self.path is None and image_token is not None else {}),
        )
        knows = image_token_id(model.config)
        if image_token is not None and knows is not None and image_token != knows:
            raise ConfigError(
                f"the processor {self.processor or self.path} has {image_token} as its image token, but the model {self.path or 'of model.config'} "
                f"{knows}; give the processor that belongs to the model"
            )
        return model  # type: ignore[no-any-return]

    def _configuration(self, vocabulary: int, longest: int, values: dict[str, Any]) -> Any:
        from transformers import AutoConfig

        if self.config is not None:
            text = {"vocab_size": vocabulary, **self.config.get("text_config", {})}
            if {"image_token_id", "image_token_index"} & set(self.config):
                values = {name: value for name, value in values.items() if name != "image_token_id"}
            return self._make_config({**values, **self.config, "text_config": text})
        text = super()._configuration(vocabulary, longest, {"tie_word_embeddings": False}).to_dict()
        vision = {
            "model_type": "clip_vision_model",
            "hidden_size": self.vision_hidden_size,
            "num_hidden_layers": self.vision_layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.vision_hidden_size,
            "image_size": self.image_size,
            "patch_size": self.patch_size,
        }
        return AutoConfig.for_model(
            "llava",
            vision_config=vision,
            text_config=text,
            image_seq_length=(self.image_size // self.patch_size) ** 2,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            **values,
        )

    def _freeze(self, model: nn.Module) -> None:
        for word in self.freeze:
            if word not in TOWERS:
                freeze(model, [word], self.key)
                continue
            # Some models have the projector inside the vision tower. Freezing `vision_tower` must not freeze the projector.
            inside = tuple(_places(model, "projector", needed=False)) if word == "vision_tower" else ()
            prefixes = tuple(_places(model, word))
            for name, parameter in model.named_parameters():
                if name.startswith(prefixes) and not name.startswith(inside):
                    parameter.requires_grad_(False)


def image_token_id(owner: Any) -> int | None:
    """Return the id of the token that represents an image patch, as a processor or configuration defines it.

    Return None if `owner` defines no such token.
    """
    found = getattr(owner, "image_token_id", None)
    return found if found is not None else getattr(owner, "image_token_index", None)


def check_images(model: Any, batch: Mapping[str, Any]) -> None:
    """Check with one row that the vision tower returns as many vectors as the processor inserts image tokens.

    Parameters of the tower that do not affect these vectors, such as layers after `vision_feature_layer`, are frozen. They would
    get no gradient, which DistributedDataParallel does not support.

    Raises:
        ConfigError: the processor does not fit the model.
    """
    look = getattr(model, "get_image_features", None)
    if look is None:
        return
    takes = inspect.signature(look).parameters
    was_training, random = model.training, random_state()
    model.eval()
    try:
        with torch.enable_grad():
            found = look(**{name: value for name, value in batch.items() if name in takes and name != "input_ids"})
    except (ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(
            f"the model cannot use the processor's output for an image: {error}; give the processor that belongs to the model, "
            "with its image and patch size"
        ) from error
    finally:
        model.train(was_training)
        restore_random_state(random)
    vectors = list(_tensors(getattr(found, "pooler_output", found)))
    token = image_token_id(model.config)
    made, room = sum(vector.numel() // vector.shape[-1] for vector in vectors), int((batch["input_ids"] == token).sum())
    if token is not None and made != room:
        raise ConfigError(
            f"the processor inserts {room} image tokens, but the model makes {made} vectors of the same images; give the processor that "
            "belongs to the model (its patch_size, num_additional_image_tokens and vision_feature_select_strategy determine the number)"
        )
    _freeze_unused(model, vectors)


def _freeze_unused(model: nn.Module, vectors: list[Tensor]) -> None:
    used, seen, ahead = set(), set(), [vector.grad_fn for vector in vectors]
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            used.add(id(variable))
        ahead += [following for following, _ in node.next_functions]
    prefixes = tuple(_places(model, "vision_tower", needed=False))
    unused = [
        parameter
        for name, parameter in model.named_parameters()
        if prefixes and name.startswith(prefixes) and parameter.requires_grad and id(parameter) not in used
    ]
    for parameter in unused:
        parameter.requires_grad_(False)
    if unused:
        count = sum(parameter.numel() for parameter in unused)
        logger.info("%d parameters of the vision tower are not trained: the model's output does not depend on them", count)


def _places(model: nn.Module, word: str, *, needed: bool = True) -> list[str]:
    """Return the prefixes of the names of parameters in one part of the model. `word` names the part, such as `vision_tower`."""
    modules = {name for name, _ in model.named_modules()}
    found = [f"{name}." for owner in ("model.", "") for alias in TOWERS[word] if (name := owner + alias) in modules]
    if not found and needed:
        children = sorted({name for name in modules if name and name.count(".") <= 1})
        raise ConfigError(
            f"freeze: {type(model).__name__} has no module that is known as its {word}; name its parameters by a pattern, such as "
            f"{children[0] if children else 'model'}.* (it has {', '.join(children[:12])})"
        )
    if word == "language_model" and found and "lm_head" in modules:
        found.append("lm_head.")
    return found


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for value in found:
            yield from _tensors(value)
