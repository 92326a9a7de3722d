"""How work is divided among cores: in parts that each have one, or not at all.

torch divides one operation among all cores, which wait for each other at its end; where operations
are small they wait longer than they work. And where it divides depends on how many there are: the
last numbers of a share are found in another way than those in its midst, so that an exponential may
have other bits.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import TypeVar

import torch

_MOST_CORES = 8
"""As many as Python can keep busy."""

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


class _Here(threading.local):
    """Of the thread that asks."""

    num_idle = 0
    """Cores that `undivided` keeps from torch; none where it is not in force."""


_here = _Here()


def num_cores() -> int:
    """How many there are for `on_all_cores` and `divided`."""
    return _here.num_idle or torch.get_num_threads()


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """torch computes each operation on one core, but for those in `divided`."""
    before = _here.num_idle
    _here.num_idle = num_cores()
    try:
        with _threads(1):
            yield
    finally:
        _here.num_idle = before


def divided() -> contextlib.AbstractContextManager[None]:
    """Within `undivided`: torch divides these operations after all."""
    return _threads(num_cores())


def on_all_cores(
    work: Callable[[Sequence[_Part]], list[_Result]], parts: Sequence[_Part]
) -> list[_Result]:
    """The results of `work` on parts, in their order; it is given some of them, and may not ask
    for gradients. Which core has which part changes no result."""
    count = min(num_cores(), len(parts), _MOST_CORES)
    if count < 2:
        return work(parts)
    is_inference = torch.is_inference_mode_enabled()

    def share(index: int) -> list[_Result]:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode(is_inference), torch.no_grad():
            return work(parts[index::count])

    with _threads(torch.get_num_threads()):  # also what threads to come begin with
        others = [_pool(count - 1).submit(share, index) for index in range(1, count)]
        try:
            shares = [share(0)]
        finally:
            futures.wait(others)
        shares += [other.result() for other in others]
    return [shares[i % count][i // count] for i in range(len(parts))]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _pool(num_others: int) -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(num_others, thread_name_prefix="cores")
