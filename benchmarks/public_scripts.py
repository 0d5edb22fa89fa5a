"""Public training scripts, each unchanged, alone and under `callsheet exec`: what is recognized, and whether training stays the same.

    make public-scripts PUBLIC=FOLDER
    python benchmarks/public_scripts.py FOLDER [--only NAME] [--again]

`public_scripts.toml` lists the scripts. FOLDER has the git clones of their repositories and gets everything that the runs write; without the
clones, the commands that make them are printed, and the exit status is 2. Each script runs in a new copy of the files of its commit, with
stand-in data of `public_scripts_data.py`. `public_scripts_recorder.py` records the losses, steps and final weights in both variants in the same
way. A script that has a result for this commit of callsheet's source is skipped. The table is written to `benchmarks/results/public-scripts.md`;
scripts without a result in FOLDER keep their rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from public_scripts_results import compared, normalized, observation_of, weights_of
from public_scripts_table import table_of

HERE = Path(__file__).parent
LIST = HERE / "public_scripts.toml"
TABLE = HERE / "results" / "public-scripts.md"

_OFFLINE = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "offline",
}
"""The environment of every script: one thread, the same hashes of strings, and no access to hubs."""


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A public repository.

    Args:
        name: the owner and the name.
        commit: the commit whose files run.
        package: the release on the package index that is run instead of a clone.
    """

    name: str
    commit: str = ""
    package: str = ""

    @property
    def url(self) -> str:
        return f"https://github.com/{self.name}"


@dataclass(frozen=True, kw_only=True)
class PublicScript:
    """A script of a public repository, and how it runs in about a minute.

    Args:
        name: the name in the table and of the result.
        repository: the owner and name of its repository.
        kind: what kind of training it shows.
        script: the path of the script from `folder`, or the name of a module; `{packages}` is the folder of the installed packages.
        arguments: its arguments.
        folder: the folder in which it runs, from the repository's root.
        is_module: whether `script` is the name of a module.
        ranks: the number of processes of torchrun, or 0 to run without torchrun.
        take: the paths of the repository that are needed; all by default.
        data: by recipe of `public_scripts_data.py`, the path of its data from the repository's root.
        environment: further variables; `{root}` is the repository's root.
        times: patterns of what differs in standard output from run to run, such as times, besides those of `_TIMES`.
        limit: the time limit in seconds for each variant.
        note: what the table says of it.
    """

    name: str
    repository: str
    kind: str
    script: str
    arguments: str = ""
    folder: str = "."
    is_module: bool = False
    ranks: int = 0
    take: Sequence[str] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    times: Sequence[str] = ()
    limit: int = 240
    note: str = ""


