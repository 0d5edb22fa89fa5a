"""Callbacks in your own training loop: three spans, and the fields that the callbacks read. Needs only torch.

python examples/own_loop.py
"""

import torch

from callsheet import Callback, CallbackManager, Context, MetricsRecord, RunInfo
from callsheet.callbacks import LRMonitor
from callsheet.metrics import MetricLog


class Printer(Callback):
    """Print each record."""

    phase = "report"

    def on_log(self, ctx: Context) -> None:
        print(ctx.step, ctx.record.values)


def main() -> None:
    """Fit a line to points."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
    targets = 3 * inputs + 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    metrics = MetricLog()
    manager = CallbackManager([LRMonitor(), Printer()])
    ctx = Context(RunInfo("own-loop"), model=model, accumulator=metrics)
    manager.open(ctx)
    spans = manager.spans(ctx)
    ctx.optimizer = optimizer

    with spans.train:
        for ctx.step in range(1, 51):
            with spans.train_step:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                with spans.optimizer_step:
                    optimizer.step()
                ctx.loss = loss.detach()
                ctx.state.timestamp = ctx.state.timestamp.next_batch()
            ctx.close("on_train_step_end")
            ctx.log({"train/loss": loss}, over="mean")
            optimizer.zero_grad()
            if ctx.step % 10 == 0:
                ctx.record = MetricsRecord(ctx.step, metrics.take())
                manager.fire("on_log", ctx)
                ctx.close("on_log")
    manager.close()


if __name__ == "__main__":
    main()
