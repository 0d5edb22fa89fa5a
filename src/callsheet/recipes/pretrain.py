"""Pretraining: train a causal language model from random weights on text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from callsheet.callbacks.support.continuations import check_prompts
from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.errors import ConfigError
from callsheet.recipes.data.byte_files import ByteFiles
from callsheet.recipes.data.text_rows import TextRows
from callsheet.recipes.job import JobConfig
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.recipes.models.language_model import BYTE_TOKENIZER, LanguageModel
from callsheet.recipes.recipe import Recipe
from callsheet.recipes.tasks.generation import log_continuations, passages
from callsheet.trainer.arguments import not_negative, positive
from callsheet.trainer.tasks import ForwardStepTask, Task

ForwardStep = Callable[[nn.Module, Any], Any]


@dataclass(kw_only=True)
class PretrainConfig(JobConfig):
    """The configuration of the recipe `pretrain`.

    Args:
        model: the model to train.
        data: files to train on, if `rows` is None; each byte is a token.
        rows: texts to train on instead of `data`, tokenized with `model.tokenizer`.
        prompts: prompts that the trained model continues at the end of the run.
        generated_tokens: the number of tokens to generate for each prompt.
        temperature: the sampling temperature; 0 chooses the most likely token.
    """

    run_name: str = "pretrain"
    max_duration: str | int = "75s"
    eval_interval: str | int | None = "200ba"
    model: LanguageModel = field(default_factory=LanguageModel)
    data: ByteFiles = field(default_factory=ByteFiles)
    rows: TextRows | None = None
    prompts: list[str] = field(default_factory=lambda: ["def ", "import ", "class "])
    generated_tokens: int = 160
    temperature: float = 0.7

    may_change: ClassVar[frozenset[str]] = JobConfig.may_change | {"prompts", "generated_tokens", "temperature"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check()
        if not all(self.prompts):
            raise ConfigError("prompts: a prompt needs at least one character")
        check_prompts(self.prompts)
        positive("generated_tokens", self.generated_tokens, int)
        not_negative("temperature", self.temperature)


class Pretrain(Recipe[PretrainConfig]):
    """Pretraining: train a causal language model from random weights on text.

    The model is evaluated at the evaluation interval and after training, when it is also tested.

    Args:
        config, callbacks, loggers, resolved: see `Recipe`.
        forward_step: a step function as in Megatron: `forward_step(model, batch)` returns the outputs and a function that computes the
            mean loss from them. None uses the model's own loss.
    """

    Config = PretrainConfig
    results_are_in = "nats per token, on texts that the model has not seen"

    def __init__(
        self,
        config: PretrainConfig | None = None,
        callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
        loggers: Iterable[Callback] = (),
        *,
        forward_step: ForwardStep | None = None,
        resolved: str = "",
    ) -> None:
        super().__init__(config, callbacks, loggers, resolved=resolved)
        self.forward_step = forward_step
        self.generations: list[tuple[str, str]] = []

    # --- methods of the base class `Recipe` ---

    def read_data(self) -> None:
        """Read the rows and tokenize them. If `rows` is not set, find text files instead; each of their bytes is one token."""
        config = self.config
        if config.rows is not None:
            self.tokenizer = config.model.make_tokenizer()
            self._texts = config.rows.sets(self.tokenizer)
            self._sets: dict[str, Any] = dict(self._texts.datasets)
            return
        if config.model.tokenizer not in (None, BYTE_TOKENIZER) or config.model.path is not None:
            raise ConfigError(
                "data: files are read as bytes, but the model has a tokenizer; give the files' texts as rows instead"
            )
        self.tokenizer = byte_tokenizer()
        self._sets = {"train": config.data.train(), "validation": config.data.validation(), "test": config.data.test()}

    def make_model(self) -> nn.Module:
        """Return a causal language model for the tokenizer's vocabulary."""
        from transformers import AutoModelForCausalLM

        window = (self.config.rows or self.config.data).sequence_length
        prompts = max((len(self.tokenizer.encode(prompt)) for prompt in self.config.prompts), default=0)
        longest = max(window, prompts + self.config.generated_tokens)
        return self.config.model.build(AutoModelForCausalLM, vocabulary=len(self.tokenizer), longest=longest)

    def make_task(self) -> Task | None:
        """Return a task that calls the user's `forward_step`. Without `forward_step`, return None: the model then computes its own loss."""
        return ForwardStepTask(self.forward_step) if self.forward_step is not None else None

    def train_data(self) -> Iterable[Any]:
        """Return windows (token sequences of a fixed length) of the training data, shuffled unless rows are streamed."""
        return self.loader(self._sets["train"], train=True)

    def validation_data(self) -> Mapping[str, Iterable[Any]]:
        """Return windows (fixed-length sequences) of the validation data: all if `rows` is set, otherwise evenly spaced ones."""
        return {name: self.loader(some, train=False) for name, some in self._sets.items() if name not in ("train", "test")}

    def test_data(self) -> Iterable[Any] | None:
        """Return windows (fixed-length sequences) of the test data: all if `rows` is set, otherwise evenly spaced ones."""
        return self.loader(self._sets["test"], train=False) if "test" in self._sets else None

    def processor(self) -> Any:
        return self.tokenizer

    def about_data(self) -> str:
        return str(self._texts) if self.config.rows is not None else self.config.data.about()

    def finish(self) -> None:
        """Compute the baselines from token counts, and let the model continue the prompts."""
        self.results = {f"{name}/loss": found["loss"] for name, found in self.evaluated.items()}
        if self.config.rows is None:
            self.results |= zip(("unigram", "bigram"), self.config.data.baselines(), strict=True)
        else:
            unigrams = {f"{name}, unigram": self._texts.unigram(name) for name in self.evaluated}
            self.results |= {name: value for name, value in unigrams.items() if value is not None}
        config = self.config
        self.generations = log_continuations(
            self.trainer,
            config.prompts,
            self.tokenizer,
            self.short(config.generated_tokens),
            temperature=config.temperature,
            seed=config.seed,
        )

    def generated_texts(self) -> Iterable[str]:
        """Return each prompt with the model's continuation."""
        return passages(self.generations)


def pretrain(
    config: PretrainConfig | None = None,
    forward_step: ForwardStep | None = None,
    *,
    callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
    loggers: Iterable[Callback] = (),
) -> Pretrain:
    """Run the recipe: set up, train, evaluate and test.

    Args:
        config: the configuration; None: a `PretrainConfig` with its default values.
        forward_step: see `Pretrain`; None: the model's own loss.
        callbacks: a manager, a callback, or any iterable of callbacks; None: only those that the recipe adds.
        loggers: more callbacks, called after the others.

    Returns:
        The recipe, with its `results` and its `trainer`.

    Raises:
        ConfigError, RunInUseError: see `Recipe.setup`.
        NonFiniteError: see `Recipe.run`.

    Examples:
        >>> from callsheet.recipes import pretrain  # doctest: +SKIP
        >>> pretrain(callbacks=[SpeedMonitor()]).results  # doctest: +SKIP
    """
    recipe = Pretrain(config, callbacks, loggers, forward_step=forward_step)
    recipe.setup()
    recipe.run()
    return recipe
