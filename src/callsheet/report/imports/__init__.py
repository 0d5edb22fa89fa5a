"""Imports runs of other tools: reads their files, and writes each run as a folder that all commands of callsheet can read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Literal

from callsheet.errors import ConfigError, did_you_mean
from callsheet.report.imports import huggingface, lightning, mlflow, tensorboard, trackio, wandb
from callsheet.report.imports.imported_run import ImportedRun
from callsheet.report.imports.source import Source
from callsheet.report.imports.write import Imported, Origin, rename_metrics, write

__all__ = ["KINDS", "Imported", "import_runs", "importing"]

logger = logging.getLogger("callsheet")

SourceKind = Literal["tensorboard", "wandb", "mlflow", "trackio", "lightning", "huggingface"]
KINDS: dict[SourceKind, ModuleType] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "trackio": trackio,
    "lightning": lightning,
    "huggingface": huggingface,
}
"""The kinds of sources, by name. The module of each kind has `find`, `read` and `LOOKS_FOR`."""


def import_runs(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    to: str | os.PathLike[str] = "runs",
    *,
    kind: SourceKind | None = None,
    name: str | None = None,
    rename: Mapping[str, str] | None = None,
) -> list[Imported]:
    """Convert runs that other tools recorded to run folders.

    Importing the same run again replaces its folder. A folder that was not made by an import is never changed. The files of the
    other tools are only read.

    Args:
        sources: files or folders of TensorBoard, W&B, MLflow, Trackio, Lightning's CSVLogger or the Hugging Face Trainer.
        to: the folder of runs.
        kind: `tensorboard`, `wandb`, `mlflow`, `trackio`, `lightning` or `huggingface`; None means to detect the tool.
        name: the name of the run's folder, if there is only one run; None means the name in the source.
        rename: new names of metrics by their old names. An old name that ends with `/` is a prefix.

    Returns:
        A summary of each imported run.

    Raises:
        ConfigError: an argument is invalid, nothing is recognized, or an existing folder in `to` must not be replaced.
        MissingPackage: the package that reads the files is not installed.
    """
    given = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    return list(importing(given, Path(to), kind=kind, name=name, rename=rename or {}))


def importing(
    given: Sequence[str | os.PathLike[str]], to: Path, *, kind: SourceKind | None, name: str | None, rename: Mapping[str, str]
) -> Iterator[Imported]:
    """Import one run after the other, and yield a summary of each run when its folder is complete. The arguments are those of `import_runs`."""
    _check(kind, name, rename, to)
    sources = [(source, _kind_of(source, each, kind)) for each in given for source in [Source.at(each)]]
    if name is not None and len(sources) > 1:
        raise ConfigError(f"--name {name} is for one run, and there are {len(sources)} sources; import them one by one")
    taken: set[str] = set()
    used: set[str] = set()
    metrics: dict[str, None] = {}
    empty: list[str] = []
    for source, found in sources:
        runs: Iterator[ImportedRun] = KINDS[found].read(source)
        if name is not None:
            first = list(islice(runs, 2))
            if len(first) > 1:
                raise ConfigError(
                    f"--name {name} is for one run, and {source.path} has several; leave it out, or name one of them"
                )
            runs = iter(first)
        for run in runs:
            if not (run.metrics.count or run.images or run.hyperparameters):
                empty.append("; ".join([f"{run.name} of {source.path} has nothing to import", *run.warnings]))
                continue
            metrics |= dict.fromkeys(run.metrics.names)
            used |= set(rename_metrics(run, rename))
            yield write(run, to, Origin(found, str(source.path), run.key), name=name, taken=taken)
    if not taken:
        raise ConfigError("\n".join(empty) or f"{', '.join(map(str, given))}: there is no run to import")
    for line in empty:
        logger.warning("%s", line)
    for old in rename:
        if old not in used:  # log a warning instead of an error, because the runs are already imported
            logger.warning("--rename %s: no imported run has this metric%s", old, did_you_mean(old, metrics))


def _check(kind: SourceKind | None, name: str | None, rename: Mapping[str, str], to: Path) -> None:
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--from {kind} is not a kind of source{did_you_mean(kind, KINDS)} (one of {', '.join(KINDS)})")
    if name is not None and (Path(name).name != name or name.startswith(".")):
        raise ConfigError(f"--name {name!r} must be a plain name: it is the name of the run's folder")
    if not all([*rename, *rename.values()]):
        raise ConfigError("--rename needs a name on both sides, such as val/loss=validation/loss")
    if to.exists() and not to.is_dir():
        raise ConfigError(f"--to {to} is not a folder")


def _kind_of(source: Source, given: object, kind: SourceKind | None) -> SourceKind:
    """Return which tool, such as `tensorboard`, wrote the files at the source.

    Raises:
        ConfigError: no known tool wrote files there, or several tools did.
    """
    if kind is not None:
        if not KINDS[kind].find(source):
            raise ConfigError(f"{given} has nothing of {kind}: there is no {KINDS[kind].LOOKS_FOR}")
        return kind
    found = [name for name, module in KINDS.items() if module.find(source)]
    if len(found) > 1:
        raise ConfigError(
            f"{given} has runs of {' and '.join(found)}; choose with --from {found[0]}, or give a folder further down"
        )
    if not found:
        looked = "; ".join(f"{name}: {module.LOOKS_FOR}" for name, module in KINDS.items())
        raise ConfigError(f"{given} has nothing that import recognizes. It looks for {looked}. Name the kind with --from")
    return found[0]
