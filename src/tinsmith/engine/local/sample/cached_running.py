"""What the new tokens of running sequences see by way of the cache.

Sequences of like length are taken at once, in one call over padded rows; on the CPU in float32 that
is torch's own kernel, where the heads that share keys are rows of one product (two cores, 16
sequences of 100 tokens: 0.14 ms a layer, and 0.26 ms as batched products). What counts there is how
often keys and values are read, so the samples of one prompt attend to it together; the two partial
results are then weighed by the probability each part holds.

Shapes: B sequences of like length, H query heads, K key/value heads, G = H / K, D head size, M
blocks of each sequence.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.model.families import AttentionSpec
from tinsmith.engine.local.sample.cached_rows import MASKED, Gathered, Rows, scores_of
from tinsmith.engine.local.sample.kvcache import KVCache


class _Own(NamedTuple):
    """A running sequence, and how many of its first blocks others of the step read too."""

    rows: Rows
    num_common: int


def of_like_length(running: list[Rows]) -> list[list[_Own]]:
    """Sequences whose own blocks are about as many: padding is then less than what is read."""
    num_readers = Counter(id(rows.table.common) for rows in running)
    parts: dict[int, list[_Own]] = {}
    for rows in running:
        table = rows.table
        num_common = len(table.common) if num_readers[id(table.common)] > 1 else 0
        num_own = max(4, len(table.blocks) - num_common)
        parts.setdefault((num_own - 1).bit_length(), []).append(_Own(rows, num_common))
    return list(parts.values())


class RunningRows:
    """Sequences of like length with a new token each, and the prompts that some of them share."""

    def __init__(self, part: list[_Own], cache: KVCache) -> None:
        shape = cache.shape
        self._num_kv_heads = shape.num_kv_heads
        self._device = shape.device
        rows = [own.rows.start for own in part]
        self.rows = torch.tensor(rows, device=shape.device)
        self.are_in_order = rows == list(range(len(rows)))
        """Whether they are the first rows of the step, in this order."""
        num_own = [own.rows.num_past - own.num_common * shape.block_tokens for own in part]
        self._own = torch.tensor(num_own, device=shape.device)
        self._longest = max(num_own) + 1
        self._are_equal = min(num_own) + 1 == self._longest
        self._own_bias: dict[int | None, Tensor | None] = {}
        self._gathered = Gathered(cache, _own_blocks(part, shape.blocks_for(self._longest)))
        sharing: dict[int, list[int]] = {}
        for member, own in enumerate(part):
            if own.num_common:
                sharing.setdefault(id(own.rows.table.common), []).append(member)
        self._prompts = [
            _SharedRows([part[member].rows for member in members], members, cache)
            for members in sharing.values()
        ]

    def attend(self, layer: int, spec: AttentionSpec, q: Tensor, sinks: Tensor | None) -> Tensor:
        """q (B, H, D) to (B, H, D)."""
        count, num_heads, head_dim = q.shape
        kv_heads = self._num_kv_heads
        # 1. Each sequence's own tokens: q to (B · K, G, D), over keys (B · K, longest, D).
        keys, values = self._gathered.read(layer)
        keys, values = keys[:, : self._longest], values[:, : self._longest]
        grouped = q.reshape(count * kv_heads, -1, head_dim)
        out, mass = _attend(grouped, keys, values, spec, self._bias(spec.window))
        # 2. Shared prompts, blended by mass: (B, K, G).
        if self._prompts:
            mass = mass.view(count, kv_heads, -1)
            out = out.view(count, kv_heads, -1, head_dim)
            grouped = grouped.view(count, kv_heads, -1, head_dim)
            for prompt in self._prompts:
                prompt_mass = prompt.blend(layer, spec, grouped, out, mass)
                if sinks is not None:
                    mass[prompt.members] = torch.logaddexp(prompt_mass, mass[prompt.members])
        out = out.view(count, num_heads, head_dim)
        if sinks is None:
            return out
        # 3. What the sinks leave of it: exp(mass) / (exp(mass) + exp(sink)).
        share = torch.sigmoid(mass.reshape(count, num_heads) - sinks.float())
        return (out.float() * share[..., None]).to(out.dtype)

    def _bias(self, window: int | None) -> Tensor | None:
        """(B · K, 1, longest), or None when every key is seen."""
        if window is not None and window >= self._longest:
            window = None
        if window not in self._own_bias:
            self._own_bias[window] = self._make_bias(window)
        return self._own_bias[window]

    def _make_bias(self, window: int | None) -> Tensor | None:
        if self._are_equal and window is None:
            return None
        key = torch.arange(self._longest, device=self._device)[None]
        own = self._own[:, None]
        is_seen = key <= own
        if window is not None:
            is_seen &= key > own - window
        bias = torch.where(is_seen, 0.0, MASKED)
        return bias.repeat_interleave(self._num_kv_heads, 0)[:, None]


def _own_blocks(part: list[_Own], num_blocks: int) -> np.ndarray:
    """(B, M): the last block of a sequence again where it has fewer."""
    found = np.empty((len(part), num_blocks), dtype=np.int64)
    for row, own in zip(found, part, strict=True):
        blocks = own.rows.table.blocks[own.num_common : own.num_common + num_blocks]
        row[: len(blocks)] = blocks
        row[len(blocks) :] = blocks[-1]
    return found


class _SharedRows:
    """The samples of one prompt: they attend together to the blocks they have in common."""

    def __init__(self, rows: list[Rows], members: list[int], cache: KVCache) -> None:
        device = cache.shape.device
        self.members = torch.tensor(members, device=device)
        positions = [each.num_past for each in rows]
        self._positions = torch.tensor(positions, device=device)
        self._last = max(positions)
        self._device = device
        self._gathered = Gathered(cache, np.array([rows[0].table.common], dtype=np.int64))

    def blend(
        self, layer: int, spec: AttentionSpec, q: Tensor, own: Tensor, own_mass: Tensor
    ) -> Tensor:
        """Mix the prompt's part into `own` (B, K, G, D).

        `own_mass` (B, K, G) is the log of the summed exponentials of the own scores; the answer
        (members, K, G) that of the prompt's.
        """
        keys, values = self._gathered.read(layer)
        kv_heads, num_tokens, head_dim = keys.shape
        count = len(self.members)
        # (members, K, G, D) to (K, members · G, D): one product for all samples of the prompt.
        grouped = q[self.members].transpose(0, 1).reshape(kv_heads, -1, head_dim)
        bias = None
        if spec.window is not None and self._last >= spec.window:
            key = torch.arange(num_tokens, device=self._device)
            is_hidden = key[None] <= (self._positions - spec.window)[:, None]
            bias = torch.where(is_hidden, MASKED, 0.0)
            bias = bias.repeat_interleave(grouped.shape[1] // count, 0)[None]
        out, mass = _attend(grouped, keys, values, spec, bias)
        # Back to (members, K, G) and (members, K, G, D).
        mass = mass.view(kv_heads, count, -1).transpose(0, 1)
        out = out.view(kv_heads, count, -1, head_dim).transpose(0, 1)
        # The prompt's share of the probability: exp(mass) / (exp(mass) + exp(own_mass)).
        share = torch.sigmoid(mass - own_mass[self.members])[..., None]
        own[self.members] = torch.lerp(own[self.members].float(), out.float(), share).to(own.dtype)
        return mass


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q (n, rows, D) over keys and values (n, tokens, D), with `bias` (1 or n, 1 or rows, tokens).

    Also (n, rows) float32: the log of each row's summed exponentials.
    """
    if q.device.type == "cpu" and q.dtype == torch.float32 and spec.softcap is None:
        if bias is not None:
            bias = bias.expand(len(q), q.shape[1], -1)[None]
        out, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q[None], keys[None], values[None], 0.0, False, attn_mask=bias, scale=spec.scale
        )
        return out[0].contiguous(), mass[0]
    scores = scores_of(q, keys, spec, bias)
    out = torch.bmm(torch.softmax(scores, dim=-1).to(values.dtype), values)
    return out, torch.logsumexp(scores, dim=-1)
