"""Run the tests of the bridges against several versions of each framework, and write docs/bridges/versions.md.

    python tools/versions.py                        test every version that has no result yet, and write the page
    python tools/versions.py --only keras torch     only these packages
    python tools/versions.py --only keras --again   test versions again that have a result

Results are kept in benchmarks/results/versions.json after each version, so that an interrupted run continues where it stopped.

How a version is installed: the version in this environment is tested as it is. Another one is installed with `pip install --no-deps
--target` into a folder in `.venv-versions/`, and this folder precedes this environment on PYTHONPATH. All other packages are therefore
shared. Requirements that this environment does not meet are installed into the same folder and named in the results. torch is
installed with its dependencies, because its libraries cannot be loaded without them. Composer and Ultralytics are tested with the
interpreters of `.venv-composer` and `.venv-ultralytics`; see `composer_venv.py` and `ultralytics_venv.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import composer_venv
import ultralytics_venv

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-versions"
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "bridges" / "versions.md"
SECONDS = 1800
"""The time limit for the tests of one version."""


@dataclass(frozen=True)
class Package:
    """A package whose versions are tested.

    `tests` are the test files, of which only those run whose name or parameters contain `selected`. `parts` is how many parts of a
    version number name a minor release, `minors` how many minor releases are tested, the latest of each. `more` are further versions
    that are tested, such as the oldest one that a host accepts. `also` are packages that are released together with this one. `has_free_requirements` is whether requirements of the package are left unmet; of these, `needs`
    are installed nevertheless, in their latest versions. `is_checked` is whether hosts and guests check the version of the package; see
    `callsheet.bridges.versions`.
    """

    name: str
    title: str
    tests: tuple[str, ...]
    selected: str = ""
    parts: int = 2
    minors: int = 4
    more: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    has_free_requirements: bool = False
    needs: tuple[str, ...] = ()
    is_checked: bool = True


def _bridge(name: str, title: str, bridge: str, **options: Any) -> Package:
    places = (ROOT / "tests" / "bridges", ROOT / "tests" / "compat")
    files = tuple(str(path.relative_to(ROOT)) for place in places for path in sorted(place.glob(f"test_{bridge}*.py")))
    return Package(name, title, (*files, "tests/bridges/test_matrix.py", "tests/bridges/test_alone.py"), bridge, **options)


def _built_on(name: str, title: str, selected: str, *tests: str, **options: Any) -> Package:
    """Return a package with trainers that are built on the Hugging Face Trainer, or that is used in them."""
    return Package(name, title, (*tests, "tests/bridges/test_built_on.py"), selected, is_checked=False, **options)


PACKAGES = (
    Package(
        "torch",
        "PyTorch",
        (
            *("tests/trainer", "tests/checkpoint", "tests/bridges/test_bare.py", "tests/test_context.py"),
            *("tests/test_lifetime.py", "tests/test_manager.py", "tests/test_metrics.py", "tests/test_snapshot.py"),
            "tests/test_spans.py",
        ),
        minors=5,
    ),
    _bridge("transformers", "transformers (Hugging Face Trainer)", "huggingface"),
    _bridge("lightning", "Lightning", "lightning", also=("pytorch-lightning",)),
    _bridge("pytorch-ignite", "Ignite", "ignite", parts=3),
    _bridge("accelerate", "Accelerate", "accelerate"),
    _bridge("torchtnt", "torchtnt", "torchtnt", parts=3),
    _bridge("keras", "Keras", "keras"),
    Package(
        "mosaicml",
        "Composer",
        ("tests/bridges/composer_in_its_own_venv.py", "tests/bridges/test_matrix.py", "tests/bridges/test_alone.py"),
        "composer",
        has_free_requirements=True,
    ),
    Package(
        "ultralytics",
        "Ultralytics",
        (
            "tests/bridges/ultralytics_in_its_own_venv.py",
            *(f"tests/bridges/test_{name}.py" for name in ("matrix", "alone", "copies")),
        ),
        "ultralytics",
        more=("8.4.14",),
        has_free_requirements=True,
    ),
    _bridge("instructlab-training", "InstructLab Training", "instructlab", has_free_requirements=True),
    _bridge("megatron-bridge", "Megatron Bridge", "megatron_bridge", parts=3, has_free_requirements=True),
    Package(
        "nemo-automodel",
        "NeMo AutoModel",
        ("tests/bridges/test_automodel.py", "tests/bridges/test_automodel_release.py"),
        "release",
        has_free_requirements=True,
        needs=("torchao", "megatron-fsdp"),
        is_checked=False,
    ),
    _built_on("trl", "TRL", "trl", "tests/bridges/test_trl.py", minors=5),
    _built_on(
        "sentence-transformers",
        "sentence-transformers",
        "sentence and not few_shot",
        "tests/bridges/test_sentence_transformers.py",
    ),
    _built_on("setfit", "SetFit", "setfit or few_shot", "tests/bridges/test_sentence_transformers.py"),
    _built_on("peft", "PEFT", "peft or lora or adapter", "tests/recipes/test_finetune.py"),
)

VENVS: Mapping[str, ModuleType] = {"mosaicml": composer_venv, "ultralytics": ultralytics_venv}
"""By package: the module that makes the venv of its own in which the package is tested."""

NOTES: Mapping[tuple[str, str], str] = {
    **dict.fromkeys(
        [("lightning", "2.5.6"), ("lightning", "2.4.0"), ("lightning", "2.3.3")],
        "if `lightning` is installed too, the host does not run in a Trainer of `pytorch_lightning`",
    ),
    **dict.fromkeys(
        [("torchtnt", "0.2.3"), ("torchtnt", "0.2.2")],
        "with torch 2.13, its own DistributedCheckpointSaver does not restore the optimizer, and its IterationTimeLogger fails",
    ),
    ("torchtnt", "0.2.1"): "its callbacks cannot be imported without torchsnapshot, which it does not require",
    **dict.fromkeys(
        [("nemo-automodel", version) for version in ("0.7.0", "0.6.0", "0.5.0", "0.4.0")],
        "its recipes take no callbacks; they have all other parts that the host uses",
    ),
    ("trl", "1.15.0"): "most of its trainers need Triton, and therefore a GPU",
    **dict.fromkeys(
        [("sentence-transformers", version) for version in ("6.1.0", "6.0.1", "5.7.0")],
        "its SparseAutoEncoder also counts the batches of evaluations, so that evaluating an average (`EMA`) changes the model",
    ),
    ("setfit", "1.1.3"): "it cannot be imported with transformers 5",
    ("setfit", "1.0.3"): "it cannot be imported with the versions of huggingface_hub that transformers 5 needs",
    ("setfit", "0.7.0"): "its trainer is not built on the Hugging Face Trainer and has no callbacks",
    **dict.fromkeys([("peft", "0.19.1"), ("peft", "0.18.1")], "transformers 5.21 and later need PEFT 0.20 to add adapters"),
}
"""By package and version: what the page says of it, in a few words, instead of its first failure."""


@dataclass(frozen=True)
class Result:
    """What the tests of one version found.

    `beside` are other packages that were installed for this version, `failures` the ids of the tests that failed.
    """

    package: str
    version: str
    verdict: str
    passed: int
    failed: int
    skipped: int
    reason: str = ""
    python: str = ""
    torch: str = ""
    tested: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()


class CannotInstallError(Exception):
    """pip cannot install this version here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [package.name for package in PACKAGES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PACKAGE", help=f"of {', '.join(names)}")
    parser.add_argument("--again", action="store_true", help="test versions again that have a result")
    given = parser.parse_args()
    results = read()
    todo = [
        (package, version)
        for package in PACKAGES
        if package.name in given.only
        for version in releases(package)
        if given.again or (package.name, version) not in results
    ]
    for number, (package, version) in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {package.name} {version} ... ", end="", flush=True)
        start = time.monotonic()
        try:
            result = tested(package, version)
        except CannotInstallError as error:
            print(f"left out: {error}")
            continue
        results[package.name, version] = result
        write(results)
        seconds = f"{time.monotonic() - start:.0f} s"
        counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped"
        print(f"{result.verdict}: {counts} ({seconds})" + f"\n    {result.reason}" * bool(result.reason), flush=True)
    write(results)
    print(f"results: {RESULTS.relative_to(ROOT)}, page: {PAGE.relative_to(ROOT)}")
    return 0


def read() -> dict[tuple[str, str], Result]:
    """Return the results so far, by package and version."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    found = (Result(**row | {"failures": tuple(row["failures"])}) for row in rows)
    return {(result.package, result.version): result for result in found}


def write(results: Mapping[tuple[str, str], Result]) -> None:
    """Write the results, and the page that is made of them."""
    names = [package.name for package in PACKAGES]
    rows = sorted(results.values(), key=lambda row: Version(row.version), reverse=True)
    rows.sort(key=lambda row: names.index(row.package))
    RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    PAGE.write_text(page(rows))


# --- versions and their installation ---


def releases(package: Package) -> list[str]:
    """Return the latest release of each of the last minor releases, the pinned version, and `package.more`, the newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", package.name]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in listed.splitlines() if line.startswith("Available versions:"))
    latest: dict[tuple[int, ...], Version] = {}
    for version in sorted(map(Version, line.partition(":")[2].replace(",", " ").split())):
        if not version.is_prerelease and not version.local:
            latest[version.release[: package.parts]] = version
    last = sorted(latest.values(), reverse=True)[: package.minors]
    others = map(Version, filter(None, (pinned(package), *package.more)))
    return [str(version) for version in sorted({*last, *others}, reverse=True)]


def pinned(package: Package) -> str:
    """Return the version that this environment has, without its local part such as `+cpu`, or an empty string."""
    if package.name in VENVS:
        return str(VENVS[package.name].VERSIONS[package.name])
    try:
        return Version(importlib.metadata.version(package.name)).public
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed(package: Package, version: str) -> Path | None:
    """Return the folder with this version, installed if it is not there yet, or None for the version of this environment.

    Raises:
        CannotInstallError: pip cannot install it, or it needs another version of torch.
    """
    if version == pinned(package):
        return None
    folder = FOLDER / f"{package.name}-{version}"
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _install(
            folder,
            [*(f"{name}=={version}" for name in (package.name, *package.also)), *package.needs],
            with_dependencies=package.name == "torch",
        )
        while not package.has_free_requirements and package.name != "torch" and (needed := unmet(folder)):
            _install(folder, needed)
        (folder / ".ready").touch()
    return folder


def _install(folder: Path, wanted: Iterable[str], *, with_dependencies: bool = False) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder), *wanted]
    done = subprocess.run(
        command + ["--no-deps"] * (not with_dependencies),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotInstallError(f"pip: {(errors or ['no message'])[0].removeprefix('ERROR: ')}")


def unmet(folder: Path) -> list[str]:
    """Return what the packages in this folder require and neither the folder nor this environment has.

    Raises:
        CannotInstallError: torch is not in the required version.
    """
    needed = []
    has = {**distributions(Path(sysconfig.get_path("purelib"))), **distributions(folder)}
    for distribution in distributions(folder).values():
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            one = has.get(canonicalize_name(requirement.name))
            if one is None or not requirement.specifier.contains(one.version, prereleases=True):
                if requirement.name == "torch":
                    raise CannotInstallError(f"it needs {requirement}")
                needed.append(f"{requirement.name}{requirement.specifier}")
    return needed


def distributions(folder: Path) -> dict[str, importlib.metadata.Distribution]:
    """Return the packages that are installed in this folder by their canonical names."""
    return {canonicalize_name(each.metadata["Name"]): each for each in importlib.metadata.distributions(path=[str(folder)])}


# --- tests ---


def tested(package: Package, version: str) -> Result:
    """Run the package's tests with this version.

    Raises:
        CannotInstallError: pip cannot install it, or it needs another version of torch.
    """
    folder = installed(package, version)
    cases, ended = _run(package, folder)
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    rejected = [_REJECTED.search("".join(case.itertext())) for case in failed]
    if failed and all(rejected):
        verdict, reason = "rejected", next(match[1] for match in rejected if match is not None)
    else:
        verdict = "broken" if failed or not cases else "works"
        reason = _first_failure(failed) if failed else "" if cases else ended
    beside = {} if folder is None or package.name == "torch" else distributions(folder)
    return Result(
        package.name,
        version,
        verdict,
        passed=len(cases) - len(failed) - skipped,
        failed=len(failed),
        skipped=skipped,
        reason=reason,
        python=platform.python_version(),
        torch=version if package.name == "torch" else Version(importlib.metadata.version("torch")).public,
        tested=date.today().isoformat(),
        beside={name: each.version for name, each in sorted(beside.items()) if name not in (package.name, *package.also)},
        failures=tuple(f"{case.get('file', case.get('classname'))}::{case.get('name')}" for case in failed),
    )


_OPTIONS = shlex.split(
    "-o addopts=--strict-markers -o junit_family=xunit1 -o verbosity_assertions=2 -m 'not browser and not slow and not test_all' -q "
    "-p no:cacheprovider -p no:xdist -p no:randomly --timeout 180"
)
"""The options of pytest: the tests run one after the other, always in the same order, and errors are reported in full."""


def _run(package: Package, folder: Path | None) -> tuple[list[ElementTree.Element], str]:
    """Run the package's tests with the packages in `folder`. Return their results in JUnit's format, and how pytest ended."""
    python = VENVS[package.name].make() if package.name in VENVS else Path(sys.executable)
    paths = [str(path) for path in (folder, ROOT / "src") if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as where:
        report = Path(where, "report.xml")
        command = [str(python), "-m", "pytest", *_OPTIONS, f"--junitxml={report}", *package.tests, "-k", package.selected]
        try:
            ran = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False, errors="replace"
            )
            ended = f"pytest ended with {ran.returncode}: {_last_line(ran.stderr or ran.stdout)}"
        except subprocess.TimeoutExpired:
            ended = f"the tests were not done after {SECONDS} seconds"
        return list(ElementTree.parse(report).iter("testcase")) if report.exists() else [], ended


_REJECTED = re.compile(r"((?:this host|a guest of .*?) needs [^{}]*?), which \S+ \S+ does not have")
"""The error of a host or guest in a version that lacks a part that it needs; see `callsheet.bridges.versions`."""


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def _first_failure(failed: list[ElementTree.Element]) -> str:
    """Return the name of the first failed test and its error, in one line without paths."""
    case = failed[0]
    found = next(each for each in case if each.tag in ("failure", "error"))
    lines = [line.removeprefix("E").strip() for line in (found.text or "").splitlines() if line.startswith("E  ")]
    error = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Supported)\b", line)), None)
    text = error or (lines or [found.get("message", "")])[0]
    text = re.sub(r"(/[\w.\-]+){2,}", "...", text.replace(str(ROOT), ""))
    return f"{case.get('name')}: {text}"[:160]


