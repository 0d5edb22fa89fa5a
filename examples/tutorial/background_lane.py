"""Tutorial, chapter 4: a slow observer, on the training thread and in a background lane.

python examples/tutorial/background_lane.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

import callsheet
from callsheet import Background, Callback, Context


class Dashboard(Callback):
    """Send the loss of every step to a server that takes 50 ms to answer."""

    phase = "report"
    snapshot_fields = ("loss",)  # what a lane copies for this callback; on the training thread it has no effect

    def __init__(self) -> None:
        self.sent: list[float] = []

    def on_train_step_end(self, ctx: Context) -> None:
        time.sleep(0.05)  # the server
        self.sent.append(ctx.loss.item())


def train(callback: Callback) -> float:
    """Train for 40 steps, and return the seconds that the steps took."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(40, 16, 8)]
    seconds = 0.0

    def timed(batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        nonlocal seconds
        start = time.perf_counter()
        yield from batches
        seconds = time.perf_counter() - start

    with callsheet.attach(model=model, optimizer=optimizer, callbacks=[callback]) as run:
        for inputs, targets in timed(run.steps(data)):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return seconds


def main() -> None:
    inline = Dashboard()
    seconds = train(inline)
    print(f"inline:      {len(inline.sent)} losses sent, the steps took {seconds:.2f} s")

    observer = Dashboard()
    seconds = train(Background(observer))
    print(f"background:  {len(observer.sent)} losses sent, the steps took {seconds:.2f} s")
    print(f"the same losses: {observer.sent == inline.sent}")

    latest = Dashboard()
    seconds = train(Background(latest, queue=1, overflow="latest"))
    print(f"latest only: some losses sent, the steps took {seconds:.2f} s")
    print(f"fewer losses: {len(latest.sent) < len(inline.sent)}")
    print(f"the last loss is there: {latest.sent[-1] == inline.sent[-1]}")


if __name__ == "__main__":
    main()
