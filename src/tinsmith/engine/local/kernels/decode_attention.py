"""Triton kernels between the projections of a decoding step: heads, cache and attention.

A row of the step is one sequence with one new token. Which blocks of the cache hold its keys and
values is read from a table on the device, which never moves, so that a captured graph stays valid
while sequences come, go and grow. A row of length zero is padding and is left alone.

The new token's keys and values are written first, then the row attends to all of its tokens, a
block at a time from the first. `cached_attention` does the same in plain torch and is the
reference.

Shapes: B rows, H query heads, K key/value heads, G = H / K, D head size, S tokens of a block,
L layers, N blocks, P splits of a scan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.model.families import AttentionSpec

_EVERYTHING = 1 << 30
_NUM_WARPS = 2
_NUM_STAGES = 3
_MAX_SPLITS = 16
ENOUGH_PROGRAMS = 512
"""Programs that keep a large device busy; with fewer rows, scans are split."""


class Heads(NamedTuple):
    """How a row of the fused projection divides into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class RowBlocks(NamedTuple):
    """The cache, and which of its blocks each row reads."""

    keys: Tensor
    """(L, N, K, S, D)."""

    values: Tensor
    lengths: Tensor
    """(B,) int64: tokens of each row, the new one included; zero for padding."""

    firsts: Tensor
    """(B,) int64: where the row's blocks begin in `blocks`."""

    blocks: Tensor
    """int32: the rows' tables, one after the other."""


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """Into how many parts the scans of so many rows are cut, whatever their lengths."""
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * num_rows * num_kv_heads <= ENOUGH_PROGRAMS:
        splits *= 2
    return splits


