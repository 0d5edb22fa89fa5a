"""The commands and the YAML of README and docs work.

Every shell command is run in a folder that has the runs and files that the pages name, with settings that make the recipes
small. A command that cannot be run here is parsed: what the page says before the block in a comment such as
`<!-- test: not run, because it needs another machine -->` is the reason. `make` and `pip` change the machine, the programs in
`examples/` and `tools/` have tests of their own, and test_docs_site.py and test_tutorial.py run the commands whose output is shown, so
these are parsed, too.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from callsheet.cli.arguments import command_line_parser
from callsheet.cli.main import _without_a_key, main
from callsheet.cli.recipe import values_of
from callsheet.cli.shipped import recipe_path
from callsheet.core.spec import import_path
from callsheet.errors import MissingPackage
from callsheet.exec.command import _parser as exec_parser
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?:\{ \.)?(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!-- test: (.+?) -->\s*\Z")
TESTED_KINDS = {"python", "py", "sh", "yaml", "json", "text", "diff"}
"""Blocks of the kind `text` are output, apart from lines that begin with `$ `. Blocks of the kind `python` run in test_readme.py, and
those of the kind `diff` in test_tutorial.py."""

SMALL = {
    "CALLSHEET_MAX_DURATION": "4ba",
    "CALLSHEET_LOG_INTERVAL": "1",
    "CALLSHEET_BATCH_SIZE": "2",
    "CALLSHEET_THREADS": "1",
    "CALLSHEET_DEVICE": "cpu",
    "CALLSHEET_MODEL__HIDDEN_SIZE": "16",
    "CALLSHEET_MODEL__LAYERS": "1",
    "CALLSHEET_MODEL__HEADS": "2",
    "CALLSHEET_MODEL__INTERMEDIATE_SIZE": "16",
    "CALLSHEET_DATA__FOLDER": "texts",
    "CALLSHEET_DATA__SEQUENCE_LENGTH": "16",
    "CALLSHEET_DATA__VALIDATION_WINDOWS": "4",
    "CALLSHEET_DATA__VALIDATION_PERCENT": "20",
    "CALLSHEET_DATA__TEST_PERCENT": "20",
    "CALLSHEET_DOCSTRINGS__FOLDER": "texts",
    "CALLSHEET_PIECES__FOLDER": "packages",
    "CALLSHEET_GENERATED_TOKENS": "4",
    "CALLSHEET_ANSWERED_ROWS": "2",
}
"""Settings that make every recipe small. They override the recipe files, and commands override them."""

RUNS = ("my-run", "lr-1", "lr-2", "old-1", "main", "candidate", "good", "slow")
"""The names of runs that pages use, besides those of the shipped recipes."""

SOURCE = '''
def add_NUMBER(x: int) -> int:
    """Add NUMBER to a number."""
    return x + NUMBER

class Adder:
    def add_NUMBER(self, x: int) -> int:
        """Add NUMBER to a number, as a method."""
        return x + NUMBER
'''

SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.01)
given = parser.parse_args()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr)
for _ in range(given.epochs * 4):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).square().mean().backward()
    optimizer.step()
"""

WANDB = """
import wandb
run = wandb.init(project="p", name="other", config={"lr": 0.1})
run.log({"train/loss": 1.0})
run.finish()
"""


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    kind: str
    text: str
    marker: str = ""
    has_output: bool = False

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return not self.has_output and not self.marker.startswith("not run, because ")

    @property
    def programs(self) -> list[str]:
        """The names of the files that the page shows in blocks with a title."""
        return re.findall(r'^ *```python title="([^"]+)"$', self.page.read_text(encoding="utf-8"), re.MULTILINE)

    @property
    def commands(self) -> list[str]:
        """The shell commands: all lines of a block of the kind `sh`, and those after a `$` in a block with output."""
        lines = re.sub(r"\\\n\s*", " ", self.text).splitlines()
        if self.kind != "sh":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        marker = MARKER.search(text[: found.start()])
        body = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        has_output = text[found.end() :].lstrip().startswith('```text title="Output"')
        yield Block(page, text.count("\n", 0, found.start()) + 1, found["kind"], body, marker[1] if marker else "", has_output)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
WITH_COMMANDS = [block for block in BLOCKS if block.kind in ("sh", "text") and block.commands]


