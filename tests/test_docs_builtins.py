"""What the docs say of each built-in is what the code has: its options with their defaults, its metrics with their units."""

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


# --- what the docs say ---


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Yield the heading and text of each section of a page, in order."""
    _, *found = re.split(r"^#{2,3} (.+)\n", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    yield from zip(found[::2], found[1::2], strict=True)


def section_of(name: str) -> str:
    """The text about a built-in; where several share a section, from its signature to the next one's."""
    page = "loggers.md" if name in loggers.__all__ else "builtins.md"
    found = [(heading, text) for heading, text in sections(page) if name in heading.split(", ")]
    assert len(found) == 1, f"docs/{page} has {len(found)} sections about {name}"
    ((heading, text),) = found
    if "," in heading:
        _, begins, text = text.partition(f"\n`{name}(")
        text = begins + re.split(r"^`\w+\(\*", text, maxsplit=1, flags=re.MULTILINE)[0]
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def signature_in(name: str, text: str) -> str:
    """Return the text between the parentheses of the constructor in a section."""
    found = re.search(rf"`{name}\((.*?)\)`", text, re.DOTALL)
    assert found is not None, f"the section about {name} does not say how it is constructed"
    return found[1]


@dataclass
class Row:
    """One of a table of metrics."""

    names: list[str]
    unit: str

    def documents(self, metric: str) -> bool:
        """Whether it is about the metric."""
        return any(re.fullmatch(pattern(name), metric) for name in self.names)


def pattern(name: str) -> str:
    """Return a regular expression for the metrics that a documented name describes."""
    parts = re.split(r"<(.+?)>", name)
    return "".join(f"(?:{PATTERNS[part]})" if i % 2 else re.escape(part) for i, part in enumerate(parts))


def rows(text: str) -> list[Row]:
    """The tables of metrics in a section; their rows hold nothing but full names before the unit."""
    found = []
    for table in re.findall(r"^\| metric \|.*\n(?:\|.*\n)+", text, re.MULTILINE):
        head, _, *lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        assert head[1] == "unit", f"{head}: the second column of a table of metrics is the unit"
        for names, unit, *_ in lines:
            assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", names), f"{names!r}: full names, each in backticks"
            assert unit, f"{names} has no unit"
            found.append(Row(re.findall(r"`([^`]+)`", names), unit))
    return found


# --- what the code has ---


def parameters(function: Any) -> dict[str, tuple[Any, Any]]:
    """Kind and default of each, by name."""
    found = inspect.signature(function).parameters.values()
    return {parameter.name: (parameter.kind, parameter.default) for parameter in found if parameter.name != "self"}


def constructor(name: str) -> dict[str, tuple[Any, Any]]:
    """The options of a built-in."""
    kind: type[Callback] = getattr(callbacks if name in callbacks.__all__ else loggers, name)
    return parameters(kind.__init__) if kind.__init__ is not Callback.__init__ else {}


class NextToken(Task):
    """Batches that count tokens."""

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch["input_ids"])
        return outputs

    def loss(self, outputs: Any, batch: Any) -> Losses:
        return nn.functional.cross_entropy(outputs[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:])

    def label_tokens(self, batch: Any) -> Tensor:
        return torch.tensor(batch["input_ids"][:, 1:].numel())


def tokens(folder: Path, callbacks: CallbackManager, resume: str | None = None) -> Trainer:
    """A run in which tokens are counted."""
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
    """The names of all that the records of a run hold."""
    memory = InMemoryLogger()
    with trainer(folder, CallbackManager([*held, memory])) as made:
        made.fit()
    return {name for record in memory.records for name in record.values}


