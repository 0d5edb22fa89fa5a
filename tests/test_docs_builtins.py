"""The docs of each built-in agree with the code: its options with their defaults, its metrics with their units."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, CallbackManager, Trainer, callbacks, loggers
from callsheet.loggers import InMemoryLogger, Logger
from callsheet.testing import Subject, run_ranks, small_trainer
from callsheet.testing.scene import MakesTrainer
from callsheet.trainer.tasks import Losses, Task

DOCS = Path(__file__).resolve().parent.parent / "docs"

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "OptimizerMonitor": [{"weights": True}],
    "RuntimeEstimator": [{"time_unit": unit} for unit in ("minutes", "hours", "days")],
    "SpeedMonitor": [{"peak_flops": 1e12}],
}
"""Options with which more is logged."""

BETWEEN_RANKS = ("SlowRankDetector",)
"""Those that log where there are several ranks."""

NOT_EVERYWHERE = ("MemoryMonitor", "SystemMetricsMonitor")
"""Those that log more with a CUDA device or on other systems. Metrics that are not logged here are looked up in the source."""

PATTERNS = {
    "dataset": "validation",
    "group": ".+",
    "loss": "loss",
    "module": ".+",
    "optimizer class": r"\w+",
    "parameter": ".+",
    "stage": "fetch|forward",
}
"""What a name in angle brackets is in the runs here, as a regular expression."""


# --- reading the docs ---


def sections(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the heading and text of each section of a page, in order."""
    _, *found = re.split(r"^## (.+)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    yield from zip(found[::2], found[1::2], strict=True)


def folder_of(name: str) -> Path:
    """Return the folder of the pages about built-ins of this kind."""
    return DOCS / ("loggers" if name in loggers.__all__ else "builtins")


def section_of(name: str) -> str:
    """Return the text about a built-in: the only section in the pages of its kind that has its name as heading."""
    found = [text for page in folder_of(name).glob("*.md") for heading, text in sections(page) if heading == name]
    assert len(found) == 1, f"the pages in {folder_of(name)} have {len(found)} sections about {name}"
    return found[0]


def tables(text: str, *head: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables whose first columns are these."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        first, _, *lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        if first[: len(head)] == list(head):
            yield from lines


def options_in(text: str) -> list[tuple[str, str]]:
    """Return the options in a section with their defaults, which the table gives as Python expressions."""
    found = []
    for option, default, meaning in tables(text, "option", "default", "meaning"):
        name = re.fullmatch(r"`(\w+)`", option)
        assert name is not None, f"{option!r}: one option, in backticks"
        assert meaning, f"{option} is not explained"
        found.append((name[1], default if default == "required" else repr(eval(default.strip("`"), {}))))
    return found


@dataclass
class Row:
    """A row of a table of metrics."""

    names: list[str]
    unit: str

    def documents(self, metric: str) -> bool:
        """Return whether the row documents the metric."""
        return any(re.fullmatch(pattern(name), metric) for name in self.names)


def pattern(name: str) -> str:
    """Return a regular expression for the metrics that a documented name describes."""
    parts = re.split(r"<(.+?)>", name)
    return "".join(f"(?:{PATTERNS[part]})" if i % 2 else re.escape(part) for i, part in enumerate(parts))


def rows(text: str) -> list[Row]:
    """Return the rows of the tables of metrics in a section. The cell before the unit holds only full names."""
    found = []
    for names, unit, meaning in tables(text, "metric"):
        assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", names), f"{names!r}: full names, each in backticks"
        assert unit, f"{names} has no unit"
        assert meaning, f"{names} is not explained"
        found.append(Row(re.findall(r"`([^`]+)`", names), unit))
    return found


# --- reading the code ---


def constructor(name: str) -> list[tuple[str, str]]:
    """Return the options of a built-in with their defaults, in order."""
    kind: type[Callback] = getattr(callbacks if name in callbacks.__all__ else loggers, name)
    if kind.__init__ is Callback.__init__:
        return []
    _, *options = inspect.signature(kind.__init__).parameters.values()  # without self
    assert all(option.kind in (option.KEYWORD_ONLY, option.VAR_KEYWORD) for option in options), f"{name}: only keyword arguments"
    return [(each.name, "required" if each.default is each.empty else repr(each.default)) for each in options]


class NextToken(Task):
    """A task whose batches have a number of tokens."""

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch["input_ids"])
        return outputs

    def loss(self, outputs: Any, batch: Any) -> Losses:
        return nn.functional.cross_entropy(outputs[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:])

    def label_tokens(self, batch: Any) -> Tensor:
        return torch.tensor(batch["input_ids"][:, 1:].numel())


def tokens(folder: Path, callbacks: CallbackManager, resume: str | None = None) -> Trainer:
    """Return a trainer that counts tokens."""
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 16))
    data = [{"input_ids": torch.arange(12).reshape(2, 6) % 16}] * 4
    return Trainer(
        model,
        NextToken(),
        data,
        data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        max_duration="10ba",
        eval_interval="4ba",
        log_interval="2ba",
        device="cpu",
        run_name="tokens",
        runs_folder=folder,
        resume=resume,
        callbacks=callbacks,
    )


