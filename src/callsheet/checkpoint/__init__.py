"""Checkpoints: sealed folders of JSON and safetensors, which read back without running code."""

from callsheet.checkpoint.disk import FileSeal, measure, read_verified, verify
from callsheet.checkpoint.folder import (
    Checkpoint,
    Found,
    delete_checkpoint,
    find_checkpoints,
    newest,
    point_latest,
    read_checkpoint,
    write_checkpoint,
)
from callsheet.checkpoint.plain import flatten, unflatten
from callsheet.checkpoint.seal import Seal, Unsealed, read_manifest, read_seal, write_seal
from callsheet.checkpoint.tensors import all_finite, read_tensors, write_tensors

__all__ = [
    "Checkpoint",
    "FileSeal",
    "Found",
    "Seal",
    "Unsealed",
    "all_finite",
    "delete_checkpoint",
    "find_checkpoints",
    "flatten",
    "measure",
    "newest",
    "point_latest",
    "read_checkpoint",
    "read_manifest",
    "read_seal",
    "read_tensors",
    "read_verified",
    "unflatten",
    "verify",
    "write_checkpoint",
    "write_seal",
    "write_tensors",
]
