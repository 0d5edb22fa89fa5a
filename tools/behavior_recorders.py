"""Record the behavior of the callsheet that is first on the path. `behavior.py` runs this program once for each part and checkout.

    python tools/behavior_recorders.py PART NAME OLD_CHECKOUT

Prints a JSON object that maps the name of each observed value to the value. Floats and tensors are recorded bit for bit.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from behavior_reasons import RENAMED

RECIPES = ("pretrain", "finetune", "finetune_vlm", "classify", "distill")
PUBLIC_MODULES = (
    *("", ".errors", ".callbacks", ".loggers", ".trainer", ".checkpoint", ".launcher", ".metrics", ".report", ".transport"),
    *(".testing", ".recipes"),
)
"""The import paths of users, in addition to every module in PUBLIC_FOLDERS."""

PUBLIC_FOLDERS = ("bridges", "compat", "plugins")
COMMANDS = (
    *("", "train", "train pretrain", "show", "exec", "events", "bridges", "recipes", "evaluate", "predict", "export", "runs"),
    *("mark", "delete", "import", "report", "compare", "watch"),
)
SHORT = ("--log_interval", "1ba", "--eval_interval", "4ba", "--seed", "5", "--device", "cpu", "--runs_folder", "runs")
"""Arguments of a short run of a recipe."""

ONLY_TRACED = ("instructlab",)
"""Hosts that give callbacks neither the model nor the optimizer, so that the built-ins have nothing to do there."""

MEASURED = re.compile("/(system|memory)/")
"""Matches metrics that are measured, so that they can be equal in two runs only by chance."""

TIMES_ALONE = ("costs", "timeline")
"""Files of a run that contain only times."""


def hosts(name: str, _: Path) -> dict[str, Any]:
    """Record a short run in this framework, with built-ins that change, measure and save.

    Each value belongs to an event and its number, so that an added event changes no other key: "on_log 3/loss". The value of
    "on_log 3" is the event that was fired before it.
    """
    from callsheet import Callback, Context
    from callsheet.callbacks import EMA, CheckpointSaver, LRMonitor, OptimizerMonitor

    class Trace(Callback):
        phase = "restore"  # after all others

        def __init__(self) -> None:
            self.found: dict[str, Any] = {}
            self.fired: Counter[str] = Counter()
            self.last, self.outcome = "the start", ""

        def on_event(self, ctx: Context) -> None:
            event = str(ctx.event)
            self.fired[event] += 1
            moment = f"{event} {self.fired[event]}"
            self.found[moment], self.last = self.last, event
            self.found.update({f"{moment}/{field}": shown(getattr(ctx, field)) for field in every_field if ctx.has(field)})
            if event == "on_run_end":
                self.outcome = str(ctx.run.outcome)
            if event == "on_log":
                self.found.update({f"{moment}/metric/{key}": shown(value) for key, value in ctx.record.values.items()})

    every_field = fields()
    # Older checkouts have the loops in `homes`.
    package = next((each for each in ("bridges.loops", "bridges.homes") if importlib.util.find_spec(each)), None)
    if package is None or not importlib.util.find_spec(f"{package}.{name}"):
        return {"not there": name}
    loop, points = importlib.import_module(f"{package}.{name}"), importlib.import_module(f"{package}.job").POINTS
    trace = Trace()
    everything = [EMA(), LRMonitor(), OptimizerMonitor(batch_log_interval=2), CheckpointSaver(save_interval="3ba"), trace]
    model = loop.train(points, Path.cwd() / "both", everything, strict=False)
    found: dict[str, Any] = {"outcome with built-ins": trace.outcome}
    if name in ONLY_TRACED:
        trace = Trace()
        model = loop.train(points, Path.cwd() / "alone", [trace], strict=False)
    found["weights"] = digest(model)
    found["weights without callbacks"] = digest(loop.train(points, Path.cwd() / "none", None))
    return found | trace.found


def fields() -> tuple[str, ...]:
    """Return the names of all fields of the context."""
    for module in ("callsheet.core.lifecycle", "callsheet.lifecycle"):  # the second is its import path in older checkouts
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
    """Return the shape of a tensor, and a digest of its bits."""
    return f"{tuple(tensor.shape)} {hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]}"


def digest(model: Any) -> str:
    """Return a digest of all weights of a model."""
    return hashlib.sha256("".join(digest_of(each) for each in model.state_dict().values()).encode()).hexdigest()[:16]


def recipes(name: str, _: Path) -> dict[str, Any]:
    """Record a few steps of the recipe on its own data, started from the command line."""
    callsheet("train", name, "--max_duration", "4ba", *SHORT)
    [folder] = Path("runs").iterdir()
    return {f"file/{path.name}": "there" for path in folder.iterdir()} | records(folder)


def run_folders(name: str, old: Path) -> dict[str, Any]:
    """Let the older checkout train this recipe for a few steps, and record what this checkout reads from the run and how it resumes it."""
    callsheet("train", name, "--max_duration", "4ba", *SHORT, tree=old)  # the recipe saves a checkpoint at the end
    [folder] = Path("runs").iterdir()
    found = {}
    for command in (("runs", "runs"), ("report", str(folder), "--out", "report.html")):
        found[command[0]] = callsheet(*command, check=False)
    resumed = callsheet("train", name, "--max_duration", "6ba", *SHORT, check=False)
    return found | {"resumed": resumed} | records(folder)


def callsheet(*arguments: str, tree: Path | None = None, check: bool = True) -> str:
    """Run callsheet's command line, that of the checkout `tree` if one is given. Return "works", or the last line of its errors.

    Raises:
        RuntimeError: the command failed, and `check` is true.
    """
    environment = os.environ | ({"PYTHONPATH": str(tree / "src")} if tree else {})
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "callsheet", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode and check:
        raise RuntimeError(f"callsheet {' '.join(arguments)}: {ran.stderr[-1000:]}")
    return f"fails: {ran.stderr.strip().splitlines()[-1:]}" if ran.returncode else "works"


def records(folder: Path) -> dict[str, Any]:
    """Return what is in the JSON lines of a run's folder."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(file.read_text().splitlines() if file.stem not in TIMES_ALONE else ()):
            values = {f"{file.stem} {number:04d}/{key}": value for key, value in flat(json.loads(line))}
            found.update({key: value for key, value in values.items() if not MEASURED.search(key)})
    return found


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf of nested dictionaries and lists."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(inner, f"{name}/{key}" if name else str(key))
    else:
        yield name, value


