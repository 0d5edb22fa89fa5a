"""Without optional packages, every public name and every command works, or prints in one line what to install."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import callsheet
from callsheet.core.optional import _EXTRAS, _INSTALLED_BY

SOURCE = Path(callsheet.__file__).parent

ONE_LINE = re.compile(
    r"callsheet[\w. ]* needs \w+, which is not installed: pip install \S+|\w+ needs \w+, which is not installed: .*"
)

PROBE = """
import contextlib, importlib, importlib.machinery, io, json, pkgutil, sys

class Hiding(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

HIDDEN = set(sys.argv[1].split(",")) - {""}
sys.meta_path[:] = [Hiding if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
import callsheet
from callsheet.cli.main import main

results = {}

def note(what, do):
    try:
        do()
    except Exception as error:
        results[what] = [type(error).__name__, str(error)]
    else:
        results[what] = ["", ""]

def star(package):
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", ()):
        note(f"{package}.{name}", lambda: getattr(module, name))

packages = ["callsheet", *(m.name for m in pkgutil.walk_packages(callsheet.__path__, "callsheet.", onerror=lambda name: None) if m.ispkg)]
for package in packages:
    note(package, lambda: star(package))
for command in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(command)
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = f"{type(error).__name__}: {error}"
    results[" ".join(command)] = [status, out.getvalue(), err.getvalue()]
print(json.dumps({"recorded": results, "dir": dir(callsheet)}))
"""

NEED_NOTHING = [
    ["--help"],
    ["--version"],
    ["recipes"],
    ["recipes", "--copy", "pretrain", "--to", "copied.yaml"],
    ["events"],
    ["bridges"],
    ["runs", "."],
    *([command, "--help"] for command in ("train", "show", "events", "bridges", "recipes", "evaluate", "predict", "export")),
    *([command, "--help"] for command in ("runs", "report", "watch", "import")),
]
NEED_SOMETHING = {
    "hf": [
        ["train", "pretrain"],
        ["show", "pretrain"],
        ["train", "pretrain", "--help"],
        ["evaluate", "here"],
        ["predict", "here", "--input", "rows.jsonl"],
        ["export", "here", "there"],
    ],
    "report": [["report", "here"], ["watch", "here"]],
}


def probed(
    python: str, folder: Path, *, hidden: str = "", commands: list[list[str]], keras_backend: str = "torch"
) -> dict[str, Any]:
    """Return the result of every public name and of the commands in an interpreter that lacks packages."""
    run = folder / "here"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    ran = subprocess.run(
        [python, "-c", PROBE, hidden, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={
            "KERAS_BACKEND": keras_backend,
            "PYTHONPATH": str(SOURCE.parent),
            "PATH": "/usr/bin:/bin",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def failures(found: dict[str, Any]) -> Iterator[str]:
    """Yield the names that raised anything but MissingPackage with one line."""
    for name, recorded in found["recorded"].items():
        if len(recorded) == 2 and recorded[0] and not (recorded[0] == "MissingPackage" and ONE_LINE.fullmatch(recorded[1])):
            yield f"{name}: {recorded[0]}: {recorded[1]}"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what `probed` finds in a venv without any package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=False)
    (folder / "work").mkdir()
    commands = [*NEED_NOTHING, *(command for some in NEED_SOMETHING.values() for command in some)]
    return probed(str(folder / "venv" / "bin" / "python"), folder / "work", commands=commands)


def test_every_public_name_works_or_its_error_says_what_to_install(bare: dict[str, Any]) -> None:
    assert not list(failures(bare))
    recorded = bare["recorded"]
    for name in ("callsheet.Trainer", "callsheet.attach", "callsheet.launch", "callsheet.callbacks.EMA"):
        assert recorded[name][1] == f"{name} needs torch, which is not installed: pip install 'callsheet[train]'"
    for name in ("callsheet.Process", "callsheet.callbacks.EarlyStopper", "callsheet.loggers.JSONLLogger"):
        assert recorded[name] == ["", ""]


@pytest.mark.parametrize("command", NEED_NOTHING, ids=" ".join)
def test_commands_that_need_no_packages_work(bare: dict[str, Any], command: list[str]) -> None:
    status, out, err = bare["recorded"][" ".join(command)]
    assert (status, err) == (0, "")
    assert out


@pytest.mark.parametrize(
    ("extra", "command"),
    [(extra, command) for extra, commands in NEED_SOMETHING.items() for command in commands],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_other_commands_print_in_one_line_what_to_install(bare: dict[str, Any], extra: str, command: list[str]) -> None:
    status, out, err = bare["recorded"][" ".join(command)]
    assert (status, out) == (1, "")
    assert re.fullmatch(rf"callsheet: .* needs \w+, which is not installed: pip install 'callsheet\[{extra}\]'\n", err), err


@pytest.mark.test_all
@pytest.mark.parametrize("hidden", ["torch", "yaml", "numpy"])
def test_a_single_missing_package_is_named_with_the_installation_command(hidden: str, tmp_path: Path) -> None:
    found = probed(sys.executable, tmp_path, hidden=hidden, commands=[["recipes"], ["--help"], ["show", "pretrain"]])
    # The bridge to Accelerate needs yaml itself.
    assert not [failed for failed in failures(found) if not failed.startswith("callsheet.bridges.accelerate")]
    assert found["recorded"]["recipes"][0] == found["recorded"]["--help"][0] == 0
    status, out, err = found["recorded"]["show pretrain"]
    assert (status, out) == (1, "")
    assert re.fullmatch(rf"callsheet: callsheet show needs {hidden}, .*: pip install 'callsheet\[(hf|train)\]'\n", err), err


@pytest.mark.test_all
def test_keras_with_a_backend_that_is_not_installed_names_torch_or_the_bridge_s_backend(tmp_path: Path) -> None:
    """Keras uses TensorFlow by default. Its own error for a missing TensorFlow names neither torch nor the bridge."""
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    keras = "callsheet.bridges.keras"
    missing = probed(sys.executable, tmp_path / "without", hidden="torch,tensorflow", commands=[], keras_backend="tensorflow")
    assert missing["recorded"][keras] == [
        "MissingPackage",
        f"{keras} needs torch, which is not installed: pip install 'callsheet[train]'",
    ]
    other = probed(sys.executable, tmp_path / "with", hidden="tensorflow", commands=[], keras_backend="tensorflow")
    kind, message = other["recorded"][keras]
    assert kind == "ConfigError"
    assert "KERAS_BACKEND=torch" in message
    assert "\n" not in message


def test_dir_lists_the_public_names(bare: dict[str, Any]) -> None:
    assert {"Trainer", "attach", "launch", "Process"} <= set(bare["dir"])
    assert not {"Any", "TYPE_CHECKING", "Mapping"} & set(bare["dir"])
    assert set(dir(callsheet)) == {*callsheet.__all__, "__version__"}


def imported() -> set[str]:
    """Return the third-party packages that the source imports by a statement."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom) and statement.module:
                found.add(statement.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"callsheet"}


def test_every_package_that_is_imported_has_an_installation_command() -> None:
    assert imported() <= set(_INSTALLED_BY)


def test_every_extra_named_in_messages_installs_its_packages() -> None:
    project = SOURCE.parents[1] / "pyproject.toml"
    declared = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    called = {
        "PIL": "pillow",
        "jinja2": "torch",  # torch requires it
        "opentelemetry": "opentelemetry-sdk",
        "sklearn": "scikit-learn",
        "tokenizers": "transformers",  # transformers requires it
        "yaml": "jsonargparse",  # jsonargparse[signatures] requires it
    }
    for extra, modules in _EXTRAS.items():
        brought = {re.split(r"[\[>=<]", requirement)[0] for requirement in declared[extra]}
        assert {called.get(module, module) for module in modules} <= brought
