"""Which experts tokens went to, as arrays that can be kept, sent and recorded.

An array is (T, L, k): for each of T tokens, in each of the L layers that have experts, the k that
were chosen. Numbers take one byte up to 255 experts and two beyond. A token whose numbers are the
largest that fit is one of which nothing is known: there the router decides.
"""

from __future__ import annotations

import numpy as np


def dtype_for(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """What one number takes; the largest one that fits is no expert."""
    return np.dtype(np.uint8 if num_experts < 256 else np.uint16)


def unknown(num_tokens: int, like: np.ndarray) -> np.ndarray:
    """Nothing about so many tokens, in the form of `like`."""
    return np.full((num_tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def are_known(choices: np.ndarray) -> np.ndarray:
    """(T,): for which tokens there is something."""
    known: np.ndarray = (choices != np.iinfo(choices.dtype).max).all(axis=(1, 2))
    return known
