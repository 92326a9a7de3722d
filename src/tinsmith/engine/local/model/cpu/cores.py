"""Work in parts, several of which run at once: each on a core of its own.

torch divides one operation among all cores, which wait for each other at its end; where operations
are small they wait longer than they work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_MOST_CORES = 8
"""As many as Python can keep busy."""

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def on_all_cores(
    work: Callable[[Sequence[_Part]], list[_Result]], parts: Sequence[_Part]
) -> list[_Result]:
    """The results of `work` on parts, in their order; it is given some of them, and may not ask
    for gradients. Which core has which part changes no result."""
    num_threads = torch.get_num_threads()
    num_cores = min(num_threads, len(parts), _MOST_CORES)
    if num_cores < 2:
        return work(parts)

    def share(index: int) -> list[_Result]:
        torch.set_num_threads(1)  # of this thread
        with torch.no_grad():
            return work(parts[index::num_cores])

    try:
        shares = list(_pool(num_cores).map(share, range(num_cores)))
    finally:
        torch.set_num_threads(num_threads)  # also what threads to come begin with
    return [shares[i % num_cores][i // num_cores] for i in range(len(parts))]


@functools.cache
def _pool(num_cores: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_cores, thread_name_prefix="cores")
