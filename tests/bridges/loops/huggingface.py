"""The Hugging Face Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from callsheet.bridges.huggingface import host

from .job import Given, Job

NAME, VERSION = "the Hugging Face Trainer", f"(transformers {transformers.__version__})"


def train(
    job: Job,
    folder: Path,
    callbacks: Given,
    *,
    strict: bool = True,
    epochs: int = 2,
    steps_an_epoch: int = 6,
    evaluate: bool = True,
    gradient_accumulation_steps: int = 1,
) -> nn.Module:
    """See `job.TrainFunction`. The model receives dictionaries and computes its own loss, as models of transformers do."""
    model = with_loss(job)
    rows: Any = job.train
    if steps_an_epoch > 6:
        rows = ConcatDataset([job.train] * (steps_an_epoch // 6))
    arguments = TrainingArguments(
        output_dir=str(folder / "small"),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=gradient_accumulation_steps,
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
        logging_steps=job.log_every,
        eval_strategy="epoch" if evaluate else "no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
        use_cpu=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = HuggingFaceTrainer(
        model,
        arguments,
        train_dataset=Rows(rows),
        eval_dataset=Rows(job.validation) if evaluate else None,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.remove_callback(PrinterCallback)  # the Trainer adds it because of `disable_tqdm`
    if callbacks is not None:
        trainer.add_callback(Empty() if isinstance(callbacks, str) else host(callbacks, strict=strict))
    torch.manual_seed(3)
    trainer.train()
    return model


def with_loss(job: Job) -> nn.Module:
    """Return the job's model, changed so that it computes the loss if it gets labels. Its weights keep their names."""
    model = job.made_model()
    kind: Any = type(model)

    def forward(self: Any, inputs: Tensor, labels: Tensor | None = None) -> Any:
        outputs = kind.forward(self, inputs)
        return outputs if labels is None else {"loss": job.loss(outputs, labels), "logits": outputs}

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


class Rows(Dataset[dict[str, Tensor]]):
    """The rows as dictionaries of the model's arguments."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = self.data[index]
        return {"inputs": inputs, "labels": labels}


class Empty(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """A callback with all hooks, which do nothing."""


def _nothing(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None: ...


for _name, _ in inspect.getmembers(TrainerCallback, inspect.isfunction):
    if _name.startswith("on_"):
        setattr(Empty, _name, _nothing)
