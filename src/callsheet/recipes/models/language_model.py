"""A language model from a folder, from the hub, or from a configuration with random weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from callsheet.errors import ConfigError, did_you_mean
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.recipes.models.configuration_keys import check_changed, check_made

logger = logging.getLogger("callsheet")

BYTE_TOKENIZER = "bytes"
"""The name of the tokenizer that needs no file."""

CLASSIFIER_SUFFIX = "ForSequenceClassification"
"""The suffix of the class names of transformers models with a classification head."""

_HUB_SECONDS = 10.0
"""How many seconds to wait for an answer of the Hugging Face hub. After that, only copies on this machine are used."""

DtypeName = Literal["float32", "bfloat16", "float16"]
_DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class LanguageModel:
    """A language model and the source of its weights. Weights are read only from safetensors; no code from a repository is run.

    Args:
        path: a folder that `from_pretrained` loads, or a model's name on the hub; None makes a model with random weights.
        revision: the revision of a model on the hub.
        config: values of a transformers configuration. For a model with random weights, the values must include `model_type`. For
            a model with a `path`, they override the values of its own configuration. If `path` and `config` are both None, the
            model is a Llama.
        tokenizer: the tokenizer's folder or name, or `bytes` for a tokenizer that needs no file. With None, a model with a `path`
            uses its own tokenizer, and a model without a `path` uses `bytes`.
        hidden_size: the width of the residual stream of the Llama.
        layers: the number of blocks of the Llama.
        heads: the number of attention heads of the Llama. `hidden_size` must be a multiple of twice this number.
        intermediate_size: the width of the feed-forward layers of the Llama.
        dtype: the type of the weights: `float32`, `bfloat16` or `float16`.
        attention: how attention is computed, such as `sdpa`, `eager` or `flash_attention_2`; None leaves the choice to transformers.
        freeze: patterns of the names of parameters that are not trained, such as `model.embed_tokens.*`.
    """

    path: str | None = None
    revision: str | None = None
    config: dict[str, Any] | None = None
    tokenizer: str | None = None
    hidden_size: int = 192
    layers: int = 4
    heads: int = 6
    intermediate_size: int = 512
    dtype: DtypeName = "float32"
    attention: str | None = None
    freeze: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key = "model"
        """The recipe's key for this model, for messages: `model`, or `teacher` for the teacher of a distillation."""

    def check(self) -> None:
        """Check the arguments. The configurations of recipes call this method.

        Raises:
            ConfigError: an argument is invalid.
        """
        key = self.key
        if self.dtype not in _DTYPES:
            raise ConfigError(f"{key}.dtype={self.dtype!r}{did_you_mean(self.dtype, _DTYPES)}: give one of {', '.join(_DTYPES)}")
        for size in ("hidden_size", "layers", "heads", "intermediate_size"):
            if getattr(self, size) < 1:
                raise ConfigError(f"{key}.{size}={getattr(self, size)}: give a whole number above 0")
        if self.path is None and self.config is None and self.hidden_size % (2 * self.heads):
            raise ConfigError(
                f"{key}.hidden_size={self.hidden_size} does not divide into {self.heads} heads of even width; give a multiple of {2 * self.heads}"
            )
        if self.path is None and self.config is not None and "model_type" not in self.config:
            raise ConfigError(f"{key}.config needs a `model_type`, such as llama, where there is no {key}.path")

    def make_tokenizer(self) -> Any:
        """Return the tokenizer, with a padding token.

        Raises:
            ConfigError: the tokenizer cannot be found, or has neither a padding token nor an end token.
        """
        name = self.tokenizer or self.path or BYTE_TOKENIZER
        if name == BYTE_TOKENIZER:
            return byte_tokenizer()
        from transformers import AutoTokenizer

        tokenizer = load_pretrained(AutoTokenizer, name, "tokenizer", self.revision if name == self.path else None, key=self.key)
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ConfigError(
                    f"the tokenizer {name} has neither a padding token nor an end token; set its pad_token, and save it"
                )
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def build(self, auto: Any, *, vocabulary: int, longest: int, **values: Any) -> nn.Module:
        """Build the model, with weights from a folder or the hub, or with random weights.

        Args:
            auto: the transformers class that makes the model, such as `AutoModelForCausalLM`.
            vocabulary: the number of ids of the tokenizer.
            longest: the maximum number of tokens of a sequence.
            values: further values of the configuration, such as `num_labels`.

        Returns:
            The model on the CPU, with the parameters frozen that `freeze` names.

        Raises:
            ConfigError: the model cannot be loaded or made, or does not fit the tokenizer or the length.
        """
        values |= {"attn_implementation": self.attention} if self.attention is not None else {}
        if self.path is not None:
            model: Any = self._load_pretrained(auto, {**values, **(self.config or {})})
        else:
            config = self._configuration(vocabulary, longest, values)
            try:
                model = auto.from_config(config, dtype=_DTYPES[self.dtype])
            except ValueError as error:  # the configuration is for another type of model
                raise ConfigError(f"this recipe cannot train a model of {self.key}.config: {error}") from error
        self._check(model, vocabulary, longest)
        self._freeze(model)
        return model  # type: ignore[no-any-return]

    def _load_pretrained(self, auto: Any, values: dict[str, Any]) -> Any:
        from transformers import AutoConfig

        if self.config:
            over = {name: value for name, value in self.config.items() if name != "attn_implementation"}
            check_changed(
                over, load_pretrained(AutoConfig, str(self.path), "model", self.revision, key=self.key), f"{self.key}.config"
            )
        model, found = load_pretrained(auto, str(self.path), "model", self.revision, key=self.key, dtype=_DTYPES[self.dtype],
                              use_safetensors=True, output_loading_info=True, **values)  # fmt: skip
        lacking = sorted(name for name in found["missing_keys"] if not _is_of_new_head(name, model))
        if lacking:
            raise ConfigError(
                f"the model {self.path} lacks {len(lacking)} of the weights of a {type(model).__name__}, which would be random, such as "
                f"{lacking[0]}; give a model that has them"
            )
        return model

    def _configuration(self, vocabulary: int, longest: int, values: dict[str, Any]) -> Any:
        from transformers import AutoConfig

        if self.config is not None:
            return self._make_config({"vocab_size": vocabulary, **values, **self.config})
        return AutoConfig.for_model(
            "llama",
            **{
                "vocab_size": vocabulary,
                "hidden_size": self.hidden_size,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "intermediate_size": self.intermediate_size,
                "max_position_embeddings": longest,
                "tie_word_embeddings": True,
                "use_cache": False,
                "bos_token_id": None,
                "eos_token_id": None,
                **values,
            },
        )

    def _make_config(self, given: dict[str, Any]) -> Any:
        from transformers import CONFIG_MAPPING, AutoConfig

        kind = given["model_type"]
        if kind not in CONFIG_MAPPING:
            raise ConfigError(
                f"{self.key}.config.model_type={kind!r} is unknown to transformers{did_you_mean(str(kind), list(CONFIG_MAPPING))}"
            )
        config = AutoConfig.for_model(**given)
        check_made(self.config or {}, config, f"{self.key}.config")
        return config

    def _freeze(self, model: nn.Module) -> None:
        freeze(model, self.freeze, self.key)

    def _check(self, model: Any, vocabulary: int, longest: int) -> None:
        has = model.get_input_embeddings().num_embeddings
        if has < vocabulary:
            raise ConfigError(
                f"the tokenizer {self.tokenizer or self.path} has {vocabulary} tokens, and the model {self.path or f'of {self.key}.config'} "
                f"knows {has}; give the tokenizer that belongs to the model"
            )
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and longest > most:
            raise ConfigError(
                f"sequences of up to {longest} tokens are longer than the {most} that the model takes; give shorter ones"
            )


