"""A program as it is written for Composer, trained with callsheet: only the import lines differ from its own.

Run it: python examples/composer_style.py
It fits a line for three epochs, in a moment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from callsheet.compat.composer import Callback, Event, Logger, State, Trainer
from callsheet.compat.composer.callbacks import LRMonitor, SpeedMonitor


class Line(torch.nn.Module):
    """A model as Composer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1])


class Best(Callback):
    """The smallest loss of a batch, and in which epoch it was."""

    def __init__(self) -> None:
        self.best = float("inf")

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BATCH_END and float(state.loss) < self.best:
            self.best = float(state.loss)
            logger.log_metrics({"best/loss": self.best})
        elif event == Event.EPOCH_END:
            print(f"{state.timestamp.epoch}: best so far {self.best:.4f}")


torch.manual_seed(0)
inputs = torch.randn(24, 2)
data = [(part, part.sum(1, keepdim=True)) for part in inputs.split(4)]
model = Line()
trainer = Trainer(
    model=model,
    train_dataloader=data,
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    max_duration="3ep",
    callbacks=[Best(), SpeedMonitor(window_size=2), LRMonitor()],
)
trainer.fit()
trainer.close()
