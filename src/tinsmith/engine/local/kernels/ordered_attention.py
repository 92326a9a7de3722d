"""A Triton kernel for attention whose sums have one order, in training and in decoding.

Each query meets the keys of its sequence from the first on, in blocks of a fixed size; keys that
it must not see change nothing, exactly. What it finds therefore does not depend on how many other
queries are computed with it, nor on whether keys lie packed, as in training, or in the blocks of
the cache: `on_policy = "exact"` rests on that. Sums are made by the matrix units alone, which add
up in the same order in a tile of any size, the sum of the weights included: a sum over the lanes
of a program would depend on how the tile is laid out. `invariant.attend` has the same rules in
plain torch.

Shapes: n queries, H query heads, K key/value heads, G = H / K, D head size, T tiles of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.decode_attention import RowBlocks
from tinsmith.engine.local.kernels.launching import Staged
from tinsmith.engine.local.model.families import AttentionSpec

_EVERYTHING = 1 << 30
_KEYS = 64
"""Keys that a query meets at a time: results depend on this."""

_SMALL_TILE = 16
_LARGE_TILE = 128
"""Rows of a tile: only speed depends on these. The heads that share keys are rows of one tile."""


class Tiles(NamedTuple):
    """The queries of some sequences, cut into tiles of one sequence each."""

    table: Tensor
    """(4, T) int64: first query, number of queries (zero for none), position of the first one, and
    where the sequence begins: its first key, or its first entry among the blocks."""

    num_rows: int
    """Rows of each tile."""


class Span(NamedTuple):
    """Queries of one sequence, in a row of queries."""

    first: int
    stop: int
    position: int
    begin: int
    """Where the sequence's keys begin."""


def tiles_of(spans: Sequence[Span], group: int, device: torch.device) -> Tiles:
    """Tiles for spans of queries, of which `group` heads share keys."""
    longest = max(span.stop - span.first for span in spans)
    num_rows = _num_rows(longest * group, group)
    size = num_rows // group
    fields = [
        (at, min(size, span.stop - at), span.position + at - span.first, span.begin)
        for span in spans
        for at in range(span.first, span.stop, size)
    ]
    table = torch.tensor(fields, dtype=torch.int64).t().contiguous()
    return Tiles(table.to(device), num_rows)


def tiles_of_rows(rows: RowBlocks, group: int) -> Tiles:
    """Tiles for rows of one new token each, made on the device."""
    first = torch.arange(len(rows.lengths), device=rows.lengths.device)
    table = torch.stack([first, rows.lengths.clamp(max=1), rows.lengths - 1, rows.firsts])
    return Tiles(table, _num_rows(group, group))


def _num_rows(most: int, group: int) -> int:
    """Rows of a tile, a power of two, when no sequence has more than `most` of them."""
    small = max(_SMALL_TILE, int(triton.next_power_of_2(group)))
    return small if most <= small else max(_LARGE_TILE, small)


