"""Fine-tuning a vision-language model: images and text in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

from torch import nn

from callsheet.core.callback import Callback, one_of
from callsheet.core.manager import CallbackManager
from callsheet.errors import ConfigError
from callsheet.recipes.data.digits import PARTS, Digits
from callsheet.recipes.data.image_answers import generate_answers
from callsheet.recipes.data.image_batches import TOO_LONG, ImageBatches, TooLong
from callsheet.recipes.data.image_text import Example, ImageText, check_rows
from callsheet.recipes.data.rows import Rows, number_rows, prepare_rows
from callsheet.recipes.data.tables import Stream, Table
from callsheet.recipes.job import JobConfig
from callsheet.recipes.models.vision_language_model import VisionLanguageModel, check_images
from callsheet.recipes.recipe import TRIAL_BATCHES, Recipe
from callsheet.recipes.tasks.generation import FINAL_TABLE
from callsheet.trainer.arguments import not_negative, positive

MAJORITY_BASELINE = "always the commonest completion"
_MAX_COUNTED_ROWS = 10_000
"""The maximum number of training rows that are searched for the most common answer, which is the baseline."""


@dataclass(kw_only=True)
class FinetuneVLMConfig(JobConfig):
    """The configuration of the recipe `finetune_vlm`.

    Args:
        model: the model to train, and its processor.
        train: rows to train on; None trains on scikit-learn's handwritten digits, with their names in words.
        validation: rows to evaluate on, by the dataset's name.
        test: rows to test on once, after training.
        image_folder: the folder to which paths of images are relative; None is the folder of the row's file.
        sequence_length: the maximum number of tokens of a row, including those of its images.
        too_long: what happens to longer rows: `reject` ends with an error, `truncate` keeps only their beginning.
        checked_rows: how many rows of each dataset are checked before training; None checks all.
        answered_rows: how many rows of each validation dataset, and of the test data, the trained model answers, so that its
            answers can be compared.
        answer_tokens: the maximum number of tokens of an answer.
    """

    run_name: str = "finetune_vlm"
    max_duration: str | int = "3ep"
    model: VisionLanguageModel = field(default_factory=VisionLanguageModel)
    train: Rows | None = None
    validation: dict[str, Rows] = field(default_factory=dict)
    test: Rows | None = None
    image_folder: str | None = None
    sequence_length: int = 512
    too_long: TooLong = "reject"
    checked_rows: int | None = 1000
    answered_rows: int = 200
    answer_tokens: int = 32

    may_change: ClassVar[frozenset[str]] = JobConfig.may_change | {"checked_rows", "answered_rows", "answer_tokens"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check()
        for name in ("sequence_length", "checked_rows", "answer_tokens"):
            positive(name, getattr(self, name), int)
        one_of("too_long", self.too_long, TOO_LONG)
        not_negative("answered_rows", self.answered_rows)
        if self.microbatch_size is not None:
            raise ConfigError(
                "microbatch_size: a batch may have more or fewer images than rows, so it cannot be split; give a smaller batch_size "
                "with gradient_accumulation_steps, which takes the same step"
            )
        if self.train is None and (self.validation or self.test is not None):
            raise ConfigError(
                "validation and test are given without train; give the rows to train on as well, such as train.path"
            )
        if taken := {"train", "test"} & set(self.validation):
            raise ConfigError(f"validation: a dataset cannot be called {taken.pop()}, as another is; choose another name")


class FinetuneVLM(Recipe[FinetuneVLMConfig]):
    """Fine-tuning a vision-language model: images and text in, text out.

    The assistant's messages count in the loss. The model is evaluated at the evaluation interval and after training, when it is also
    tested. Then it answers held-out rows, and its answers are compared with those in the rows.

    The arguments are those of `Recipe`.
    """

    Config = FinetuneVLMConfig
    results_are_in = "losses in nats per target token, the rest as the fraction of held-out rows that are answered exactly"
    generations: Sequence[Sequence[str]] = ()
    """For some held-out rows: the row's place, the expected answer, and the model's answer."""

    # --- methods of the base class `Recipe` ---

    def read_data(self) -> None:
        """Read the rows. Check the messages of the first rows, and the headers of their image files."""
        config = self.config
        self.vlm_processor = config.model.make_processor()
        self.batches = ImageBatches(self.vlm_processor, config.sequence_length, config.too_long)
        self.rows: dict[str, Table | Stream] = {}
        self.forms: dict[str, ImageText] = {}
        for name, where in self._row_sources().items():
            self.rows[name] = where.read(()) if where is not None else Digits(name)
            self.forms[name] = ImageText(self.vlm_processor, where, config.image_folder)
            for example in check_rows(self.rows[name], self.forms[name], config.checked_rows):
                self.batches.check_length(example)

    def make_model(self) -> nn.Module:
        """Return the vision-language model, after checking with the first row that the processor fits the model."""
        model = self.config.model.make_model(self.vlm_processor, self.config.sequence_length + self.config.answer_tokens)
        check_images(model, self.batches(self._examples("train", 1)))
        return model

    def train_data(self) -> Iterable[Any]:
        return self._loader("train")

    def validation_data(self) -> Mapping[str, Iterable[Any]]:
        return {name: self._loader(name) for name in self.rows if name not in ("train", "test")}

    def test_data(self) -> Iterable[Any] | None:
        return self._loader("test") if "test" in self.rows else None

    def processor(self) -> Any:
        return self.vlm_processor

    def about_data(self) -> str:
        sizes = [f"{len(rows)} {name}" if isinstance(rows, Table) else f"{name} streamed" for name, rows in self.rows.items()]
        return f"{', '.join(sizes)} rows of {self.config.train.path if self.config.train else 'handwritten digits'}"

    def finish(self) -> None:
        """Let the model answer held-out rows. As a baseline, count how often the most common answer would be right."""
        lines: list[list[str]] = []
        self.results = {}
        usual = self._commonest() if self.config.answered_rows else None
        for name in self.evaluated:
            self.results[f"{name}/loss"] = self.evaluated[name]["loss"]
            most = (
                self.config.answered_rows
                if not self.is_trial or self._is_opened
                else min(self.config.answered_rows, TRIAL_BATCHES)
            )
            if not (examples := self._examples(name, most)):
                continue
            answers = self._generate_answers([example.question() for example in examples])
            wanted = [example.completion.strip() for example in examples]
            right = [answer == want for answer, want in zip(answers, wanted, strict=True)]
            self.results[f"{name}/exact_match"] = exact = sum(right) / len(right)
            self.evaluated[name] = {**self.evaluated[name], "exact_match": exact}
            if usual is not None:
                self.results[f"{name}, {MAJORITY_BASELINE}"] = wanted.count(usual) / len(wanted)
            lines += [list(line) for line in zip([e.place for e in examples], wanted, answers, strict=True)][:8]
        self.generations = lines
        self.trainer.ctx.log_table(FINAL_TABLE, ["row", "completion", "answer"], lines)

    def generated_texts(self) -> Iterable[str]:
        """Return one line for each held-out row: the model's answer, and the expected answer if the two differ."""
        return [
            f"{place}: {answer!r}" + ("" if answer == want else f", not {want!r}") for place, want, answer in self.generations
        ]

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
        """Yield the model's `completion` for each row.

        A row has `messages` or `prompt`, and images. Their paths are relative to `image_folder` or, without it, to the current
        folder.
        """
        form = ImageText(self.vlm_processor, None, self.config.image_folder)
        questions = (form.make_question(row, place) for place, row in number_rows(rows))
        while some := list(islice(questions, self.config.eval_batch_size or self.config.batch_size)):
            yield from ({"completion": answer} for answer in self._generate_answers(some))

    # --- private methods ---

    def _row_sources(self) -> Mapping[str, Rows | None]:
        """Return the source of each dataset's rows. The source is None for scikit-learn's digits, which are used if `train` is None."""
        config = self.config
        if config.train is None:
            return dict.fromkeys(PARTS)
        test = {"test": config.test} if config.test is not None else {}
        return {"train": config.train, **config.validation, **test}

    def _loader(self, name: str) -> Iterable[Any]:
        return self.loader(prepare_rows(self.rows[name], self.forms[name]), collate=self.batches, train=name == "train")

    def _examples(self, name: str, most: int) -> list[Example]:
        """Return up to `most` examples of a dataset, evenly spaced if its rows are a table."""
        rows, form = self.rows[name], self.forms[name]
        if isinstance(rows, Stream):
            return [form(row, place) for place, row in islice(rows.places(), most)]
        count = min(most, len(rows))
        return [form(rows[index], rows.place(index)) for index in (len(rows) * i // count for i in range(count))]

    def _generate_answers(self, questions: Sequence[Example]) -> list[str]:
        config = self.config
        size = config.eval_batch_size or config.batch_size
        tokenizer = self.vlm_processor.tokenizer
        return list(generate_answers(self.trainer, questions, self.batches, tokenizer, config.answer_tokens, batch_size=size))

    def _commonest(self) -> str | None:
        rows, form = self.rows["train"], self.forms["train"]
        if isinstance(rows, Stream):
            return None  # a stream can be read only once, so read nothing in advance
        counts = Counter(form.completion(rows[i], rows.place(i)).strip() for i in range(min(len(rows), _MAX_COUNTED_ROWS)))
        return counts.most_common(1)[0][0]


def finetune_vlm(
    config: FinetuneVLMConfig | None = None,
    *,
    callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
    loggers: Iterable[Callback] = (),
) -> FinetuneVLM:
    """Run the recipe: set up, train, evaluate, test and answer.

    Args:
        config: the configuration; None: a `FinetuneVLMConfig` with its default values.
        callbacks: a manager, a callback, or any iterable of callbacks; None: only those that the recipe adds.
        loggers: more callbacks, called after the others.

    Returns:
        The recipe, with its `results` and its `trainer`.

    Raises:
        ConfigError, RunInUseError: see `Recipe.setup`.
        NonFiniteError: see `Recipe.run`.

    Examples:
        >>> from callsheet.recipes import finetune_vlm  # doctest: +SKIP
        >>> finetune_vlm(callbacks=[SpeedMonitor()]).results  # doctest: +SKIP
    """
    recipe = FinetuneVLM(config, callbacks, loggers)
    recipe.setup()
    recipe.run()
    return recipe
