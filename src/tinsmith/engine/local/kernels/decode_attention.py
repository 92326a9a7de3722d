"""Triton kernels between the projections of a decoding step: heads, cache and attention.

A row of the step is one sequence with one new token. Where its keys and values lie is read from
a table of places on the device, never passed as a tensor, so that a captured graph stays valid
while slots come, go and move. A place with address zero is padding and is left alone.

The new token's keys and values are written first, then the row attends to its shared prompt and
to its own slot in one scan. `cached_attention` does the same in plain torch and is the reference.

Shapes: B rows, H query heads, K key/value heads, G = H / K, D head size, S splits of a scan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.model.families import AttentionSpec

NUM_PLACE_FIELDS = 10
_KEYS = tl.constexpr(0)
_VALUES = tl.constexpr(1)
_LAYER_STRIDE = tl.constexpr(2)
_HEAD_STRIDE = tl.constexpr(3)
_NUM_TOKENS = tl.constexpr(4)
_SHARED_KEYS = tl.constexpr(5)
_SHARED_VALUES = tl.constexpr(6)
_SHARED_LAYER_STRIDE = tl.constexpr(7)
_SHARED_HEAD_STRIDE = tl.constexpr(8)
_NUM_SHARED = tl.constexpr(9)

_EVERYTHING = 1 << 30
_BLOCK = 32
_NUM_WARPS = 2
_NUM_STAGES = 3
_MAX_SPLITS = 16
_ENOUGH_PROGRAMS = 512
"""Programs that keep a large device busy; with fewer rows, scans are split."""


class Heads(NamedTuple):
    """How a row of the fused projection divides into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """Into how many parts the scans of so many rows are cut, whatever their lengths."""
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * num_rows * num_kv_heads <= _ENOUGH_PROGRAMS:
        splits *= 2
    return splits


