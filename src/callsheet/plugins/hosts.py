"""Makes the Hugging Face callback with which the plugins run callsheet's callbacks."""

from __future__ import annotations

import os

from callsheet.bridges.huggingface import HuggingFaceHost, host
from callsheet.exec.log_pace import FIRST_INTERVAL_STEPS, LogPace
from callsheet.exec.observers import observers_of


def host_of(file: str | os.PathLike[str] | None) -> HuggingFaceHost:
    """Return a Hugging Face callback that runs the callbacks of a YAML file or, if there is no file, the defaults of `callsheet exec`.

    If the Trainer does not support what a callback needs, a warning is logged, and no error is raised. With the default callbacks,
    no error of callsheet ends the training, and nothing is added to the checkpoints of the training.

    Raises:
        ConfigError: the file cannot be read, or a callback in it cannot be made.
    """
    made = host(observers_of(file)(LogPace(FIRST_INTERVAL_STEPS)), strict=False)
    made.only_observes = file is None
    return made