def prepare(
    qkv: Tensor,
    rows: RowBlocks,
    rotation: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    layer: int,
    heads: Heads,
) -> None:
    """Norm and rotate the heads of qkv (B, (H + 2K) · D): queries in place, the rest to the cache.

    `rotation` are cosines and sines (B, D / 2); `norms` the weights (D,) for queries and keys.
    """
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    grid = (len(qkv), heads.num_heads + 2 * heads.num_kv_heads)
    _prepare_kernel[grid](
        qkv,
        *rows,
        *rotation,
        q_norm,
        k_norm,
        layer,
        rows.keys.shape[1],
        eps,
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        DIM=heads.head_dim,
        HALF_PAD=triton.next_power_of_2(heads.head_dim // 2),
        BLOCK=rows.keys.shape[3],
        HAS_NORM=norms is not None,
        num_warps=1,
    )


def attend(qkv: Tensor, rows: RowBlocks, spec: AttentionSpec, layer: int, heads: Heads) -> Tensor:
    """(B, H · D): attention of each row's prepared queries over its keys and values in the
    cache."""
    num_rows = len(qkv)
    out = qkv.new_empty(num_rows, heads.num_heads * heads.head_dim)
    splits = num_splits(num_rows, heads.num_kv_heads)
    parts, masses = out, out
    if splits > 1:
        shape = (num_rows, heads.num_heads, splits)
        parts = torch.empty(*shape, heads.head_dim, device=qkv.device, dtype=torch.float32)
        masses = torch.empty(*shape, 2, device=qkv.device, dtype=torch.float32)
    group = heads.num_heads // heads.num_kv_heads
    _attend_kernel[(num_rows, heads.num_kv_heads, splits)](
        qkv,
        out,
        parts,
        masses,
        *rows,
        layer,
        rows.keys.shape[1],
        spec.scale,
        0.0 if spec.softcap is None else spec.softcap,
        _EVERYTHING if spec.window is None else spec.window,
        KV_HEADS=heads.num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        DIM=heads.head_dim,
        DIM_PAD=max(16, triton.next_power_of_2(heads.head_dim)),
        BLOCK=rows.keys.shape[3],
        SPLITS=splits,
        HAS_CAP=spec.softcap is not None,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
    if splits > 1:
        _combine_kernel[(num_rows, heads.num_heads)](
            out,
            parts,
            masses,
            rows.lengths,
            HEADS=heads.num_heads,
            DIM=heads.head_dim,
            DIM_PAD=triton.next_power_of_2(heads.head_dim),
            SPLITS=splits,
            num_warps=1,
        )
    return out


@triton.jit(do_not_specialize=["layer"])
def _prepare_kernel(
    qkv,
    keys,
    values,
    lengths,
    firsts,
    blocks,
    cosines,
    sines,
    q_norm,
    k_norm,
    layer,
    num_blocks,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    # One program per row and head, in the order q, k, v; the head as two halves, (HALF_PAD,) each.
    row = tl.program_id(0)
    head = tl.program_id(1)
    dtype = qkv.dtype.element_ty
    half = tl.arange(0, HALF_PAD)
    is_in = half < DIM // 2
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM + half
    left = tl.load(source, mask=is_in, other=0.0).to(tl.float32)
    right = tl.load(source + DIM // 2, mask=is_in, other=0.0).to(tl.float32)
    # Queries and keys: RMS norm over D, where the model has one...
    if head < HEADS + KV_HEADS:
        if HAS_NORM:
            square = tl.sum(left * left, axis=0) + tl.sum(right * right, axis=0)
            factor = tl.rsqrt(square / DIM + eps)
            if head < HEADS:
                left_weight = tl.load(q_norm + half, mask=is_in, other=0.0).to(tl.float32)
                right_weight = tl.load(q_norm + DIM // 2 + half, mask=is_in, other=0.0)
                right_weight = right_weight.to(tl.float32)
            else:
                left_weight = tl.load(k_norm + half, mask=is_in, other=0.0).to(tl.float32)
                right_weight = tl.load(k_norm + DIM // 2 + half, mask=is_in, other=0.0)
                right_weight = right_weight.to(tl.float32)
            left = left * factor * left_weight
            right = right * factor * right_weight
        # ... then RoPE: rotate each pair (i, i + D/2) by the angle of the row's position.
        cos = tl.load(cosines + row * (DIM // 2) + half, mask=is_in, other=0.0).to(tl.float32)
        sin = tl.load(sines + row * (DIM // 2) + half, mask=is_in, other=0.0).to(tl.float32)
        rotated = left * cos - right * sin
        right = right * cos + left * sin
        left = rotated
    # Queries stay in qkv; keys and values of the new token go to the row's last block.
    if head < HEADS:
        tl.store(source, left.to(dtype), mask=is_in)
        tl.store(source + DIM // 2, right.to(dtype), mask=is_in)
    else:
        length = tl.load(lengths + row)
        if length > 0:
            block = tl.load(blocks + tl.load(firsts + row) + (length - 1) // BLOCK)
            kv_head = head - HEADS
            target = keys
            if kv_head >= KV_HEADS:
                target = values
                kv_head -= KV_HEADS
            # Vectors (D,) of (L, N, K, S, D), counted in 64 bits.
            vector = (layer.to(tl.int64) * num_blocks + block) * KV_HEADS + kv_head
            vector = vector * BLOCK + (length - 1) % BLOCK
            target += vector * DIM + half
            tl.store(target, left.to(dtype), mask=is_in)
            tl.store(target + DIM // 2, right.to(dtype), mask=is_in)


@triton.jit(do_not_specialize=["layer"])
def _attend_kernel(
    qkv,
    out,
    parts,
    masses,
    keys,
    values,
    lengths,
    firsts,
    blocks,
    layer,
    num_blocks,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    # One program per row, key/value head and split; the G query heads of a group share its keys.
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_tokens = tl.load(lengths + row)
    if num_tokens == 0:
        return
    table = blocks + tl.load(firsts + row)

    # This split's share of the blocks that reach into the window.
    first = tl.maximum(num_tokens - window, 0)
    first_block = first // BLOCK
    stop_block = tl.cdiv(num_tokens, BLOCK)
    share = tl.cdiv(stop_block - first_block, SPLITS)
    start = first_block + split * share
    stop = tl.minimum(start + share, stop_block)

    # Queries of the group: (GROUP_PAD, DIM_PAD).
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    is_in = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    at = (kv_head * GROUP + member)[:, None] * DIM + dim[None, :]
    q = tl.load(qkv + row * (GROUP + 2) * KV_HEADS * DIM + at, mask=is_in, other=0.0)
    # Online softmax: peak and total (GROUP_PAD,), sums (GROUP_PAD, DIM_PAD).
    peak = tl.full([GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    token = tl.arange(0, BLOCK)
    inside = token[:, None] * DIM + dim[None, :]
    layer_blocks = layer.to(tl.int64) * num_blocks
    for index in range(start, stop):
        # A block's keys and values of one head: (S, D), D numbers apart.
        block = tl.load(table + index)
        place = ((layer_blocks + block) * KV_HEADS + kv_head) * (BLOCK * DIM) + inside
        position = index * BLOCK + token
        is_seen = (position >= first) & (position < num_tokens)
        is_loaded = is_seen[:, None]
        if DIM != DIM_PAD:
            is_loaded = is_loaded & (dim < DIM)[None, :]
        key = tl.load(keys + place, mask=is_loaded, other=0.0)
        # Scores q Kᵀ: (GROUP_PAD, S); Gemma 2 caps them by a tanh.
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        if HAS_CAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(is_seen[None, :], scores, -1e30)
        # What was summed so far fades by exp(old peak - new peak).
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_peak[:, None])
        weights = tl.where(is_seen[None, :], weights, 0.0)
        fade = tl.exp(peak - new_peak)
        # Weighted sum of the values: (GROUP_PAD, DIM_PAD).
        value = tl.load(values + place, mask=is_loaded, other=0.0)
        total = total * fade + tl.sum(weights, axis=1)
        sums = sums * fade[:, None]
        sums = tl.dot(weights.to(q.dtype), value, sums, input_precision="ieee")
        peak = new_peak
    # Alone: normalize and store (G, D). Else leave the sums to `_combine_kernel`.
    if SPLITS == 1:
        result = sums / total[:, None]
        tl.store(out + row * KV_HEADS * GROUP * DIM + at, result.to(q.dtype), mask=is_in)
    else:
        head = row * KV_HEADS * GROUP + kv_head * GROUP + member
        part = head * SPLITS + split
        tl.store(parts + part[:, None] * DIM + dim[None, :], sums, mask=is_in)
        tl.store(masses + part * 2, peak, mask=member < GROUP)
        tl.store(masses + part * 2 + 1, total, mask=member < GROUP)


@triton.jit
def _combine_kernel(
    out,
    parts,
    masses,
    lengths,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # One program per row and query head.
    row = tl.program_id(0)
    if tl.load(lengths + row) == 0:
        return
    # Peaks and totals of the splits (P,), and the weight of each against the largest peak.
    head = row * HEADS + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PAD)
    peaks = tl.load(masses + (head * SPLITS + split) * 2)
    totals = tl.load(masses + (head * SPLITS + split) * 2 + 1)
    weights = tl.exp(peaks - tl.max(peaks, axis=0))
    # Weighted sum of the splits' sums (P, D) over the weighted total: (D,).
    is_in = (dim < DIM)[None, :]
    at = (head * SPLITS + split)[:, None] * DIM + dim[None, :]
    sums = tl.load(parts + at, mask=is_in, other=0.0)
    total = tl.sum(totals * weights, axis=0)
    result = tl.sum(sums * weights[:, None], axis=0) / total
    tl.store(out + head * DIM + dim, result.to(out.dtype.element_ty), mask=dim < DIM)
