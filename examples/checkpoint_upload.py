"""Copy each published checkpoint to other storage while training continues.

    python examples/checkpoint_upload.py DESTINATION [FOLDER]
    torchrun --nproc_per_node 8 examples/checkpoint_upload.py DESTINATION [FOLDER]

The destination is any URL that fsspec can open, such as `s3://bucket/runs`, `gs://bucket/runs` or `file:///mnt/backup`. The copy is a
complete checkpoint: `Trainer(resume=...)`, a recipe's `resume` and `LoadCheckpoint` accept its URL.

(`Trainer(checkpoints_folder="s3://bucket/runs")` writes checkpoints only to that storage, without a local copy.)
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
    """Copy each checkpoint to `<destination>/<run>/<name>` when it is published.

    All ranks write to the checkpoint's folder, and a published checkpoint is complete, so one rank copies all of it. A checkpoint that a
    saver has already deleted is skipped.
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
            for name in (
                *read_manifest(here).files,
                MANIFEST,
            ):  # the manifest comes last: an incomplete upload is not a checkpoint
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
    upload = Background(UploadCheckpoints(destination), deadline=600)  # the end of the run waits up to 600 s for the last upload
    pretrain(config, callbacks=[saver, upload])


if __name__ == "__main__":
    main(*sys.argv[1:])
