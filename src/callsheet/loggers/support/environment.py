"""Records the environment of a run in a separate thread: command, git commit and changes, packages, hardware."""

from __future__ import annotations

import logging
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from callsheet.run.reasons import is_secret, without_credentials

logger = logging.getLogger("callsheet")

ENVIRONMENT_FILE = "environment.json"

_GIT_SECONDS = 10.0  # time limit of each git command; a repository may be on a slow network disk
_MAX_DIFF_CHARACTERS = 2**18  # record at most this many characters of the uncommitted changes
_MAX_FILES = 500  # record the names of at most this many changed files, and of at most this many new files
_SECRET_FILE_ENDINGS = (".env", ".pem", ".key", ".p12", ".netrc", ".npmrc", ".pypirc", "id_rsa", "id_ed25519", "credentials")
"""Endings of file names. Changes in files with these endings are left out of the diff, because the files may contain secrets."""


def record_environment(device: str, write: Callable[[dict[str, Any]], None]) -> threading.Thread:
    """Start and return a thread that collects the git commit, the packages, the hardware and so on, and passes them to `write`.

    Only the current folder and the command are read on the caller's thread, because a program may change them later. What cannot
    be read is left out.
    """
    folder, command = Path.cwd(), list(sys.orig_argv)

    def read() -> None:
        try:
            write(
                {
                    "command": [without_credentials(word) for word in _without_secret_values(command)],
                    "folder": str(folder),
                    "git": _git(folder),
                    "python": platform.python_version(),
                    "platform": platform.platform(),
                    "packages": _packages(),
                    "hardware": _hardware(device),
                }
            )
        except Exception as error:  # no code of the run needs the file, so a failure must not end the run
            logger.warning("What the run was started with is not recorded in %s: %s", ENVIRONMENT_FILE, error)

    thread = threading.Thread(target=read, name="callsheet environment", daemon=True)
    thread.start()
    return thread


def _without_secret_values(command: list[str]) -> list[str]:
    """Return the command with `...` in place of the value after an option such as `--api_key`."""
    shown: list[str] = []
    for word in command:
        follows_option = bool(shown) and shown[-1].startswith("-") and "=" not in shown[-1] and not word.startswith("-")
        shown.append("..." if follows_option and is_secret(shown[-1].lstrip("-")) else word)
    return shown


def _packages() -> dict[str, str]:
    """Return the installed packages with their versions, by name."""
    found: dict[str, str] = {}
    for each in distributions():
        # `each.name` and `each.version` would each parse the whole metadata file, which often has a long description.
        text = each.read_text("METADATA") or each.read_text("PKG-INFO") or each.read_text("") or ""
        headers = dict(re.findall(r"^(Name|Version): *(.*)$", text.partition("\n\n")[0], re.MULTILINE))
        if "Name" in headers:
            found[headers["Name"]] = headers.get("Version", "")
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _hardware(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and device.startswith("cuda"):
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found |= {"gpus": names, "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory}
    return found


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no `sysconf`
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _git(folder: Path) -> dict[str, Any]:
    """Return commit, branch and uncommitted changes of the git repository that contains `folder`; empty if there is none."""
    top = _run_git(folder, "rev-parse", "--show-toplevel")
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not top or not commit:
        return {}
    root = Path(top)
    names = [name for name in (_run_git(root, "diff", "HEAD", "--name-only", "--no-renames", "-z") or "").split("\0") if name]
    shown = [name for name in names if not name.lower().endswith(_SECRET_FILE_ENDINGS)][:_MAX_FILES]
    options = ("--no-renames", "--no-color", "--no-ext-diff", "--no-textconv")
    diff = (_run_git(root, "diff", "HEAD", *options, "--", *shown) or "") if shown else ""
    text = without_credentials(diff[:_MAX_DIFF_CHARACTERS])
    untracked = (_run_git(root, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
    return {
        "commit": commit,
        "branch": _run_git(root, "rev-parse", "--abbrev-ref", "HEAD"),
        "is_dirty": bool(names),
        "diff": text,
        "is_diff_cut": len(diff) > _MAX_DIFF_CHARACTERS,
        "left_out": sorted(set(names) - set(shown)),
        "untracked": sorted(filter(None, untracked))[:_MAX_FILES],
    }


def _run_git(folder: Path, *question: str) -> str | None:
    """Return the output of a git command; None if there is no git or no repository, or if git does not answer in time."""
    # The user's git hooks, pagers, editors and prompts must not run, and reading must not write to the repository.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat", "LC_ALL": "C"}
    try:
        answer = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false", *question],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode("utf-8", "replace").strip("\n")
