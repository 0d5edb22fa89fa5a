"""A table of the results of many random runs."""

from __future__ import annotations

from .scenario import ANSWER, KINDS, TIMEOUT, RunResult

WHAT = {
    "calm": "slow ranks, uneven data, other keys, requests of one rank",
    "signal": "the same, and SIGTERM or SIGINT at one rank or all",
    "paused": f"the same, and a rank stopped for {TIMEOUT / 3:.1f} s (SIGSTOP, SIGCONT)",
    "raise": "the same, and an exception on one rank",
    "dead": "the same, and a rank killed (SIGKILL), in half of the runs followed by SIGTERM to the others",
    "stuck": "the same, and a rank stopped and not continued (SIGSTOP)",
}


def table(runs: list[RunResult]) -> str:
    """Return a Markdown table by kind of failure: the number of seeds, how they ended, and the longest time."""
    lines = [
        "# Random runs on 2 and 4 ranks",
        "",
        f"{len(runs)} seeds of `tests/many_ranks`: real processes over gloo, DDP and FSDP2, `timeout_seconds={TIMEOUT:g}`. A rank on",
        f"which a collective failed searches for the missing rank for up to {ANSWER:g} s. Made by `make ranks`.",
        "",
        "| what goes wrong | seeds | how all ranks ended | longest time until the last rank ended |",
        "| --- | --- | --- | --- |",
    ]
    for kind in dict.fromkeys(KINDS):
        of_kind = [run for run in runs if run.scenario.kind == kind]
        if not of_kind:
            continue
        outcomes: dict[str, int] = {}
        for run in of_kind:
            ends = {report.outcome for report in run.reports.values()}
            what = " and ".join(sorted(ends)) + (", the rank named" if ends == {"failed"} else "")
            outcomes[what] = outcomes.get(what, 0) + 1
        ended = ", ".join(f"{number} {what}" for what, number in sorted(outcomes.items()))
        struck = [run.seconds for run in of_kind if run.struck_after is not None]
        longest = f"{max(struck):.1f} s after it" if struck and kind != "calm" else ""
        lines.append(f"| {WHAT[kind]} | {len(of_kind)} | {ended} | {longest} |")
    return "\n".join(lines) + "\n"
