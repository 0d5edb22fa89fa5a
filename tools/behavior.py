"""Record the behavior that users can observe in this checkout of callsheet and in an older one, and print the differences.

    python tools/behavior.py OLD_CHECKOUT            record both trees, print every difference, exit 1 if there is one
    python tools/behavior.py OLD_CHECKOUT --only hosts recipes

For each host and each recipe, a short real run is recorded: its events with the fields available at each, the logged metrics,
losses and final weights, bit for bit. Also recorded are the cells of the matrix, the public names, the options of the command
line and the keys of the recipes' YAML. The old checkout is run twice: values that differ between these two runs (times, rates,
memory) are not compared. `RENAMED` maps old names to new ones.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RENAMED: dict[str, str] = {
    "FieldNotTold": "FieldNotAvailable",
    "NotCarried": "NotSupported",
    "RequestRefused": "RequestRejected",
    "LogRecord": "MetricsRecord",
    "Told": "RecordedEvent",
    "accumulate": "gradient_accumulation_steps",
    "refuse": "reject",
    "refused": "rejected",
    "hears": "listens",
}
"""Maps the old name of a field, metric, option or public name to the new one."""

HOSTS = (
    *("trainer", "bare", "huggingface", "lightning", "ignite", "accelerate", "torchtnt", "keras"),
    *("megatron_bridge", "automodel", "instructlab", "composer"),
)
RECIPES = ("pretrain", "finetune", "finetune_vlm", "classify", "distill")
MODULES = (
    "",
    ".errors",
    ".callbacks",
    ".loggers",
    ".trainer",
    ".checkpoint",
    ".metrics",
    ".report",
    ".transport",
    ".testing",
    ".recipes",
)
COMMANDS = ("", "train", "show", "events", "bridges", "recipes", "evaluate", "predict", "export", "runs", "report", "watch")
PARTS = ("hosts", "recipes", "matrix", "names", "commands", "yaml")
MEASURED = re.compile("/system/|/memory|size_bytes|/time|_seconds|_per_second")
"""Matches measured values in a recipe's files, which differ in every run."""
SECONDS = 600
"""The time limit for one run."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("old", type=Path, help="the older checkout (git worktree add DIR COMMIT)")
    arguments.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the parts to record; by default all")
    arguments.add_argument("--composer", type=Path, default=Path(".venv-composer/bin/python"), help="Composer's own interpreter")
    given = arguments.parse_args()
    new = Path(__file__).resolve().parent.parent
    differences = compared = 0
    for part in given.only:
        for title, command, interpreter in commands(part, given.composer):
            first, second = (record(given.old.resolve(), command, interpreter) for _ in range(2))
            found = record(new, command, interpreter)
            same = {key: value for key, value in first.items() if second.get(key) == value}
            varying = renamed(dict.fromkeys((first.keys() | second.keys()) - same.keys())).keys()
            stable = renamed(same)
            different = [
                f"  {key}: was {stable.get(key, 'absent')!r}, is {found.get(key, 'absent')!r}"
                for key in sorted(stable.keys() | (found.keys() - varying))
                if stable.get(key, "absent") != found.get(key, "absent")
            ]
            print(
                f"{title}: {len(stable)} values compared, {len(different)} differ, {len(varying)} vary by themselves", flush=True
            )
            print("\n".join(different[:40]), end="\n" if different else "", flush=True)
            differences, compared = differences + len(different), compared + len(stable)
    print(f"{compared} values compared, {differences} differ")
    return bool(differences)


def commands(part: str, composer: Path) -> Iterator[tuple[str, list[str], Path]]:
    """Yield what to record for this part: a title, the arguments of this program, and the interpreter."""
    interpreter = Path(sys.executable)
    for name in {"hosts": HOSTS, "recipes": RECIPES}.get(part, ("",)):
        yield f"{part} {name}".strip(), [part, name], composer.absolute() if name == "composer" else interpreter


def record(tree: Path, command: list[str], interpreter: Path) -> dict[str, Any]:
    """Run this program with the packages and tests of the checkout `tree`, and return the values that it prints as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree / 'tests'}",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
        }
        ran = subprocess.run(
            [str(interpreter), "-W", "ignore", str(Path(__file__).resolve()), "--record", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    if ran.returncode:
        return {"failed": ran.stderr[-2000:]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Replace old names in the keys, and in the values that are names."""

    def name(text: Any) -> Any:
        return "/".join(RENAMED.get(part, part) for part in text.split("/")) if isinstance(text, str) else text

    return {name(key): name(value) for key, value in values.items()}


# --- in a process that uses the packages of one checkout ---


def hosts(name: str) -> dict[str, Any]:
    """Record a short run in this framework, with built-ins that change, measure and save."""
    from callsheet import Callback, Context
    from callsheet.callbacks import EMA, CheckpointSaver, LRMonitor, OptimizerMonitor

    found: dict[str, Any] = {}

    class Trace(Callback):
        phase = "restore"  # after all others

        def on_event(self, ctx: Context) -> None:
            count = sum(key.startswith("event/") for key in found)
            values = {}
            for field in every_field:
                if ctx.has(field):
                    values[field] = shown(getattr(ctx, field))
            found[f"event/{count:04d}"] = str(ctx.event)
            for field, value in values.items():
                found[f"{count:04d} {ctx.event}/{field}"] = value
            if str(ctx.event) == "on_log":
                found.update({f"{count:04d} metric/{key}": shown(value) for key, value in ctx.record.values.items()})

    every_field = fields()
    # The package was called `homes` in older checkouts.
    package = next(each for each in ("bridges.loops", "bridges.homes") if importlib.util.find_spec(each))
    loop, points = importlib.import_module(f"{package}.{name}"), importlib.import_module(f"{package}.job").POINTS
    everything = [EMA(), LRMonitor(), OptimizerMonitor(), CheckpointSaver(save_interval="3ba"), Trace()]
    try:
        model = loop.train(points, Path.cwd() / "both", everything, strict=False)
    except Exception as error:
        found = {"rejected": type(error).__name__}
        model = loop.train(points, Path.cwd() / "alone", [LRMonitor(), Trace()], strict=False)
    found["weights"] = digest(model)
    found["weights without callbacks"] = digest(loop.train(points, Path.cwd() / "none", None))
    return found


def fields() -> tuple[str, ...]:
    """Return the names of all fields of the context."""
    for module in ("callsheet.core.lifecycle", "callsheet.lifecycle"):  # the second is its place in older checkouts
        if importlib.util.find_spec(module.rpartition(".")[0]) and importlib.util.find_spec(module):
            return tuple(importlib.import_module(module).FIELDS)
    raise ModuleNotFoundError("The module of the lifecycle's table is neither callsheet.core.lifecycle nor callsheet.lifecycle.")


def shown(value: Any) -> Any:
    """Return numbers, strings and tensors in a form that can be compared bit for bit, and "there" for any other value."""
    import torch

    if isinstance(value, torch.Tensor):
        return digest_of(value)
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    return value.hex() if isinstance(value, float) else "there"


def digest_of(tensor: Any) -> str:
    return f"{tuple(tensor.shape)} {hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]}"


def digest(model: Any) -> str:
    """Return a digest of all weights of a model."""
    return hashlib.sha256("".join(digest_of(each) for each in model.state_dict().values()).encode()).hexdigest()[:16]


def recipes(name: str) -> dict[str, Any]:
    """Record a few steps of the recipe on its own data, started from the command line."""
    short = ["--max_duration", "6ba", "--eval_interval", "3ba", "--runs_folder", "runs", "--seed", "5", "--device", "cpu"]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "callsheet", "train", name, *short], check=True, stdout=subprocess.DEVNULL
    )
    [folder] = Path("runs").iterdir()
    found: dict[str, Any] = {"files": sorted({path.name for path in folder.iterdir()})}
    for file in sorted(folder.glob("*.jsonl")):
        if file.stem == "costs":  # it has only times
            continue
        for number, line in enumerate(file.read_text().splitlines()):
            found.update({f"{file.stem} {number:04d}/{key}": value for key, value in flat(json.loads(line))})
    return found


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf of nested dictionaries and lists."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(inner, f"{name}/{key}" if name else str(key))
    else:
        yield name, value


def matrix(_: str) -> dict[str, Any]:
    """Record the kind of each cell of the matrix: works, limited, refused or rejected."""
    import callsheet

    found: dict[str, Any] = {}
    for file in sorted(Path(str(callsheet.__file__)).parent.rglob("*.json")):
        for key, value in flat(json.loads(file.read_text())):
            if isinstance(value, str) and len(value) < 12:
                found[f"{file.stem}/{key}"] = value
    return found


def names(_: str) -> dict[str, Any]:
    """Record the public names of the public modules."""
    return {
        f"{module}/{name}": "there"
        for module in (f"callsheet{end}" for end in MODULES)
        for name in getattr(importlib.import_module(module), "__all__", ())
    }


def command_line(_: str) -> dict[str, Any]:
    """Record the options of each command."""
    found: dict[str, Any] = {}
    for command in COMMANDS:
        command_help = [sys.executable, "-m", "callsheet", *command.split(), "--help"]
        text = subprocess.run(command_help, capture_output=True, text=True, check=True).stdout
        found.update({f"{command or 'callsheet'}/{option}": "there" for option in re.findall(r"(?<![\w-])--?[a-z][\w.-]*", text)})
    return found


def yaml(_: str) -> dict[str, Any]:
    """Record the keys and defaults of each recipe."""
    from yaml import safe_load

    found: dict[str, Any] = {}
    for name in RECIPES:
        print_config = [sys.executable, "-W", "ignore", "-m", "callsheet", "train", name, "--print_config"]
        text = subprocess.run(print_config, capture_output=True, text=True, check=True).stdout
        found.update({f"{name}/{key}": value for key, value in flat(safe_load(text))})
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        recorders = {"hosts": hosts, "recipes": recipes, "matrix": matrix, "names": names, "commands": command_line, "yaml": yaml}
        print(json.dumps(recorders[sys.argv[2]](sys.argv[3]), default=str))
    else:
        sys.exit(main())
