"""Trainers of other libraries that subclass or wrap the Hugging Face Trainer, each with a tiny model and local data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from packaging.version import Version
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from callsheet.recipes.models.byte_tokenizer import byte_tokenizer

ROWS = 24
STEPS = 6
"""Steps of each training: one epoch of batches with 2 rows, and where the library can, 2 batches a step."""


@dataclass(frozen=True)
class Built:
    """A trainer that is built on the Hugging Face Trainer.

    `make(folder, callbacks, **options)` creates the trainer; its model has the same weights each time. `options` are training arguments.
    `evaluates` is whether an evaluation leaves the model as it is.
    """

    packages: tuple[str, ...]
    make: Callable[..., Any]
    accumulates: bool = True
    resumes: bool = True
    evaluates: bool = True

    @property
    def library(self) -> str:
        """The names and versions of the packages."""
        return ", ".join(f"{package} {version(package)}" for package in self.packages)


def inner(trainer: Any) -> Any:
    """Return the Hugging Face Trainer: the trainer itself, or the one inside SetFit's trainer."""
    return getattr(trainer, "st_trainer", trainer)


def module(trainer: Any) -> torch.nn.Module:
    """Return the model that the trainer trains."""
    found: torch.nn.Module = getattr(trainer.model, "model_body", trainer.model)
    return found


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 1,
        "gradient_accumulation_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False, "learning_rate": 1e-2, "seed": 3, **more,
    }  # fmt: skip


# --- TRL ---


