"""Sequence classification: train a model that assigns texts to classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from callsheet.core.callback import Callback, one_of
from callsheet.core.manager import CallbackManager
from callsheet.errors import ConfigError
from callsheet.recipes.data.class_labels import WEIGHTS, ClassLabels, Weights, align_with_head, class_weights
from callsheet.recipes.data.labeled_texts import TOO_LONG, LabeledTexts, TooLong
from callsheet.recipes.data.package_pieces import PackagePieces
from callsheet.recipes.data.padding import Padding
from callsheet.recipes.data.rows import Rows, number_rows, prepare_rows
from callsheet.recipes.data.tables import Stream, Table
from callsheet.recipes.job import JobConfig
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.recipe import Recipe
from callsheet.recipes.tasks.class_baselines import ByteCounts
from callsheet.recipes.tasks.classification_task import ClassificationTask
from callsheet.trainer.arguments import positive
from callsheet.trainer.tasks import Task


@dataclass(kw_only=True)
class ClassifyConfig(JobConfig):
    """The configuration of the recipe `classify`.

    Args:
        model: the model to train; a model without a classification head gets a new one.
        train: rows to train on; None trains on `pieces`.
        validation: rows to evaluate on, by the dataset's name.
        test: rows to test on once, after training.
        pieces: folders of source files (packages), used if `train` is None: each package is a class.
        text_column: the name of the column with the texts.
        label_column: the name of the column with the labels. A label is the name of a class, or its number, counted from 0.
        labels: the names of the classes, in the order of their numbers; None takes those in the training rows.
        class_weights: the weight of a sample in the loss. `none`: all samples have the same weight. `balanced`: all classes have
            the same total weight. A list of numbers: the weight of each class.
        sequence_length: the maximum number of tokens of a text.
        too_long: what happens to longer texts: `truncate` keeps only their beginning, `reject` ends with an error before
            training.
    """

    run_name: str = "classify"
    max_duration: str | int = "3ep"
    model: LanguageModel = field(default_factory=LanguageModel)
    train: Rows | None = None
    validation: dict[str, Rows] = field(default_factory=dict)
    test: Rows | None = None
    pieces: PackagePieces = field(default_factory=PackagePieces)
    text_column: str = "text"
    label_column: str = "label"
    labels: list[str] | None = None
    class_weights: Weights | list[float] = "none"
    sequence_length: int = 256
    too_long: TooLong = "truncate"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check()
        positive("sequence_length", self.sequence_length, int)
        one_of("too_long", self.too_long, TOO_LONG)
        if isinstance(self.class_weights, str):
            one_of("class_weights", self.class_weights, WEIGHTS)
        elif not all(0 <= weight < math.inf for weight in self.class_weights) or not any(self.class_weights):
            raise ConfigError(
                f"class_weights={self.class_weights}: give a finite number of 0 or more for each class, and not 0 for all"
            )
        if self.train is None and (self.validation or self.test is not None):
            raise ConfigError(
                "validation and test are given without train; give the rows to train on as well, such as train.path"
            )
        if taken := {"train", "test"} & set(self.validation):
            raise ConfigError(f"validation: a dataset cannot be called {taken.pop()}, as another is; choose another name")


class Classify(Recipe[ClassifyConfig]):
    """Sequence classification: train a model that assigns texts to classes.

    The model is evaluated at the evaluation interval and after training, when it is also tested. Metrics are loss, accuracy and F1.

    The arguments are those of `Recipe`.
    """

    Config = ClassifyConfig
    results_are_in = (
        "accuracy, and F1 as the mean over the classes, on texts that the model has not seen; baselines on the last set"
    )

    # --- methods of the base class `Recipe` ---

    def read_data(self) -> None:
        """Read the rows. Check the labels and texts of all rows except those that are streamed."""
        config, columns = self.config, (self.config.text_column, self.config.label_column)
        self.tokenizer = config.model.make_tokenizer()
        self.sets: dict[str, Table | Stream] = {}
        if config.train is None:
            pieces = config.pieces
            self.sets = {"train": pieces.train(), "validation": pieces.validation(), "test": pieces.test()}
            columns = ("text", "label")
        else:
            given = {"train": config.train, **config.validation, "test": config.test}
            self.sets = {name: rows.read(columns) for name, rows in given.items() if rows is not None}
        train = self.sets["train"]
        if config.labels is not None:
            labels = ClassLabels(config.labels)
        elif isinstance(train, Table):
            labels = ClassLabels.of((place, row[columns[1]]) for place, row in train.places())
        else:
            raise ConfigError("labels: the classes of streamed rows are not known before training; name them in `labels`")
        self.labels = labels = align_with_head(labels, config.model, may_reorder=config.labels is None)
        cuts, most = config.too_long == "truncate", config.sequence_length
        self.texts = LabeledTexts(self.tokenizer, labels, *columns, most, cuts)
        self.counts = ByteCounts(len(labels))
        for name, rows in self.sets.items():
            for place, row in rows.places() if isinstance(rows, Table) else ():
                text, label = self.texts.check_row(row, place)
                if name == "train":
                    self.counts.add(text, label)
        self.weights = class_weights(config.class_weights, self.counts.rows.tolist(), labels.names)

    def make_model(self) -> nn.Module:
        """Return a model with one logit for each class."""
        from transformers import AutoModelForSequenceClassification

        names = dict(enumerate(self.labels.names))
        return self.config.model.build(
            AutoModelForSequenceClassification,
            vocabulary=len(self.tokenizer),
            longest=self.config.sequence_length,
            num_labels=len(names),
            id2label=names,
            label2id={name: number for number, name in names.items()},
            # A decoder model classifies by the last token that is not padding, so it must know the padding token.
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def make_task(self) -> Task:
        """Return the task: weighted cross entropy as the loss, with accuracy and F1 as metrics."""
        return ClassificationTask(len(self.labels), self.weights)

    def train_data(self) -> Iterable[Any]:
        """Return batches of the training rows, each padded to its longest row."""
        return self._batches("train")

    def validation_data(self) -> Mapping[str, Iterable[Any]]:
        return {name: self._batches(name) for name in self.sets if name not in ("train", "test")}

    def test_data(self) -> Iterable[Any] | None:
        return self._batches("test") if "test" in self.sets else None

    def processor(self) -> Any:
        return self.tokenizer

    def about_data(self) -> str:
        """Return a text with the number of rows and classes."""
        rows = [f"{len(rows)} rows for {name}" for name, rows in self.sets.items() if isinstance(rows, Table)]
        return ", ".join([f"{len(self.labels)} classes", *rows])

    def finish(self) -> None:
        """Compute `results`: accuracy and F1 of the model on every evaluated dataset, and of the baselines on the last dataset."""
        for name, found in self.evaluated.items():
            self.results |= {f"{name}/{metric}": found[metric] for metric in ("accuracy", "f1")}
        last = self.sets[list(self.evaluated)[-1]] if self.evaluated else None
        if isinstance(last, Table) and self.counts.rows.any():
            texts, labels = zip(*(self.texts.check_row(row, place) for place, row in last.places()), strict=True)
            targets = torch.tensor(labels)
            for name, guess in {
                "majority class": torch.full_like(targets, self.counts.majority()),
                "naive Bayes of bytes": self.counts.naive_bayes(texts),
            }.items():
                metrics = ClassificationTask(len(self.labels)).metrics
                self.results |= {f"{name}/{metric}": float(judge(guess, targets)) for metric, judge in metrics.items()}

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield each row's prediction: the most likely `label`, its `probability`, and the `probabilities` of all classes.

        Every rank must call this method. Rank 0 gets the predictions.
        """
        collate, size = Padding(self.tokenizer.pad_token_id), self.config.eval_batch_size or self.config.batch_size
        questions = number_rows(rows)
        while some := list(islice(questions, size)):
            batch = collate([{"input_ids": self.texts.ids(row, place)} for place, row in some])
            for outputs in self.trainer.predict([batch]):
                for of_row in outputs.logits.float().softmax(-1).tolist():
                    named = dict(zip(self.labels.names, of_row, strict=True))
                    label = max(named, key=named.__getitem__)
                    yield {"label": label, "probability": named[label], "probabilities": named}

    # --- private methods ---

    def _batches(self, name: str) -> Iterable[Any]:
        dataset = prepare_rows(self.sets[name], self.texts.sample)
        return self.loader(dataset, collate=Padding(self.tokenizer.pad_token_id), train=name == "train")


def classify(
    config: ClassifyConfig | None = None,
    *,
    callbacks: CallbackManager | Callback | Iterable[Callback] | None = None,
    loggers: Iterable[Callback] = (),
) -> Classify:
    """Run the recipe: set up, train, evaluate and test.

    Args:
        config: the configuration; None: a `ClassifyConfig` with its default values.
        callbacks: a manager, a callback, or any iterable of callbacks; None: only those that the recipe adds.
        loggers: more callbacks, called after the others.

    Returns:
        The recipe, with its `results` and its `trainer`.

    Raises:
        ConfigError, RunInUseError: see `Recipe.setup`.
        NonFiniteError: see `Recipe.run`.

    Examples:
        >>> from callsheet.recipes import Rows, classify, ClassifyConfig  # doctest: +SKIP
        >>> classify(ClassifyConfig(train=Rows("train.jsonl"), test=Rows("test.jsonl"))).results  # doctest: +SKIP
    """
    recipe = Classify(config, callbacks, loggers)
    recipe.setup()
    recipe.run()
    return recipe