# --- the page ---

_PAGE = """\
# Versions

<!-- tools/versions.py writes this page. -->

This page lists the versions of PyTorch and of each framework with which callsheet was tested, on {machine}. The frameworks were
tested with torch {torch}. CI tests only the versions in `constraints.txt`. The columns "passed", "failed" and "skipped" contain numbers of tests:

- The rows of a framework contain the results of the tests of the framework's [bridge](index.md), including tests of a few built-in callbacks and
  tests on two ranks.
- The rows of PyTorch contain the results of the tests of callsheet's core, its Trainer, checkpoints and [hand-written loops](bare.md).
- The rows of TRL, sentence-transformers and SetFit count trainings with [their trainers](huggingface.md#trainers-that-are-built-on-the-hugging-face-trainer),
  which are built on the Hugging Face Trainer. The rows of PEFT count trainings of PEFT's adapters, with the trainers of TRL and transformers and with
  callsheet's recipe [`finetune`](../recipes.md).
- InstructLab Training, Megatron Bridge and NeMo AutoModel can train only on GPUs. The tests run InstructLab's and Megatron Bridge's own callback
  classes in loops that imitate the loops of these frameworks. No release of NeMo AutoModel has [callbacks](automodel.md) yet, so its rows count tests
  of the parts of NeMo AutoModel that the bridge uses: the step scheduler, and the methods and attributes of the recipes.

| package | version | verdict | passed | failed | skipped | tested on |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

The verdicts are:

- **works**: all tests pass. Tests of features that this version of the framework does not have are skipped.
- **rejected**: with this version of the framework, `host` or `guest` raises a `NotSupported` error that names what the framework lacks. Training does
  not start.
- **broken**: with this version of the framework, some tests fail. The table gives the reason.

**Versions that are not listed.** callsheet checks which version of a framework is installed. If no version of the installed minor release (such as
2.6) has the verdict **works** in the table, callsheet logs one warning, which names the releases that work. The versions of NeMo AutoModel, TRL,
sentence-transformers, SetFit and PEFT are not checked. A bridge also uses parts of a framework that are not public API. If the installed version
lacks a part that the bridge needs, `host` or `guest` raises a `NotSupported` error that names the part. The file `internals.py` in the folder of each
bridge lists the parts that the bridge needs and the parts that it can do without; `bridges/torch_internals.py` lists the parts of PyTorch.

{beside}**Run the tests again.** `make versions` tests the newest minor releases of each package, writes their results to
`benchmarks/results/versions.json` and updates this page. `make versions` skips versions that already have a result, so you can interrupt the command
and start it again. To test only one package:

```sh
python tools/versions.py --only keras           # versions without a result
python tools/versions.py --only keras --again   # every version
```
"""


