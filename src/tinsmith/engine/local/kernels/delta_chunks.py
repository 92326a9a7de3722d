"""Triton kernels for what chunks of the gated delta rule have before memories walk along them.

A chunk's gates, G and β, and the inverse T of its triangular system, by which all that its rows
write is found at once. `delta_rule` says what they are for, and does the rest. Both are worked out
for each chunk and head by itself, in float32.

Shapes: N rows, n chunks, H heads of values, C channels of queries, keys and values together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels import short_convolution
from tinsmith.engine.local.kernels.launching import Launcher
from tinsmith.engine.local.kernels.short_convolution import head_sizes
from tinsmith.engine.local.model.recurrent.delta_rule import DeltaWeights
from tinsmith.engine.local.model.recurrent.recurrence import CHUNK, ChunkTables


class Prepared(NamedTuple):
    """What the walks along sequences begin with."""

    qkv: Tensor
    """(N, C): queries, keys and values."""

    gates: Tensor
    """(n, H, 3, 64): G in two parts, whose sum has more digits than float32, and β."""

    solved: Tensor
    """(n, H, 64, 64): T, in the dtype of products within a chunk."""


def prepare(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    tables: ChunkTables,
    past: Tensor | None,
) -> Prepared:
    qkv = short_convolution.convolve(mixed, weights, tables.rows, past)
    num_heads, num_chunks = len(weights.a_log), tables.chunks.shape[1]
    gates = torch.empty((num_chunks, num_heads, 3, CHUNK), dtype=torch.float32, device=mixed.device)
    at_once = min(8, triton.next_power_of_2(num_heads))
    _GATES(
        (num_chunks, -(-num_heads // at_once), 1),
        (
            a,
            b,
            weights.a_log,
            weights.dt_bias,
            gates,
            tables.chunks,
            num_chunks,
            a.stride(0),
            b.stride(0),
        ),
        (num_heads, at_once, CHUNK),
        num_warps=2,
    )
    within = torch.float16 if mixed.dtype == torch.bfloat16 else mixed.dtype
    solved = mixed.new_empty(num_chunks, num_heads, CHUNK, CHUNK, dtype=within)
    sizes = head_sizes(weights)
    key_block = min(weights.key_dim, 64)
    precision = "ieee" if mixed.dtype == torch.float32 else "tf32x3"
    _SOLVE(
        (num_chunks * num_heads, 1, 1),
        (qkv, gates, solved, tables.chunks, num_chunks),
        (*sizes, key_block, CHUNK, precision),
        num_warps=1,
        num_stages=1,
    )
    return Prepared(qkv, gates, solved)


@triton.jit
def _gates(
    a,
    b,
    a_log,
    dt_bias,
    gates,
    chunks,
    num_chunks,
    a_row,
    b_row,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # One program per chunk and a few heads: (CHUNK, AT_ONCE).
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_head = head < HEADS
    first = tl.load(chunks + chunk).to(tl.int64)
    count = tl.load(chunks + num_chunks + chunk)
    place = tl.arange(0, CHUNK)
    is_in = (place < count)[:, None] & is_head[None, :]
    row = (first + place)[:, None]
    speed = tl.exp(tl.load(a_log + head, mask=is_head, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=is_head, other=0.0).to(tl.float32)
    x = tl.load(a + row * a_row + head[None, :], mask=is_in, other=0.0).to(tl.float32)
    g = tl.where(is_in, -speed[None, :] * softplus(x + bias[None, :]), 0.0)
    # Differences of long sums are wanted to float32's precision.
    total = tl.cumsum(g.to(tl.float64), axis=0)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    x = tl.load(b + row * b_row + head[None, :], mask=is_in, other=0.0).to(tl.float32)
    beta = tl.where(is_in, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    at = gates + (chunk * HEADS + head)[None, :] * (3 * CHUNK) + place[:, None]
    tl.store(at, high, mask=is_head[None, :])
    tl.store(at + CHUNK, low, mask=is_head[None, :])
    tl.store(at + 2 * CHUNK, beta, mask=is_head[None, :])


@triton.jit
def softplus(x):
    """log(1 + eˣ), also where that is hardly more than nothing."""
    small = tl.exp(-tl.abs(x))
    sum = 1.0 + small
    # What rounding took from 1 + eˣ is put back, in proportion.
    log = tl.where(sum == 1.0, small, tl.log(sum) * (small / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _solve(
    qkv,
    gates,
    solved,
    chunks,
    num_chunks,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program, one warp, per chunk and head. The system is cut into blocks of 16 × 16: a row of
    # blocks is made of those above it.
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    head = tl.program_id(0) % HEADS
    chunk = (tl.program_id(0) // HEADS).to(tl.int64)
    first = tl.load(chunks + chunk).to(tl.int64)
    count = tl.load(chunks + num_chunks + chunk)
    place = tl.arange(0, 16)
    dim = tl.arange(0, KEY_BLOCK)
    # Products of keys, kᵢ kⱼᵀ, of which rows beyond the chunk's are zero.
    s00 = tl.zeros([16, 16], tl.float32)
    s11 = tl.zeros([16, 16], tl.float32)
    s22 = tl.zeros([16, 16], tl.float32)
    s33 = tl.zeros([16, 16], tl.float32)
    s10 = tl.zeros([16, 16], tl.float32)
    s20 = tl.zeros([16, 16], tl.float32)
    s21 = tl.zeros([16, 16], tl.float32)
    s30 = tl.zeros([16, 16], tl.float32)
    s31 = tl.zeros([16, 16], tl.float32)
    s32 = tl.zeros([16, 16], tl.float32)
    row = (first + place) * CHANNELS
    keys = qkv + (KEY_HEADS + head // GROUP) * KEYS + row[:, None] + dim[None, :]
    for _ in range(KEYS // KEY_BLOCK):
        k0 = tl.load(keys, mask=(place < count)[:, None], other=0.0)
        k1 = tl.load(keys + 16 * CHANNELS, mask=(place + 16 < count)[:, None], other=0.0)
        k2 = tl.load(keys + 32 * CHANNELS, mask=(place + 32 < count)[:, None], other=0.0)
        k3 = tl.load(keys + 48 * CHANNELS, mask=(place + 48 < count)[:, None], other=0.0)
        s00 = tl.dot(k0, tl.trans(k0), s00, input_precision=PRECISION)
        s11 = tl.dot(k1, tl.trans(k1), s11, input_precision=PRECISION)
        s22 = tl.dot(k2, tl.trans(k2), s22, input_precision=PRECISION)
        s33 = tl.dot(k3, tl.trans(k3), s33, input_precision=PRECISION)
        s10 = tl.dot(k1, tl.trans(k0), s10, input_precision=PRECISION)
        s20 = tl.dot(k2, tl.trans(k0), s20, input_precision=PRECISION)
        s21 = tl.dot(k2, tl.trans(k1), s21, input_precision=PRECISION)
        s30 = tl.dot(k3, tl.trans(k0), s30, input_precision=PRECISION)
        s31 = tl.dot(k3, tl.trans(k1), s31, input_precision=PRECISION)
        s32 = tl.dot(k3, tl.trans(k2), s32, input_precision=PRECISION)
        keys += KEY_BLOCK
    # The system's blocks; those on the diagonal transposed, which takes no more than the shares of
    # columns instead of rows, as kᵢ kᵢᵀ is symmetric.
    own = gates + (chunk * HEADS + head) * (3 * CHUNK)
    t00 = _inverse(s00, own, 0, CHUNK)
    t11 = _inverse(s11, own, 16, CHUNK)
    t22 = _inverse(s22, own, 32, CHUNK)
    t33 = _inverse(s33, own, 48, CHUNK)
    a10 = _system(s10, own, 16, 0, CHUNK)
    a20 = _system(s20, own, 32, 0, CHUNK)
    a21 = _system(s21, own, 32, 16, CHUNK)
    a30 = _system(s30, own, 48, 0, CHUNK)
    a31 = _system(s31, own, 48, 16, CHUNK)
    a32 = _system(s32, own, 48, 32, CHUNK)
    # Below the diagonal: Tᵢⱼ = -Tᵢᵢ Σₘ Aᵢₘ Tₘⱼ over j ≤ m < i.
    sum = tl.dot(a10, t00, input_precision=PRECISION)
    t10 = -tl.dot(t11, sum, input_precision=PRECISION)
    sum = tl.dot(a21, t11, input_precision=PRECISION)
    t21 = -tl.dot(t22, sum, input_precision=PRECISION)
    sum = tl.dot(a32, t22, input_precision=PRECISION)
    t32 = -tl.dot(t33, sum, input_precision=PRECISION)
    sum = tl.dot(a20, t00, input_precision=PRECISION)
    sum = tl.dot(a21, t10, sum, input_precision=PRECISION)
    t20 = -tl.dot(t22, sum, input_precision=PRECISION)
    sum = tl.dot(a31, t11, input_precision=PRECISION)
    sum = tl.dot(a32, t21, sum, input_precision=PRECISION)
    t31 = -tl.dot(t33, sum, input_precision=PRECISION)
    sum = tl.dot(a30, t00, input_precision=PRECISION)
    sum = tl.dot(a31, t10, sum, input_precision=PRECISION)
    sum = tl.dot(a32, t20, sum, input_precision=PRECISION)
    t30 = -tl.dot(t33, sum, input_precision=PRECISION)
    # Store all blocks, those above the diagonal as zeros.
    at = solved + (chunk * HEADS + head) * (CHUNK * CHUNK) + place[:, None] * CHUNK + place[None, :]
    none = tl.zeros([16, 16], tl.float32)
    tl.store(at, t00)
    tl.store(at + 16, none)
    tl.store(at + 32, none)
    tl.store(at + 48, none)
    at += 16 * CHUNK
    tl.store(at, t10)
    tl.store(at + 16, t11)
    tl.store(at + 32, none)
    tl.store(at + 48, none)
    at += 16 * CHUNK
    tl.store(at, t20)
    tl.store(at + 16, t21)
    tl.store(at + 32, t22)
    tl.store(at + 48, none)
    at += 16 * CHUNK
    tl.store(at, t30)
    tl.store(at + 16, t31)
    tl.store(at + 32, t32)
    tl.store(at + 48, t33)


@triton.jit
def _system(products, gates, i, j, CHUNK: tl.constexpr):
    """β kᵢ kⱼᵀ exp(Gᵢ - Gⱼ), rows from i on and columns from j on."""
    place = tl.arange(0, 16)
    fall = tl.load(gates + i + place)[:, None] - tl.load(gates + j + place)[None, :]
    rest = tl.load(gates + CHUNK + i + place)[:, None]
    rest -= tl.load(gates + CHUNK + j + place)[None, :]
    beta = tl.load(gates + 2 * CHUNK + i + place)[:, None]
    return products * beta * tl.exp(fall + rest)


@triton.jit
def _inverse(products, gates, i, CHUNK: tl.constexpr):
    """Of a block on the diagonal, row by row: what is below a row's one is minus its numbers times
    the rows above."""
    place = tl.arange(0, 16)
    fall = tl.load(gates + i + place)[None, :] - tl.load(gates + i + place)[:, None]
    rest = tl.load(gates + CHUNK + i + place)[None, :]
    rest -= tl.load(gates + CHUNK + i + place)[:, None]
    beta = tl.load(gates + 2 * CHUNK + i + place)[None, :]
    # Transposed: a row's numbers are a column here.
    is_before = place[:, None] < place[None, :]
    system = products * beta * tl.exp(tl.where(is_before, fall + rest, float("-inf")))
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    for step in range(1, 16):
        numbers = tl.sum(tl.where(place[None, :] == step, system, 0.0), axis=1)
        found = tl.sum(numbers[:, None] * inverse, axis=0)
        inverse = tl.where(place[:, None] == step, inverse - found[None, :], inverse)
    return inverse


_GATES, _SOLVE = Launcher(_gates), Launcher(_solve)
