"""Copy each published checkpoint elsewhere, while training goes on.

    python examples/checkpoint_upload.py DESTINATION [FOLDER]
    torchrun --nproc_per_node 8 examples/checkpoint_upload.py DESTINATION [FOLDER]

The destination is any URL that fsspec opens, such as `s3://bucket/runs`, `gs://bucket/runs` or `file:///mnt/backup`. What arrives there
is a checkpoint like the one here: `Trainer(resume=...)`, a recipe's `resume` and `LoadCheckpoint` take its URL.

(Where checkpoints should stand there and nowhere else, `Trainer(checkpoints_folder="s3://bucket/runs")` writes them there at once.)
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import fsspec

from callsheet import Background, Callback, Context
from callsheet.callbacks import CheckpointSaver
from callsheet.checkpoint import MANIFEST, read_manifest
from callsheet.errors import CheckpointError
from callsheet.recipes import ByteFiles, LanguageModel, PretrainConfig, pretrain

logger = logging.getLogger("upload")


class UploadCheckpoints(Callback):
    """Copy each checkpoint to `<destination>/<run>/<name>` once it is durable here.

    It stands in a folder that all ranks write to, and is complete when it is published: one rank copies all of it. One that a saver
    has deleted before its turn came is passed over; a newer one follows.
    """

    ranks = "zero"

    def __init__(self, destination: str) -> None:
        self.destination = destination

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        here = Path(ctx.checkpoint.path)
        files, root = fsspec.url_to_fs(self.destination)
        there = f"{root}/{ctx.run.name}/{here.name}"
        files.makedirs(there, exist_ok=True)
        try:
            for name in (*read_manifest(here).files, MANIFEST):  # the seal comes last: half an upload is no checkpoint
                files.put_file(str(here / name), f"{there}/{name}")
        except (CheckpointError, FileNotFoundError):
            logger.warning("%s was deleted before it was uploaded; let the CheckpointSaver keep more", here)
        else:
            logger.info("uploaded %s, %.1f MB", there, ctx.checkpoint.size_bytes / 1e6)


def main(destination: str, folder: str = "runs") -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    config = PretrainConfig(
        run_name="checkpoint-upload",
        runs_folder=folder,
        max_duration="40ba",
        eval_interval="20ba",
        batch_size=8,
        model=LanguageModel(hidden_size=32, layers=1, heads=2, intermediate_size=64),
        data=ByteFiles(sequence_length=64, validation_windows=32),
        prompts=[],
        threads=1,
    )
    saver = CheckpointSaver(save_interval="20ba", monitor="validation/loss", keep=3)
    upload = Background(UploadCheckpoints(destination), deadline=600)  # seconds that the run's end waits for the last upload
    pretrain(config, callbacks=[saver, upload])


if __name__ == "__main__":
    main(*sys.argv[1:])
