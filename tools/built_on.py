"""Train with programs that are built on the frameworks, or that have a training loop of their own, with and without callsheet.

    python tools/built_on.py                              train with every program that has no result in its present version
    python tools/built_on.py --only skorch axolotl        only with these programs
    python tools/built_on.py --only skorch --again        also if it has a result
    python tools/built_on.py --only skorch --keep         keep the venv and what the trainings wrote, in .venv-built-on/skorch

`built_on_programs.py` lists the programs. Each is installed into a venv of its own, which shares the packages of this environment. Then
it trains a tiny model on local data for a few steps on the CPU: without callsheet, with callbacks that observe, with callbacks that stop the
training and save, and with what callsheet is expected to reject. The results go to benchmarks/results/built_on.json after each program, so
that an interrupted command continues where it stopped. `tools/generate.py` makes the table in docs/bridges/index.md from them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

import composer_venv
from built_on_programs import ACTS, CALLBACKS, OBSERVES, PROGRAMS, SCRIPTS, STOP_AT, Ask, Program, Run, Way, prepare

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-built-on"
RESULTS = ROOT / "benchmarks" / "results" / "built_on.json"
SECONDS = 600
"""The time limit of one training."""


@dataclass(frozen=True)
class Result:
    """What was found about one way to train with a program.

    `verdict` is `trains`, `rejected` (callsheet raises an error before training), `fails` (callsheet was attached, but the training or
    the record of its events failed), or `not possible` (the program cannot be installed here, or fails without callsheet). `reason`
    gives the message. `order` is the error if the events were not in lifecycle order. `steps` and `losses` are what callsheet counted
    and logged, `own_steps` and `own_losses` what the program itself recorded in the same run. `weights` is whether the final weights
    are bitwise the same as without callsheet. `stops`, `saves` and `keeps` say whether requests of callbacks were carried out: training
    stopped at the requested step with the weights that training without callsheet has there, a checkpoint was written, and it contains
    the callbacks' states. `messages` are callsheet's warnings while callbacks observed. `rejected` has the message for each thing that
    was rejected.
    """

    program: str
    title: str
    attached: str
    versions: Mapping[str, str]
    verdict: str = "trains"
    reason: str = ""
    order: str = ""
    steps: int = 0
    own_steps: int = 0
    losses: tuple[float, ...] = ()
    own_losses: tuple[float, ...] = ()
    weights: bool = False
    stops: bool | None = None
    saves: bool | None = None
    keeps: bool | None = None
    rejected: Mapping[str, str] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    python: str = ""
    torch: str = ""
    tested: str = ""


class NotPossibleError(Exception):
    """The program cannot be installed here, or does not train here without callsheet."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [program.name for program in PROGRAMS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PROGRAM", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--again", action="store_true", help="train again with programs that have a result in their present version"
    )
    parser.add_argument("--keep", action="store_true", help="keep the venvs and what the trainings wrote")
    given = parser.parse_args()
    results = read()
    for program in PROGRAMS:
        ways = [way for way in program.ways if given.again or not _is_done(program, way, results)]
        if program.name not in given.only or not ways:
            continue
        print(f"{program.name} {program.versions[program.shown[0]]}", flush=True)
        folder = FOLDER / program.name
        try:
            for way, result in zip(ways, tested(program, ways, folder), strict=True):
                results[way.title, way.attached] = result
        finally:
            if not given.keep:
                shutil.rmtree(folder, ignore_errors=True)
        write(results)
    print(f"results: {RESULTS.relative_to(ROOT)}; `make generate` writes them to the docs")
    return 0


def _is_done(program: Program, way: Way, results: Mapping[tuple[str, str], Result]) -> bool:
    result = results.get((way.title, way.attached))
    return result is not None and result.versions == program.versions


