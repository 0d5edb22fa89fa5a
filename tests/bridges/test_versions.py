"""The tested versions of the frameworks: the page about them, and what hosts do if a version is not tested or lacks a part."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
import sys
import tomllib
from collections.abc import Callable
from enum import EnumType
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers

from callsheet import Callback, Context, attach
from callsheet.bridges import versions
from callsheet.bridges.versions import check_version, has, is_tested, span
from callsheet.callbacks import History
from callsheet.errors import NotSupported

from .cells import loop_of
from .loops import huggingface
from .loops.job import POINTS

ROOT = Path(__file__).resolve().parents[2]
BRIDGES = ("accelerate", "huggingface", "ignite", "instructlab", "keras", "lightning", "megatron_bridge", "torchtnt")
for _bridge in BRIDGES:
    loop_of(_bridge)  # imports Keras, which must be imported after torch and after its backend is set
PACKAGES = {bridge: importlib.import_module(f"callsheet.bridges.{bridge}.internals").PACKAGE for bridge in BRIDGES}


@pytest.fixture(scope="module")
def tool() -> Any:
    """Import `tools/versions.py`."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("versions")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_the_page_shows_the_results(tool: Any) -> None:
    assert tool.PAGE.read_text() == tool.page(tool.read().values()), "make versions writes the page"


def test_the_tested_versions_are_those_with_correct_results(tool: Any) -> None:
    checked = {package.name for package in tool.PACKAGES if package.is_checked}
    assert dict(versions.TESTED) == {name: each for name, each in tool.working(tool.read().values()).items() if name in checked}


def test_every_pinned_version_has_a_result(tool: Any) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    results = tool.read()
    for package in tool.PACKAGES:
        if package.name in pinned:
            assert results[package.name, pinned[package.name]].verdict == "works", package.name


def test_the_package_requires_no_version_older_than_those_that_are_tested(tool: Any) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    required = dict(
        re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(text for texts in extras.values() for text in texts), re.MULTILINE)
    )
    tested = {package: minors[0] for package, minors in tool.working(tool.read().values()).items() if package in required}
    assert {package: required[package] for package in tested} == tested


# --- a version that is not tested ---


@pytest.fixture
def of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every package report version 99.1."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.1.0+local")
    monkeypatch.setattr(versions, "warned", set())


@pytest.mark.usefixtures("of_another_version")
def test_a_version_that_is_not_tested_is_named_once_with_the_tested_ones(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        check_version("keras")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"keras 99.1.0+local is not tested with callsheet: the tests pass with {span(versions.TESTED['keras'])}. Parts of the bridge may not work"
    )


@pytest.mark.usefixtures("of_another_version")
def test_a_loop_by_hand_names_a_torch_that_is_not_tested(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), runs_folder=tmp_path)
    assert "torch 99.1.0+local is not tested with callsheet" in caplog.text


@pytest.mark.usefixtures("of_another_version")
@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_host_names_a_framework_that_is_not_tested(bridge: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    loop_of(bridge).train(POINTS, tmp_path, [History()])
    assert caplog.text.count(f"{PACKAGES[bridge]} 99.1.0+local is not tested with callsheet") == 1


def test_a_tested_version_is_not_mentioned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "warned", set())
    for package, tested in versions.TESTED.items():
        monkeypatch.setattr(importlib.metadata, "version", lambda name, tested=tested: f"{tested[-1]}.7")
        check_version(package)
    assert not caplog.records


def test_a_minor_release_contains_its_patch_releases() -> None:
    assert is_tested("2.13.0+cpu", ["2.12", "2.13"])
    assert is_tested("0.5.5", ["0.5.5"])
    assert not is_tested("2.1.0", ["2.12", "2.13"])
    assert not is_tested("0.5.6", ["0.5.5"])
    assert not is_tested("3", ["3.1"])


# --- parts that are not public API ---


def names_of(bridge: str, side: str) -> list[str]:
    """Return the dotted names of what the host or the guest needs: `side` is `HOST` or `GUEST`."""
    module = importlib.import_module(f"callsheet.bridges.{bridge}.internals")
    base = "lightning.pytorch." if bridge == "lightning" else ""
    return [f"{base}{name}" for name in getattr(module, side, ())]


