"""Checkpoints: folders of JSON and safetensors files. The manifest (the seal) is written last; it makes the folder a valid checkpoint.

Many ranks can write a checkpoint together, any number of ranks can read it, and no code from its files is run.
"""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.checkpoint.background import AsyncWriter
    from callsheet.checkpoint.export import export_huggingface, export_weights
    from callsheet.checkpoint.folder import (
        Checkpoint,
        Found,
        delete_checkpoint,
        delete_later,
        find_checkpoints,
        newest,
        open_folder,
        point_latest,
        read_manifest,
    )
    from callsheet.checkpoint.plain import flatten, plain_copy, unflatten
    from callsheet.checkpoint.ranks import RankLost
    from callsheet.checkpoint.read import Loaded, read_checkpoint
    from callsheet.checkpoint.seal import MANIFEST, Seal, Unsealed
    from callsheet.checkpoint.storage import FileSeal, Folder
    from callsheet.checkpoint.tensors import all_finite
    from callsheet.checkpoint.write import write_checkpoint

__all__ = [
    "MANIFEST",
    "AsyncWriter",
    "Checkpoint",
    "FileSeal",
    "Folder",
    "Found",
    "Loaded",
    "RankLost",
    "Seal",
    "Unsealed",
    "all_finite",
    "delete_checkpoint",
    "delete_later",
    "export_huggingface",
    "export_weights",
    "find_checkpoints",
    "flatten",
    "newest",
    "open_folder",
    "plain_copy",
    "point_latest",
    "read_checkpoint",
    "read_manifest",
    "unflatten",
    "write_checkpoint",
]
