"""Opens an existing run for evaluation, predictions or export. The run's folder and metrics are not changed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callsheet.cli import names
from callsheet.cli.named_run import RUNS_FOLDER
from callsheet.cli.recipe import CONFIG, current_file, errors_on_first_rank, values_of
from callsheet.cli.shipped import RECIPES, recipe_path
from callsheet.core.callback import Callback
from callsheet.core.spec import import_path
from callsheet.errors import ConfigError, did_you_mean
from callsheet.report.index import run_names

if TYPE_CHECKING:
    from callsheet.recipes.recipe import Recipe

_UNCLAIMED_WARNING = "the checkpoint holds the state of callbacks that are not here"


def open_run(
    run: str, overrides: Sequence[str], *, command: str, checkpoint: str | None = None, with_changes: bool = False
) -> Recipe[Any]:
    """Return the recipe of an existing run, with the run's weights loaded. The caller must close the recipe's trainer.

    Args:
        run: a run's folder, its name in `runs/`, or the file or name of a recipe of which there is a run.
        overrides: values that override those of the run, as on the command line.
        command: the command for which the run is opened.
        checkpoint: a path, or the name of one of the run's checkpoints; None is the newest one whose weights and loss are finite.
        with_changes: whether to use the run's callbacks of phase `change`, such as an EMA, which change the weights. The run's
            other callbacks are never used.

    Raises:
        ConfigError: there is no such run, checkpoint or key, or a value has a wrong type.
        CheckpointError: the checkpoint is invalid, or belongs to another model.
    """
    with errors_on_first_rank():
        path, folder = _find_recipe(run)
        with current_file(path) as file:
            values = values_of(file, overrides, command=command)
            given = values.given
            if folder is not None:  # use the present folder, which may have been renamed or moved since training
                given.run_name, given.runs_folder = folder.name, str(folder.parent)
            given.callbacks = [spec for spec in given.callbacks or [] if with_changes and _changes_weights(spec)]
            given.loggers = []
            job = values.make().job
        checkpoint = _checkpoint_at(job.folder / "checkpoints", checkpoint)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with _without_warning_of_unused_states():
        return job.open(checkpoint)


def name_of(job: Recipe[Any]) -> str:
    """Return the opened run's folder and step as text."""
    return f"{job.folder}, step {job.trainer.state.timestamp.batch}"


def _find_recipe(run: str) -> tuple[Path, Path | None]:
    """Return the recipe file and the folder of the run `run`. If `run` is a recipe and not a run, the folder is None."""
    for folder in [RUNS_FOLDER / run, Path(run)] if Path(run).name == run else [Path(run)]:
        if (folder / CONFIG).is_file():
            return folder / CONFIG, folder.resolve() if folder.name in ("", "..") else folder
    if Path(run).is_file() or (run in RECIPES and not Path(run).exists()):
        return recipe_path(run), None
    if (there := next((folder for folder in (Path(run), RUNS_FOLDER / run) if folder.is_dir()), None)) is not None:
        raise ConfigError(
            f"{there} has no {CONFIG}, so it is not the run of a recipe; give the recipe file that it was trained with"
        )
    beside = RUNS_FOLDER if Path(run).name == run else Path(run).parent
    near = did_you_mean(Path(run).name, [*run_names(beside), *RECIPES])
    raise ConfigError(f"there is no run {run!r}{near} (a run's folder, its name in {RUNS_FOLDER}/, or a recipe file)")


def _checkpoint_at(folder: Path, checkpoint: str | None) -> str | None:
    if checkpoint is None or "://" in checkpoint or Path(checkpoint).is_dir():
        return checkpoint
    if Path(checkpoint).name == checkpoint and (folder / checkpoint).is_dir():
        return str(folder / checkpoint)
    there = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    near = did_you_mean(Path(checkpoint).name, there)
    raise ConfigError(f"there is no checkpoint {checkpoint!r}{near} ({folder} has {', '.join(there) or 'none'})")


def _changes_weights(spec: Any) -> bool:
    path, init_args = spec.class_path, spec.get("init_args")
    if path == names.NAMED_PATH:
        return _changes_weights(init_args.callback)
    kind = import_path(path)
    return isinstance(kind, type) and issubclass(kind, Callback) and kind.phase == "change"


@contextmanager
def _without_warning_of_unused_states() -> Iterator[None]:
    """While the `with` block runs, suppress the warning that the checkpoint contains callback states that no callback uses.

    Some callbacks of the run are left out on purpose, so their states are unused.
    """
    logger = logging.getLogger("callsheet")

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_UNCLAIMED_WARNING)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
