"""Triton kernels for the gated delta rule over packed sequences, forward and backward.

Sequences are cut into chunks of 64 rows from their first row on, so that what a sequence finds does
not depend on others in the batch. Within a chunk, with G the sum of log-decays since its start and
M the memory before it,

    T = (I + tril(β k kᵀ ∘ exp(Gᵢ - Gⱼ), -1))⁻¹        in `delta_chunks`,
    n = T β (v - exp(G) k M)                            what each row writes,
    y = exp(G) q M + tril(q kᵀ ∘ exp(Gᵢ - Gⱼ)) n        what each row reads,
    M ← exp(G_last) M + (exp(G_last - G) k)ᵀ n

where the last three walk along a sequence, for each head and block of values, with the memory in
registers. The backward pass walks once more to find M and n of each chunk, then backwards for the
gradients of M and n; all others follow for each chunk by itself. Sums, decays, the triangular
system and the memory are float32. Products have inputs of the model's dtype; but in a bfloat16
model those within a chunk, on the way forward, have inputs in float16, which lie close together and
want digits more than range: most of what rounding changes would come from them.

Shapes: N rows, S sequences, n chunks, H heads of values, K key size, V value size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels import delta_chunks, short_convolution
from tinsmith.engine.local.kernels.launching import Launcher
from tinsmith.engine.local.kernels.short_convolution import head_sizes
from tinsmith.engine.local.model.recurrent.delta_rule import DeltaWeights
from tinsmith.engine.local.model.recurrent.recurrence import CHUNK, ChunkTables


def forward(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    tables: ChunkTables,
    past: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs (N, H, V), and the memories after (S, H, K, V), float32.

    From mixed (N, C), a and b (N, H), past inputs (S, taps - 1, C) and memories (S, H, K, V), which
    are zero where there are none.
    """
    prepared = delta_chunks.prepare(mixed, a, b, weights, tables, past)
    out = mixed.new_empty(len(mixed), len(weights.a_log), weights.value_dim)
    num_sequences = tables.sequences.shape[1]
    after = torch.empty(
        (num_sequences, len(weights.a_log), weights.key_dim, weights.value_dim),
        dtype=torch.float32,
        device=mixed.device,
    )
    _walk(prepared, weights, tables, before, out, after, None, None)
    return out, after


