"""Small tensors between host and device, for which neither waits.

A plain copy ends when everything the device was asked for before has ended. From and to pinned
memory the host goes on at once, and waits for what it reads only where it reads it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on the device."""
    if device.type != "cuda":
        return x.to(device)
    if torch.cuda.is_current_stream_capturing():
        # A graph would read the host's memory each time, whatever is there by then.
        raise RuntimeError("a tensor of the host's cannot become part of a graph")
    return x.pin_memory().to(device, non_blocking=True)


def begin_copy(x: Tensor) -> Callable[[], Tensor]:
    """A tensor on its way to the host; what is returned waits for it, and gives it once or more."""
    if not x.is_cuda:
        return x.cpu
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copy.copy_(x, non_blocking=True)
    is_there = torch.cuda.Event()
    is_there.record(torch.cuda.current_stream(x.device))

    def fetch() -> Tensor:
        is_there.synchronize()
        return copy

    return fetch
