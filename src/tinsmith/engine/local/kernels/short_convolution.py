"""Triton kernels for what comes before the delta rule: convolution, SiLU, and keys of length one.

Each channel of a row is a sum over that row and the few before it in its sequence, then SiLU. The
channels of a head of queries or keys are then divided by their length; queries also by √K, as
scores of attention are. Arithmetic is in float32, whatever the dtype in memory. The weights are
frozen: there is a gradient for the inputs alone.

Shapes: N rows, S sequences, C channels (queries, keys, values), H heads of values, K key size,
V value size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Launcher
from tinsmith.engine.local.model.recurrent.delta_rule import NORM_EPS, DeltaWeights

_ROWS = 32
_COLUMNS = 128


def convolve(mixed: Tensor, weights: DeltaWeights, rows: Tensor, past: Tensor | None) -> Tensor:
    """Queries, keys and values (N, C) of mixed (N, C), without those of other sequences.

    `rows` (2, N) int32: rows since each one's sequence began, and which sequence that is. `past`
    (S, taps - 1, C) are the inputs before; zero where there is none.
    """
    out = mixed.new_empty(mixed.shape)
    arguments = (
        mixed,
        weights.conv,
        rows,
        *_past(past, mixed),
        out,
        len(mixed),
        mixed.stride(0),
        NORM_EPS,
    )
    _launch_by_heads(_CONVOLVE, arguments, past is not None, len(mixed), weights)
    return out


def convolve_backward(
    grads: Tensor,
    mixed: Tensor,
    weights: DeltaWeights,
    rows: Tensor,
    past: Tensor | None,
    scratch: Tensor,
) -> Tensor:
    """The gradient for mixed (N, C). `scratch` (N, C) is overwritten.

    `grads` (N, H, 2K + V) are those of queries, keys and values of each head of values; what a key
    head's value heads give is added up here.
    """
    arguments = (
        mixed,
        weights.conv,
        rows,
        *_past(past, mixed),
        grads,
        scratch,
        len(mixed),
        mixed.stride(0),
        NORM_EPS,
    )
    _launch_by_heads(_ACTIVATION_BACKWARD, arguments, past is not None, len(mixed), weights)
    out = torch.empty_like(scratch)
    num_rows, channels = scratch.shape
    grid = (-(-channels // _COLUMNS), -(-num_rows // _ROWS), 1)
    _CONVOLUTION_BACKWARD(
        grid,
        (scratch, weights.conv, rows, out, num_rows, channels),
        (weights.conv.shape[1], _ROWS, _COLUMNS),
        num_warps=4,
    )
    return out


def last_inputs(mixed: Tensor, sequences: Tensor, past: Tensor | None, num_past: int) -> Tensor:
    """(S, num_past, C) in float32: what is `past` for the rows after these.

    `sequences` (4, S) int32 begins with each one's first row, its number of rows, and which it is.
    """
    num_sequences, channels = sequences.shape[1], mixed.shape[1]
    out = torch.empty(num_sequences, num_past, channels, dtype=torch.float32, device=mixed.device)
    block = 1024
    grid = (-(-channels // block), num_sequences, 1)
    _LAST_INPUTS(
        grid,
        (mixed, sequences, *_past(past, mixed), out, num_sequences, mixed.stride(0), channels),
        (past is not None, num_past, block),
        num_warps=4,
    )
    return out


def _past(past: Tensor | None, otherwise: Tensor) -> tuple[Tensor, int]:
    """The inputs before and the distance of two sequences in them; a tensor that is not read."""
    return (otherwise, 0) if past is None else (past, past.stride(0))


def _launch_by_heads(
    launcher: Launcher,
    arguments: tuple[object, ...],
    has_past: bool,
    num_rows: int,
    weights: DeltaWeights,
) -> None:
    grid = (2 * weights.num_key_heads + len(weights.a_log), -(-num_rows // _ROWS), 1)
    block = triton.next_power_of_2(max(weights.key_dim, weights.value_dim))
    constants = (has_past, *head_sizes(weights), block, weights.conv.shape[1], _ROWS)
    launcher(grid, arguments, constants, num_warps=4)


def head_sizes(weights: DeltaWeights) -> tuple[int, int, int, int]:
    """Key heads, value heads of each, K and V: constants of all kernels here."""
    group = len(weights.a_log) // weights.num_key_heads
    return weights.num_key_heads, group, weights.key_dim, weights.value_dim


@triton.jit
def columns_of(head, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """A head's first channel, and how many it has."""
    beyond = tl.maximum(head - 2 * KEY_HEADS, 0)
    first = tl.minimum(head, 2 * KEY_HEADS) * KEYS + beyond * VALUES
    return first, tl.where(head < 2 * KEY_HEADS, KEYS, VALUES)


