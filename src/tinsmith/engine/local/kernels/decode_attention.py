"""Triton kernels between the projections of a decoding step: heads, cache and attention.

A row of the step is one sequence with one new token. Which blocks of the cache hold its keys and
values is read from a table on the device, which never moves, so that a captured graph stays valid
while sequences come, go and grow. A row of length zero is padding and is left alone.

One kernel norms and rotates the new token's heads, writes its keys and values, and attends to them
and to all tokens before, a block at a time. `cached_running` does the same in plain torch and is
the reference.

Shapes: B rows, H query heads, K key/value heads, G = H / K, D head size, S tokens of a block,
L layers, N blocks, P splits of a scan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Staged
from tinsmith.engine.local.model.families import AttentionSpec
from tinsmith.engine.local.model.rope import Rotation

_EVERYTHING = 1 << 30
_NUM_WARPS = 2
_NUM_STAGES = 3
_MAX_SPLITS = 16
ENOUGH_PROGRAMS = 512
"""Programs that keep a large device busy; with fewer rows, scans are split."""

_MOST_LOOKING_AHEAD = 2
"""Times as many programs up to which the next block is looked up while the one at hand is read,
which keeps more of both in shared memory. On an H200 a step of 64 rows of Qwen3-0.6B (512 programs)
is 4 % quicker, one of 256 rows (2,048) 1 % slower: there other programs fill the time."""


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


def num_splits(num_rows: int, num_kv_heads: int, enough: int = ENOUGH_PROGRAMS) -> int:
    """Into how many parts the scans of so many rows are cut, whatever their lengths; `enough`
    programs keep the device busy."""
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * num_rows * num_kv_heads <= enough:
        splits *= 2
    return splits


def attend(
    qkv: Tensor,
    rows: RowBlocks,
    rotation: Rotation,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    spec: AttentionSpec,
    layer: int,
    heads: Heads,
    sinks: Tensor | None = None,
    enough_programs: int = ENOUGH_PROGRAMS,
) -> Tensor:
    """(B, H · D): attention of each row's new token, whose heads are qkv (B, (H + 2K) · D).

    Queries and keys are normed and rotated, keys and values go to the cache. `norms` are the
    weights (D,) for queries and keys, `sinks` (H,) the scores of one more key whose value is zero.
    """
    num_rows = len(qkv)
    out = qkv.new_empty(num_rows, heads.num_heads * heads.head_dim)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    splits = num_splits(num_rows, heads.num_kv_heads, enough_programs)
    num_programs = num_rows * heads.num_kv_heads * splits
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
        rotation.cos,
        rotation.sin,
        q_norm,
        k_norm,
        out if sinks is None else sinks,
        layer,
        rows.keys.shape[1],
        rotation.distance,
        eps,
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
        HAS_NORM=norms is not None,
        HAS_CAP=spec.softcap is not None,
        HAS_SINKS=sinks is not None,
        LOOKS_AHEAD=num_programs <= _MOST_LOOKING_AHEAD * enough_programs,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
    if splits > 1:
        combine(out, parts, masses, rows.lengths, sinks)
    return out


def combine(
    out: Tensor, parts: Tensor, masses: Tensor, lengths: Tensor, sinks: Tensor | None = None
) -> None:
    """Fill `out` (B, H · D) by what the splits of its rows have summed up: parts (B, H, P, D), with
    the peak and the total (B, H, P, 2) of each."""
    num_rows, num_heads, splits, dim = parts.shape
    dim_pad = triton.next_power_of_2(dim)
    _combine_kernel[(num_rows, num_heads)](
        out,
        parts,
        masses,
        lengths,
        out if sinks is None else sinks,
        HEADS=num_heads,
        DIM=dim,
        DIM_PAD=dim_pad,
        SPLITS=splits,
        HAS_SINKS=sinks is not None,
        num_warps=max(1, min(4, dim_pad // 256)),
    )


@triton.jit
def _rotated(
    heads,
    is_head,
    norm,
    cosines,
    sines,
    distance,
    eps,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads (N, D) that begin at `heads` (N,): RMS norm over D where the model has one, then RoPE,
    which rotates each pair (i, i + distance) by the angle of the row's position."""
    dim = tl.arange(0, DIM_PAD)
    is_left = dim < distance
    is_rotated = dim < 2 * distance
    # Each number together with the other one of its pair.
    other = tl.where(is_left, dim + distance, dim - distance)
    is_in = is_head[:, None] & (dim < DIM)[None, :]
    x = tl.load(heads[:, None] + dim[None, :], mask=is_in, other=0.0).to(tl.float32)
    y = tl.load(heads[:, None] + other[None, :], mask=is_in, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        scale = tl.load(norm + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        other_scale = tl.load(norm + other, mask=dim < DIM, other=0.0).to(tl.float32)
        x = x * factor * scale[None, :]
        y = y * factor * other_scale[None, :]
    angle = tl.where(is_left, dim, other)
    cos = tl.load(cosines + angle, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(sines + angle, mask=is_rotated, other=0.0).to(tl.float32)
    return x * cos[None, :] + y * tl.where(is_left, -sin, sin)[None, :]


@Staged
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
    cosines,
    sines,
    q_norm,
    k_norm,
    sinks,
    layer,
    num_blocks,
    distance,
    eps,
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
    HAS_NORM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LOOKS_AHEAD: tl.constexpr,
):
    # One program per row, key/value head and split; the G query heads of a group share its keys.
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_tokens = tl.load(lengths + row)
    if num_tokens == 0:
        return
    table = blocks + tl.load(firsts + row)

    # This split's share of the blocks that reach into the window, without the new token.
    num_past = num_tokens - 1
    first = tl.maximum(num_tokens - window, 0)
    first_block = first // BLOCK
    stop_block = tl.cdiv(num_past, BLOCK)
    share = tl.cdiv(stop_block - first_block, SPLITS)
    start = first_block + split * share
    stop = tl.minimum(start + share, stop_block)
    layer_blocks = layer.to(tl.int64) * num_blocks

    # The new token's queries of the group (GROUP_PAD, DIM_PAD), its key and its value (1, DIM_PAD).
    dtype = qkv.dtype.element_ty
    member = tl.arange(0, GROUP_PAD)
    one = tl.arange(0, 1)
    dim = tl.arange(0, DIM_PAD)
    source = qkv + row * (GROUP + 2) * KV_HEADS * DIM
    angles = row * (DIM // 2)
    q = _rotated(
        source + (kv_head * GROUP + member) * DIM,
        member < GROUP,
        q_norm,
        cosines + angles,
        sines + angles,
        distance,
        eps,
        DIM,
        DIM_PAD,
        HAS_NORM,
    ).to(dtype)
    new_key = _rotated(
        source + (GROUP * KV_HEADS + kv_head + one) * DIM,
        one == 0,
        k_norm,
        cosines + angles,
        sines + angles,
        distance,
        eps,
        DIM,
        DIM_PAD,
        HAS_NORM,
    ).to(dtype)
    from_v = ((GROUP + 1) * KV_HEADS + kv_head) * DIM + dim
    new_value = tl.load(source + from_v, mask=dim < DIM, other=0.0)[None, :]
    # One split puts key and value into the row's last block...
    if split == 0:
        last = tl.load(table + num_past // BLOCK)
        vector = ((layer_blocks + last) * KV_HEADS + kv_head) * BLOCK + num_past % BLOCK
        to = vector * DIM + dim[None, :]
        tl.store(keys + to, new_key, mask=(dim < DIM)[None, :])
        tl.store(values + to, new_value, mask=(dim < DIM)[None, :])
    # ... and begins with them. Online softmax: peak and total (GROUP_PAD,), sums (GROUP_PAD,
    # DIM_PAD).
    peak = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
    if HAS_CAP:
        peak = softcap * (2.0 * tl.sigmoid(2.0 * peak / softcap) - 1.0)
    total = tl.full([GROUP_PAD], 1.0, tl.float32)
    sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32) + new_value.to(tl.float32)
    if SPLITS > 1:
        peak = tl.where(split == 0, peak, -1e30)
        total = tl.where(split == 0, total, 0.0)
        sums = tl.where(split == 0, sums, 0.0)
    is_in = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    at = (kv_head * GROUP + member)[:, None] * DIM + dim[None, :]
    token = tl.arange(0, BLOCK)
    inside = token[:, None] * DIM + dim[None, :]
    # Triton divides its stages among loads that wait for each other, so that keys and values are
    # read further ahead where their block is known from the turn before.
    if LOOKS_AHEAD:
        following = tl.load(table + start, mask=start < stop, other=0)
    for index in range(start, stop):
        if LOOKS_AHEAD:
            block = following
            following = tl.load(table + index + 1, mask=index + 1 < stop, other=0)
        else:
            block = tl.load(table + index)
        # A block's keys and values of one head: (S, D), D numbers apart.
        place = ((layer_blocks + block) * KV_HEADS + kv_head) * (BLOCK * DIM) + inside
        position = index * BLOCK + token
        is_seen = (position >= first) & (position < num_past)
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
        if HAS_SINKS:
            sink = tl.load(sinks + kv_head * GROUP + member, mask=member < GROUP, other=-1e30)
            new_peak = tl.maximum(peak, sink)
            fade = tl.exp(peak - new_peak)
            total = total * fade + tl.exp(sink - new_peak)
            sums = sums * fade[:, None]
        result = sums / total[:, None]
        tl.store(out + row * KV_HEADS * GROUP * DIM + at, result.to(dtype), mask=is_in)
    else:
        head = row * KV_HEADS * GROUP + kv_head * GROUP + member
        part = head * SPLITS + split
        tl.store(parts + part[:, None] * DIM + dim[None, :], sums, mask=is_in)
        tl.store(masses + part * 2, peak, mask=member < GROUP)
        tl.store(masses + part * 2 + 1, total, mask=member < GROUP)


@Staged
@triton.jit
def _combine_kernel(
    out,
    parts,
    masses,
    lengths,
    sinks,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
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
    peak = tl.max(peaks, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1))
        peak = tl.maximum(peak, sink)
    weights = tl.exp(peaks - peak)
    # Weighted sum of the splits' sums (P, D) over the weighted total: (D,).
    is_in = (dim < DIM)[None, :]
    at = (head * SPLITS + split)[:, None] * DIM + dim[None, :]
    sums = tl.load(parts + at, mask=is_in, other=0.0)
    total = tl.sum(totals * weights, axis=0)
    if HAS_SINKS:
        total += tl.exp(sink - peak)
    result = tl.sum(sums * weights[:, None], axis=0) / total
    tl.store(out + head * DIM + dim, result.to(out.dtype.element_ty), mask=dim < DIM)
