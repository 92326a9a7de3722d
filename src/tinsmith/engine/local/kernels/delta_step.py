"""Triton kernels for one token of each sequence under the gated delta rule, as decoding has it.

The states lie in a pool, a row for each sequence, and are changed where they lie. Reading and
writing the memories is nearly all of the work. Arithmetic is in float32. Nothing here waits for
the device, so that a step can be captured as a graph.

Shapes: B rows, C channels, H heads of values, K key size, V value size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.delta_chunks import softplus
from tinsmith.engine.local.kernels.launching import Launcher
from tinsmith.engine.local.kernels.short_convolution import columns_of, head_sizes
from tinsmith.engine.local.model.recurrent.delta_rule import NORM_EPS, DeltaWeights

_VALUES = 32
"""Of a head, for one program: its part of the memory stays in registers."""


def step_in_place(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    states: Tensor,
    numbers: Tensor,
    offset: int,
) -> Tensor:
    """Outputs (B, H, V) of mixed (B, C), a and b (B, H), one token of each sequence.

    `states` (R, n), float32, holds one row for each sequence; this layer's state, as
    `StateShape.split` has it, begins at place `offset` of a row, and is changed in place. `numbers`
    (B,) int64 says whose row of `states` it is; -1 changes nothing, and its output means nothing.
    """
    num_rows, channels = mixed.shape
    sizes = head_sizes(weights)
    num_heads, key_dim, value_dim = len(weights.a_log), weights.key_dim, weights.value_dim
    taps = weights.conv.shape[1]
    qkv = torch.empty((num_rows, channels), dtype=torch.float32, device=mixed.device)
    block = triton.next_power_of_2(max(key_dim, value_dim))
    _STEP_CONVOLUTION(
        (2 * weights.num_key_heads + num_heads, num_rows, 1),
        (
            mixed,
            weights.conv,
            states,
            numbers,
            qkv,
            mixed.stride(0),
            states.stride(0),
            offset,
            NORM_EPS,
        ),
        (*sizes, block, taps),
        num_warps=1,
    )
    out = mixed.new_empty(num_rows, num_heads, value_dim)
    at_once = min(_VALUES, value_dim)
    _STEP_MEMORY(
        (value_dim // at_once, num_heads, num_rows),
        (
            qkv,
            a,
            b,
            weights.a_log,
            weights.dt_bias,
            states,
            numbers,
            out,
            a.stride(0),
            b.stride(0),
            states.stride(0),
            offset + (taps - 1) * channels,
        ),
        (*sizes, at_once),
        num_warps=4,
    )
    return out


@triton.jit
def _step_convolution(
    mixed,
    weight,
    states,
    numbers,
    out,
    mixed_row,
    states_row,
    offset,
    norm_eps,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
):
    # One program per head of queries, keys or values, and row: (BLOCK,).
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + KEY_HEADS * GROUP * VALUES
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    number = tl.load(numbers + row)
    first, size = columns_of(head, KEY_HEADS, KEYS, VALUES)
    is_column = tl.arange(0, BLOCK) < size
    is_kept = is_column & (number >= 0)
    column = first + tl.arange(0, BLOCK)
    past = states + number * states_row + offset + column
    # This token's input, then those before it; each of them moves on by one place.
    x = tl.load(mixed + row * mixed_row + column, mask=is_column, other=0.0).to(tl.float32)
    total = x * tl.load(weight + column * TAPS + TAPS - 1, mask=is_column, other=0.0).to(tl.float32)
    for lag in tl.static_range(1, TAPS):
        place = past + (TAPS - 1 - lag) * CHANNELS
        earlier = tl.load(place, mask=is_kept, other=0.0)
        share = tl.load(weight + column * TAPS + TAPS - 1 - lag, mask=is_column, other=0.0)
        total += earlier * share.to(tl.float32)
        tl.store(place, x, mask=is_kept)
        x = earlier
    total = total / (1.0 + tl.exp(-total))
    # Queries and keys are divided by their length, queries by √K too.
    if head < 2 * KEY_HEADS:
        total = total * tl.rsqrt(tl.sum(total * total, axis=0) + norm_eps)
    total = tl.where(head < KEY_HEADS, total * KEYS**-0.5, total)
    tl.store(out + row * CHANNELS + column, total, mask=is_column)


@triton.jit
def _step_memory(
    qkv,
    a,
    b,
    a_log,
    dt_bias,
    states,
    numbers,
    out,
    a_row,
    b_row,
    states_row,
    offset,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row, head and BLOCK values: (KEYS, BLOCK) of the memory.
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    number = tl.load(numbers + row)
    is_kept = number >= 0
    dim = tl.arange(0, KEYS)
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at_memory = states + number * states_row + offset
    at_memory += ((head * KEYS + dim) * VALUES)[:, None] + value[None, :]
    memory = tl.load(at_memory, mask=is_kept, other=0.0)
    keys = qkv + row * CHANNELS + head // GROUP * KEYS + dim
    q = tl.load(keys)
    k = tl.load(keys + KEY_HEADS * KEYS)
    v = tl.load(qkv + row * CHANNELS + 2 * KEY_HEADS * KEYS + head * VALUES + value)
    x = tl.load(a + row * a_row + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    speed = tl.exp(tl.load(a_log + head).to(tl.float32))
    decay = tl.exp(-speed * softplus(x))
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b + row * b_row + head).to(tl.float32)))
    # M ← exp(g) M; M ← M + β k (v - kᵀM)ᵀ; y = qᵀM, of which qᵀk comes apart.
    memory = memory * decay
    said = tl.sum(memory * k[:, None], axis=0)
    read = tl.sum(memory * q[:, None], axis=0)
    new = beta * (v - said)
    tl.store(at_memory, memory + k[:, None] * new[None, :], mask=is_kept)
    y = read + tl.sum(q * k, axis=0) * new
    tl.store(out + (row * HEADS + head) * VALUES + value, y)


_STEP_CONVOLUTION, _STEP_MEMORY = Launcher(_step_convolution), Launcher(_step_memory)
