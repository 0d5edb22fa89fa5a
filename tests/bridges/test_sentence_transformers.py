"""sentence-transformers and SetFit use Hugging Face Trainers that call the model several times per batch, and outside of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers")

from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from transformers import TrainerCallback

from callsheet.bridges.huggingface import host
from callsheet.callbacks import EMA, CheckpointSaver, EarlyStopper, History, LRMonitor, NaNMonitor, SpeedMonitor
from callsheet.testing import Recorder, check_events

from .built_on import embedder, save_encoders

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROWS = 16
SPEEDS = ("runtime", "per_second")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models in the format of their libraries."""
    folder = tmp_path_factory.mktemp("models")
    save_encoders(folder)
    embedder(folder).save(str(folder / "embedder"))
    return folder


class EncodesAtEveryEvent(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """A user's callback that encodes some sentences at every event."""

    def _look(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if hasattr(model, "training"):
            was_training = model.training
            (model.encode if hasattr(model, "encode") else model.predict)(
                [("one", "two")] if hasattr(model, "predict") else ["one"]
            )
            model.train(was_training)


for _event in (name for name in vars(TrainerCallback) if name.startswith("on_")):
    setattr(EncodesAtEveryEvent, _event, EncodesAtEveryEvent._look)


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "learning_rate": 1e-2, **more,
    }  # fmt: skip


PAIRS = Dataset.from_dict(
    {"anchor": [f"what is {i}" for i in range(ROWS)], "positive": [f"{i} is a number" for i in range(ROWS)]}
)
SCORED = Dataset.from_dict(
    {"one": [f"{i}" for i in range(ROWS)], "two": [f"{i % 3}" for i in range(ROWS)], "label": [float(i % 2) for i in range(ROWS)]}
)


def train_sentence_transformer(
    saved: Path, folder: Path, loss: Any, data: Dataset, callbacks: list[Any]
) -> SentenceTransformerTrainer:
    model = embedder(saved)
    rows = data.select(range(8))
    evaluator = EmbeddingSimilarityEvaluator(rows[data.column_names[0]], rows[data.column_names[1]], [i / 8 for i in range(8)])
    trainer = SentenceTransformerTrainer(
        model, SentenceTransformerTrainingArguments(**options(folder)), train_dataset=data, eval_dataset=rows, loss=loss(model),
        evaluator=evaluator, callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    return trainer


def train_cross_encoder(saved: Path, folder: Path, callbacks: list[Any]) -> CrossEncoderTrainer:
    torch.manual_seed(0)
    model = CrossEncoder(str(saved / "cross"), device="cpu", max_length=16)
    trainer = CrossEncoderTrainer(
        model, CrossEncoderTrainingArguments(**options(folder)), train_dataset=SCORED, eval_dataset=SCORED.select(range(8)),
        loss=BinaryCrossEntropyLoss(model), callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    return trainer


def same(ours: Any, plain: Any) -> bool:
    one, other = ours.model.state_dict(), plain.model.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logged(trainer: Any, *, of_training: bool) -> list[dict[str, float]]:
    found = [{name: value for name, value in entry.items() if not name.endswith(SPEEDS)} for entry in trainer.state.log_history]
    return [entry for entry in found if not of_training or "loss" in entry]


LOSSES: dict[str, tuple[Any, Dataset]] = {
    "ranking": (MultipleNegativesRankingLoss, PAIRS),
    "cached ranking": (lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=2), PAIRS),
    "similarity": (CosineSimilarityLoss, SCORED),
}


@pytest.mark.parametrize(
    ("name", "averages"), [("ranking", False), ("ranking", True), ("cached ranking", True), ("similarity", True)]
)
def test_a_sentence_transformer_trains_as_without_callsheet(name: str, averages: bool, saved: Path, tmp_path: Path) -> None:
    loss, data = LOSSES[name]
    recorder, history = Recorder(fields=("batch",)), History()
    observers = [recorder, history, SpeedMonitor(), NaNMonitor(), LRMonitor(), CheckpointSaver(save_interval="2ba")]
    hosted = host([*observers, *([EMA(half_life=2, at_end=False)] if averages else [])])
    ours = train_sentence_transformer(saved, tmp_path / "ours", loss, data, [hosted, EncodesAtEveryEvent()])
    plain = train_sentence_transformer(saved, tmp_path / "plain", loss, data, [EncodesAtEveryEvent()])
    assert same(ours, plain)
    assert logged(ours, of_training=averages) == logged(plain, of_training=averages)
    check_events(recorder.events)
    assert recorder.events.count("on_microbatch_end") == recorder.events.count("on_train_step_end") == 2 * ROWS // 4
    assert recorder.events.count("on_eval_all_end") == 4
    assert recorder.events.count("on_eval_step_end") == 4 * 2
    assert len(history["validation/spearman_cosine"]) == 4  # a metric of the user's evaluator
    assert history.records[-1][1]["time/sample"] == 2 * ROWS
    losses = [entry["loss"] for entry in logged(plain, of_training=True)]
    assert history["train/loss"][: len(losses)] == pytest.approx(losses, rel=1e-5)


def test_a_cross_encoder_trains_as_without_callsheet(saved: Path, tmp_path: Path) -> None:
    recorder, history = Recorder(), History()
    stopper = EarlyStopper(monitor="validation/loss", patience=9)
    observers = [recorder, history, SpeedMonitor(), stopper, CheckpointSaver(save_interval="2ba"), EMA(half_life=2, at_end=False)]
    ours = train_cross_encoder(saved, tmp_path / "ours", [host(observers), EncodesAtEveryEvent()])
    plain = train_cross_encoder(saved, tmp_path / "plain", [EncodesAtEveryEvent()])
    assert same(ours, plain)
    assert logged(ours, of_training=True) == logged(plain, of_training=True)
    check_events(recorder.events)
    assert recorder.events.count("on_eval_all_end") == 4
    assert recorder.events.count("on_checkpoint_published") == 4  # the Trainer evaluates whenever it saves


def test_a_few_shot_classifier_trains_as_without_callsheet(saved: Path, tmp_path: Path) -> None:
    setfit = pytest.importorskip("setfit")
    data = Dataset.from_dict(
        {"text": [f"{'good' if i % 2 else 'bad'} {i}" for i in range(8)], "label": [i % 2 for i in range(8)]}
    )

    def trained(folder: Path, callbacks: list[Any]) -> Any:
        torch.manual_seed(0)
        model = setfit.SetFitModel.from_pretrained(str(saved / "embedder"), device="cpu")
        arguments = setfit.TrainingArguments(
            str(folder), batch_size=4, num_epochs=1, max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="no", logging_steps=1,
            report_to="none", show_progress_bar=False, seed=3,
        )  # fmt: skip
        trainer = setfit.Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)
        trainer.train()
        return trainer

    recorder, history = Recorder(), History()
    observers = [recorder, history, SpeedMonitor(), EMA(half_life=2, at_end=False), CheckpointSaver(save_interval="3ba")]
    ours = trained(tmp_path / "ours", [host(observers)])
    plain = trained(tmp_path / "plain", [])
    one, other = (each.model.model_body.state_dict() for each in (ours, plain))
    assert all(torch.equal(one[name], other[name]) for name in one)
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == 6
    assert len(history["train/loss"]) >= 6
    assert {name for _, results in history.evaluations for name in results["validation"]} == {
        "loss"
    }  # SetFit's metrics have another prefix
