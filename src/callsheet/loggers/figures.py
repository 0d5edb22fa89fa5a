"""How figures are worded for people."""

from __future__ import annotations

from datetime import timedelta

from callsheet.context import Context


def place(ctx: Context) -> str:
    """Where training is: `epoch 2  step 120`."""
    return f"epoch {ctx.epoch}  step {ctx.step}"


def clock(seconds: float) -> str:
    """A length of time: `1:02:05`."""
    return str(timedelta(seconds=round(seconds)))


def short(rate: float) -> str:
    """A rate in about three digits: `0.5`, `12.3`, `1,234`."""
    return f"{rate:.3g}" if rate < 1000 else f"{rate:,.0f}"


def outcome(ctx: Context) -> str:
    """Return how the run ended, and why, in a line."""
    reason = f"  ({ctx.run.outcome_reason})" if ctx.run.outcome_reason else ""
    return f"{ctx.run.name} {ctx.run.outcome}: {place(ctx)}  {clock(ctx.state.timestamp.seconds)} of training{reason}"


def speeds(ctx: Context) -> list[str]:
    """The record's speeds: `1,234 samples/s`; none in an evaluation's."""
    rates = {"samples": ctx.record.samples_per_second, "tokens": ctx.record.tokens_per_second}
    return [f"{short(rate)} {name}/s" for name, rate in rates.items() if rate]


def results(ctx: Context) -> str:
    """The evaluation's: `validation/loss 0.5  validation/accuracy 0.75`."""
    told = ctx.eval_results.items()
    return "  ".join(f"{name}/{metric} {value:.4g}" for name, result in told for metric, value in result.items())