@triton.jit
def _convolved(
    mixed,
    weight,
    rows,
    past,
    past_row,
    row,
    column,
    is_in,
    is_column,
    num_rows,
    row_stride,
    HAS_PAST: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """The sums over taps: (ROWS, BLOCK)."""
    since = tl.load(rows + row, mask=row < num_rows, other=0)
    total = tl.zeros(is_in.shape, tl.float32)
    for lag in tl.static_range(TAPS):
        share = tl.load(weight + column * TAPS + (TAPS - 1 - lag), mask=is_column, other=0.0)
        at = mixed + (row - lag)[:, None] * row_stride + column[None, :]
        is_here = is_in & (since >= lag)[:, None]
        x = tl.load(at, mask=is_here, other=0.0).to(tl.float32)
        if HAS_PAST and lag > 0:
            sequence = tl.load(rows + num_rows + row, mask=row < num_rows, other=0)
            before = (TAPS - 1 + since - lag) * CHANNELS
            at = past + (sequence.to(tl.int64) * past_row + before)[:, None] + column[None, :]
            x += tl.load(at, mask=is_in & (since < lag)[:, None], other=0.0)
        total += x * share.to(tl.float32)[None, :]
    return total


@triton.jit
def _convolve(
    mixed,
    weight,
    rows,
    past,
    past_row,
    out,
    num_rows,
    row_stride,
    norm_eps,
    HAS_PAST: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    # One program per head of queries, keys or values, and ROWS rows: (ROWS, BLOCK).
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + KEY_HEADS * GROUP * VALUES
    head = tl.program_id(0)
    first, size = columns_of(head, KEY_HEADS, KEYS, VALUES)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_column = tl.arange(0, BLOCK) < size
    column = first + tl.arange(0, BLOCK)
    is_in = (row < num_rows)[:, None] & is_column[None, :]
    x = _convolved(
        mixed,
        weight,
        rows,
        past,
        past_row,
        row,
        column,
        is_in,
        is_column,
        num_rows,
        row_stride,
        HAS_PAST,
        CHANNELS,
        TAPS,
    )
    x = x / (1.0 + tl.exp(-x))
    # Queries and keys are divided by their length, queries by √K too.
    if head < 2 * KEY_HEADS:
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) + norm_eps)[:, None]
    x = tl.where(head < KEY_HEADS, x * KEYS**-0.5, x)
    tl.store(out + row[:, None] * CHANNELS + column[None, :], x, mask=is_in)


@triton.jit
def _activation_backward(
    mixed,
    weight,
    rows,
    past,
    past_row,
    grads,
    out,
    num_rows,
    row_stride,
    norm_eps,
    HAS_PAST: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    # One program as in `_convolve`; what comes before the length and SiLU is computed again.
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + KEY_HEADS * GROUP * VALUES
    SIZE: tl.constexpr = 2 * KEYS + VALUES
    head = tl.program_id(0)
    first, size = columns_of(head, KEY_HEADS, KEYS, VALUES)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offset = tl.arange(0, BLOCK)
    is_column = offset < size
    column = first + offset
    is_in = (row < num_rows)[:, None] & is_column[None, :]
    x = _convolved(
        mixed,
        weight,
        rows,
        past,
        past_row,
        row,
        column,
        is_in,
        is_column,
        num_rows,
        row_stride,
        HAS_PAST,
        CHANNELS,
        TAPS,
    )
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    x = x * sigmoid
    at = grads + row[:, None] * (KEY_HEADS * GROUP * SIZE) + offset[None, :]
    if head < 2 * KEY_HEADS:
        # The sum over the value heads that share the key head.
        at += (head % KEY_HEADS) * GROUP * SIZE + (head // KEY_HEADS) * KEYS
        grad = tl.zeros([ROWS, BLOCK], tl.float32)
        for member in tl.static_range(GROUP):
            grad += tl.load(at + member * SIZE, mask=is_in, other=0.0).to(tl.float32)
        # x̂ = x / |x|; d x = (g - x̂ · (x̂ · g)) / |x|.
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) + norm_eps)[:, None]
        unit = x * inverse
        grad = (grad - unit * tl.sum(unit * grad, axis=1)[:, None]) * inverse
    else:
        at += (head - 2 * KEY_HEADS) * SIZE + 2 * KEYS
        grad = tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    grad = tl.where(head < KEY_HEADS, grad * KEYS**-0.5, grad)
    tl.store(out + row[:, None] * CHANNELS + column[None, :], grad * slope, mask=is_in)


@triton.jit
def _convolution_backward(
    grad,
    weight,
    rows,
    out,
    num_rows,
    channels,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # One program per block of rows and channels: a row's input went to the rows after it, too.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_column = column < channels
    is_in = (row < num_rows)[:, None] & is_column[None, :]
    at = row[:, None] * channels + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    # Tap after tap: the gradient (ROWS, COLUMNS) of rows `lag` later, if they are of the sequence.
    for lag in tl.static_range(TAPS):
        share = tl.load(weight + column * TAPS + (TAPS - 1 - lag), mask=is_column, other=0.0)
        since = tl.load(rows + row + lag, mask=row + lag < num_rows, other=-1)
        is_there = (since >= lag)[:, None] & is_column[None, :]
        x = tl.load(grad + at + lag * channels, mask=is_there, other=0.0).to(tl.float32)
        total += x * share.to(tl.float32)[None, :]
    tl.store(out + at, total, mask=is_in)


@triton.jit
def _last_inputs(
    mixed,
    sequences,
    past,
    past_row,
    out,
    num_sequences,
    row_stride,
    channels,
    HAS_PAST: tl.constexpr,
    NUM_PAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per sequence and BLOCK channels.
    index = tl.program_id(1)
    first = tl.load(sequences + index).to(tl.int64)
    count = tl.load(sequences + num_sequences + index)
    sequence = tl.load(sequences + 2 * num_sequences + index).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < channels
    for place in tl.static_range(NUM_PAST):
        # Counted from the sequence's first row here; before it are the inputs of then.
        since = count - NUM_PAST + place
        at = mixed + (first + since) * row_stride + column
        x = tl.load(at, mask=is_column & (since >= 0), other=0.0).to(tl.float32)
        if HAS_PAST:
            at = past + sequence * past_row + (NUM_PAST + since) * channels + column
            x += tl.load(at, mask=is_column & (since < 0), other=0.0)
        tl.store(out + (sequence * NUM_PAST + place) * channels + column, x, mask=is_column)


_CONVOLVE, _ACTIVATION_BACKWARD = Launcher(_convolve), Launcher(_activation_backward)
_CONVOLUTION_BACKWARD, _LAST_INPUTS = Launcher(_convolution_backward), Launcher(_last_inputs)