def logged_on_a_rank(built_in: str, folder: str) -> set[str]:
    """The same, on one of several ranks."""
    return logged(small_trainer, Path(folder), getattr(callbacks, built_in)())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What the Trainer itself logs."""
    return set().union(*(logged(trainer, tmp_path_factory.mktemp("plain")) for trainer in (small_trainer, tokens)))


# --- that they agree ---


def test_options_are_in_the_docs_with_their_defaults(built_in: str) -> None:
    if built_in == "Logger":  # what loggers derive from: it has none, and the page begins with it
        assert not constructor(built_in)
        return
    scope: dict[str, Any] = {}
    exec(f"def documented({signature_in(built_in, section_of(built_in))}): ...", scope)
    assert parameters(scope["documented"]) == constructor(built_in)


def test_every_option_is_explained(built_in: str) -> None:
    if built_in == "Logger":
        return
    text = section_of(built_in)
    explained = re.findall(r"`[^`]+`", text.replace(f"`{built_in}({signature_in(built_in, text)})`", ""))
    missing = [name for name in constructor(built_in) if not any(re.search(rf"\b{name}\b", span) for span in explained)]
    assert missing == []


@pytest.mark.test_all
def test_the_metrics_of_a_built_in_are_those_in_its_table(
    built_in: str, subjects: Mapping[str, Subject], plain: set[str], tmp_path: Path
) -> None:
    if built_in in loggers.__all__:  # loggers write what others log
        return
    subject, recorded = subjects[built_in], rows("" if built_in == "Logger" else section_of(built_in))
    found = logged(subject.trainer, tmp_path / "run", subject.make())
    trainers: list[MakesTrainer] = [subject.trainer, tokens]
    for i, options in enumerate(VARIANTS.get(built_in, [])):
        for j, trainer in enumerate(trainers):
            found |= logged(trainer, tmp_path / f"{i}-{j}", partial(subject.make, **options)())
    if built_in in BETWEEN_RANKS:
        found |= run_ranks(logged_on_a_rank, 2, built_in, str(tmp_path / "ranks"))[0]
    own = sorted(name for name in found - plain if name != "looked/step")  # which is what a function of `Lambda` logs here
    assert [name for name in own if not any(row.documents(name) for row in recorded)] == []
    kind: type[Callback] = getattr(callbacks, built_in)
    source = inspect.getsource(inspect.getmodule(kind) or kind) if built_in in NOT_EVERYWHERE else ""
    not_logged = [
        name for row in recorded for name in row.names if not any(re.fullmatch(pattern(name), received) for received in own)
    ]
    assert [name for name in not_logged if f'"{name.split("/")[-1].removesuffix("_per_second")}"' not in source] == []


def test_the_metrics_of_the_trainer_are_those_in_its_table(plain: set[str]) -> None:
    recorded = rows(dict(sections("builtins.md"))["Metrics of the Trainer itself"])
    assert [name for name in sorted(plain) if not any(row.documents(name) for row in recorded)] == []
    not_logged = [
        name for row in recorded for name in row.names if not any(re.fullmatch(pattern(name), received) for received in plain)
    ]
    assert not_logged == []


def test_the_page_for_composer_users_names_existing_options() -> None:
    ((table,),) = [
        re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE) for heading, text in sections("builtins.md") if "Composer" in heading
    ]
    name, seen = "", set()
    for line in table.splitlines()[2:]:
        of, there, here = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        name = of or name
        seen.add(name)
        spans = re.findall(r"`([^`]+)`", there if here.startswith("the same") else "") + re.findall(r"`([^`]+)`", here)
        options = {span.partition("=")[0] for span in spans if re.fullmatch(r"[a-z_]+(=.*)?", span)} - {
            "elapsed_seconds",
            "aborted",
        }
        assert sorted(options - constructor(name).keys()) == [], line
    assert seen <= set(callbacks.__all__)
    assert len(seen) == 14


def test_the_docs_name_only_what_exists() -> None:
    pages = {"builtins.md": callbacks.__all__, "loggers.md": loggers.__all__}
    for page, names in pages.items():
        headings = [name for heading, _ in sections(page) for name in heading.split(", ")]
        unknown = [name for name in headings if re.fullmatch(r"[A-Z]\w*[A-Z]\w*", name) and name not in names]
        assert unknown == []
    assert issubclass(Logger, Callback)