def page(results: Iterable[Result]) -> str:
    """Return the Markdown page that shows these results."""
    rows = list(results)
    titles = {package.name: package.title for package in PACKAGES}
    lines = []
    for row in rows:
        reason = NOTES.get((row.package, row.version), row.reason).replace("|", r"\|")
        verdict = f"{row.verdict}; {reason}" if reason else row.verdict
        lines.append(
            f"| {titles[row.package]} | {row.version} | {verdict} | {row.passed} | {row.failed} | {row.skipped} | {row.tested} |"
        )
    beside = [
        f"- {row.package} {row.version} was tested with {' and '.join(f'{name} {version}' for name, version in row.beside.items())}.\n"
        for row in rows
        if row.beside
    ]
    if beside:
        beside.insert(
            0,
            "**Other packages.** A few versions in the table do not work with all package versions in `constraints.txt`, and were tested with other\n"
            "package versions:\n\n",
        )
        beside.append("\n")
    of_frameworks = [row for row in rows if row.package != "torch"]
    return _PAGE.format(
        machine=" and ".join(sorted({f"Python {row.python}" for row in rows})),
        torch=" and ".join(sorted({row.torch for row in of_frameworks})),
        rows="\n".join(lines),
        beside="".join(beside),
    )


def working(results: Iterable[Result]) -> dict[str, tuple[str, ...]]:
    """Return, for each package, the minor releases with which all tests pass, the oldest first, as in `callsheet.bridges.versions`."""
    found: dict[str, list[str]] = {package.name: [] for package in PACKAGES}
    parts = {package.name: package.parts for package in PACKAGES}
    for row in sorted(results, key=lambda row: Version(row.version)):
        minor = ".".join(map(str, Version(row.version).release[: parts[row.package]]))
        if row.verdict == "works" and minor not in found[row.package]:
            found[row.package].append(minor)
    return {name: tuple(minors) for name, minors in found.items()}


if __name__ == "__main__":
    sys.exit(main())
