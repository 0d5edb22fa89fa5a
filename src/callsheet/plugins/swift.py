"""The plugin for ms-swift: importing it registers the callback `callsheet`, for `--callbacks callsheet`.

ms-swift imports the files that `--external_plugins` names. Write this line into such a file:

    import callsheet.plugins.swift
"""

from __future__ import annotations

from typing import Any

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from swift.callbacks import callbacks_map

    from callsheet.bridges.huggingface import HuggingFaceHost, host
    from callsheet.exec.observers import observers_of


def callsheet(args: Any, trainer: Any) -> HuggingFaceHost:
    """Return the host of the callbacks that the file named by `CALLSHEET_CALLBACKS` lists, or of callbacks that only observe."""
    return host(observers_of(None, 10)())


callbacks_map["callsheet"] = callsheet