def _is_of_new_head(name: str, model: Any) -> bool:
    """Return whether the missing weight `name` belongs to a new classification head or its pooler, which start from random weights."""
    if not type(model).__name__.endswith(CLASSIFIER_SUFFIX) or any(
        CLASSIFIER_SUFFIX in kind for kind in model.config.architectures or ()
    ):
        return False
    return not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name


def load_pretrained(auto: Any, name: str, what: str, revision: str | None = None, *, key: str = "model", **options: Any) -> Any:
    """Return `auto.from_pretrained(name)`, without running code of the model's repository.

    If `name` is not a local folder and the hub does not answer, only a copy from an earlier download is used.

    Args:
        auto: a class of transformers, such as `AutoTokenizer`.
        name: a folder, or a name on the hub.
        what: what is loaded, for messages: a model, a tokenizer or a processor.
        revision: the revision on the hub.
        key: the recipe's key for the model, for messages.
        options: further arguments of `from_pretrained`.

    Raises:
        ConfigError: there is no such model, tokenizer or processor, or it cannot be loaded.
    """
    source = name
    try:
        if not Path(name).is_dir() and _is_name_on_hub(name):
            logger.info("there is no folder %s; loading the %s of that name from the hub", name, what)
            if not _hub_answers():
                source = _copy_of(name, revision)
                logger.info("the hub does not answer; using the copy in %s", source)
        with _quiet_hub():
            return auto.from_pretrained(source, revision=revision, trust_remote_code=False, **options)
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
        RuntimeError,
    ) as error:  # the causes include missing packages, and weights that do not fit the model
        raise ConfigError(f"no {what} could be loaded from {name!r}: {_why_not_loaded(name, what, key, error)}") from error


