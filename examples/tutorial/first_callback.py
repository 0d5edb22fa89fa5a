"""Tutorial, chapter 1: a first callback in a training loop of your own.

python examples/tutorial/first_callback.py
"""

from __future__ import annotations

import torch

import callsheet
from callsheet import Callback, Context, every


class LossCurve(Callback):
    """Print the loss every ten steps, as a bar, and how the run ended."""

    def __init__(self, *, width: int = 40) -> None:
        self.width = width
        self.losses: list[float] = []

    @every("10ba")
    def on_train_step_end(self, ctx: Context) -> None:
        loss = ctx.loss.item()
        self.losses.append(loss)
        print(f"step {ctx.step}  loss {loss:.4f}  {'#' * round(self.width * loss / self.losses[0])}")

    def on_run_end(self, ctx: Context) -> None:
        last = f"{self.losses[-1]:.4f}" if self.losses else "not printed yet"
        print(f"{ctx.run.outcome} after {ctx.step} steps: loss {last}")


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.linspace(-3, 3, 64).unsqueeze(1)
    data = [(x, torch.sin(x))] * 80

    with callsheet.attach(model=model, optimizer=optimizer, callbacks=[LossCurve()]) as run:
        for inputs, targets in run.steps(data):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
