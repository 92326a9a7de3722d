"""What a device's memory is for: divided once, before anything is computed.

Keys and values of samples get a pool of fixed size from it (`sample.kvcache`), so that a sampler
that is first used after a large pass has as much as one in a fresh server. Adapters that train, and
frozen ones, have a share beyond which the server puts idle models on disk and lets idle samplers
go; one for which there is no memory at all is refused with the numbers. In that share is also what
only saves time, copies of adapters that are sampled side by side and memory for the next gradient;
it leaves first. What is left is for passes: activations, logits and captured graphs. Of it torch
keeps what a pass has used for the next one; what exceeds the share is given back when the pass has
ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tinsmith.engine.local import device_memory
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.ranks.group import ALONE, Ranks
from tinsmith.errors import EngineError
from tinsmith.memory import machine_bytes

_CPU_CACHE_BYTES = 1 << 30
"""Most for keys and values on a CPU, which is slow long before this is full."""

_MOST_OF_FREE = 0.9
"""Most that is planned of the CUDA memory that other processes leave; the rest lets them grow."""

_MOST_WEIGHTS = 0.6
"""Share of all memory that base models get where more are served than fit: fewer are expected to be
in use at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes for each part, of the device's or, on the CPU, of the machine's."""

    total_bytes: int
    weights_bytes: int
    """Of base models."""

    cache_bytes: int
    """For the keys and values of each base model."""

    num_caches: int
    adapter_bytes: int
    """For adapters, their gradients and moments, frozen samplers, and stacks of these."""

    pass_bytes: int
    """For activations, logits and graphs: what the other parts leave."""

    @property
    def stack_bytes(self) -> int:
        """Most that each base model's stack of adapters may take of their share."""
        return self.adapter_bytes // 4 // self.num_caches

    def __str__(self) -> str:
        each = "" if self.num_caches == 1 else f" for each of {self.num_caches} base models"
        return (
            f"{_size(self.total_bytes)} of memory: {_size(self.weights_bytes)} base weights, "
            f"{_size(self.cache_bytes)} keys and values{each}, "
            f"{_size(self.adapter_bytes)} adapters, {_size(self.pass_bytes)} passes"
        )

    def check_adapter(self, num_bytes: int, held_bytes: int) -> None:
        """Refuse an adapter that does not fit beside those that are held, even if passes got no
        memory."""
        room = self.adapter_bytes + self.pass_bytes - held_bytes
        if num_bytes > room:
            raise EngineError(
                f"the adapter takes {num_bytes:,} bytes, but only {max(0, room):,} bytes are left "
                f"for it ({self}); unload models, ask for a smaller rank, or lower "
                "max_loaded_models"
            )


def plan_memory(
    config: LocalEngineConfig,
    device: torch.device,
    weights_bytes: Sequence[int],
    ranks: Ranks = ALONE,
    *,
    num_names: int | None = None,
) -> MemoryPlan:
    """Divide what the device has for base models of these sizes, and all that works with them.

    The answer depends on the device, the settings and the models, and not on what was done before;
    of several ranks, on the device with the least. Where some of the models have several names,
    `num_names` counts them: each is sampled by itself.
    """
    total = int(min(ranks.numbers(_planned_bytes(config.memory_fraction, device))))
    weights = _weights_share(config, total, weights_bytes)
    rest = max(0, total - weights)
    count = max(1, len(weights_bytes), num_names or 0)
    share = rest // 3 // count
    if device.type != "cuda":
        share = min(share, _CPU_CACHE_BYTES)
    cache = config.kv_cache_bytes or share
    rest = max(0, rest - count * cache)
    return MemoryPlan(
        total_bytes=total,
        weights_bytes=weights,
        cache_bytes=cache,
        num_caches=count,
        adapter_bytes=rest // 4,
        pass_bytes=rest - rest // 4,
    )


def _weights_share(config: LocalEngineConfig, total: int, weights_bytes: Sequence[int]) -> int:
    """Memory for all models, within their budget; without one, at most `_MOST_WEIGHTS` of the whole
    or the largest model."""
    weights = sum(weights_bytes)
    if config.memory_budget_bytes is not None:
        return min(weights, config.memory_budget_bytes)
    return min(weights, max([int(_MOST_WEIGHTS * total), *weights_bytes]))


def _planned_bytes(fraction: float, device: torch.device) -> float:
    """A fraction of the device's memory, whether or not another engine has taken its own already;
    but never all that others leave."""
    if device.type != "cuda":
        return fraction * machine_bytes()
    whole, ours = device_memory.whole(device), device_memory.ours(device)
    return min(fraction * whole, max(fraction, _MOST_OF_FREE) * ours)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