def matrix(_: str, __: Path) -> dict[str, Any]:
    """Record the verdict of each cell of the matrix, and what each guest does: only listens, reads, or drives."""
    found: dict[str, Any] = {}
    for file in sorted((package_folder() / "bridges" / "matrix").glob("*.json")):
        for key, value in flat(json.loads(file.read_text())):
            if value and key.endswith(("/verdict", "/tier")):
                found[f"{file.stem}/{key}"] = value
    return found


def names(_: str, old: Path) -> dict[str, Any]:
    """Record the names in each public module, and which imports in the docs and examples of the older checkout still work."""
    found: dict[str, Any] = {}
    for module in public_modules():
        found[module] = "there"
        found.update({f"{module}/{name}": "there" for name in public_names(module)})
    for module, name in sorted(documented_imports(old)):
        key = f"in docs/{module}/{RENAMED.get(name, name)}"
        if any(can_import(module, each) for each in (name, RENAMED.get(name, name))):
            found[key] = "there"
    return found


def package_folder() -> Path:
    """Return the folder of the package that is recorded."""
    import callsheet

    return Path(str(callsheet.__file__)).parent


def public_modules() -> list[str]:
    """Return the names of the public modules that exist, also of those that the names of other libraries make importable."""
    folder = package_folder()
    found = [f"callsheet{end}" for end in PUBLIC_MODULES if path_of(f"callsheet{end}")]
    for name in PUBLIC_FOLDERS:
        for each in pkgutil.iter_modules([str(folder / name)]):
            module = f"callsheet.{name}.{each.name}"
            if each.ispkg or each.name == "bare" or name == "plugins":
                found.append(module)
                imported(module)
    return sorted({*found, *(each for each in sys.modules if each.startswith("callsheet.compat.") and has_names(each))})


