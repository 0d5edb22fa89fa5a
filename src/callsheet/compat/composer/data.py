"""`composer.core.DataSpec`: a dataloader with a function that prepares its batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from callsheet.compat.composer.rejections import reject

_SPLIT_HINT = "a microbatch is a slice of every tensor of the batch; have the dataloader make batches of that kind"
_COUNT_HINT = "samples and tokens are counted by the first dimension of the batch and by its input_ids; leave it out"


class DataSpec:
    """A dataloader, and a function that changes each of its batches.

    Args:
        dataloader: an iterable of batches.
        num_samples: stored as an attribute, and not used.
        num_tokens: stored as an attribute, and not used.
        batch_transforms: takes a batch and returns the changed batch. This function is called after the dataloader's `collate_fn`,
            in the dataloader's worker processes if there are any.
        microbatch_transforms, split_batch, get_num_samples_in_batch, get_num_tokens_in_batch: must be None.

    Raises:
        NotSupported: a function is given that must be None.
    """

    def __init__(
        self,
        dataloader: Any,
        num_samples: int | None = None,
        num_tokens: int | None = None,
        batch_transforms: Callable[[Any], Any] | None = None,
        microbatch_transforms: Callable[[Any], Any] | None = None,
        split_batch: Callable[..., Any] | None = None,
        get_num_samples_in_batch: Callable[[Any], Any] | None = None,
        get_num_tokens_in_batch: Callable[[Any], Any] | None = None,
    ) -> None:
        _reject(microbatch_transforms, split_batch, get_num_samples_in_batch, get_num_tokens_in_batch)
        self.dataloader, self.num_samples, self.num_tokens = dataloader, num_samples, num_tokens
        self.batch_transforms = batch_transforms


def loader_of(given: Any, batches: int = -1) -> Any:
    """Return the dataloader of `given`: a dataloader, a `DataSpec` (callsheet's or Composer's), or a dict of a DataSpec's arguments.

    If `batches` is 0 or more, only as many batches are used.
    """
    if isinstance(given, Mapping) and "dataloader" in given:
        given = DataSpec(**given)
    loader = getattr(given, "dataloader", given)
    if loader is not given:
        if not isinstance(given, DataSpec):  # it is Composer's DataSpec, which accepts functions that callsheet does not support
            names = ("microbatch_transforms", "split_batch", "get_num_samples_in_batch", "_get_num_tokens_in_batch")
            _reject(*(_own(getattr(given, name, None)) for name in names))
        if (transform := _own(getattr(given, "batch_transforms", None))) is not None:
            loader = _transform_batches(loader, transform)
    return loader if loader is None or batches < 0 else _Cut(loader, batches)


def is_loader(given: Any) -> bool:
    """Return whether the object is a dataloader or an evaluator. A list is neither: it contains dataloaders or batches."""
    if isinstance(given, DataLoader) or hasattr(given, "dataloader"):
        return True
    if isinstance(given, Mapping):
        return "dataloader" in given
    return isinstance(given, Iterable) and not isinstance(given, (torch.Tensor, tuple, list, str))


class _Cut:
    """A dataloader that yields only the first batches of another dataloader."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __len__(self) -> int:
        return min(self._batches, len(self._loader))

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._batches)


class _CollatedAndTransformed:
    """A `collate_fn` that calls another `collate_fn` and then a transform. It can be pickled for worker processes."""

    def __init__(self, collate: Callable[[Any], Any], transform: Callable[[Any], Any]) -> None:
        self._collate, self._transform = collate, transform

    def __call__(self, samples: Any) -> Any:
        return self._transform(self._collate(samples))


class _Transformed:
    """Applies a transform to every batch of an iterable that is not a DataLoader."""

    def __init__(self, loader: Any, transform: Callable[[Any], Any]) -> None:
        self._loader, self._transform = loader, transform

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._transform, self._loader)


def _transform_batches(loader: Any, transform: Callable[[Any], Any]) -> Any:
    if not isinstance(loader, DataLoader):
        return _Transformed(loader, transform)
    # Change a copy, not the caller's dataloader. The Trainer can shard and resume the copy like any DataLoader.
    changed = copy.copy(loader)
    changed.collate_fn = _CollatedAndTransformed(loader.collate_fn, transform)
    return changed


def _own(function: Any) -> Any:
    """Return `function` if the user gave it, and None if it is a default function of Composer's DataSpec."""
    return None if getattr(function, "__name__", "").startswith("_default") else function


def _reject(microbatch_transforms: Any, split_batch: Any, samples: Any, tokens: Any) -> None:
    reject(
        "DataSpec",
        {
            "microbatch_transforms": (microbatch_transforms, None, "give batch_transforms, which changes the whole batch"),
            "split_batch": (split_batch, None, _SPLIT_HINT),
            "get_num_samples_in_batch": (samples, None, _COUNT_HINT),
            "get_num_tokens_in_batch": (tokens, None, _COUNT_HINT),
        },
    )
