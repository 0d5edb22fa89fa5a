"""Tutorial, chapter 3: the class of chapter 2 in callsheet's Trainer, in the Hugging Face Trainer and in Lightning.

python examples/tutorial/same_class_three_loops.py
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from callsheet import Callback, Context

EPOCHS = 30


class PlateauStopper(Callback):
    """Stop when the validation loss has not improved in `patience` evaluations in a row."""

    phase = "decide"

    def __init__(self, *, patience: int = 3) -> None:
        self.patience = patience
        self.best = float("inf")
        self.waited = 0

    def on_run_start(self, ctx: Context) -> None:
        self.best, self.waited = float("inf"), 0

    def on_eval_all_end(self, ctx: Context) -> None:
        loss = ctx.eval_results["validation"]["loss"]
        if loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        print(f"evaluation {loss:.4f}, best {self.best:.4f}, waited {self.waited}")
        if self.waited >= self.patience:
            ctx.control.stop(f"no improvement on {self.best:.4f} in {self.waited} evaluations", replicated=True)

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class Outcome(Callback):
    """Print how the run ended."""

    def __init__(self, *, loop: str) -> None:
        self.loop = loop

    def on_run_end(self, ctx: Context) -> None:
        print(f"{self.loop}: {ctx.run.outcome} after step {ctx.step}")


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, generator=generator) * 6 - 3
    return x, torch.sin(x) + 0.3 * torch.randn(count, 1, generator=generator)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


TRAIN: Any = [samples(12, seed=1)] * 50  # an epoch is fifty steps on the same twelve samples
VALIDATION: Any = [samples(64, seed=2)]


def in_callsheet(folder: str) -> None:
    from callsheet import Trainer

    with Trainer(
        network(),
        torch.nn.functional.mse_loss,
        TRAIN,
        VALIDATION,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        max_duration=f"{EPOCHS}ep",
        runs_folder=folder,
        progress=False,
        callbacks=[PlateauStopper(), Outcome(loop="callsheet")],
    ) as trainer:
        trainer.fit()


def in_lightning(folder: str) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from callsheet.bridges.lightning import host

    class Sine(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Any) -> Any:
            return self.network(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[host([PlateauStopper(), Outcome(loop="Lightning")])],
    )
    train = torch.utils.data.DataLoader(TRAIN, batch_size=None)
    validation = torch.utils.data.DataLoader(VALIDATION, batch_size=None)
    trainer.fit(Sine(), train, validation)


def in_hugging_face(folder: str) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from callsheet.bridges.huggingface import host

    class Sine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Any, labels: Any) -> Any:
            outputs = self.network(x)
            return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}

    def rows(batches: Any) -> Any:
        return [{"x": x, "labels": y} for inputs, targets in batches for x, y in zip(inputs, targets, strict=True)]

    model = Sine()
    trainer = Trainer(
        model,
        TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=12,
            per_device_eval_batch_size=64,
            eval_strategy="epoch",
            save_strategy="no",
            max_grad_norm=0,
            lr_scheduler_type="constant",
            disable_tqdm=True,
            report_to="none",
            use_cpu=True,
            train_sampling_strategy="sequential",
        ),
        train_dataset=rows(TRAIN),
        eval_dataset=rows(VALIDATION),
        optimizers=(torch.optim.Adam(model.parameters(), lr=0.01), None),
        callbacks=[host([PlateauStopper(), Outcome(loop="Hugging Face")])],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def main() -> None:
    for train in (in_callsheet, in_lightning, in_hugging_face):
        train(tempfile.mkdtemp())


if __name__ == "__main__":
    main()
