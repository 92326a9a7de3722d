"""`Ranks`: the processes that have one model together, as one of them sees the others.

Tensors are summed and gathered by `torch.distributed`; small values travel on the sockets between
the first rank and the others (`link`). Every rank makes the same calls in the same order. One that
cannot, because memory ran out or a product failed, would leave the others waiting for ever: it ends
its process, which ends them all, and the server starts them again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from tinsmith.engine.local.ranks.link import Link

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Exit status of a rank that could not do what the others did."""

T = TypeVar("T")


class Ranks:
    """A single process: there are no others to add to, wait for or agree with."""

    index = 0
    count = 1

    def sum_(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all ranks, which is the same to the bit on all."""

    def max_(self, tensor: Tensor) -> None:
        """Replace a tensor by its largest numbers over all ranks."""

    def copy_(self, tensor: Tensor) -> None:
        """Replace a tensor by the first rank's."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in their order; all have the same shape."""
        return [tensor]

    def numbers(self, number: float) -> list[float]:
        """The number of every rank, in their order."""
        return [number]

    def everywhere(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on all ranks."""
        return flags

    def first(self, compute: Callable[[], T]) -> T:
        """What the first rank computes, or its error; the others compute nothing."""
        return compute()

    def give_up(self, error: Exception) -> None:
        """Call it where this rank fails and others may not."""


ALONE = Ranks()


class JoinedRanks(Ranks):
    """One of several; `join` before the first call."""

    def __init__(self, index: int, count: int, link: Link) -> None:
        self.index = index
        self.count = count
        self._link = link

    def join(self, folder: Path, device: torch.device) -> None:
        """Meet the others, through a file in a folder that is theirs alone."""
        # All ranks are on this machine: nobody else is to reach their ports.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo" if os.uname().sysname == "Linux" else "lo0")
        has_own_device = device.type == "cuda" and torch.cuda.device_count() >= self.count
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_own_device else "gloo",
            store=dist.FileStore(str(folder / "ranks"), self.count),
            rank=self.index,
            world_size=self.count,
        )

    def sum_(self, *tensors: Tensor) -> None:
        if not tensors:
            return
        if len(tensors) == 1 and tensors[0].is_contiguous():
            dist.all_reduce(tensors[0])
            return
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(joined)
        parts = joined.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def max_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def copy_(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(parts, tensor)
        return parts

    def numbers(self, number: float) -> list[float]:
        return [float(found) for found in self.gather(torch.tensor([number], dtype=torch.float64))]

    def everywhere(self, flags: list[bool]) -> list[bool]:
        found = self.gather(torch.tensor(flags, dtype=torch.int32))
        return [bool(flag) for flag in torch.stack(found).amin(dim=0).tolist()]

    def first(self, compute: Callable[[], T]) -> T:
        if self.index == 0:
            result: T | None = None
            error: Exception | None = None
            try:
                result = compute()
            except Exception as problem:  # whatever it is, all ranks meet it
                error = problem
            self._link.tell((result, error))
        else:
            result, error = self._link.hear()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # no error, so it is what was computed

    def give_up(self, error: Exception) -> None:
        logger.critical("rank %d fails, and the others with it", self.index, exc_info=error)
        logging.shutdown()
        os._exit(EXIT_STATUS)