def read() -> dict[tuple[str, str], Result]:
    """Return the results so far, by title and how callsheet was attached."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    lists = ("losses", "own_losses", "messages")
    found = [Result(**row | {name: tuple(row[name]) for name in lists}) for row in rows]
    return {(result.title, result.attached): result for result in found}


def write(results: Mapping[tuple[str, str], Result]) -> None:
    """Write the results in the order of the programs. Results of ways that no longer exist are left out."""
    keys = [(way.title, way.attached) for program in PROGRAMS for way in program.ways]
    rows = [asdict(results[key]) for key in keys if key in results]
    RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


# --- trainings ---


def tested(program: Program, ways: list[Way], folder: Path) -> list[Result]:
    """Train in each way, and return the results."""
    made = partial(
        Result,
        program.name,
        versions=program.versions,
        python=platform.python_version(),
        torch=version("torch"),
        tested=date.today().isoformat(),
    )
    shutil.rmtree(folder / "runs", ignore_errors=True)
    results = []
    for way in ways:
        start = time.monotonic()
        result = made(title=way.title, attached=way.attached)
        try:
            python = composer_venv.make(folder / "venv", program.versions)
            result = measured(Training(program, way, folder / "runs", python), result)
        except (composer_venv.CannotInstallError, NotPossibleError) as error:
            result = replace(result, verdict="not possible", reason=str(error))
        print(f"  {way.title}, {way.attached}: {summary(result)} ({time.monotonic() - start:.0f} s)", flush=True)
        results.append(result)
    return results


def measured(training: Training, result: Result) -> Result:
    """Train without callsheet and with it, and return what was found.

    Raises:
        NotPossibleError: the program does not train here without callsheet.
    """
    way = training.way
    plain = training.run("plain")
    if plain.error or not plain.states():
        raise NotPossibleError(plain.error or "the program has written no record of its training")
    ours = training.run("observed", OBSERVES)
    if ours.rejection:
        return replace(result, verdict="rejected", reason=ours.rejection)
    if ours.error or ours.watched is None:
        return replace(result, verdict="fails", reason=ours.error or "callsheet has observed no training")
    own_steps, own_losses = ours.recorded()
    result = replace(
        result,
        order=ours.watched["order"],
        steps=ours.watched["steps"],
        own_steps=own_steps,
        losses=tuple(ours.losses()),
        own_losses=tuple(own_losses),
        weights=same_weights(plain.weights(), ours.weights()),
        messages=tuple(ours.messages),
    )
    if way.acts:
        acting = training.run("acting", ACTS, saves=False)
        if acting.error:
            return replace(result, verdict="fails", reason=acting.error)
        at, half = f"checkpoint-{STOP_AT}", "checkpoint-2"
        is_same = same_weights(plain.weights(at), acting.weights(at))
        result = replace(
            result,
            stops=acting.has_stopped and is_same,
            saves=bool(acting.found(half)),
            keeps=any((folder / "callsheet").is_dir() for folder in acting.found(half)),
        )
    messages = {name: training.asked(name, ask, known=ours.messages) for name, ask in way.asks.items()}
    return replace(result, rejected={name: message for name, message in messages.items() if message})


@dataclass
class Training:
    """Starts the runs of one way to train."""

    program: Program
    way: Way
    folder: Path
    python: Path

    def run(self, name: str, callbacks: list[Any] | None = None, *, saves: bool = True, options: tuple[str, ...] = ()) -> Ran:
        """Train in a new folder, and return what is there afterwards."""
        if not (self.folder / "model").exists():
            self.folder.mkdir(parents=True)
            prepare(self.folder)
            for module in self.program.empty_modules:
                (self.folder / "empty" / module).mkdir(parents=True)
                (self.folder / "empty" / module / "__init__.py").touch()
        where = self.folder / re.sub(r"\W+", "-", f"{self.way.title} {self.way.attached} {name}")
        where.mkdir()
        run = Run(where, callbacks or [], saves, (*self.way.options, *options))
        if callbacks:
            (where / CALLBACKS).write_text(yaml.safe_dump(callbacks))
        try:
            done = subprocess.run(
                [self.python, *self._torchrun(), *self.way.command(run)],
                cwd=where,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
            output, is_error = re.sub(r"^\[rank\d\]: ", "", done.stdout, flags=re.MULTILINE), done.returncode != 0
        except subprocess.TimeoutExpired:
            output, is_error = f"the training was not done after {SECONDS} seconds", True
        (where / "output.txt").write_text(output)
        return Ran(where, output, is_error, self.way.ranks)

    def asked(self, name: str, ask: Ask, known: list[str]) -> str:
        """Return the message with which callsheet rejects something, or nothing if it does not."""
        ran = self.run(name, ["watch.Watch", *ask.callbacks], saves=False, options=ask.options)
        own = f"not tried, because the program itself fails: {ran.error}" if ran.error else ""
        new = [message for message in ran.messages if message not in known]
        return ran.rejection or own or "".join(new[-1:])

    def _torchrun(self) -> list[str]:
        """Return the arguments with which the interpreter starts the way's ranks, or none for a single process."""
        if self.way.ranks == 1:
            return []
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.way.ranks)]

    def _environment(self) -> dict[str, str]:
        paths = [ROOT / "src", SCRIPTS, self.folder / "empty"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "huggingface"), "AXOLOTL_DO_NOT_TRACK": "1", "DS_ACCELERATOR": "cpu",
            "TOKENIZERS_PARALLELISM": "false", "CALLSHEET_CALLBACKS": "", "TORCH_EXTENSIONS_DIR": str(self.folder.parent / "extensions"),
        }  # fmt: skip
        if self.program.is_distributed and self.way.ranks == 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environment |= {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        return environment


@dataclass
class Ran:
    """What a run has written to its folder."""

    folder: Path
    output: str
    is_error: bool
    ranks: int

    @property
    def error(self) -> str:
        """The error that ended the run, in one line without paths, or nothing."""
        if not self.is_error:
            return ""
        lines = [line for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|NotSupported)\b.*: ", line)]
        return re.sub(r"(/[\w.\-]+){2,}", "...", (errors or lines or ["no output"])[-1])[:300]

    @property
    def rejection(self) -> str:
        """The error with which callsheet ended the run, or what `callsheet exec` printed if it observed no training, or nothing."""
        if self.is_error or self.watched is None:
            pattern = r"^callsheet\.errors\.\w+: (.*)$" if self.is_error else r"^callsheet: (.*)$"
            return next(iter(re.findall(pattern, self.output, re.MULTILINE)), "")
        return ""

    @property
    def messages(self) -> list[str]:
        """The warnings and errors that callsheet has logged."""
        file = self.folder / "messages.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def watched(self) -> dict[str, Any] | None:
        """What `watch.Watch` has written, or None if no training was observed to its end."""
        file = self.folder / "watched.json"
        return json.loads(file.read_text()) if file.exists() else None

    def losses(self) -> list[float]:
        """Return the training losses that callsheet has logged."""
        from callsheet.loggers.support.jsonl_reader import METRICS, read_metrics

        (file,) = self.folder.rglob(METRICS)
        return [float(record.values["train/loss"]) for record in read_metrics(file.parent) if "train/loss" in record.values]

    def states(self) -> list[Path]:
        """Return the files in which the program has recorded its training, the latest last."""
        return sorted(
            (self.folder / "out").rglob("trainer_state.json"), key=lambda file: json.loads(file.read_text())["global_step"]
        )

    def recorded(self) -> tuple[int, list[float]]:
        """Return the number of steps and the losses that the program itself has recorded."""
        state = json.loads(self.states()[-1].read_text())
        return state["global_step"], [entry["loss"] for entry in state["log_history"] if "loss" in entry]

    @property
    def has_stopped(self) -> bool:
        """Whether the requested stop ended the training. Several ranks agree on it while they train on, so they stop some steps later."""
        stopped, steps = any("stopped by Stops" in message for message in self.messages), self.recorded()[0]
        return stopped and (steps == STOP_AT if self.ranks == 1 else steps > STOP_AT)

    def found(self, name: str) -> list[Path]:
        """Return the checkpoint of this name, in a list that is empty if there is none."""
        return list((self.folder / "out").rglob(name))

    def weights(self, name: str = "") -> dict[str, Any]:
        """Return the weights in the checkpoint of this name, by default those after the last step."""
        from safetensors.torch import load_file

        folder = self.found(name)[0] if name else self.states()[-1].parent
        return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def same_weights(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether these are the same tensors, bit for bit, and at least one."""
    import torch

    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- table ---


def summary(result: Result) -> str:
    """Return the result in one line."""
    if result.verdict != "trains":
        return f"{result.verdict}: {result.reason}"
    return f"order {_order(result)}, steps {_steps(result)}, losses {_losses(result)}, weights {_sign(result.weights)}, stop {_sign(result.stops)}"


def markdown() -> list[str]:
    """Return the table of the results, and below it the reasons of what does not work."""
    rows = list(read().values())
    if not rows:
        return ["(not tested yet: `make built-on`)"]
    programs = {program.name: program for program in PROGRAMS}
    environments = " and ".join(sorted({f"Python {row.python} with torch {row.torch}" for row in rows}))
    lines = [
        f"Tested on {environments}, on the CPU.",
        "",
        "| program | tested | callsheet | events | steps | losses | weights | stop | save |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    reasons, rejected = [], dict[tuple[str, str], list[str]]()
    for row in rows:
        program, way = programs[row.program], f"{row.title} ({row.attached})"
        tested = ", ".join(f"{name} {row.versions[name]}" for name in program.shown)
        empty = "".join(f", and an empty module in place of {name}" for name in program.empty_modules)
        saves = "without states" if row.saves and not row.keeps else _sign(row.saves)
        cells = [_order(row), _steps(row), _losses(row), _sign(row.weights), _sign(row.stops), saves]
        if row.verdict != "trains":
            cells = [row.verdict, *[""] * 5]
            reasons.append(f"- {way}: {row.reason}")
        reasons += [f"- {way}: the events are not in lifecycle order: {row.order}"] if row.order else []
        for what, message in row.rejected.items():
            rejected.setdefault((what, message.replace("|", r"\|")), []).append(way)
        lines.append(" | ".join([f"| {row.title}", tested + empty, row.attached, *cells]).replace("  ", " ") + " |")
    lines += ["", *reasons] if reasons else []
    if rejected:
        lines += ["", "| what callsheet rejects | with | message |", "| --- | --- | --- |"]
        lines += [f"| {what} | {', '.join(ways)} | {message} |" for (what, message), ways in rejected.items()]
    return lines


def _sign(holds: bool | None) -> str:
    return "" if holds is None else "✓" if holds else "✗"


def _order(result: Result) -> str:
    return _sign(not result.order)


def _steps(result: Result) -> str:
    return _sign(True) if result.steps == result.own_steps else f"{result.steps} of {result.own_steps}"


def _losses(result: Result) -> str:
    ours, own = result.losses, result.own_losses
    if ours == own:
        return _sign(bool(own))
    if len(ours) != len(own):
        return f"{len(ours)} of {len(own)}"
    return f"to {max(abs(a - b) / abs(b) for a, b in zip(ours, own, strict=True)):.0e}"


if __name__ == "__main__":
    sys.path.append(str(ROOT))  # for tests.bridges.built_on
    sys.exit(main())