# --- the folder in which the commands run ---


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs and files that the pages name."""
    folder = tmp_path_factory.mktemp("reader")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        small(patch, folder)
        assert main(["train", "pretrain"]) == 0
        assert main(["train", "classify", "--run_name", "topics"]) == 0
        for path in folder.glob("runs/*/report.html"):
            path.unlink()  # four megabytes
        for name in RUNS:
            shutil.copytree("runs/stdlib-lm", f"runs/{name}")
        assert main(["runs"]) == 0
    return folder


def write_files(folder: Path) -> None:
    for number in range(40):
        for path in (f"texts/{number}.py", f"packages/a/{number}.py", f"packages/b/{number}.py"):
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(SOURCE.replace("NUMBER", str(number)))
    (folder / "new.jsonl").write_text('{"text": "import a"}\n{"text": "import b"}\n')
    (folder / "train.py").write_text(SCRIPT)
    (folder / "callbacks.yaml").write_text("- class_path: LRMonitor\n")
    (folder / "shouting.py").write_text("from callsheet import Callback\n\n\nclass Shout(Callback):\n    pass\n")
    (folder / "lightning_logs" / "version_0").mkdir(parents=True)
    (folder / "lightning_logs" / "version_0" / "metrics.csv").write_text("epoch,step,train_loss\n0,1,0.5\n0,2,0.25\n")
    run = folder / "mlruns" / "0" / "abc"
    (run / "metrics" / "train").mkdir(parents=True)
    (run / "metrics" / "train" / "loss").write_text("1700000000000 0.5 1\n1700000001000 0.25 2\n")
    (run / "meta.yaml").write_text("run_id: abc\nrun_name: flow\nstatus: 3\nlifecycle_stage: active\nstart_time: 1700000000000\n")


def small(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Change to the folder, and make the recipes small."""
    patch.chdir(folder)
    for name, value in SMALL.items():
        patch.setenv(name, value)
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("PYTHONPATH", str(ROOT / "src"))