def prepare(
    qkv: Tensor,
    places: Tensor,
    rotation: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    layer: int,
    heads: Heads,
) -> None:
    """Norm and rotate the heads of qkv (B, (H + 2K) · D): queries in place, the rest to the cache.

    `places` is the table (NUM_PLACE_FIELDS, at least B) of int64; `rotation` cosines and sines
    (B, D / 2); `norms` the weights (D,) for queries and keys.
    """
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    grid = (len(qkv), heads.num_heads + 2 * heads.num_kv_heads)
    _prepare_kernel[grid](
        qkv,
        places,
        *rotation,
        q_norm,
        k_norm,
        layer,
        places.stride(0),
        eps,
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        DIM=heads.head_dim,
        HALF_PAD=triton.next_power_of_2(heads.head_dim // 2),
        HAS_NORM=norms is not None,
        num_warps=1,
    )


def attend(qkv: Tensor, places: Tensor, spec: AttentionSpec, layer: int, heads: Heads) -> Tensor:
    """(B, H · D): what each row's queries, prepared, find in the cache."""
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
        places,
        layer,
        places.stride(0),
        spec.scale,
        0.0 if spec.softcap is None else spec.softcap,
        _EVERYTHING if spec.window is None else spec.window,
        KV_HEADS=heads.num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        DIM=heads.head_dim,
        DIM_PAD=max(16, triton.next_power_of_2(heads.head_dim)),
        BLOCK=_BLOCK,
        SPLITS=splits,
        HAS_CAP=spec.softcap is not None,
        IS_ALIGNED=heads.head_dim % 16 == 0,
        ITEM_BYTES=qkv.element_size(),
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
    if splits > 1:
        _combine_kernel[(num_rows, heads.num_heads)](
            out,
            parts,
            masses,
            places,
            HEADS=heads.num_heads,
            DIM=heads.head_dim,
            DIM_PAD=triton.next_power_of_2(heads.head_dim),
            SPLITS=splits,
            num_warps=1,
        )
    return out


def write(k: Tensor, v: Tensor, places: Tensor, layer: int) -> None:
    """Store keys and values (N, K, D) of prompt tokens where `places` (4, N) says.

    Its rows are the addresses of the token's key and value in the first layer's first head, and
    the strides between layers and heads.
    """
    num_rows, kv_heads, dim = k.shape
    _write_kernel[(num_rows, kv_heads)](
        k,
        v,
        places,
        layer,
        num_rows,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["layer"])
def _prepare_kernel(
    qkv,
    places,
    cosines,
    sines,
    q_norm,
    k_norm,
    layer,
    num_places,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
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
            left = (left * factor * left_weight).to(dtype).to(tl.float32)
            right = (right * factor * right_weight).to(dtype).to(tl.float32)
        # ... then RoPE: rotate each pair (i, i + D/2) by the angle of the row's position.
        cos = tl.load(cosines + row * (DIM // 2) + half, mask=is_in, other=0.0).to(tl.float32)
        sin = tl.load(sines + row * (DIM // 2) + half, mask=is_in, other=0.0).to(tl.float32)
        rotated = left * cos - right * sin
        right = right * cos + left * sin
        left = rotated
    # Queries stay in qkv; keys and values of the new token go to the row's place in the cache.
    if head < HEADS:
        tl.store(source, left.to(dtype), mask=is_in)
        tl.store(source + DIM // 2, right.to(dtype), mask=is_in)
    else:
        place = places + row
        address = tl.load(place + _KEYS * num_places)
        kv_head = head - HEADS
        if kv_head >= KV_HEADS:
            address = tl.load(place + _VALUES * num_places)
            kv_head -= KV_HEADS
        is_in = is_in & (address != 0)
        offset = layer * tl.load(place + _LAYER_STRIDE * num_places)
        offset += kv_head * tl.load(place + _HEAD_STRIDE * num_places)
        offset += tl.load(place + _NUM_TOKENS * num_places) * DIM
        target = address.to(tl.pointer_type(dtype)) + offset + half
        tl.store(target, left.to(dtype), mask=is_in)
        tl.store(target + DIM // 2, right.to(dtype), mask=is_in)


@triton.jit
def _scan(
    q,
    peak,
    total,
    sums,
    keys,
    values,
    start,
    stop,
    scale,
    softcap,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Go on with an online softmax over the tokens start to stop at two addresses."""
    # q (GROUP_PAD, DIM_PAD); state: peak and total (GROUP_PAD,), sums (GROUP_PAD, DIM_PAD).
    token = tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM_PAD)
    key_base = keys.to(tl.pointer_type(q.dtype))
    value_base = values.to(tl.pointer_type(q.dtype))
    if IS_ALIGNED:
        key_base = tl.multiple_of(key_base, 16)
        value_base = tl.multiple_of(value_base, 16)
    # BLOCK tokens at a time; keys and values of one head lie D numbers apart.
    for first in range(start, stop, BLOCK):
        is_in = first + token < stop
        at = (first + token)[:, None] * DIM + dim[None, :]
        is_loaded = is_in[:, None]
        if DIM != DIM_PAD:
            is_loaded = is_loaded & (dim < DIM)[None, :]
        key = tl.load(key_base + at, mask=is_loaded, other=0.0)
        # Scores q Kᵀ: (GROUP_PAD, BLOCK); Gemma 2 caps them by a tanh.
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        if HAS_CAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(is_in[None, :], scores, -1e30)
        # Online softmax: what was summed so far fades by exp(old peak - new peak).
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_peak[:, None])
        weights = tl.where(is_in[None, :], weights, 0.0)
        fade = tl.exp(peak - new_peak)
        # Weighted sum of the values: (GROUP_PAD, DIM_PAD).
        value = tl.load(value_base + at, mask=is_loaded, other=0.0)
        total = total * fade + tl.sum(weights, axis=1)
        sums = sums * fade[:, None]
        sums = tl.dot(weights.to(q.dtype), value, sums, input_precision="ieee")
        peak = new_peak
    return peak, total, sums


@triton.jit(do_not_specialize=["layer"])
def _attend_kernel(
    qkv,
    out,
    parts,
    masses,
    places,
    layer,
    num_places,
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
    IS_ALIGNED: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
):
    # One program per row, key/value head and split; the G query heads of a group share its keys.
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    place = places + row
    keys = tl.load(place + _KEYS * num_places)
    if keys == 0:
        return
    # Where the row's own tokens lie, and the prompt that it shares with others.
    values = tl.load(place + _VALUES * num_places)
    offset = layer * tl.load(place + _LAYER_STRIDE * num_places)
    offset += kv_head * tl.load(place + _HEAD_STRIDE * num_places)
    shared_keys = tl.load(place + _SHARED_KEYS * num_places)
    shared_values = tl.load(place + _SHARED_VALUES * num_places)
    shared_offset = layer * tl.load(place + _SHARED_LAYER_STRIDE * num_places)
    shared_offset += kv_head * tl.load(place + _SHARED_HEAD_STRIDE * num_places)
    num_shared = tl.load(place + _NUM_SHARED * num_places)
    num_tokens = num_shared + tl.load(place + _NUM_TOKENS * num_places) + 1

    # This split's share of the tokens in the window, a whole number of blocks.
    first = tl.maximum(num_tokens - window, 0)
    share = tl.cdiv(tl.cdiv(num_tokens - first, SPLITS), BLOCK) * BLOCK
    start = first + split * share
    stop = tl.minimum(start + share, num_tokens)

    # Queries of the group: (GROUP_PAD, DIM_PAD).
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    is_in = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    at = (kv_head * GROUP + member)[:, None] * DIM + dim[None, :]
    q = tl.load(qkv + row * (GROUP + 2) * KV_HEADS * DIM + at, mask=is_in, other=0.0)
    peak = tl.full([GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    # The shared prompt first, then the row's own tokens, in one softmax.
    peak, total, sums = _scan(
        q,
        peak,
        total,
        sums,
        shared_keys + shared_offset * ITEM_BYTES,
        shared_values + shared_offset * ITEM_BYTES,
        start,
        tl.minimum(stop, num_shared),
        scale,
        softcap,
        DIM,
        DIM_PAD,
        BLOCK,
        HAS_CAP,
        IS_ALIGNED,
    )
    peak, total, sums = _scan(
        q,
        peak,
        total,
        sums,
        keys + offset * ITEM_BYTES,
        values + offset * ITEM_BYTES,
        tl.maximum(start, num_shared) - num_shared,
        stop - num_shared,
        scale,
        softcap,
        DIM,
        DIM_PAD,
        BLOCK,
        HAS_CAP,
        IS_ALIGNED,
    )
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
    places,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # One program per row and query head.
    row = tl.program_id(0)
    if tl.load(places + row) == 0:
        return
    # Peaks and totals of the splits (S,), and the weight of each against the largest peak.
    head = row * HEADS + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PAD)
    peaks = tl.load(masses + (head * SPLITS + split) * 2)
    totals = tl.load(masses + (head * SPLITS + split) * 2 + 1)
    weights = tl.exp(peaks - tl.max(peaks, axis=0))
    # Weighted sum of the splits' sums (S, D) over the weighted total: (D,).
    is_in = (dim < DIM)[None, :]
    at = (head * SPLITS + split)[:, None] * DIM + dim[None, :]
    sums = tl.load(parts + at, mask=is_in, other=0.0)
    total = tl.sum(totals * weights, axis=0)
    result = tl.sum(sums * weights[:, None], axis=0) / total
    tl.store(out + head * DIM + dim, result.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit(do_not_specialize=["layer"])
def _write_kernel(
    k,
    v,
    places,
    layer,
    num_rows,
    k_row,
    k_head,
    v_row,
    v_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    # One program per prompt token and key/value head; (D,) each is copied to the cache.
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_PAD)
    is_in = dim < DIM
    dtype = k.dtype.element_ty
    place = places + row
    offset = layer * tl.load(place + _LAYER_STRIDE * num_rows)
    offset += head * tl.load(place + _HEAD_STRIDE * num_rows)
    key_target = tl.load(place + _KEYS * num_rows).to(tl.pointer_type(dtype)) + offset
    value_target = tl.load(place + _VALUES * num_rows).to(tl.pointer_type(dtype)) + offset
    key = tl.load(k + row * k_row + head * k_head + dim, mask=is_in)
    value = tl.load(v + row * v_row + head * v_head + dim, mask=is_in)
    tl.store(key_target + dim, key, mask=is_in)
    tl.store(value_target + dim, value, mask=is_in)