def language_model(kind: Any = LlamaForCausalLM, **more: Any) -> tuple[Any, PreTrainedTokenizerFast]:
    """Return a model, with the same weights each time, and its tokenizer."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, **more,
    )  # fmt: skip
    return kind(config), tokenizer


def rows(of: Callable[[int], dict[str, Any]], count: int = ROWS) -> dict[str, Dataset]:
    """Return the datasets for training and for evaluation."""
    data = Dataset.from_list([of(i) for i in range(count)])
    return {"train_dataset": data, "eval_dataset": data.select(range(4))}


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)


def fine_tuning(folder: Path, callbacks: list[Any], *, peft_config: Any = None, **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = language_model()
    given = arguments(folder, max_length=64, activation_checkpointing=False, **options)
    data = rows(lambda i: {"prompt": f"{i} and {i} is", "completion": f" {2 * i}"})
    return SFTTrainer(
        model, SFTConfig(**given), processing_class=tokenizer, callbacks=callbacks, peft_config=peft_config and peft_config(), **data
    )  # fmt: skip


def preference_tuning(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = language_model()
    given = arguments(folder, max_length=64, activation_checkpointing=False, **options)
    data = rows(lambda i: {"prompt": f"{i} is", "chosen": " odd", "rejected": " blue"})
    reference = language_model()[0]
    return DPOTrainer(model, reference, DPOConfig(**given), processing_class=tokenizer, callbacks=callbacks, **data)


def unpaired_preference_tuning(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    from trl import KTOConfig, KTOTrainer

    model, tokenizer = language_model()
    given = arguments(folder, max_length=64, activation_checkpointing=False, **options)
    data = rows(lambda i: {"prompt": f"{i} is", "completion": " odd" if i % 2 else " blue", "label": bool(i % 2)})
    reference = language_model()[0]
    return KTOTrainer(model, reference, KTOConfig(**given), processing_class=tokenizer, callbacks=callbacks, **data)


def reward_modeling(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    model, tokenizer = language_model(LlamaForSequenceClassification, num_labels=1)
    given = arguments(folder, max_length=64, activation_checkpointing=False, **options)
    data = rows(lambda i: {"prompt": f"{i} is", "chosen": " odd", "rejected": " blue"})
    return RewardTrainer(model, RewardConfig(**given), processing_class=tokenizer, callbacks=callbacks, **data)


def is_long(completions: list[str], **_: Any) -> list[float]:
    """Reward long completions."""
    return [float(len(completion)) for completion in completions]


def reinforcement(name: str, folder: Path, callbacks: list[Any], **options: Any) -> Any:
    """Create TRL's trainer `name`, which trains with generated completions and a reward."""
    import trl

    model, tokenizer = language_model()
    model.save_pretrained(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model")  # RLOO loads its reference model from this folder
    given = {"num_generations": 2, "num_generations_eval": 2, "max_completion_length": 4, "max_steps": STEPS}
    given |= arguments(folder, activation_checkpointing=False, **options)
    config = getattr(trl, f"{name}Config")(**given)
    data = rows(lambda i: {"prompt": f"{i} is"})
    kind = getattr(trl, f"{name}Trainer")
    return kind(model, reward_funcs=is_long, args=config, processing_class=tokenizer, callbacks=callbacks, **data)


# --- transformers and PEFT ---


def translation(folder: Path, callbacks: list[Any], **options: Any) -> Seq2SeqTrainer:
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    data = rows(lambda i: {"input_ids": tokenizer(f"{i} and {i}")["input_ids"], "labels": tokenizer(f"{2 * i}")["input_ids"]})
    given = Seq2SeqTrainingArguments(**arguments(folder, predict_with_generate=True, generation_max_length=6, **options))
    collator = DataCollatorForSeq2Seq(tokenizer, model)
    return Seq2SeqTrainer(model, given, data_collator=collator, processing_class=tokenizer, callbacks=callbacks, **data)


def adapter_tuning(folder: Path, callbacks: list[Any], **options: Any) -> Trainer:
    from peft import get_peft_model

    model, tokenizer = language_model()
    torch.manual_seed(0)
    adapted = get_peft_model(model, adapter())
    data = rows(lambda i: {"input_ids": (ids := tokenizer(f"{i:2} is a number")["input_ids"]), "labels": ids})
    return Trainer(
        adapted, TrainingArguments(**arguments(folder, **options)), processing_class=tokenizer, callbacks=callbacks, **data,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )  # fmt: skip


# --- sentence-transformers and SetFit ---


def save_encoders(folder: Path) -> None:
    """Write tiny models in the format of sentence-transformers."""
    tokenizer = byte_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, num_labels=1, hidden_dropout_prob=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    for name, kind in {"encoder": BertModel, "cross": BertForSequenceClassification}.items():
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def embedder(saved: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    torch.manual_seed(0)
    return SentenceTransformer(modules=[Transformer(str(saved / "encoder"), max_seq_length=16), Pooling(16)], device="cpu")


PAIRS = rows(lambda i: {"anchor": f"what is {i}", "positive": f"{i} is a number"})
SCORED = rows(lambda i: {"one": f"{i}", "two": f"{i % 3}", "label": float(i % 2)})


def embedding(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    save_encoders(folder)
    model = embedder(folder)
    given = SentenceTransformerTrainingArguments(**arguments(folder, **options))
    return SentenceTransformerTrainer(model, given, loss=MultipleNegativesRankingLoss(model), callbacks=callbacks, **PAIRS)


def sparse_embedding(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

    save_encoders(folder)
    torch.manual_seed(0)
    parts = [
        Transformer(str(folder / "encoder"), max_seq_length=16),
        Pooling(16),
        SparseAutoEncoder(16, hidden_dim=32, k=4, k_aux=4),
    ]
    model = SparseEncoder(modules=parts, device="cpu")
    ranking = SparseMultipleNegativesRankingLoss(model)
    loss = SpladeLoss(model, ranking, document_regularizer_weight=1e-3, query_regularizer_weight=1e-3)
    given = SparseEncoderTrainingArguments(**arguments(folder, **options))
    return SparseEncoderTrainer(model, given, loss=loss, callbacks=callbacks, **PAIRS)


def scoring(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    save_encoders(folder)
    torch.manual_seed(0)
    model = CrossEncoder(str(folder / "cross"), device="cpu", max_length=16)
    given = CrossEncoderTrainingArguments(**arguments(folder, **options))
    return CrossEncoderTrainer(model, given, loss=BinaryCrossEntropyLoss(model), callbacks=callbacks, **SCORED)


def few_shots(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    import setfit

    save_encoders(folder)
    embedder(folder).save(str(folder / "embedder"))
    torch.manual_seed(0)
    model = setfit.SetFitModel.from_pretrained(str(folder / "embedder"), device="cpu")
    data = rows(lambda i: {"text": f"{'good' if i % 2 else 'bad'} {i}", "label": i % 2}, 8)
    kept = ("output_dir", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "logging_steps", "seed")
    given = {name: value for name, value in arguments(folder, **options).items() if name in kept}
    args = setfit.TrainingArguments(
        batch_size=2, num_epochs=1, max_steps=STEPS, report_to="none", show_progress_bar=False, **given
    )
    return setfit.Trainer(model, args, callbacks=callbacks, **data)


TRL, SENTENCES = ("trl",), ("sentence-transformers",)
BUILT_ON: Mapping[str, Built] = {
    "SFTTrainer": Built(TRL, fine_tuning),
    "SFTTrainer with LoRA": Built((*TRL, "peft"), partial(fine_tuning, peft_config=adapter)),
    "DPOTrainer": Built(TRL, preference_tuning),
    "KTOTrainer": Built(TRL, unpaired_preference_tuning),
    "RewardTrainer": Built(TRL, reward_modeling),
    "GRPOTrainer": Built(TRL, partial(reinforcement, "GRPO")),
    "RLOOTrainer": Built(TRL, partial(reinforcement, "RLOO")),
    "SentenceTransformerTrainer": Built(SENTENCES, embedding),
    "SparseEncoderTrainer": Built(SENTENCES, sparse_embedding, evaluates=Version(version(*SENTENCES)) >= Version("6.2")),
    "CrossEncoderTrainer": Built(SENTENCES, scoring),
    "setfit.Trainer": Built(("setfit",), few_shots, accumulates=False, resumes=False),
    "Seq2SeqTrainer": Built(("transformers",), translation),
    "Trainer with LoRA": Built(("transformers", "peft"), adapter_tuning),
}
"""The trainers by class name."""
