"""The plugin for ms-swift: it registers the callback `callsheet`, which the option `--callbacks callsheet` selects.

ms-swift imports the files that `--external_plugins` names. Write these lines into such a file:

    from callsheet.plugins.swift import register

    register("callbacks.yaml")
"""

from __future__ import annotations

import os
from typing import Any

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from swift.callbacks import callbacks_map

    from callsheet.bridges.huggingface import HuggingFaceHost
    from callsheet.plugins.hosts import host_of


def register(file: str | os.PathLike[str] | None = None) -> None:
    """Register callsheet's callbacks with ms-swift under the name `callsheet`.

    Args:
        file: a YAML file that lists the callbacks, as for `callsheet exec`. None: the default callbacks, which only observe.
    """

    def callsheet(args: Any, trainer: Any) -> HuggingFaceHost:
        return host_of(file)

    callbacks_map["callsheet"] = callsheet
