"""The names of a checkpoint's files, and of its tensors.

    checkpoint.txt              written first, removed last: this folder is ours to clear
    state.json                  the document of what all ranks share (`plain`)
    local-00000.json            the document of what is a rank's own; one for each rank
    shard-00000.safetensors     the parts of tensors that a rank wrote
    index.json                  which part of which tensor stands where (`index`)
    manifest.json               the seal, written last (`seal`)

A checkpoint that is overwritten stays whole until the new one is sealed: the new files stand beside the old ones under their other
names (`state.2.json`, ...), and the manifest, which says which ones count, changes in one instant.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

KIND = "callsheet.checkpoint"
MARKER = "checkpoint.txt"
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one of the two sets of files that a folder can hold."""

    infix: str

    @property
    def state(self) -> str:
        """The shared document."""
        return f"state{self.infix}.json"

    @property
    def index(self) -> str:
        """The index."""
        return f"index{self.infix}.json"

    def local(self, rank: int) -> str:
        """A rank's own document."""
        return f"local-{rank:05d}{self.infix}.json"

    def shard(self, rank: int) -> str:
        """A rank's tensors."""
        return f"shard-{rank:05d}{self.infix}.safetensors"


NAMES = (Names(""), Names(".2"))


def names_in(files: Container[str]) -> Names | None:
    """Under which names these files stand; None where they are no checkpoint's."""
    return next((names for names in NAMES if names.state in files and names.index in files), None)


SHARED = "state."
"""Before the name of every shared tensor."""


def own(rank: int) -> str:
    """Before the name of every tensor that is a rank's own."""
    return f"local-{rank:05d}."