def logged(trainer: MakesTrainer, folder: Path, *held: Callback) -> set[str]:
    """Return the names of all metrics in the records of a run."""
    memory = InMemoryLogger()
    with trainer(folder, CallbackManager([*held, memory])) as made:
        made.fit()
    return {name for record in memory.records for name in record.values}


def logged_on_a_rank(built_in: str, folder: str) -> set[str]:
    """Return the names of all metrics in the records of a run on several ranks."""
    return logged(small_trainer, Path(folder), getattr(callbacks, built_in)())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of the metrics that the Trainer itself logs."""
    return set().union(*(logged(trainer, tmp_path_factory.mktemp("plain")) for trainer in (small_trainer, tokens)))


# --- comparing both ---


def test_the_table_of_options_has_all_options_of_the_constructor_with_their_defaults(built_in: str) -> None:
    text = section_of(built_in)
    assert options_in(text) == constructor(built_in)
    assert ("has no options" in text) == (not constructor(built_in))


def test_a_section_has_a_table_of_metrics_or_says_that_there_are_none(built_in: str) -> None:
    text = section_of(built_in)
    if built_in in loggers.__all__:  # these only write what other callbacks log
        assert "metrics records" in outputs_of_a_logger(text)
    else:
        assert bool(rows(text)) != ("logs no metrics" in text)


def test_a_section_has_an_example(built_in: str) -> None:
    """The examples run in test_readme.py."""
    examples = re.findall(r"^```python\n(.*?)^```$", section_of(built_in), re.MULTILINE | re.DOTALL)
    assert any(re.search(rf"\b{built_in}\(|\({built_in}\):", example) for example in examples)


def outputs_of_a_logger(text: str) -> dict[str, str]:
    """Return where a logger writes metrics records, tables and so on, according to its section. The keys are these names."""
    found: dict[str, str] = {}
    for what, where, *_ in [*tables(text, "what", "where"), *tables(text, "what", "method to override")]:
        found |= dict.fromkeys(what.split(", "), where)
    return found


def test_the_table_of_a_logger_lists_what_it_does_not_write(built_in: str) -> None:
    if built_in not in loggers.__all__ or built_in == "Logger":  # the base class writes nothing
        return
    kind, where = getattr(loggers, built_in), outputs_of_a_logger(section_of(built_in))
    for what in ("hyperparameters", "tables", "images", "files"):
        method = {"tables": "log_table", "files": "log_file"}.get(what, f"log_{what}")
        is_written = getattr(kind, method) is not getattr(Logger, method)
        assert where[what].startswith("not ") != is_written, f"{what}: {where[what]}"


def test_the_overview_links_to_every_built_in() -> None:
    for folder, names in (("builtins", callbacks.__all__), ("loggers", loggers.__all__)):
        text = (DOCS / folder / "index.md").read_text(encoding="utf-8")
        linked = re.findall(r"^\| \[(\w+)\]\((\w+\.md)#(\w+)\) \|", text, re.MULTILINE)
        assert sorted(name for name, *_ in linked) == sorted({*names} - {"Logger", "read_metrics"})
        for name, page, anchor in linked:
            assert anchor == name.lower()
            assert name in dict(sections(DOCS / folder / page))


@pytest.mark.test_all
def test_a_built_in_logs_exactly_the_metrics_in_its_table(
    built_in: str, subjects: Mapping[str, Subject], plain: set[str], tmp_path: Path
) -> None:
    if built_in in loggers.__all__:  # loggers only write what other callbacks log
        return
    subject, recorded = subjects[built_in], rows(section_of(built_in))
    found = logged(subject.trainer, tmp_path / "run", subject.make())
    trainers: list[MakesTrainer] = [subject.trainer, tokens]
    for i, options in enumerate(VARIANTS.get(built_in, [])):
        for j, trainer in enumerate(trainers):
            found |= logged(trainer, tmp_path / f"{i}-{j}", partial(subject.make, **options)())
    if built_in in BETWEEN_RANKS:
        found |= run_ranks(logged_on_a_rank, 2, built_in, str(tmp_path / "ranks"))[0]
    own = sorted(name for name in found - plain if name != "looked/step")  # the function that the tests pass to `Lambda` logs it
    assert [name for name in own if not any(row.documents(name) for row in recorded)] == []
    kind: type[Callback] = getattr(callbacks, built_in)
    source = inspect.getsource(inspect.getmodule(kind) or kind) if built_in in NOT_EVERYWHERE else ""
    not_logged = [
        name for row in recorded for name in row.names if not any(re.fullmatch(pattern(name), received) for received in own)
    ]
    assert [name for name in not_logged if f'"{name.split("/")[-1].removesuffix("_per_second")}"' not in source] == []


def test_the_trainer_logs_exactly_the_metrics_in_its_table(plain: set[str]) -> None:
    recorded = rows(dict(sections(DOCS / "builtins" / "index.md"))["Metrics of the Trainer itself"])
    assert [name for name in sorted(plain) if not any(row.documents(name) for row in recorded)] == []
    not_logged = [
        name for row in recorded for name in row.names if not any(re.fullmatch(pattern(name), received) for received in plain)
    ]
    assert not_logged == []


def test_the_page_for_composer_users_names_existing_options() -> None:
    name, seen = "", set()
    text = (DOCS / "builtins" / "composer.md").read_text(encoding="utf-8")
    for of, there, here in tables(text, "callback", "its options in Composer", "in callsheet"):
        name = re.sub(r"\[(\w+)\]\(.*\)", r"\1", of) or name
        seen.add(name)
        spans = re.findall(r"`([^`]+)`", there if here.startswith("the same") else "") + re.findall(r"`([^`]+)`", here)
        options = {span.partition("=")[0] for span in spans if re.fullmatch(r"[a-z_]+(=.*)?", span)} - {
            "elapsed_seconds",
            "aborted",
        }
        assert sorted(options - dict(constructor(name)).keys()) == [], (name, there, here)
    assert seen <= set(callbacks.__all__)
    assert len(seen) == 14


def test_every_heading_that_names_a_class_is_a_built_in() -> None:
    for folder, names in (("builtins", callbacks.__all__), ("loggers", loggers.__all__)):
        headings = [heading for page in (DOCS / folder).glob("*.md") for heading, _ in sections(page)]
        unknown = [name for name in headings if re.fullmatch(r"[A-Z]\w*", name) and name not in (*names, "Overview")]
        assert unknown == []
