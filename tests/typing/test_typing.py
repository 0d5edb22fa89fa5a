"""Type checkers accept what a user writes, and find the mistakes, in the wheel as it is installed."""

import json
import os
import re
import site
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.test_all


HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".mypy_cache" / "of_the_wheel"
MYPY = """\
[mypy]
strict = true
follow_imports = skip
[mypy-callsheet.*]
follow_imports = normal
[mypy-torch.*,torchmetrics.*]
follow_imports = silent
"""
"""Of the packages, only callsheet, torch and torchmetrics are read: mypy needs minutes for the frameworks. pyright reads those as well."""
# Only the installed wheel may be found.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
USER_CODE, MISTAKES = HERE / "user_code.py", HERE / "mistakes.py"


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a venv with the project's wheel and the packages of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    wheel = next(folder.glob("*.whl"))
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", wheel], check=True)
    packages = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    ).stdout.strip()
    Path(packages, "others.pth").write_text("\n".join(site.getsitepackages()))
    return python


def wrong_lines(path: Path) -> set[int]:
    return {number for number, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# error")}


@pytest.fixture(scope="module")
def mypy_finds(interpreter: Path) -> dict[str, dict[int, str]]:
    """Return the errors that mypy finds, by file and line."""
    CACHE.mkdir(parents=True, exist_ok=True)
    config = CACHE / "mypy.ini"
    config.write_text(MYPY)
    options: list[str | Path] = [
        "--config-file",
        config,
        "--no-error-summary",
        "--hide-error-context",
        "--python-executable",
        interpreter,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", CACHE, USER_CODE, MISTAKES],
        cwd=CACHE,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, dict[int, str]] = {USER_CODE.name: {}, MISTAKES.name: {}}
    for line in done.stdout.splitlines():
        if match := re.match(r"(.*?):(\d+): error: (.*)", line):
            found[Path(match[1]).name][int(match[2])] = match[3]
    return found


@pytest.fixture(scope="module")
def pyright() -> list[str]:
    """Return the command for pyright. Skip the test if pyright's program, which needs Node.js, cannot be installed."""
    command = [sys.executable, "-m", "pyright"]
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("pyright could not be downloaded within 120 s")
    if done.returncode != 0:
        pytest.skip(f"pyright cannot be started here: {(done.stdout + done.stderr).strip()[-200:]}")
    return command


def found_by_pyright(command: list[str], interpreter: Path, path: Path, folder: Path) -> dict[int, str]:
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    copy = folder / path.name
    copy.write_text(path.read_text())
    done = subprocess.run(
        [*command, "--outputjson", "--pythonpath", interpreter, "-p", folder / "pyrightconfig.json"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1: each["message"] for each in found if each["severity"] == "error"}


def test_mypy_accepts_what_a_user_writes(mypy_finds: dict[str, dict[int, str]]) -> None:
    assert mypy_finds[USER_CODE.name] == {}


def test_mypy_finds_the_mistakes(mypy_finds: dict[str, dict[int, str]]) -> None:
    assert set(mypy_finds[MISTAKES.name]) == wrong_lines(MISTAKES), mypy_finds


def test_pyright_accepts_what_a_user_writes(pyright: list[str], interpreter: Path, tmp_path: Path) -> None:
    assert found_by_pyright(pyright, interpreter, USER_CODE, tmp_path) == {}


def test_pyright_finds_the_mistakes(pyright: list[str], interpreter: Path, tmp_path: Path) -> None:
    found = found_by_pyright(pyright, interpreter, MISTAKES, tmp_path)
    assert set(found) == wrong_lines(MISTAKES), found
