"""Baselines for a language model, computed from counts of tokens and of pairs of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from callsheet.recipes.data.examples import Examples


class TokenCounts:
    """Counts of the target tokens, and of pairs in which a target token follows another token.

    The counts are smoothed, so that unseen tokens have a probability. One is added to the count of each token (Laplace). To the
    counts of pairs, the probabilities of single tokens are added, multiplied by the number of different successors of the first
    token (Witten and Bell 1991).

    Args:
        examples: the examples to count.
        vocabulary: the number of tokens.
    """

    def __init__(self, examples: Examples, vocabulary: int) -> None:
        before, target = _pairs(examples)
        self._vocabulary = vocabulary
        single = np.bincount(target, minlength=vocabulary) + 1.0
        self._single: NDArray[Any] = single / single.sum()
        self._pairs, self._seen = np.unique(before * vocabulary + target, return_counts=True)
        self._seen_before = np.bincount(before, minlength=vocabulary)
        self._followers = np.bincount(self._pairs // vocabulary, minlength=vocabulary)

    def cross_entropies(self, examples: Examples) -> tuple[float, float]:
        """Return the unigram and the bigram cross-entropy of the target tokens, in nats per token.

        The first uses the counts of single tokens, the second those of pairs.
        """
        before, target = _pairs(examples)
        single = self._single[target]
        pair = before * self._vocabulary + target
        place = np.minimum(np.searchsorted(self._pairs, pair), len(self._pairs) - 1)
        seen = np.where(self._pairs[place] == pair, self._seen[place], 0)
        followers = self._followers[before]
        joint = np.where(
            followers > 0, (seen + followers * single) / np.maximum(self._seen_before[before] + followers, 1), single
        )
        return float(-np.log(single).mean()), float(-np.log(joint).mean())


def _pairs(examples: Examples) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays: the token before each target token, and the target tokens.

    There always is a token before, because the first token of an example is never a target.
    """
    is_target = examples.is_target.copy()
    is_target[examples.starts] = False
    places = np.flatnonzero(is_target)
    return examples.ids[places - 1].astype(np.int64), examples.ids[places].astype(np.int64)
