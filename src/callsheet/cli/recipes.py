"""`callsheet recipes`: list the shipped recipes, or copy one as a starting point."""

from __future__ import annotations

from pathlib import Path

from callsheet.cli.shipped import RECIPES, recipe_path
from callsheet.errors import CallsheetError, ConfigError, did_you_mean


def recipes() -> str:
    """Return a text with a line for each shipped recipe: its name, and the description in its file."""
    width = max(map(len, RECIPES))
    lines = [f"{name:<{width}}  {_about(name)}" for name in sorted(RECIPES)]
    return "\n".join(
        [*lines, "", "callsheet train NAME runs one; callsheet recipes --copy NAME copies its file here, for you to change"]
    )


def copy(name: str, to: str | None = None) -> str:
    """Copy a shipped recipe's file to `to` (default: `NAME.yaml`). Return a text with the path of the copy and the command that runs it.

    Raises:
        ConfigError: there is no such recipe, or the file exists already.
        CallsheetError: the file cannot be written.
    """
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}{did_you_mean(name, RECIPES)} (one of {', '.join(sorted(RECIPES))})")
    path = Path(to if to is not None else f"{name}.yaml")
    path = path / f"{name}.yaml" if path.is_dir() else path
    content = _shipped_path(name).read_text(encoding="utf-8").replace(f"callsheet train {name}", f"callsheet train {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; name another file with --to") from None
    except OSError as error:
        raise CallsheetError(f"{path} cannot be written: {error}; name another file with --to") from error
    return f"{path}; run it: callsheet train {path}"


def _about(name: str) -> str:
    """Return a recipe's description, which is the comment on the first line of the recipe's file."""
    first = _shipped_path(name).read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def _shipped_path(name: str) -> Path:
    return recipe_path(name, is_shipped=True)
