"""The table of `public_scripts.py`: what was recognized in each script, and whether training stayed the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Described(Protocol):
    """What the table needs of a script."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def repository(self) -> str: ...
    @property
    def note(self) -> str: ...


class Cloned(Protocol):
    """What the table needs of a repository."""

    @property
    def url(self) -> str: ...
    @property
    def commit(self) -> str: ...
    @property
    def package(self) -> str: ...


_BEGIN = """\
# Public training scripts under `callsheet exec`

Made by `make public-scripts PUBLIC=FOLDER`. Each script is a file of a public repository at the commit that is listed in the second table, or the
command of a public package, and runs unchanged: alone with `python`, and observed with `python -m callsheet.exec --log_interval 1`. It runs on one
thread of a CPU, with few steps and with stand-in data or tiny models, because no hub is reached.

In both variants, a recorder is imported when Python starts (a `sitecustomize` on `PYTHONPATH`). The recorder sets the seeds of `random`, numpy and
torch, wraps `Tensor.backward` and `zero_grad`, and registers hooks for the optimizers' steps. It lets torchvision accept stand-in files for CIFAR10
without their MD5 sums, and declares two operators of torchvision if its compiled library does not go with the installed torch. It adds the name
`DistributedType.TPU`, which accelerate removed in version 1.0 and transformers' `run_clm_no_trainer.py` still reads. At the end of each process, the
recorder hashes the parameters of the optimizers that have stepped, and torch's random state.

- **Recognized**: the host, or the model and the optimizer of a loop that is written by hand.
- **Steps**: the steps of the observed run, and of how many steps the recorder knows for the same optimizer. **Epochs** are those of the observed run.
- **Parts**: the parts of the step that are in every timed step after the first: fetch, forward pass (fwd), backward pass (bwd), optimizer step (opt).
  A fetch is observed only in loops that are written by hand and have a `DataLoader`, and in Lightning and Ultralytics. A part of less than 15
  microseconds counts as not observed.
- **Losses**: how many logged values of `train/loss` equal, within 2e-6 of their value, the sum of the values whose `backward` gave gradients to the
  optimizer in that step. If a framework logs more rarely than at each step, the mean over the steps since its last record is compared. With
  several ranks, the values are those of the first rank, or their means over the ranks if the framework logs these.
- **Weights** and **random state**: whether their hashes are equal in both variants. *varies*: they also differ between two runs alone.
- **Output**: whether standard output is equal, apart from times and rates, and with several ranks apart from the order of the lines.
- **Exit**: the exit status, of both variants if they differ. None: the process reached the time limit of its script and was ended, so the rest of
  its row means nothing.
- **Time**: the wall time of the observed process divided by that of the process alone, and the same ratio for the time from the first to the last
  step. The processes last seconds, and a shared machine with two cores was used, so the ratios are rough. The time of the process includes the
  import of callsheet and the report, a few seconds that do not grow with training; a metrics record is written at each step.
"""

_COLUMNS = (
    "script",
    "kind",
    "recognized",
    "steps",
    "epochs",
    "parts",
    "losses",
    "weights",
    "random state",
    "output",
    "exit",
    "time",
    "callsheet",
)
_DIFFERENT = "**different**"
_NOTES = "What the numbers do not say:"
_SHORT = {"fetch": "fetch", "forward": "fwd", "backward": "bwd", "optimizer_step": "opt"}