OF_HOSTS = [(bridge, name) for bridge in BRIDGES for name in names_of(bridge, "HOST")]
OF_GUESTS = [(bridge, name) for bridge in BRIDGES for name in names_of(bridge, "GUEST")]


@pytest.mark.parametrize(("bridge", "name"), sorted({*OF_HOSTS, *OF_GUESTS}))
def test_the_installed_version_has_what_the_bridge_needs(bridge: str, name: str) -> None:
    assert has(name)


def test_a_name_is_found_in_modules_classes_and_their_instances() -> None:
    assert has("logging.Handler.emit")
    assert has("logging.Handler.formatter")  # the constructor sets it
    assert has("callsheet.bridges.versions.TESTED")
    assert not has("logging.Handler.no_such_thing")
    assert not has("logging.no_such_thing")
    assert not has("no_such_package.thing")


def remove(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a method or property from a framework's class. Attributes that only instances have are reported as missing."""
    owner, _, attribute = name.rpartition(".")
    module, _, kind = owner.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    if isinstance(found, EnumType) or not hasattr(found, attribute):
        really_has = versions.has
        monkeypatch.setattr(versions, "has", lambda asked: asked != name and really_has(asked))
    for each in found.__mro__:
        if attribute in vars(each) and not isinstance(found, EnumType):
            monkeypatch.delattr(each, attribute)


def host_of(bridge: str) -> Callable[[], Any]:
    """Return a function that creates a host. The host's arguments are created beforehand."""
    host, model = importlib.import_module(f"callsheet.bridges.{bridge}").host, torch.nn.Linear(2, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    if bridge == "accelerate":
        return functools.partial(host, [], accelerator=accelerate.Accelerator(cpu=True), **given)
    return functools.partial(host, [], **(given if bridge == "ignite" else {}))


@pytest.mark.parametrize(("bridge", "name"), OF_HOSTS)
def test_a_host_rejects_a_framework_without_a_part_that_it_needs(bridge: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = host_of(bridge)
    make()
    remove(name, monkeypatch)
    wanted = (
        rf"this host needs {re.escape(name)}, which {PACKAGES[bridge]} [\d.]+ does not have; install one of the tested versions"
    )
    with pytest.raises(NotSupported, match=wanted):
        make()


@pytest.mark.parametrize(("bridge", "name"), OF_GUESTS)
def test_a_guest_rejects_a_framework_without_a_part_that_it_needs(
    bridge: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {
        "huggingface": transformers.TrainerCallback,
        "ignite": importlib.import_module("callsheet.bridges.ignite").GuestEngine,
        "torchtnt": importlib.import_module("torchtnt.framework.callback").Callback,
    }[bridge]()
    remove(name, monkeypatch)
    with pytest.raises(
        NotSupported, match=rf"a guest of .* needs {re.escape(name)}, which {PACKAGES[bridge]} [\d.]+ does not have"
    ):
        importlib.import_module(f"callsheet.bridges.{bridge}").guest(foreign)


class Records(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_event(self, ctx: Context) -> None:
        self.events.append(str(ctx.event))


def test_a_trainer_without_its_inner_loop_fires_the_same_events_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def events(folder: str) -> list[str]:
        records = Records()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=3, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True
        )
        transformers.Trainer(
            huggingface.with_loss(POINTS), arguments, train_dataset=huggingface.Rows(POINTS.train),
            callbacks=[importlib.import_module("callsheet.bridges.huggingface").host([records], strict=False)],
        ).train()  # fmt: skip
        return records.events

    expected = events("expected")
    assert expected[-1] == "on_run_end"
    assert "_inner_training_loop" not in caplog.text
    inner = transformers.Trainer._inner_training_loop
    monkeypatch.delattr(transformers.Trainer, "_inner_training_loop")
    monkeypatch.setattr(
        transformers.Trainer, "train", lambda self: inner(self, batch_size=self._train_batch_size, args=self.args)
    )
    assert events("found") == expected
    assert "it has no _inner_training_loop" in caplog.text
