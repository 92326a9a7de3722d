"""How much of a CUDA device's memory we can use, whatever ran on it before.

torch keeps the memory of work that has ended for later work. To the device such memory is taken;
to us it is free. Shares that count only what the device calls free depend on which work came
first: a sampler that was first used after a large pass had a tenth of its cache, for good.
"""

from __future__ import annotations

import torch


def whole(device: torch.device) -> int:
    """All that the device has, whoever uses it."""
    return torch.cuda.mem_get_info(device)[1]


def ours(device: torch.device) -> int:
    """All that this process has or can have, in use or not."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def give_back(device: torch.device, most_bytes: int) -> None:
    """Give back what torch keeps of work that has ended, where that is more than its share."""
    if device.type != "cuda":
        return
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if kept > most_bytes:
        torch.cuda.empty_cache()


def unused(device: torch.device) -> int:
    """What can still be allocated."""
    return ours(device) - torch.cuda.memory_allocated(device)
