"""The names of a checkpoint's files, and of its tensors.

    checkpoint.txt              the marker, written first, removed last. It shows that callsheet may clear this folder
    state.json                  the document that all ranks share (`plain`)
    local-00000.json            a rank's own document; one for each rank
    shard-00000.safetensors     the parts of tensors that a rank wrote
    index.json                  which file holds which part of which tensor (`index`)
    manifest.json               the seal, written last (`seal`)

When a checkpoint is overwritten, the old one stays complete until the new one is sealed. The new files are written next to the
old ones, under other names (`state.2.json`, ...). Then the manifest, which lists the valid files, is replaced atomically.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

KIND = "callsheet.checkpoint"
MARKER = "checkpoint.txt"
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Names:
    """The file names of a checkpoint. There are two sets of names, so that one folder can hold an old checkpoint and a new one."""

    infix: str

    @property
    def state(self) -> str:
        """The name of the file with the state that all ranks share."""
        return f"state{self.infix}.json"

    @property
    def index(self) -> str:
        """The name of the file with the index of tensors."""
        return f"index{self.infix}.json"

    def local(self, rank: int) -> str:
        """Return the name of the file with the state that only rank `rank` has."""
        return f"local-{rank:05d}{self.infix}.json"

    def shard(self, rank: int) -> str:
        """Return the name of the file with the tensors that rank `rank` wrote."""
        return f"shard-{rank:05d}{self.infix}.safetensors"


FILE_NAMES = (Names(""), Names(".2"))


def names_in(files: Container[str]) -> Names | None:
    """Return the item of `FILE_NAMES` that matches the file names `files`. Return None if no item matches."""
    return next((names for names in FILE_NAMES if names.state in files and names.index in files), None)


SHARED_PREFIX = "state."
"""The prefix of the names of tensors in the state that all ranks share."""


def own(rank: int) -> str:
    """Return the prefix of the names of tensors that only rank `rank` has, such as `local-00003.`."""
    return f"local-{rank:05d}."
