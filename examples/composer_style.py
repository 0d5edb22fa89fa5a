"""A script in the style of Composer, trained with callsheet. Only the import lines differ from Composer's.

    python examples/composer_style.py

It fits a line for three epochs, which takes about a second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from callsheet.compat.composer import Callback, Event, Logger, State, Trainer
from callsheet.compat.composer.callbacks import LRMonitor, SpeedMonitor


class Line(torch.nn.Module):
    """A model with the methods that Composer needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1])


class Best(Callback):
    """Log the smallest loss so far, and print it after each epoch."""

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
