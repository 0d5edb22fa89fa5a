"""What mere counting says of the tokens that are learnt: the baselines of a language model."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from callsheet.recipes.examples import Examples


class TokenCounts:
    """How often each token was an answer's, and how often it followed which.

    What was never seen has its share as well: of single tokens as if each had been seen once more (Laplace); of pairs, as much as there
    are different tokens that followed the first, dealt out as the single ones are (Witten and Bell 1991).

    Args:
        examples: those that are counted.
        vocabulary: how many tokens there are.
    """

    def __init__(self, examples: Examples, vocabulary: int) -> None:
        before, learnt = _pairs(examples)
        self._vocabulary = vocabulary
        single = np.bincount(learnt, minlength=vocabulary) + 1.0
        self._single: NDArray[Any] = single / single.sum()
        self._pairs, self._seen = np.unique(before * vocabulary + learnt, return_counts=True)
        self._seen_before = np.bincount(before, minlength=vocabulary)
        self._followers = np.bincount(self._pairs // vocabulary, minlength=vocabulary)

    def cross_entropies(self, examples: Examples) -> tuple[float, float]:
        """Of the learnt tokens of these examples, in nats a token: by single tokens, and by the token before."""
        before, learnt = _pairs(examples)
        single = self._single[learnt]
        pair = before * self._vocabulary + learnt
        place = np.minimum(np.searchsorted(self._pairs, pair), len(self._pairs) - 1)
        seen = np.where(self._pairs[place] == pair, self._seen[place], 0)
        followers = self._followers[before]
        joint = np.where(
            followers > 0, (seen + followers * single) / np.maximum(self._seen_before[before] + followers, 1), single
        )
        return float(-np.log(single).mean()), float(-np.log(joint).mean())


def _pairs(examples: Examples) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The token before each learnt one, and the learnt one; the first of an example is not learnt."""
    is_learnt = examples.is_learnt.copy()
    is_learnt[examples.starts] = False
    places = np.flatnonzero(is_learnt)
    return examples.ids[places - 1].astype(np.int64), examples.ids[places].astype(np.int64)