@dataclass(frozen=True)
class Campaign:
    """The scripts that run, and the folder of their clones, data and results.

    Args:
        folder: the folder outside the project.
        packages: the packages that only these scripts need.
        repositories: all repositories.
        scripts: all scripts.
    """

    folder: Path
    packages: Sequence[str]
    repositories: Sequence[Repository]
    scripts: Sequence[PublicScript]

    @classmethod
    def from_list(cls, folder: Path) -> Campaign:
        """Read the list of the scripts."""
        content = tomllib.loads(LIST.read_text(encoding="utf-8"))
        repositories = [Repository(**each) for each in content["repository"]]
        return cls(
            folder.resolve(),
            [*content["packages"], *(each.package for each in repositories if each.package)],
            repositories,
            [PublicScript(**each) for each in content["script"]],
        )

    def clone_commands(self, names: set[str]) -> list[str]:
        """Return the commands that make the missing clones of these repositories."""
        commands = []
        for each in self.repositories:
            clone = self.folder / each.name
            has_commit = clone.is_dir() and _succeeds("git", "-C", str(clone), "cat-file", "-e", f"{each.commit}^{{commit}}")
            if each.name in names and each.commit and not has_commit:
                at = shlex.quote(str(clone))
                commands += [] if clone.is_dir() else [f"git clone {each.url} {at}"]
                commands.append(f"git -C {at} checkout {each.commit}")
        return commands

    # --- preparation ---

    def make_venv(self) -> Path:
        """Make the venv that sees the packages of this one and has `packages` besides. Return its interpreter."""
        place = self.folder / "venv"
        python = place / "bin" / "python"
        wanted = "\n".join([sys.executable, *self.packages])
        ready = place / ".ready"
        if not ready.is_file() or ready.read_text() != wanted:
            print(f"making {place} ...", flush=True)
            venv.create(place, clear=True, with_pip=False)
            ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
            packages = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
            ours = sysconfig.get_path("purelib")
            Path(packages, "callsheet_venv.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages]
            subprocess.run([*install, *self.packages], check=True)
            ready.write_text(wanted)
        return python

    def copy_files(self, script: PublicScript, python: Path) -> Path:
        """Make a new copy of the script's repository with the stand-in data, and return its root.

        All variants run at the same path, because some scripts print it.
        """
        root = self._root(script)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        repository = next(each for each in self.repositories if each.name == script.repository)
        if repository.commit:
            clone = str(self.folder / repository.name)
            archive = subprocess.run(
                ["git", "-C", clone, "archive", repository.commit, *script.take], capture_output=True, check=True
            ).stdout
            subprocess.run(["tar", "-x", "-C", str(root)], input=archive, check=True)
        for recipe, place in script.data.items():
            source = self.folder / "data" / recipe
            if not source.is_dir():
                part = source.with_suffix(".part")
                shutil.rmtree(part, ignore_errors=True)
                command = [str(python), str(HERE / "public_scripts_data.py"), recipe, str(part)]
                subprocess.run(command, check=True, env=self._environment(script, root, part))
                part.rename(source)
            shutil.copytree(source, root / place, dirs_exist_ok=True)
        return root

    def _environment(self, script: PublicScript, root: Path, records: Path) -> dict[str, str]:
        own = {name: value.format(root=root) for name, value in script.environment.items()}
        recorder = self.folder / "recorder"
        recorder.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "public_scripts_recorder.py", recorder / "sitecustomize.py")
        paths = [str(recorder), str(HERE.parent / "src"), *([own.pop("PYTHONPATH")] if "PYTHONPATH" in own else [])]
        hubs = {"HF_HOME": str(self.folder / "hub"), "PYTHONPATH": os.pathsep.join(paths)}
        return {**os.environ, **_OFFLINE, **hubs, "PUBLIC_SCRIPTS_RECORDS": str(records), **own}

    # --- running ---

    def run(self, script: PublicScript, python: Path, variant: str, results: Path) -> dict[str, Any]:
        """Run one variant of the script: `alone`, `observed`, or `again` for a second run alone. Return its status and seconds."""
        root = self.copy_files(script, python)
        output = results / variant
        output.mkdir(parents=True)
        launcher: list[str] = []
        if script.ranks:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(script.ranks)]
        ours = ["callsheet.exec", "--run_name", "a", "--runs_folder", str(output / "runs"), "--log_interval", "1"]
        observer = ["-m", *ours] if variant == "observed" else []
        packages = next((self.folder / "venv" / "lib").glob("python*/site-packages"))
        target = ["-m", script.script] if script.is_module else [script.script.format(packages=packages)]
        command = [str(python), *launcher, *observer, *target, *shlex.split(script.arguments)]
        began = time.perf_counter()
        with open(output / "stdout.txt", "wb") as stdout, open(output / "stderr.txt", "wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=root / script.folder,
                env=self._environment(script, root, output / "records"),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(script.limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        seconds = time.perf_counter() - began
        shutil.rmtree(root, ignore_errors=True)
        return {"status": status, "seconds": seconds}

    def measure(self, script: PublicScript, python: Path, commit: str) -> dict[str, Any]:
        """Run all variants of the script, and return the result for the table."""
        results = self.results_of(script).with_suffix("")
        shutil.rmtree(results, ignore_errors=True)
        done = {variant: self.run(script, python, variant, results) for variant in ("alone", "observed")}
        alone, observed = (self.read(script, variant, done[variant]) for variant in done)
        differs = weights_of(alone) != weights_of(observed) or alone["stdout"] != observed["stdout"]
        if differs and alone["status"] == 0:
            done["again"] = self.run(script, python, "again", results)
        self.results_of(script).write_text(
            json.dumps({"commit": commit, "versions": _versions(python), "variants": done}, indent=1)
        )
        return self.evaluate(script)

    def read(self, script: PublicScript, variant: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of one variant: status, seconds, lines of stdout, tracebacks, and the record of each process."""
        output = self.results_of(script).with_suffix("") / variant
        records = [json.loads(path.read_text()) for path in sorted((output / "records").glob("*.json"))]
        root = str(self._root(script))
        lines = normalized((output / "stdout.txt").read_text(errors="replace").replace(root, "ROOT"), script.times)
        return {
            **found,
            "processes": sorted(records, key=lambda record: (record["rank"], str(record["weights"]))),
            "stdout": sorted(lines) if script.ranks else lines,  # ranks write their lines in any order
            "errors": (output / "stderr.txt").read_text(errors="replace").count("Traceback (most recent call last)"),
        }

    def evaluate(self, script: PublicScript) -> dict[str, Any]:
        """Return the result for the table, from the outputs and records of the variants."""
        result = json.loads(self.results_of(script).read_text())
        variants = {name: self.read(script, name, found) for name, found in result.pop("variants").items()}
        result |= compared(variants["alone"], variants["observed"], variants.get("again"))
        return {**result, **observation_of(self.results_of(script).with_suffix("") / "observed", variants["observed"])}

    def results_of(self, script: PublicScript) -> Path:
        """Return the path of the script's result. The folder of the same name has the outputs and records of the variants."""
        return self.folder / "results" / f"{_file_name(script)}.json"

    def _root(self, script: PublicScript) -> Path:
        return self.folder / "run" / _file_name(script)


def _file_name(script: PublicScript) -> str:
    return re.sub(r"[^\w.]+", "-", script.name)


def _versions(python: Path) -> dict[str, str]:
    ask = "import json, sys, torch; print(json.dumps({'python': sys.version.split()[0], 'torch': torch.__version__}))"
    output = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    versions: dict[str, str] = json.loads(output)
    return versions


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _source_commit() -> str:
    """Return the last commit that changed callsheet's source."""
    command = ["git", "-C", str(HERE.parent), "log", "-1", "--format=%h", "--", "src"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Run the scripts that have no result yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the clones, outside the project")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="run only scripts whose name contains NAME")
    parser.add_argument("--again", action="store_true", help="also run scripts that have a result for this commit")
    parser.add_argument("--table", action="store_true", help="run nothing, and write the table from the results")
    options = parser.parse_args()
    campaign = Campaign.from_list(options.folder)
    chosen = [each for each in campaign.scripts if not options.only or any(name in each.name for name in options.only)]
    if not chosen:
        parser.error(f"no script has a name that contains {' or '.join(options.only)}; the names are in {LIST.name}")
    if not options.table:
        if commands := campaign.clone_commands({each.repository for each in chosen}):
            print("These repositories are missing. Clone them, and start again:\n", *commands, sep="\n  ", file=sys.stderr)
            return 2
        python, commit = campaign.make_venv(), _source_commit()
        for number, script in enumerate(chosen, 1):
            label = f"[{number}/{len(chosen)}] {script.name}"
            path = campaign.results_of(script)
            if path.is_file() and json.loads(path.read_text())["commit"] == commit and not options.again:
                print(f"{label}: has a result", flush=True)
                continue
            print(f"{label} ...", flush=True)
            try:
                result = campaign.measure(script, python, commit)
            except subprocess.CalledProcessError as error:
                print(f"  could not be prepared: {error}", flush=True)
            else:
                print(f"  {_summary(result)}", flush=True)
    results = {each.name: campaign.evaluate(each) for each in campaign.scripts if campaign.results_of(each).is_file()}
    earlier = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    repositories = {each.name: each for each in campaign.repositories}
    TABLE.write_text(table_of(campaign.scripts, results, repositories, earlier), encoding="utf-8")
    print(f"wrote {TABLE.relative_to(HERE.parent)}: {len(results)} of {len(campaign.scripts)} scripts were run here")
    return 0


def _summary(result: Mapping[str, Any]) -> str:
    runs = [
        f"{run['steps']} steps ({run['steps_of_optimizer']} recorded), losses {run['losses_equal']}/{run['losses_compared']}, "
        f"parts {run['parts']} of {run['timed_steps']}, {run['epochs']} epochs {run['first_difference']}"
        for run in result["runs"]
    ]
    one, other = result["seconds"]
    return (
        f"status {result['status']}, weights {result['weights']}, stdout {result['stdout']}, random state {result['random_state']}, "
        f"{one:.0f} s and {other:.0f} s; {'; '.join(runs) or 'not observed: ' + ' | '.join(result['said'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