def backward(
    grad: Tensor,
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    tables: ChunkTables,
    past: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of mixed, a and b, from that of the outputs (N, H, V)."""
    num_rows, num_heads = a.shape
    num_chunks = tables.chunks.shape[1]
    key_dim, value_dim = weights.key_dim, weights.value_dim
    prepared = delta_chunks.prepare(mixed, a, b, weights, tables, past)
    # The walk once more: memories and what rows wrote.
    news = mixed.new_empty(num_rows, num_heads, value_dim)
    memories = mixed.new_empty(num_chunks, num_heads, key_dim, value_dim)
    _walk(prepared, weights, tables, before, None, None, news, memories)
    # Backwards: the gradients of memories, and in `grads` those of β (v - exp(G) k M).
    grads = mixed.new_empty(num_rows, num_heads, 2 * key_dim + value_dim)
    memory_grads = torch.empty_like(memories)
    grad = grad.to(mixed.dtype).contiguous()
    num_sequences = tables.sequences.shape[1]
    block, warps, stages, precision = _tile(mixed.dtype, weights)
    sizes = head_sizes(weights)
    _WALK_BACK(
        (value_dim // block, num_heads, num_sequences),
        (*prepared, grad, grads, memory_grads, tables.sequences, num_sequences),
        (*sizes, block, CHUNK, precision),
        warps,
        stages,
    )
    # Chunk by chunk: queries, keys, values and gates.
    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    _GRADIENTS(
        (num_chunks * num_heads, 1, 1),
        (
            *prepared[:2],
            a,
            weights.a_log,
            weights.dt_bias,
            grad,
            news,
            memories,
            memory_grads,
            grads,
            grad_a,
            grad_b,
            tables.chunks,
            num_chunks,
            a.stride(0),
            grad_a.stride(0),
            grad_b.stride(0),
        ),
        (*sizes, min(block, 32) if precision == "ieee" else block, CHUNK, precision),
        num_warps=8,
        num_stages=1 if precision == "ieee" else 2,
    )
    grad_mixed = short_convolution.convolve_backward(
        grads, mixed, weights, tables.rows, past, scratch=prepared.qkv
    )
    return grad_mixed, grad_a, grad_b


def _walk(
    prepared: delta_chunks.Prepared,
    weights: DeltaWeights,
    tables: ChunkTables,
    before: Tensor | None,
    out: Tensor | None,
    after: Tensor | None,
    news: Tensor | None,
    memories: Tensor | None,
) -> None:
    """Along each sequence, from the memories before; what is None is not wanted."""
    num_sequences = tables.sequences.shape[1]
    block, warps, stages, precision = _tile(prepared.qkv.dtype, weights)
    unread = prepared.gates
    _WALK(
        (weights.value_dim // block, len(weights.a_log), num_sequences),
        (
            *prepared,
            unread if before is None else before,
            prepared.qkv if out is None else out,
            unread if after is None else after,
            prepared.qkv if news is None else news,
            prepared.qkv if memories is None else memories,
            tables.sequences,
            num_sequences,
            0 if before is None else before.stride(0),
        ),
        (
            before is not None,
            out is not None,
            news is not None,
            *head_sizes(weights),
            block,
            CHUNK,
            precision,
        ),
        warps,
        stages,
    )


def _tile(dtype: torch.dtype, weights: DeltaWeights) -> tuple[int, int, int, str]:
    """Values of a program that walks, its warps and stages, and how it multiplies."""
    if dtype == torch.float32:
        return min(weights.value_dim, 32), 8, 1, "ieee"
    return min(weights.value_dim, 64), 4, 2, "tf32"


@triton.jit
def _decays(gates, IS_EXACT: tl.constexpr, CHUNK: tl.constexpr):
    """exp(G), exp(G_last - G), exp(G_last), and β, of a chunk."""
    place = tl.arange(0, CHUNK)
    high, last = tl.load(gates + place), tl.load(gates + CHUNK - 1)
    rest = last - high
    if IS_EXACT:
        rest += tl.load(gates + 2 * CHUNK - 1) - tl.load(gates + CHUNK + place)
    beta = tl.load(gates + 2 * CHUNK + place)
    return tl.exp(high), tl.exp(rest), tl.exp(last), beta


@triton.jit
def _between(gates, IS_TRANSPOSED: tl.constexpr, IS_EXACT: tl.constexpr, CHUNK: tl.constexpr):
    """exp(Gᵢ - Gⱼ) from column j to row i, zero where j comes later; or its transpose."""
    place = tl.arange(0, CHUNK)
    high = tl.load(gates + place)
    fall = high[:, None] - high[None, :]
    if IS_EXACT:
        low = tl.load(gates + CHUNK + place)
        fall += low[:, None] - low[None, :]
    is_seen = place[:, None] >= place[None, :]
    if IS_TRANSPOSED:
        fall = -fall
        is_seen = place[:, None] <= place[None, :]
    return tl.exp(tl.where(is_seen, fall, float("-inf")))


@triton.jit
def _walk_kernel(
    qkv,
    gates,
    solved,
    before,
    out,
    after,
    news,
    memories,
    sequences,
    num_sequences,
    before_row,
    HAS_BEFORE: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_NEWS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program per sequence, head and BLOCK values.
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    IS_EXACT: tl.constexpr = PRECISION == "ieee"
    head = tl.program_id(1)
    index = tl.program_id(2)
    first = tl.load(sequences + index).to(tl.int64)
    count = tl.load(sequences + num_sequences + index)
    sequence = tl.load(sequences + 2 * num_sequences + index).to(tl.int64)
    chunk = tl.load(sequences + 3 * num_sequences + index).to(tl.int64)
    dtype = qkv.dtype.element_ty
    inner = solved.dtype.element_ty
    place = tl.arange(0, CHUNK)
    dim = tl.arange(0, KEYS)
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_memory = (head * KEYS + dim)[:, None] * VALUES + value[None, :]
    # The memory: (KEYS, BLOCK).
    if HAS_BEFORE:
        memory = tl.load(before + sequence * before_row + in_memory)
    else:
        memory = tl.zeros([KEYS, BLOCK], tl.float32)
    for step in range(tl.cdiv(count, CHUNK)):
        row = step * CHUNK + place
        is_row = (row < count)[:, None]
        row = first + row
        own = (chunk + step) * HEADS + head
        # Keys (CHUNK, KEYS), values (CHUNK, BLOCK), and the solved system (CHUNK, CHUNK).
        at = qkv + row[:, None] * CHANNELS + head // GROUP * KEYS + dim[None, :]
        k = tl.load(at + KEY_HEADS * KEYS, mask=is_row, other=0.0)
        to_value = head * VALUES + value[None, :]
        v = tl.load(
            qkv + row[:, None] * CHANNELS + 2 * KEY_HEADS * KEYS + to_value, mask=is_row, other=0.0
        )
        t = tl.load(solved + own * (CHUNK * CHUNK) + place[:, None] * CHUNK + place[None, :])
        since, until, decay, beta = _decays(gates + own * (3 * CHUNK), IS_EXACT, CHUNK)
        rounded = memory.to(dtype)
        # What the memory says already, and what is written: (CHUNK, BLOCK).
        said = tl.dot(k, rounded, input_precision=PRECISION) * since[:, None]
        wanted = beta[:, None] * (v.to(tl.float32) - said)
        new = tl.dot(t, wanted.to(inner), input_precision=PRECISION)
        at_value = row[:, None] * (HEADS * VALUES) + to_value
        if HAS_OUT:
            q = tl.load(at, mask=is_row, other=0.0)
            weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights *= _between(gates + own * (3 * CHUNK), False, IS_EXACT, CHUNK)
            y = tl.dot(q, rounded, input_precision=PRECISION) * since[:, None]
            y = tl.dot(weights.to(inner), new.to(inner), y, input_precision=PRECISION)
            tl.store(out + at_value, y, mask=is_row)
        if HAS_NEWS:
            tl.store(news + at_value, new, mask=is_row)
            tl.store(memories + (chunk + step) * (HEADS * KEYS * VALUES) + in_memory, rounded)
        memory = tl.dot(
            tl.trans(k),
            (new * until[:, None]).to(dtype),
            memory * decay,
            input_precision=PRECISION,
        )
    if HAS_OUT:
        tl.store(after + sequence * (HEADS * KEYS * VALUES) + in_memory, memory)


@triton.jit
def _walk_back_kernel(
    qkv,
    gates,
    solved,
    grad,
    grads,
    memory_grads,
    sequences,
    num_sequences,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program as in `_walk_kernel`. Nothing wants the memory after the last chunk.
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    SIZE: tl.constexpr = 2 * KEYS + VALUES
    IS_EXACT: tl.constexpr = PRECISION == "ieee"
    head = tl.program_id(1)
    index = tl.program_id(2)
    first = tl.load(sequences + index).to(tl.int64)
    count = tl.load(sequences + num_sequences + index)
    chunk = tl.load(sequences + 3 * num_sequences + index).to(tl.int64)
    dtype = qkv.dtype.element_ty
    place = tl.arange(0, CHUNK)
    dim = tl.arange(0, KEYS)
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_memory = (head * KEYS + dim)[:, None] * VALUES + value[None, :]
    memory_grad = tl.zeros([KEYS, BLOCK], tl.float32)
    num_steps = tl.cdiv(count, CHUNK)
    for back in range(num_steps):
        step = num_steps - 1 - back
        row = step * CHUNK + place
        is_row = (row < count)[:, None]
        row = first + row
        own = (chunk + step) * HEADS + head
        at = qkv + row[:, None] * CHANNELS + head // GROUP * KEYS + dim[None, :]
        q = tl.load(at, mask=is_row, other=0.0)
        k = tl.load(at + KEY_HEADS * KEYS, mask=is_row, other=0.0)
        at = grad + row[:, None] * (HEADS * VALUES) + head * VALUES + value[None, :]
        dy = tl.load(at, mask=is_row, other=0.0)
        t = tl.load(solved + own * (CHUNK * CHUNK) + place[:, None] * CHUNK + place[None, :])
        since, until, decay, beta = _decays(gates + own * (3 * CHUNK), IS_EXACT, CHUNK)
        rounded = memory_grad.to(dtype)
        tl.store(memory_grads + (chunk + step) * (HEADS * KEYS * VALUES) + in_memory, rounded)
        # Of what was written, which the chunk's later rows and the memory after it read.
        weights = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        weights *= _between(gates + own * (3 * CHUNK), True, IS_EXACT, CHUNK)
        dnew = tl.dot(k, rounded, input_precision=PRECISION) * until[:, None]
        dnew = tl.dot(weights.to(dtype), dy, dnew, input_precision=PRECISION)
        dwanted = tl.dot(tl.trans(t.to(dtype)), dnew.to(dtype), input_precision=PRECISION)
        at = grads + row[:, None] * (HEADS * SIZE) + head * SIZE + 2 * KEYS + value[None, :]
        tl.store(at, dwanted, mask=is_row)
        # Of the memory before the chunk.
        read = (dy.to(tl.float32) * since[:, None]).to(dtype)
        memory_grad = tl.dot(tl.trans(q), read, memory_grad * decay, input_precision=PRECISION)
        said = (dwanted * (-beta * since)[:, None]).to(dtype)
        memory_grad = tl.dot(tl.trans(k), said, memory_grad, input_precision=PRECISION)


@triton.jit
def _gradients_kernel(
    qkv,
    gates,
    a,
    a_log,
    dt_bias,
    grad,
    news,
    memories,
    memory_grads,
    grads,
    grad_a,
    grad_b,
    chunks,
    num_chunks,
    a_row,
    grad_a_row,
    grad_b_row,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program per chunk and head.
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    SIZE: tl.constexpr = 2 * KEYS + VALUES
    IS_EXACT: tl.constexpr = PRECISION == "ieee"
    head = tl.program_id(0) % HEADS
    chunk = (tl.program_id(0) // HEADS).to(tl.int64)
    first = tl.load(chunks + chunk).to(tl.int64)
    count = tl.load(chunks + num_chunks + chunk)
    own = gates + (chunk * HEADS + head) * (3 * CHUNK)
    dtype = qkv.dtype.element_ty
    place = tl.arange(0, CHUNK)
    dim = tl.arange(0, KEYS)
    is_row = (place < count)[:, None]
    row = (first + place)[:, None]
    since, until, decay, beta = _decays(own, IS_EXACT, CHUNK)
    # Sums over values. Products with memories: (CHUNK, KEYS); of rows with rows: (CHUNK, CHUNK).
    dread = tl.zeros([CHUNK, KEYS], tl.float32)
    dsaid = tl.zeros([CHUNK, KEYS], tl.float32)
    dwritten = tl.zeros([CHUNK, KEYS], tl.float32)
    dweights = tl.zeros([CHUNK, CHUNK], tl.float32)
    dsystem = tl.zeros([CHUNK, CHUNK], tl.float32)
    dbeta = tl.zeros([CHUNK], tl.float32)
    kept = tl.zeros([KEYS], tl.float32)
    for start in range(0, VALUES, BLOCK):
        value = start + tl.arange(0, BLOCK)
        at_value = row * (HEADS * VALUES) + head * VALUES + value[None, :]
        dy = tl.load(grad + at_value, mask=is_row, other=0.0)
        new = tl.load(news + at_value, mask=is_row, other=0.0)
        at = grads + row * (HEADS * SIZE) + head * SIZE + 2 * KEYS + value[None, :]
        dwanted = tl.load(at, mask=is_row, other=0.0)
        at_v = 2 * KEY_HEADS * KEYS + head * VALUES + value[None, :]
        v = tl.load(qkv + row * CHANNELS + at_v, mask=is_row, other=0.0)
        at_memory = ((chunk * HEADS + head) * KEYS + dim)[:, None] * VALUES + value[None, :]
        memory = tl.load(memories + at_memory)
        memory_grad = tl.load(memory_grads + at_memory)
        dread = tl.dot(dy, tl.trans(memory), dread, input_precision=PRECISION)
        dsaid = tl.dot(dwanted, tl.trans(memory), dsaid, input_precision=PRECISION)
        dwritten = tl.dot(new, tl.trans(memory_grad), dwritten, input_precision=PRECISION)
        dweights = tl.dot(dy, tl.trans(new), dweights, input_precision=PRECISION)
        dsystem = tl.dot(dwanted, tl.trans(new), dsystem, input_precision=PRECISION)
        dbeta += tl.sum(dwanted.to(tl.float32) * v.to(tl.float32), axis=1)
        kept += tl.sum(memory.to(tl.float32) * memory_grad.to(tl.float32), axis=1)
        # The values' gradient takes the place of what it is made of.
        tl.store(at, dwanted.to(tl.float32) * beta[:, None], mask=is_row)
    at = qkv + row * CHANNELS + head // GROUP * KEYS + dim[None, :]
    q = tl.load(at, mask=is_row, other=0.0)
    k = tl.load(at + KEY_HEADS * KEYS, mask=is_row, other=0.0)
    # Along rows, by way of the memory.
    dread *= since[:, None]
    dsaid *= since[:, None]
    dwritten *= until[:, None]
    by_reading = tl.sum(dread * q.to(tl.float32), axis=1)
    by_saying = tl.sum(dsaid * k.to(tl.float32), axis=1)
    by_writing = tl.sum(dwritten * k.to(tl.float32), axis=1)
    # Within the chunk: the weights of reading, and the system, of which T is the inverse.
    is_earlier = place[:, None] > place[None, :]
    between = _between(own, False, IS_EXACT, CHUNK)
    dweights *= between
    dsystem *= tl.where(is_earlier, -between, 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    dbeta += tl.sum(dsystem * products, axis=1) - by_saying
    dsystem *= beta[:, None]
    # Of the gates. A row's log-decay is in what later rows read of the memory before the chunk, in
    # what the memory after it keeps of that and of earlier rows, and in what goes from earlier rows
    # to later ones: the diagonal, from a row to itself, would only take digits.
    flow = tl.where(is_earlier, dweights * scores, 0.0) + dsystem * products
    after = by_reading - beta * by_saying + tl.sum(flow, axis=1) - tl.sum(flow, axis=0)
    dg = tl.cumsum(after, axis=0, reverse=True) + decay * tl.sum(kept, axis=0)
    dg += tl.sum(tl.where(is_earlier, by_writing[None, :], 0.0), axis=1)
    # Of queries and keys: (CHUNK, KEYS).
    rounded = dweights.to(dtype)
    dq = tl.dot(rounded, k, dread, input_precision=PRECISION)
    dk = dwritten - beta[:, None] * dsaid
    dk = tl.dot(tl.trans(rounded), q, dk, input_precision=PRECISION)
    both = (dsystem + tl.trans(dsystem)).to(dtype)
    dk = tl.dot(both, k, dk, input_precision=PRECISION)
    at = grads + row * (HEADS * SIZE) + head * SIZE + dim[None, :]
    tl.store(at, dq, mask=is_row)
    tl.store(at + KEYS, dk, mask=is_row)
    # Of what the token said of its gates.
    row = first + place
    is_in = place < count
    x = tl.load(a + row * a_row + head, mask=is_in, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head).to(tl.float32)
    speed = tl.exp(tl.load(a_log + head).to(tl.float32))
    tl.store(grad_a + row * grad_a_row + head, -dg * speed / (1.0 + tl.exp(-x)), mask=is_in)
    tl.store(grad_b + row * grad_b_row + head, dbeta * beta * (1.0 - beta), mask=is_in)


_WALK, _WALK_BACK = Launcher(_walk_kernel), Launcher(_walk_back_kernel)
_GRADIENTS = Launcher(_gradients_kernel)