def attend_packed(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Attention of q (n, H, D) over keys and values (m, K, D), and log Σ exp(scores), (H, n)."""
    normalizers = torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
    return _attend(spec, q, k, v, tiles, normalizers), normalizers


def attend_cached(
    spec: AttentionSpec,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    layer: int,
    tiles: Tiles,
) -> Tensor:
    """Attention of q (n, H, D) over the cache (L, N, K, S, D); tiles begin at entries of
    `blocks`."""
    return _attend(spec, q, keys, values, tiles, None, blocks, layer)


def append(k: Tensor, v: Tensor, rows: RowBlocks, layer: int) -> None:
    """Write keys and values (B, K, D) of the rows' new tokens to the cache."""
    num_rows, num_kv_heads, head_dim = k.shape
    _append_kernel[(num_rows, num_kv_heads)](
        k,
        v,
        *rows,
        layer,
        rows.keys.shape[1],
        k.stride(0),
        v.stride(0),
        KV_HEADS=num_kv_heads,
        DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        PAGE=rows.keys.shape[3],
        num_warps=1,
    )


def _attend(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    normalizers: Tensor | None,
    blocks: Tensor | None = None,
    layer: int = 0,
) -> Tensor:
    num_queries, num_heads, head_dim = q.shape
    is_paged = blocks is not None
    num_kv_heads = k.shape[2] if is_paged else k.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_tiles = tiles.table.shape[1]
    _attend_kernel[(num_tiles, num_kv_heads)](
        q,
        k,
        v,
        out,
        out if normalizers is None else normalizers,
        tiles.table,
        tiles.table if blocks is None else blocks,
        num_tiles,
        num_queries,
        q.stride(0),
        0 if is_paged else k.stride(0),
        0 if is_paged else v.stride(0),
        layer,
        k.shape[1] if is_paged else 0,
        spec.scale,
        0.0 if spec.softcap is None else spec.softcap,
        _EVERYTHING if spec.window is None else spec.window,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        DIM=head_dim,
        DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
        ROWS=tiles.num_rows,
        KEYS=_KEYS,
        PAGE=k.shape[3] if is_paged else 0,
        HAS_CAP=spec.softcap is not None,
        HAS_NORMALIZERS=normalizers is not None,
        num_warps=8 if tiles.num_rows > 64 else 2,
        num_stages=2 if tiles.num_rows > 64 else 3,
        enable_fp_fusion=False,
    )
    return out


@Staged
@triton.jit(do_not_specialize=["layer", "num_tiles", "num_queries", "num_blocks"])
def _attend_kernel(
    q,
    k,
    v,
    out,
    normalizers,
    tiles,
    blocks,
    num_tiles,
    num_queries,
    q_row,
    k_row,
    v_row,
    layer,
    num_blocks,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_NORMALIZERS: tl.constexpr,
):
    # One program per tile of queries and key/value head; a row of it is one query of one head.
    tile = tiles + tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(tile)
    count = tl.load(tile + num_tiles)
    if count == 0:
        return
    first_position = tl.load(tile + 2 * num_tiles)
    begin = tl.load(tile + 3 * num_tiles)
    row = tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = token < count
    position = first_position + token
    dim = tl.arange(0, DIM_PAD)
    is_in = is_row[:, None] & (dim < DIM)[None, :]
    # Queries: (ROWS, DIM_PAD).
    at = (first + token) * q_row + head * DIM
    query = tl.load(q + at[:, None] + dim[None, :], mask=is_in, other=0.0)
    # Online softmax: peak (ROWS,), mass (ROWS, 16) in equal columns, sums (ROWS, DIM_PAD).
    peak = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS, 16], tl.float32)
    sums = tl.zeros([ROWS, DIM_PAD], tl.float32)
    ones = tl.full([KEYS, 16], 1.0, query.dtype)
    # From the block in which the first query's window begins to the last query's own key.
    start = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    stop = first_position + count
    for key_block in range(start, stop, KEYS):
        key = key_block + tl.arange(0, KEYS)
        is_key = key < stop
        # Keys and values of one head: (KEYS, DIM_PAD).
        if PAGE > 0:
            page = tl.load(blocks + begin + key // PAGE, mask=is_key, other=0).to(tl.int64)
            vector = ((layer.to(tl.int64) * num_blocks + page) * KV_HEADS + kv_head) * PAGE
            from_k = (vector + key % PAGE) * DIM
            from_v = from_k
        else:
            from_k = (begin + key) * k_row + kv_head * DIM
            from_v = (begin + key) * v_row + kv_head * DIM
        is_loaded = is_key[:, None] & (dim < DIM)[None, :]
        keys = tl.load(k + from_k[:, None] + dim[None, :], mask=is_loaded, other=0.0)
        values = tl.load(v + from_v[:, None] + dim[None, :], mask=is_loaded, other=0.0)
        # Scores q Kᵀ: (ROWS, KEYS); Gemma 2 caps them by a tanh.
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if HAS_CAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        is_seen = (key[None, :] <= position[:, None]) & is_key[None, :]
        is_seen = is_seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, -1e30)
        # What was summed so far fades by exp(old peak - new peak): by one where nothing is seen.
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        fade = tl.exp(peak - new_peak)[:, None]
        weights = tl.where(is_seen, tl.exp(scores - new_peak[:, None]), 0.0).to(query.dtype)
        mass = tl.dot(weights, ones, mass * fade, input_precision="ieee")
        sums = tl.dot(weights, values, sums * fade, input_precision="ieee")
        peak = new_peak
    # Normalize and store: (ROWS, D).
    total = tl.max(mass, axis=1)
    target = out + ((first + token) * (KV_HEADS * GROUP) + head)[:, None] * DIM + dim[None, :]
    tl.store(target, (sums / total[:, None]).to(query.dtype), mask=is_in)
    if HAS_NORMALIZERS:
        tl.store(normalizers + head * num_queries + first + token, peak + tl.log(total), is_row)


@Staged
@triton.jit(do_not_specialize=["layer", "num_blocks"])
def _append_kernel(
    k,
    v,
    keys,
    values,
    lengths,
    firsts,
    blocks,
    layer,
    num_blocks,
    k_row,
    v_row,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    # One program per row and head: (D,) of each. A row of length zero is padding.
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    length = tl.load(lengths + row)
    if length == 0:
        return
    dim = tl.arange(0, DIM_PAD)
    is_in = dim < DIM
    # The block of the newest token, from the row's part of the table, and the token's place in it.
    page = tl.load(blocks + tl.load(firsts + row) + (length - 1) // PAGE).to(tl.int64)
    vector = ((layer.to(tl.int64) * num_blocks + page) * KV_HEADS + kv_head) * PAGE
    at = (vector + (length - 1) % PAGE) * DIM + dim
    tl.store(keys + at, tl.load(k + row * k_row + kv_head * DIM + dim, mask=is_in), mask=is_in)
    tl.store(values + at, tl.load(v + row * v_row + kv_head * DIM + dim, mask=is_in), mask=is_in)
