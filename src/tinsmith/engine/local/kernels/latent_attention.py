"""Latent attention of a decoding step: all heads of a row look at the same vectors of the cache.

Queries have come to the latent vectors before (`model.latent.heads`, absorbed), so that what the
cache holds of a token, its latent vector and its rotated key, is the key of every head, and the
first part of it the value. A program reads a block once for both. As in `decode_attention`, which
blocks are a row's is read from a table on the device, a row of length zero is padding, and long
scans are split. `sample.cached_latents` does the same in plain torch and is the reference.

Shapes: B rows, H heads, R the size of a latent vector, P that of the rotated part, S tokens of a
block, L layers, N blocks, T tokens that a program reads at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.decode_attention import (
    ENOUGH_PROGRAMS,
    RowBlocks,
    combine,
    num_splits,
)
from tinsmith.engine.local.kernels.launching import Staged

_TILE_HEADS = 16
"""Heads of a program; the matrix units take no fewer."""

_NUM_WARPS = 4
_NUM_STAGES = 2


def attend(
    q: Tensor,
    latents: Tensor,
    rows: RowBlocks,
    scale: float,
    layer: int,
    rank: int,
    enough_programs: int = ENOUGH_PROGRAMS,
) -> Tensor:
    """(B, H, R): the weighed sum of latent vectors that each head of a row's new token finds.

    q (B, H, R + P) are its queries. Its own vector, of latents (B, R + P), is one of those, and
    goes to the cache, whose `keys` are (L, N, 1, S, R + P).
    """
    num_rows, num_heads, size = q.shape
    num_tiles = triton.cdiv(num_heads, _TILE_HEADS)
    splits = num_splits(num_rows, num_tiles, enough_programs)
    out = q.new_empty(num_rows, num_heads, rank)
    parts, masses = out, out
    if splits > 1:
        shape = (num_rows, num_heads, splits)
        parts = torch.empty(*shape, rank, device=q.device, dtype=torch.float32)
        masses = torch.empty(*shape, 2, device=q.device, dtype=torch.float32)
    _attend_kernel[(num_rows, num_tiles, splits)](
        q.contiguous(),
        latents.contiguous(),
        out,
        parts,
        masses,
        rows.keys,
        rows.lengths,
        rows.firsts,
        rows.blocks,
        layer,
        rows.keys.shape[1],
        scale,
        HEADS=num_heads,
        TILE=_TILE_HEADS,
        RANK=rank,
        RANK_PAD=max(16, triton.next_power_of_2(rank)),
        ROTATED=size - rank,
        ROTATED_PAD=max(16, triton.next_power_of_2(size - rank)),
        BLOCK=rows.keys.shape[3],
        # In float32, so many vectors as fit into the shared memory of smaller devices.
        TOKENS=16 if q.dtype == torch.float32 else rows.keys.shape[3],
        SPLITS=splits,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
    if splits > 1:
        combine(out, parts, masses, rows.lengths)
    return out


@Staged
@triton.jit(do_not_specialize=["layer"])
def _attend_kernel(
    q,
    latents,
    out,
    parts,
    masses,
    keys,
    lengths,
    firsts,
    blocks,
    layer,
    num_blocks,
    scale,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # One program per row, tile of heads and split.
    row = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    num_tokens = tl.load(lengths + row)
    if num_tokens == 0:
        return
    table = blocks + tl.load(firsts + row)

    # This split's share of the past, in steps of T tokens; a block is one step or several.
    num_past = num_tokens - 1
    num_steps = tl.cdiv(num_past, TOKENS)
    share = tl.cdiv(num_steps, SPLITS)
    start = split * share
    stop = tl.minimum(start + share, num_steps)
    layer_blocks = layer.to(tl.int64) * num_blocks

    # Queries (TILE, R) and (TILE, P), and the new token's vector (1, R) and rotated key (1, P).
    SIZE: tl.constexpr = RANK + ROTATED
    dtype = q.dtype.element_ty
    head = tile * TILE + tl.arange(0, TILE)
    low = tl.arange(0, RANK_PAD)
    high = tl.arange(0, ROTATED_PAD)
    is_low = (low < RANK)[None, :]
    is_high = (high < ROTATED)[None, :]
    is_head = (head < HEADS)[:, None]
    source = q + (row * HEADS + head)[:, None] * SIZE
    q_low = tl.load(source + low[None, :], mask=is_head & is_low, other=0.0)
    q_high = tl.load(source + RANK + high[None, :], mask=is_head & is_high, other=0.0)
    own = latents + row * SIZE
    own_low = tl.load(own + low[None, :], mask=is_low, other=0.0)
    own_high = tl.load(own + RANK + high[None, :], mask=is_high, other=0.0)
    # One program puts it into the row's last block...
    if (split == 0) & (tile == 0):
        last = tl.load(table + num_past // BLOCK)
        to = keys + ((layer_blocks + last) * BLOCK + num_past % BLOCK) * SIZE
        tl.store(to + low[None, :], own_low, mask=is_low)
        tl.store(to + RANK + high[None, :], own_high, mask=is_high)
    # ... and those of the first split begin with it. Online softmax: peak and total (TILE,), sums
    # (TILE, R).
    peak = tl.sum(q_low.to(tl.float32) * own_low.to(tl.float32), axis=1)
    peak += tl.sum(q_high.to(tl.float32) * own_high.to(tl.float32), axis=1)
    peak = peak * scale
    total = tl.full([TILE], 1.0, tl.float32)
    sums = tl.zeros([TILE, RANK_PAD], tl.float32) + own_low.to(tl.float32)
    if SPLITS > 1:
        peak = tl.where(split == 0, peak, -1e30)
        total = tl.where(split == 0, total, 0.0)
        sums = tl.where(split == 0, sums, 0.0)
    token = tl.arange(0, TOKENS)
    for index in range(start, stop):
        # Vectors (T, R) and rotated keys (T, P).
        first = index * TOKENS
        block = tl.load(table + first // BLOCK)
        is_seen = first + token < num_past
        place = keys + ((layer_blocks + block) * BLOCK + first % BLOCK + token)[:, None] * SIZE
        vectors = tl.load(place + low[None, :], mask=is_seen[:, None] & is_low, other=0.0)
        turned = tl.load(place + RANK + high[None, :], mask=is_seen[:, None] & is_high, other=0.0)
        # Scores (TILE, T).
        scores = tl.dot(q_low, tl.trans(vectors), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(turned), scores, input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, -1e30)
        # What was summed so far fades by exp(old peak - new peak).
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.where(is_seen[None, :], tl.exp(scores - new_peak[:, None]), 0.0)
        fade = tl.exp(peak - new_peak)
        # Weighted sum of the same vectors: (TILE, R).
        total = total * fade + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(dtype), vectors, sums * fade[:, None], input_precision="ieee")
        peak = new_peak
    # Alone: normalize and store (TILE, R). Else leave the sums to `combine`.
    is_in = is_head & is_low
    if SPLITS == 1:
        to = out + (row * HEADS + head)[:, None] * RANK + low[None, :]
        tl.store(to, (sums / total[:, None]).to(dtype), mask=is_in)
    else:
        part = (row * HEADS + head) * SPLITS + split
        tl.store(parts + part[:, None] * RANK + low[None, :], sums, mask=is_in)
        tl.store(masses + part * 2, peak, mask=head < HEADS)
        tl.store(masses + part * 2 + 1, total, mask=head < HEADS)