def imported(module: str) -> Any:
    """Return a module, or None if it does not exist or its framework is not installed."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # also an error of callsheet that says which package is missing
        print(f"{module}: {error}", file=sys.stderr)
        return None


def has_names(module: str) -> bool:
    """Return whether an imported module of `compat` is part of its public API: one with a list of its names."""
    return "__all__" in vars(sys.modules[module])


def public_names(module: str) -> list[str]:
    """Return the names that a module offers: of `__all__`, or those that its source defines at the top level."""
    offered = getattr(imported(module), "__all__", None)
    if offered is not None:
        return list(offered)
    path = path_of(module)
    tree = ast.parse(path.read_text("utf-8") if path else "")
    defined: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            defined.append(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            assigned = [each.id for each in targets if isinstance(each, ast.Name)]
            if assigned == ["__all__"] and statement.value is not None:
                return list(ast.literal_eval(statement.value))
            defined += assigned
    return [name for name in defined if not name.startswith("_") and name != "logger"]


def path_of(module: str) -> Path | None:
    """Return the file of a module of the package, or None if there is none."""
    base = package_folder().parent.joinpath(*module.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def documented_imports(old: Path) -> set[tuple[str, str]]:
    """Return the modules and names of callsheet that the docs, the README and the examples of a checkout import."""
    found: set[tuple[str, str]] = set()
    pages = [old / "README.md", *(old / "docs").rglob("*.md"), *(old / "examples").rglob("*.py")]
    for page in pages:
        for module, names in re.findall(
            r"^\s*from (callsheet[\w.]*) import (\([^)]*\)|[^\n(]+)", page.read_text("utf-8"), re.MULTILINE
        ):
            listed = re.sub(r"#.*", "", names).strip("()\n ").split(",")
            found |= {(module, name.split(" as ")[0].strip()) for name in listed if name.strip().isidentifier() or " as " in name}
    return found


def can_import(module: str, name: str) -> bool:
    """Return whether `from module import name` works, or is in a module whose framework is not installed."""
    found = imported(module)
    if found is None:
        return name in public_names(module)
    return hasattr(found, name) or path_of(f"{module}.{name}") is not None


def commands(_: str, __: Path) -> dict[str, Any]:
    """Record the options of each command."""
    found: dict[str, Any] = {}
    for command in COMMANDS:
        command_help = [sys.executable, "-m", "callsheet", *command.split(), "--help"]
        ran = subprocess.run(command_help, capture_output=True, text=True, check=False)
        if not ran.returncode:
            options = re.findall(r"(?<![\w-])--?[a-z][\w.-]*", ran.stdout)
            found.update({f"{command or 'callsheet'}/{option.rstrip('.')}": "there" for option in options})
    return found


def yaml(_: str, __: Path) -> dict[str, Any]:
    """Record the keys and defaults of each recipe."""
    from yaml import safe_load

    found: dict[str, Any] = {}
    for name in RECIPES:
        print_config = [sys.executable, "-W", "ignore", "-m", "callsheet", "train", name, "--print_config"]
        text = subprocess.run(print_config, capture_output=True, text=True, check=True).stdout
        found.update({f"{name}/{key}": value for key, value in flat(safe_load(text))})
    return found


RECORDERS = {
    "hosts": hosts,
    "recipes": recipes,
    "run_folders": run_folders,
    "matrix": matrix,
    "names": names,
    "commands": commands,
    "yaml": yaml,
}

if __name__ == "__main__":
    print(json.dumps(RECORDERS[sys.argv[1]](sys.argv[2], Path(sys.argv[3])), default=str))