def _is_name_on_hub(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def _hub_answers() -> bool:
    """Return whether the hub answers one short request.

    The hub's own client would try again for a minute, for each file.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception:  # the type of the error depends on the version of the hub's client, and on its offline mode
        return False
    return True


def _copy_of(name: str, revision: str | None) -> str:
    """Return the folder of a model that was downloaded earlier. Raise OSError if there is no such folder."""
    from huggingface_hub import snapshot_download

    return snapshot_download(name, revision=revision, local_files_only=True)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """While the `with` block runs, suppress the hub client's log lines about retries. If the last retry fails, its error is still raised."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(level)


def _why_not_loaded(name: str, what: str, key: str, error: BaseException) -> str:
    """Return why a model cannot be loaded: a hint for a known error, otherwise the package's own message."""
    give = "give a folder that from_pretrained loads, or a model's name on the hub, such as owner/name"
    if (folder := Path(name)).is_dir():
        if not (folder / "config.json").is_file() and what == "model":
            return f"the folder has no config.json, so it holds no model; {give}"
        if what == "tokenizer" and not any(folder.glob("token*")):
            return f"the folder has no tokenizer; name one with {key}.tokenizer, such as bytes"
        return str(error)
    if not _is_name_on_hub(name):
        return f"there is no such folder; {give}"
    causes, cause = set(), error
    while cause is not None and type(cause).__name__ not in causes:
        causes.add(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]  # None ends the loop
    if "GatedRepoError" in causes:
        return "it is gated on the hub; request access on its page, and log in with `hf auth login`"
    if "RevisionNotFoundError" in causes:
        return f"the hub has the model, but no such revision of it; give another {key}.revision"
    if "RepositoryNotFoundError" in causes:
        return f"there is no such folder, and the hub has no model of that name, or a private one; {give}"
    if isinstance(error, OSError):
        return f"there is no such folder, no copy of a model of that name is kept here, and the hub could not be asked; {give}"
    return str(error)


def freeze(model: nn.Module, patterns: Sequence[str], key: str) -> None:
    """Freeze the parameters whose names match one of the patterns. `key` is the recipe's key for the model, for messages.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    names = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"{key}.freeze: no parameter matches {pattern}{did_you_mean(pattern, list(names))}; give patterns of parameter names, "
                "such as 'model.embed_tokens.*'"
            )
        for name in matching:
            names[name].requires_grad_(False)
