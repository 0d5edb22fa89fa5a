"""Formats numbers, durations and results for output that people read."""

from __future__ import annotations

from datetime import timedelta

from callsheet.core.context import Context


def place(ctx: Context) -> str:
    """Format the position in training: `epoch 2  step 120`."""
    return f"epoch {ctx.epoch}  step {ctx.step}"


def clock(seconds: float) -> str:
    """Format a duration in seconds: `1:02:05`."""
    return str(timedelta(seconds=round(seconds)))


def short(rate: float) -> str:
    """Format a rate with about three digits: `0.5`, `12.3`, `1,234`."""
    return f"{rate:.3g}" if rate < 1000 else f"{rate:,.0f}"


def outcome(ctx: Context) -> str:
    """Return a line of text that says how the run ended, and why."""
    reason = f"  ({ctx.run.outcome_reason})" if ctx.run.outcome_reason else ""
    return f"{ctx.run.name} {ctx.run.outcome}: {place(ctx)}  {clock(ctx.state.timestamp.seconds)} of training{reason}"


def speeds(ctx: Context) -> list[str]:
    """Return the speeds in the metrics record as texts such as `1,234 samples/s`; none for the record of an evaluation."""
    rates = {"samples": ctx.record.samples_per_second, "tokens": ctx.record.tokens_per_second}
    return [f"{short(rate)} {name}/s" for name, rate in rates.items() if rate]


def results(ctx: Context) -> str:
    """Return the evaluation's results as text: `validation/loss 0.5  validation/accuracy 0.75`."""
    found = ctx.eval_results.items()
    return "  ".join(f"{name}/{metric} {value:.4g}" for name, result in found for metric, value in result.items())