@pytest.fixture
def reader(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a copy of the prepared folder, for one block."""
    folder = tmp_path / "reader"
    shutil.copytree(prepared, folder)
    small(monkeypatch, folder)
    return folder


@pytest.fixture
def other_tools(reader: Path) -> None:
    """Add logs of other tools, which these tools write themselves."""
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(reader / "logs" / "baseline"))
    for step in (1, 2):
        writer.add_scalar("Loss/train", 1 / step, step)
    writer.close()
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([python(), "-c", WANDB], check=True, cwd=reader, env=environment, timeout=120)


# --- running and parsing ---


def words_of(command: str) -> list[str]:
    """Return the words of a command, without a comment and without what follows a redirection."""
    words = shlex.split(command, comments=True)
    return list(takewhile(lambda word: word not in (">", ">>", "|"), words))


def run(command: str) -> None:
    """Run a command of a page, and raise AssertionError if it fails."""
    words = words_of(command)
    program = words[0]
    if program == "callsheet" and words[1] in ("exec", "watch"):
        as_process([python(), "-m", *words], is_watch=words[1] == "watch")
    elif program == "callsheet":
        assert main(words[1:]) == 0, command
    elif program == "torchrun" and "-m" in words:
        parse(command)
        as_process([python(), "-m", "torch.distributed.run", "--nproc_per_node", "2", *words[words.index("-m") :]])
    elif program == "sqlite3":
        assert sqlite3.connect(words[1]).execute(words[2]).fetchall(), command
    elif program in ("make", "pip", "python", "torchrun"):
        parse(command)
    else:
        subprocess.run(["bash", "-ec", command], check=True, timeout=60)


def as_process(command: list[str], *, is_watch: bool = False) -> None:
    if is_watch and "--no-browser" not in command:
        command = [*command, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            if is_watch:  # until Ctrl-C
                assert "watching" in process.stdout.readline(), command
                process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, printed


def parse(command: str, programs: Collection[str] = ()) -> None:
    """Check that a command is one that the program accepts, as far as this can be known without running it.

    `programs` are the files that the page shows.
    """
    program, *rest = words_of(command)
    if program == "callsheet":
        parse_callsheet(rest)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for word in rest:
            name, is_variable, _ = word.partition("=")
            assert re.search(rf"\b{name}\b" if is_variable else rf"^{name}:", makefile, re.MULTILINE), (
                f"the Makefile has no {name}"
            )
    elif program == "pip":
        parse_pip(rest)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        parser = get_args_parser()
        given = parser.parse_args(rest)
        if given.module:
            parse_module(given.training_script, given.training_script_args)
        elif given.training_script not in programs:
            parse_script(given.training_script, given.training_script_args)
    elif program == "python" and rest[0] in programs:
        pass
    elif program == "python":
        parse_module(rest[1], rest[2:]) if rest[0] == "-m" else parse_script(rest[0], rest[1:])
    elif program == "ssh" and "callsheet" in rest:
        parse_callsheet(rest[rest.index("callsheet") + 1 :])
    else:
        subprocess.run(["bash", "-nc", command], check=True, timeout=60)


def parse_callsheet(words: list[str]) -> None:
    if words[0] == "exec":
        script = next(number for number, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        exec_parser().parse_args(words[1:script])
        return
    parser = command_line_parser()
    given, rest = parser.parse_known_args(words)
    if words[0] in ("train", "show"):
        path = Path(given.recipe)
        values_of(path if path.is_file() else recipe_path("pretrain"), rest, command="train")
    elif words[0] in ("evaluate", "predict", "export"):
        assert _without_a_key(rest) == []
        values_of(recipe_path("pretrain"), rest, command=words[0])
    else:
        assert rest == [], f"callsheet {words[0]} does not take {rest}"


def parse_module(module: str, words: list[str]) -> None:
    assert importlib.util.find_spec(module) is not None, f"there is no module {module}"
    if module in ("callsheet", "callsheet.exec"):
        parse_callsheet(words if module == "callsheet" else ["exec", *words])


def parse_script(script: str, words: list[str]) -> None:
    """Check that the script is one of the project, and has the options."""
    source = (ROOT / script).read_text(encoding="utf-8")
    for word in words:
        if word.startswith("-"):
            assert f'"{word.partition("=")[0]}"' in source, f"{script} has no option {word}"


def parse_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert words[0] == "install"
    for before, word in pairwise(words):
        if before == "-c":  # callsheet/ stands for the reader's clone
            assert (ROOT / word.removeprefix("callsheet/")).is_file(), f"there is no file {word}"
        elif found := re.fullmatch(r"(?:\.|(?:\./)?callsheet)\[([\w,]+)\]", word):
            for extra in found[1].split(","):
                assert extra in project["optional-dependencies"], f"callsheet has no extra {extra}"


# --- the tests ---


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert [f"{block} is {block.kind!r}" for block in BLOCKS if block.kind not in TESTED_KINDS] == []
    assert len(WITH_COMMANDS) > 20
    assert [str(block) for block in BLOCKS if block.marker and block.is_run] == []  # another marker has no effect


@pytest.mark.test_all
@pytest.mark.parametrize("block", [block for block in WITH_COMMANDS if block.is_run], ids=str)
def test_the_commands_of_a_block_run(block: Block, reader: Path, request: pytest.FixtureRequest) -> None:
    if any(word in block.text for word in ("callsheet import", "wandb")):
        request.getfixturevalue("other_tools")
    for command in block.commands:
        run(command)


@pytest.mark.parametrize("block", WITH_COMMANDS, ids=str)
def test_the_commands_of_a_block_are_accepted(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if block.has_output:  # another test runs it, as one script, which may have loops over several lines
        subprocess.run(["bash", "-nc", "\n".join(block.commands)], check=True, timeout=60)
        return
    for command in block.commands:
        parse(command, block.programs)


@pytest.mark.parametrize(
    "command",
    [
        "callsheet train pretrain --max_durtion 2ep",
        "callsheet show pretrain --model.layer 2",
        "callsheet train mine.yaml --optimizer.lrr 1e-3",
        "callsheet runs --wher 'validation/loss < 2'",
        "callsheet exec --run_nme baseline train.py",
        "callsheet evaluate stdlib-lm --devise cpu",
        "callsheet compar lr-1 lr-2",
        "torchrun --nproc_per_nodes 8 -m callsheet train mine.yaml",
        "torchrun --nproc_per_node 8 -m callsheet train mine.yaml --batchsize 8",
        "python tools/versions.py --onyl keras",
        "python -m callshet train mine.yaml",
        "make tset",
        "make demo RESUMED=new",
        "pip install 'callsheet[reports]'",
        "pip install './callsheet[reports]'",
        "pip install -c callsheet/constraint.txt ./callsheet",
        "ssh trainer.example callsheet watch big --prt 8080",
    ],
)
def test_a_misspelled_command_is_found(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, AssertionError, ValueError, OSError)):
        parse(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_exist(page: Path) -> None:
    """`callsheet compare --fail-if` in a sentence names a command and its options, but not all of its arguments."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    commands = next(action.choices for action in command_line_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for span in re.findall(r"`callsheet ([a-z][^`]*)`", text):
        words = re.findall(r"[\w.-]+", span)
        if words[0] in ("train", "show"):
            continue
        parser: argparse.ArgumentParser = exec_parser() if words[0] == "exec" else commands[words[0]]
        options = [word for word in words if word.startswith("--")]
        assert [option for option in options if option not in parser._option_string_actions] == [], span
    for span in re.findall(r"`(make [^`]*|pip install [^`]*)`", text):
        parse(span.replace("=DIR", "=folder"))


def test_every_command_and_option_is_on_the_page_of_commands() -> None:
    """Each command has a section, and each of its options is in that section."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## callsheet ([a-z, ]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    text_of = {name: text for names, text in sections for name in names.split(", ")}
    commands: dict[str, argparse.ArgumentParser] = {
        name: parser
        for action in command_line_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, parser in action.choices.items()
    }
    commands["exec"] = exec_parser()
    assert sorted(text_of) == sorted(commands)
    missing = [
        f"callsheet {name} {option}"
        for name, parser in commands.items()
        for option in parser._option_string_actions
        if option not in ("-h", "--help") and not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text_of[name])
    ]
    assert missing == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "yaml" and block.is_run], ids=str)
def test_every_yaml_block_is_accepted(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content: Any = yaml.safe_load(block.text)
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    if isinstance(content, list):  # the steps of a workflow
        for step in content:
            for command in step.get("run", "").splitlines():
                parse(command)
        return
    text = block.text if "recipe" in content else f"recipe: pretrain\n{block.text}"
    (tmp_path / "page.yaml").write_text(text, encoding="utf-8")
    assert main(["show", "page.yaml"]) == 0


def test_the_complete_jobs_in_the_docs_record_what_a_report_needs() -> None:
    """`callsheet report` rejects a run without the files of JSONLLogger."""
    contents = [yaml.safe_load(block.text) for block in BLOCKS if block.kind == "yaml"]
    jobs = [
        content for content in contents if isinstance(content, dict) and {"recipe", "run_name", "callbacks"} <= content.keys()
    ]
    assert {"pretrain", "finetune", "finetune_vlm", "classify", "distill"} <= {job["recipe"] for job in jobs}
    assert [
        job["recipe"] for job in jobs if not any(each["class_path"].endswith("JSONLLogger") for each in job.get("loggers", []))
    ] == []


def test_yaml_with_a_misspelled_key_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = next(block for block in BLOCKS if block.kind == "yaml" and "sequence_length" in block.text)
    wrong = Block(block.page, block.line, "yaml", block.text.replace("sequence_length", "sequence_lenght"))
    with pytest.raises(AssertionError):
        test_every_yaml_block_is_accepted(wrong, tmp_path, monkeypatch)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "json"], ids=str)
def test_every_json_block_is_valid(block: Block) -> None:
    assert [type(json.loads(line)) for line in block.text.splitlines()] == [dict] * len(block.text.splitlines())


READS_RUNS = [block for block in BLOCKS if block.kind == "py" and "from callsheet.report import" in block.text]


@pytest.mark.test_all
@pytest.mark.parametrize("block", READS_RUNS, ids=str)
def test_python_blocks_that_read_runs_can_be_executed(
    block: Block, reader: Path, other_tools: None, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(block.text, str(block), "exec"), {"__name__": "page"})
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "py"], ids=str)
def test_python_blocks_that_are_not_executed_import_existing_names(block: Block) -> None:
    """Blocks of the kind `py` need a large model, another framework, a run or several machines. Their imports and arguments exist."""
    tree = ast.parse(block.text)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("callsheet"):
            for each in node.names:
                try:
                    known[each.asname or each.name] = import_path(f"{node.module}.{each.name}")
                except MissingPackage as error:
                    pytest.skip(str(error))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            names = {each.arg: None for each in node.keywords if each.arg is not None}
            has_star = any(isinstance(each, ast.Starred) for each in node.args)
            inspect.signature(known[node.func.id]).bind_partial(*([] if has_star else node.args), **names)
