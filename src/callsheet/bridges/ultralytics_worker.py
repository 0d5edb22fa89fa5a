"""A DDP worker of Ultralytics: runs the script that Ultralytics has generated, and attaches the callbacks to Ultralytics' trainer.

This module is not in the package `bridges.ultralytics`, which imports Ultralytics: a worker cannot import Ultralytics before it
has opened the payload.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from callsheet.transport.payload import open_payload


def main() -> None:
    """Rebuild the callbacks from the payload, and run Ultralytics' script with the callbacks attached to Ultralytics' trainer."""
    file = sys.argv[2]
    unpacked = open_payload(os.environ, is_ours=True)
    sent = unpacked.extra

    from ultralytics.engine.trainer import BaseTrainer

    from callsheet.bridges.ultralytics.hosts import UltralyticsHost

    host = UltralyticsHost(unpacked.callbacks, strict=sent["strict"], allow_pickle=False, **sent["settings"])
    host.only_observes = sent["only_observes"]
    train = BaseTrainer.train

    def train_with_host(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        BaseTrainer.train = train
        host.attach(trainer)
        return BaseTrainer.train(trainer, *args, **kwargs)  # look up `train` again, because `attach` may have replaced it

    BaseTrainer.train = train_with_host
    runpy.run_path(file, run_name="__main__")
