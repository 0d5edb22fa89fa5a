"""Fine-tuning: a causal language model learns from conversations, prompts with completions, or plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from callsheet.callbacks.support.continuations import check_prompts
from callsheet.core.callback import Callback, one_of
from callsheet.core.manager import CallbackManager
from callsheet.errors import ConfigError
from callsheet.recipes.data.conversations import Conversations
from callsheet.recipes.data.docstrings import Docstrings
from callsheet.recipes.data.example_sets import ExampleSets
from callsheet.recipes.data.examples import TOO_LONG, Examples, TooLong
from callsheet.recipes.data.packing import check_kept_apart
from callsheet.recipes.data.rows import Rows, number_rows
from callsheet.recipes.data.tables import Stream, Table, reject
from callsheet.recipes.job import JobConfig
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.models.lora import Lora
from callsheet.recipes.recipe import Recipe
from callsheet.recipes.tasks.generation import continuations, log_continuations
from callsheet.recipes.tasks.token_counts import TokenCounts
from callsheet.trainer.arguments import not_negative, positive
from callsheet.trainer.tasks import HuggingFaceTask, Task

BEFORE_KEY = "finetune/before"
"""The key in `ctx.user_state` under which the model's losses before training are stored."""


@dataclass(kw_only=True)
class FinetuneConfig(JobConfig):
    """The configuration of the recipe `finetune`.

    Args:
        model: the model to train.
        lora: settings of low-rank adapters. With adapters, only the adapters are trained. None trains all parameters except those
            that `model.freeze` names.
        train: rows to train on, with the columns `messages`, or `prompt` and `completion`, or `text`; None trains on `docstrings`.
        validation: rows to evaluate on, by the dataset's name.
        test: rows to test on once, after training.
        docstrings: Python files, used if `train` is None. The model learns to answer with the first line of a function's docstring.
        chat_template: the path of a Jinja file with a chat template, or `plain` for no template; None is the tokenizer's own
            template.
        completion_only: whether only the answers count in the loss, and not the prompts.
        sequence_length: the maximum number of tokens of an example, and of a packed row.
        too_long: what happens to longer examples: `reject` ends with an error before training, `truncate` keeps only their
            beginning, `drop` leaves them out.
        packing: whether to put several examples into each row of `sequence_length` tokens; `batch_size` is then a number of rows.
        evaluate_first: whether the validation data is also evaluated before the first step.
        prompts: prompts that the trained model answers at the end of the run.
        samples: how many rows of each validation dataset the trained model answers at the end of the run, in addition to
            `prompts`.
        generated_tokens: the maximum number of tokens of an answer.
        temperature: the sampling temperature; 0 chooses the most likely token.
    """

    run_name: str = "finetune"
    max_duration: str | int = "3ep"
    model: LanguageModel = field(default_factory=LanguageModel)
    lora: Lora | None = None
    train: Rows | None = None
    validation: dict[str, Rows] = field(default_factory=dict)
    test: Rows | None = None
    docstrings: Docstrings = field(default_factory=Docstrings)
    chat_template: str | None = None
    completion_only: bool = True
    sequence_length: int = 512
    too_long: TooLong = "reject"
    packing: bool = False
    evaluate_first: bool = True
    prompts: list[str] = field(default_factory=list)
    samples: int = 2
    generated_tokens: int = 96
    temperature: float = 0.0

    may_change: ClassVar[frozenset[str]] = JobConfig.may_change | {"prompts", "samples", "generated_tokens", "temperature"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check()
        for name in ("sequence_length", "generated_tokens"):
            positive(name, getattr(self, name), int)
        one_of("too_long", self.too_long, TOO_LONG)
        for name in ("samples", "temperature"):
            not_negative(name, getattr(self, name))
        check_prompts(self.prompts)
        if self.train is None and (self.validation or self.test is not None):
            raise ConfigError("validation or test is given without train; give the rows to train on as well, as train.path")
        if taken := {"train", "test"} & set(self.validation):
            raise ConfigError(f"validation: a dataset cannot be called {taken.pop()}, as another is; choose another name")
        if self.lora is not None and not self.lora.merge and self.model.path is None:
            raise ConfigError("lora.merge: false exports adapters without their model, which has no model.path; give merge: true")


class CausalTask(HuggingFaceTask):
    """A task for models that compute their own loss. The task turns off the key-value cache, which training does not need.

    With the cache, packed examples could attend to each other.
    """

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(**batch, use_cache=False)


class Finetune(Recipe[FinetuneConfig]):
    """Fine-tuning: a causal language model learns from conversations, prompts with completions, or plain text.

    The model is evaluated before training, at the evaluation interval, and after training, when it is also tested.

    The arguments are those of `Recipe`.
    """

    Config = FinetuneConfig
    results_are_in = "nats per token of the answers; the baselines use token counts of the training answers"

    # --- methods of the base class `Recipe` ---

    def read_data(self) -> None:
        """Read all rows, and tokenize those that are not streamed.

        Rows that are too long or cannot be used are rejected here.
        """
        config = self.config
        self.tokenizer = config.model.make_tokenizer()
        self.conversations = Conversations(self.tokenizer, template=config.chat_template, completion_only=config.completion_only)
        self.rows: dict[str, Table | Stream] = {}
        if config.train is None:
            self.rows = {"train": config.docstrings.train, **config.docstrings.validation}
        else:
            given = {"train": config.train, **config.validation, "test": config.test}
            self.rows = {name: rows.read(()) for name, rows in given.items() if rows is not None}
        self.sets = ExampleSets(
            self.rows,
            self.conversations,
            longest=config.sequence_length,
            too_long=config.too_long,
            packing=config.packing,
            flat=self._is_flash,
            pad_id=self.tokenizer.pad_token_id,
        )

    def make_model(self) -> nn.Module:
        """Return the language model. Its generation ends at the tokenizer's end token. If `lora` is set, the model has adapters."""
        from transformers import AutoModelForCausalLM

        config = self.config
        longest = config.sequence_length
        if config.model.path is None and config.model.config is None:
            longest += config.generated_tokens
        model: Any = config.model.build(AutoModelForCausalLM, vocabulary=len(self.tokenizer), longest=longest)
        if config.packing and not self._is_flash:
            check_kept_apart(model)
        self._most = getattr(model.config, "max_position_embeddings", None)
        self.questions = self._questions()
        generation = model.generation_config
        known = generation.eos_token_id
        ends = [] if known is None else [known] if isinstance(known, int) else list(known)
        if self.tokenizer.eos_token_id not in (None, *ends):
            generation.eos_token_id = [*ends, self.tokenizer.eos_token_id] if ends else self.tokenizer.eos_token_id
        if generation.pad_token_id is None:
            generation.pad_token_id = self.tokenizer.pad_token_id
        if config.lora is not None:
            config.lora.add_to(model)
        return model  # type: ignore[no-any-return]

    def make_task(self) -> Task:
        """Return a task for a model that computes its own loss over the target tokens."""
        return CausalTask()

    def train_data(self) -> Iterable[Any]:
        """Return the training examples, or rows of packed examples, in random order."""
        return self._loader("train", train=True)

    def validation_data(self) -> Mapping[str, Iterable[Any]]:
        """Return the examples of each validation dataset, or rows of packed examples, by dataset name. The examples are not shuffled."""
        return {name: self._loader(name, train=False) for name in self.rows if name not in ("train", "test")}

    def test_data(self) -> Iterable[Any] | None:
        return self._loader("test", train=False) if "test" in self.rows else None

    def processor(self) -> Any:
        return self.tokenizer

    def about_data(self) -> str:
        """Return a text with the number of examples, and the number of examples that were too long."""
        return str(self.sets)

    def begin(self) -> None:
        """Evaluate the untrained model, unless training has already begun."""
        trainer = self.trainer
        if self.config.evaluate_first and trainer.state.evaluators and not trainer.state.timestamp.batch:
            found = trainer.evaluate()
            trainer.ctx.user_state[BEFORE_KEY] = {name: losses["loss"] for name, losses in found.items()}

    def finish(self) -> None:
        """Compute `results` (the losses and the baselines), and let the model answer the prompts."""
        before = self.trainer.ctx.user_state.get(BEFORE_KEY, {})
        train = self.sets.examples["train"]
        counts = TokenCounts(train, len(self.tokenizer)) if isinstance(train, Examples) else None
        for name, found in self.evaluated.items():
            self.results[f"{name}/loss"] = found["loss"]
            if name in before:
                self.results[f"{name}, before training"] = before[name]
            examples = self.sets.examples[name]
            if counts is not None and isinstance(examples, Examples):
                unigram, bigram = counts.cross_entropies(examples)
                self.results |= {f"{name}, unigram": unigram, f"{name}, bigram": bigram}
        config = self.config
        self.generated = log_continuations(
            self.trainer,
            [ids for ids, _ in self.questions],
            self.tokenizer,
            self.short(config.generated_tokens),
            temperature=config.temperature,
            seed=config.seed,
        )

    def generated_texts(self) -> Iterable[str]:
        """Yield each prompt with the model's answer and, if there is one, the expected answer."""
        for (prompt, answer), (_, data) in zip(getattr(self, "generated", ()), self.questions, strict=False):
            yield f"--- {prompt!r} ---\n{answer}" + (f"\n(the data: {data})" if data else "") + "\n"

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
        """Yield the model's `completion` for each row's `messages` or `prompt`."""
        config, trainer = self.config, self.trainer
        batch_size = config.eval_batch_size or config.batch_size
        questions = number_rows(rows)
        # Take the rows of several batches at once, so that prompts of equal length are batched together.
        while some := list(islice(questions, 8 * batch_size)):
            prompts = [self._prompt(row, place) for place, row in some]
            answers = continuations(
                trainer,
                prompts,
                self.tokenizer,
                config.generated_tokens,
                temperature=config.temperature,
                seed=config.seed,
                batch_size=batch_size,
            )
            yield from ({"completion": answer} for _, answer in answers)

    def export(self, path: str | Path) -> None:
        """Write the model and its tokenizer as a Hugging Face folder.

        Adapters are merged into the weights; if `lora.merge` is False, only the adapters are written.
        """
        lora = self.config.lora
        if lora is None or not lora.merge:
            super().export(path)
        else:
            lora.export_merged(self.trainer.model, path, writes=self.ranks.rank == 0, processor=self.tokenizer)

    # --- private methods ---

    @property
    def _is_flash(self) -> bool:
        return "flash" in (self.config.model.attention or "")

    def _loader(self, name: str, *, train: bool) -> Iterable[Any]:
        return self.loader(self.sets.dataset(name), collate=self.sets.collate, train=train)

    def _questions(self) -> list[tuple[list[int], str]]:
        """Return the tokens of each prompt, with the expected answer (an empty text if the data has none)."""
        config, say = self.config, self.conversations
        questions = [(self._prompt({"prompt": text}, f"prompts: {text!r}"), "") for text in config.prompts]
        for name, rows in self.rows.items():
            if name in ("train", "test") or not isinstance(rows, Table):
                continue
            for index in range(min(config.samples, len(rows))):
                row, place = rows[index], rows.place(index)
                if "messages" not in row and "prompt" not in row:
                    break
                prompt, example = say.prompt(row, place), say.example(row, place)
                if self._has_room(prompt):
                    questions.append((prompt, self.tokenizer.decode(example.ids[len(prompt) :], skip_special_tokens=True)))
        return questions

    def _prompt(self, row: Mapping[str, Any], place: str) -> list[int]:
        prompt = self.conversations.prompt(row, place)
        if not self._has_room(prompt):
            reject(
                place,
                f"a prompt of {len(prompt)} tokens and {self.config.generated_tokens} generated tokens are more than the {self._most} that "
                "the model takes; give a shorter prompt, or fewer generated_tokens",
            )
        return prompt

    def _has_room(self, prompt: list[int]) -> bool:
        return self._most is None or len(prompt) + self.config.generated_tokens <= self._most


def finetune(
    config: FinetuneConfig | None = None,
    *,
    callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
    loggers: Iterable[Callback] = (),
) -> Finetune:
    """Run the recipe: set up, train, evaluate and test.

    Args:
        config: the configuration; None: a `FinetuneConfig` with its default values.
        callbacks: a manager, a callback, or any iterable of callbacks; None: only those that the recipe adds.
        loggers: more callbacks, called after the others.

    Returns:
        The recipe, with its `results` and its `trainer`.

    Raises:
        ConfigError, RunInUseError: see `Recipe.setup`.
        NonFiniteError: see `Recipe.run`.

    Examples:
        >>> from callsheet.recipes import finetune  # doctest: +SKIP
        >>> finetune(callbacks=[SpeedMonitor()]).results  # doctest: +SKIP
    """
    recipe = Finetune(config, callbacks, loggers)
    recipe.setup()
    recipe.run()
    return recipe