def table_of(
    scripts: Sequence[Described], results: Mapping[str, Mapping[str, Any]], repositories: Mapping[str, Cloned], earlier: str
) -> str:
    """Return the page: what was measured, a row for each script, what is not equal and why, and the commits.

    A script without a result keeps its row and its note of the earlier page.
    """
    rows, notes = _rows_of(earlier), dict(re.findall(r"^- \*\*(.+?)\*\*: (.+)$", earlier.partition(_NOTES)[2], re.MULTILINE))
    for script in scripts:
        if result := results.get(script.name):
            rows[script.name], notes[script.name] = _row(script, result), _note(script, result)
    shown = [script for script in scripts if script.name in rows]
    whole = sum(_is_whole(rows[script.name]) for script in shown)
    changed = sum(rows[script.name][_COLUMNS.index("weights")] == _DIFFERENT for script in shown)
    versions = {f"Python {result['versions']['python']}, torch {result['versions']['torch']}" for result in results.values()}
    versions |= set(re.findall(r"Python [\d.]+, torch [\d.+a-z]*\w", earlier))
    return "\n".join(
        [
            _BEGIN,
            f"Of {len(shown)} scripts, {whole} are observed completely: forward pass, backward pass and optimizer step are recognized, and each logged "
            f"loss equals the one on which the script called `backward()`. The observation changed the final weights of {changed} scripts.",
            "",
            f"{'; '.join(sorted(versions))}. The last column is the commit of callsheet.",
            "",
            _line(_COLUMNS),
            _line(["---"] * len(_COLUMNS)),
            *(_line(rows[script.name]) for script in shown),
            "",
            _NOTES,
            "",
            *(f"- **{script.name}**: {notes[script.name]}" for script in shown if notes.get(script.name)),
            "",
            _line(("repository", "commit")),
            _line(("---", "---")),
            *(
                _line((repositories[name].url, repositories[name].commit or repositories[name].package))
                for name in sorted({script.repository for script in shown})
            ),
            "",
        ]
    )


def _rows_of(page: str) -> dict[str, list[str]]:
    """Return the cells of each row of the page's table of scripts, by the script's name."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {cells[0]: cells for cells in lines if len(cells) == len(_COLUMNS) and cells[0] not in (_COLUMNS[0], "---")}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(script: Described, result: Mapping[str, Any]) -> list[str]:
    runs = result["runs"]
    alone, observed = result["status"]
    shown = {"equal": "equal", "none": "-", "varies": "varies", "DIFFERENT": _DIFFERENT}
    return [
        script.name,
        script.kind,
        "; ".join(_recognized(run, script.kind) for run in runs) or "not observed",
        "; ".join(f"{run['steps']} of {run['steps_of_optimizer']}" for run in runs) or "-",
        "; ".join(str(run["epochs"]) for run in runs) or "-",
        "; ".join(map(_parts, runs)) or "-",
        "; ".join(f"{run['losses_equal']} of {run['losses_compared']}" for run in runs) or "-",
        shown[result["weights"]],
        shown[result["random_state"]],
        shown[result["stdout"]],
        str(alone) if alone == observed else f"**{alone} and {observed}**",
        f"{_ratio(result['seconds'])}, {_ratio(result['seconds_of_steps'])}",
        result["commit"],
    ]


def _recognized(run: Mapping[str, Any], kind: str) -> str:
    found = " and ".join(name for name in (run["model"], run["optimizer"]) if name)
    host = next((name for name in ("Lightning", "Ultralytics") if name in kind), "Hugging Face")
    return found if run["is_by_hand"] else f"host of {host}: {found}"


def _parts(run: Mapping[str, Any]) -> str:
    whole = [short for name, short in _SHORT.items() if run["timed_steps"] and run["parts"][name] == run["timed_steps"]]
    some = [f"{short} in some" for name, short in _SHORT.items() if 0 < run["parts"][name] < run["timed_steps"]]
    return ", ".join([*whole, *some]) or "none"


def _ratio(seconds: Sequence[float]) -> str:
    return f"{seconds[1] / seconds[0]:.2f}" if seconds[0] else "-"


def _is_whole(cells: Sequence[str]) -> bool:
    """Return whether each run of the script has all parts of a step and equal losses."""
    row = dict(zip(_COLUMNS, cells, strict=True))
    losses = [re.fullmatch(r"(\d+) of (\d+)", each) for each in row["losses"].split("; ")]
    has_parts = all({"fwd", "bwd", "opt"} <= set(parts.split(", ")) for parts in row["parts"].split("; "))
    return has_parts and all(each is not None and each[1] == each[2] != "0" for each in losses)


def _note(script: Described, result: Mapping[str, Any]) -> str:
    notes = [script.note] if script.note else []
    if not result["runs"]:
        notes += [f"`{line}`" for line in result["said"][:2]]
    notes += [
        f"The first loss that is not equal: {run['first_difference']}." for run in result["runs"] if run["first_difference"]
    ]
    return " ".join(notes)
