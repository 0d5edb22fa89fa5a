"""The help texts of a recipe's keys in `--help`."""

from __future__ import annotations

import re
from argparse import Action
from typing import Any

from jsonargparse import DefaultHelpFormatter

from callsheet.cli.key_types import names_code


class KeyHelp(DefaultHelpFormatter):
    """jsonargparse's help formatter, but for a key whose values name classes, it shows only the class names of the default.

    A list of all subclasses and their arguments would be so long that the other keys are hard to find.
    """

    def _get_help_string(self, action: Action) -> str:
        text: str = super()._get_help_string(action)
        if not names_code(getattr(action, "_typehint", None)):
            return text
        text = re.sub(r", known subclasses: .*\)$", ")", text, flags=re.DOTALL).replace("type: %(type)s, ", "")
        default = ", ".join(_class_names(action.default)).replace("%", "%%") or "none"
        return text.replace("%(default)s)", f"{default}; --{action.dest}.help CLASS explains the arguments of a class)")


def _class_names(spec: Any) -> list[str]:
    if isinstance(spec, (list, tuple)):
        return [name for each in spec for name in _class_names(each)]
    try:
        path = spec["class_path"]
    except (TypeError, KeyError):
        return []
    return [str(path).rpartition(".")[2]]
