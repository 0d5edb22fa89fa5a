"""A DDP worker of Ultralytics: it runs the script that Ultralytics has generated, and attaches the callbacks to its trainer.

It is not in the package `ultralytics`, which imports Ultralytics: this process can only find that when the payload is opened.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from callsheet.transport.payload import open_payload


def main() -> None:
    """Rebuild the callbacks, attach them to the trainer that Ultralytics' file makes, and run the file."""
    file = sys.argv[2]
    unpacked = open_payload(os.environ, is_ours=True)
    sent = unpacked.extra

    from ultralytics.engine.trainer import BaseTrainer

    from callsheet.bridges.ultralytics.hosts import UltralyticsHost

    host = UltralyticsHost(unpacked.callbacks, sent["settings"], allow_pickle=False, strict=sent["strict"])
    host.only_observes = sent["only_observes"]
    train = BaseTrainer.train

    def train_with_host(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        BaseTrainer.train = train
        host.attach(trainer)
        return BaseTrainer.train(trainer, *args, **kwargs)  # `attach` may have replaced it

    BaseTrainer.train = train_with_host
    runpy.run_path(file, run_name="__main__")
