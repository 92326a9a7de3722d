"""Triton kernels that choose experts for tokens, sort the choices, and weigh what comes back.

In a decoding step there are few choices, and what counts is how many kernels there are: one
chooses, one sorts by comparing every choice with every other, one makes a table of tiles. Sums of
a token's rows read these where they lie, in training too, so that no sorted row is moved.

`model.experts.router` and `model.experts.routing` do the same in plain torch.

Shapes: T tokens, k experts of each, S = k · T rows, E experts, N tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Launcher

MAX_SORTED = 4096
"""Choices that are sorted here: comparing more takes longer than torch's sort."""

_SORT_BLOCK = 32
_SORT_WIDE = 128
_SUM_BLOCK = 1024


def choose(
    logits: Tensor, per_token: int, is_normalized: bool, choices: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax of logits (T, E) in float32, its largest k and their shares (T, k).

    Among equals the first are taken. With `choices` (T, k) these are, by the same arithmetic.
    """
    num_tokens, num_experts = logits.shape
    probabilities = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    shares = probabilities.new_empty(num_tokens, per_token)
    has_choices = choices is not None
    if choices is None:
        choices = torch.empty(shares.shape, dtype=torch.int64, device=logits.device)
    _CHOOSE(
        (num_tokens, 1, 1),
        (logits.contiguous(), probabilities, choices.contiguous(), shares, num_experts),
        (
            per_token,
            triton.next_power_of_2(per_token),
            triton.next_power_of_2(num_experts),
            is_normalized,
            has_choices,
        ),
        num_warps=1,
    )
    return probabilities, choices, shares


def sort(choices: Tensor) -> tuple[Tensor, ...]:
    """Sort choices (T, k), stably. Of each row its expert, its choice and its token, and of each
    choice its row: (S,) int64 all four."""
    total, per_token = choices.numel(), choices.shape[1]
    found = torch.empty(4, total, dtype=torch.int64, device=choices.device)
    _SORT(
        (triton.cdiv(total, _SORT_BLOCK), 1, 1),
        (choices.contiguous(), found, total, per_token),
        (_SORT_BLOCK, _SORT_WIDE),
        num_warps=4,
    )
    return found.unbind()


def tiles(
    experts: Tensor, tokens: Tensor, runs: tuple[Tensor, int] | None, num_rows: int, num_tiles: int
) -> Tensor:
    """(2, N) int64: the first row of each tile, and how many it has.

    A tile has up to `num_rows` rows of one expert (`experts`, `tokens` are sorted), and where
    `runs` are given, of one run: each token's number (T,), and how many there are.
    """
    numbers, num_runs = runs if runs is not None else (tokens, 1)
    total = len(experts)
    block = triton.next_power_of_2(total)
    table = torch.empty(2, num_tiles, dtype=torch.int64, device=experts.device)
    _TILES(
        (1, 1, 1),
        (experts, tokens, numbers, table, total, num_runs, num_rows, num_tiles),
        (
            block,
            triton.next_power_of_2(num_tiles),
            block.bit_length(),
            runs is not None,
        ),
        num_warps=8 if total >= 1024 else 4,
    )
    return table


def sums(
    rows: Tensor,
    places: Tensor,
    per_token: int,
    shares: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(T, n): the sum of each token's rows (S, n), times shares (T, k) where given; of the rows'
    dtype unless another is asked for.

    `places` (S,) says of each choice where its row is.
    """
    num_tokens, size = len(places) // per_token, rows.shape[1]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = rows.new_empty(num_tokens, size, dtype=dtype or rows.dtype)
    block = min(_SUM_BLOCK, max(32, triton.next_power_of_2(size)))
    has_shares = shares is not None
    _SUMS(
        (num_tokens, triton.cdiv(size, block), 1),
        (
            rows,
            places,
            shares.contiguous() if shares is not None else rows,
            out,
            rows.stride(0),
            size,
        ),
        (per_token, block, has_shares),
        num_warps=4 if block > 256 else 1,
    )
    return out


def weigh(rows: Tensor, x: Tensor, shares: Tensor) -> Tensor:
    """Multiply rows (S, n) by their shares (S,), in place; (S,) float32 are the products of each
    row, as it was, with that of x (S, n)."""
    num_rows, size = rows.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    along = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    block = min(_SUM_BLOCK, max(32, triton.next_power_of_2(size)))
    _WEIGH(
        (num_rows, 1, 1),
        (rows, x, shares, along, rows.stride(0), x.stride(0), size),
        (block,),
        num_warps=4 if block > 256 else 1,
    )
    return along


@triton.jit
def _choose(
    logits,
    probabilities,
    choices,
    shares,
    num_experts,
    PER_TOKEN: tl.constexpr,
    PLACES: tl.constexpr,
    EXPERTS: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    HAS_CHOICES: tl.constexpr,
):
    # One program per token. Softmax over its logits (EXPERTS,), in float32.
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    at = token * num_experts + expert
    values = tl.load(logits + at, mask=is_expert, other=float("-inf")).to(tl.float32)
    weights = tl.exp(values - tl.max(values, axis=0))
    found = weights / tl.sum(weights, axis=0)
    tl.store(probabilities + at, found, mask=is_expert)
    # The largest, one after another. What is not a number comes first, as in `topk`, so that an
    # expert is chosen in any case.
    place = tl.arange(0, PLACES)
    chosen = tl.zeros((PLACES,), dtype=tl.int32)
    chosen_share = tl.zeros((PLACES,), dtype=tl.float32)
    left = tl.where(found == found, found, float("inf"))
    left = tl.where(is_expert, left, -2.0)
    for number in range(PER_TOKEN):
        if HAS_CHOICES:
            best = tl.load(choices + token * PER_TOKEN + number).to(tl.int32)
        else:
            best = tl.argmax(left, axis=0).to(tl.int32)
            left = tl.where(expert == best, -1.0, left)
        share = tl.sum(tl.where(expert == best, found, 0.0), axis=0)
        chosen = tl.where(place == number, best, chosen)
        chosen_share = tl.where(place == number, share, chosen_share)
    if IS_NORMALIZED:
        chosen_share /= tl.sum(chosen_share, axis=0)
    to = token * PER_TOKEN + place
    is_place = place < PER_TOKEN
    tl.store(shares + to, chosen_share, mask=is_place)
    if not HAS_CHOICES:
        tl.store(choices + to, chosen.to(tl.int64), mask=is_place)


@triton.jit
def _sort(
    choices,
    found,
    total,
    per_token,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    # One program per BLOCK choices: a choice's row is the number of choices that come before it.
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_own = choice < total
    own = tl.load(choices + choice, mask=is_own, other=0).to(tl.int32)
    # Before it come those of smaller experts, and earlier ones of its own: (BLOCK, WIDE) at a time.
    before = tl.zeros((BLOCK, WIDE), dtype=tl.int32)
    for at in range(0, total, WIDE):
        other = at + tl.arange(0, WIDE)
        experts = tl.load(choices + other, mask=other < total, other=1 << 30).to(tl.int32)
        is_same = experts[None, :] == own[:, None]
        is_earlier = is_same & (other[None, :] < choice[:, None])
        before += (is_earlier | (experts[None, :] < own[:, None])).to(tl.int32)
    # Of each row its expert, its choice and its token; of each choice its row: (BLOCK,) each.
    row = tl.sum(before, axis=1)
    tl.store(found + row, own.to(tl.int64), mask=is_own)
    tl.store(found + total + row, choice.to(tl.int64), mask=is_own)
    tl.store(found + 2 * total + row, (choice // per_token).to(tl.int64), mask=is_own)
    tl.store(found + 3 * total + choice, row.to(tl.int64), mask=is_own)


@triton.jit
def _key(row, experts, tokens, runs, num_runs, is_row, HAS_RUNS: tl.constexpr):
    """What rises from one expert and run to the next."""
    key = tl.load(experts + row, mask=is_row, other=0)
    if HAS_RUNS:
        token = tl.load(tokens + row, mask=is_row, other=0)
        key = key * num_runs + tl.load(runs + token, mask=is_row, other=0)
    return key


@triton.jit
def _tiles(
    experts,
    tokens,
    runs,
    table,
    total,
    num_runs,
    num_rows,
    num_tiles,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_RUNS: tl.constexpr,
):
    # One program for all. The first row with the key of each row (BLOCK,), and the first behind
    # its tile, by halving.
    row = tl.arange(0, BLOCK)
    is_row = row < total
    own = _key(row, experts, tokens, runs, num_runs, is_row, HAS_RUNS)
    first, first_end = tl.zeros_like(row), row
    end, last_end = row, tl.minimum(row + num_rows, total)
    for _ in range(STEPS):
        middle = (first + first_end) // 2
        is_less = _key(middle, experts, tokens, runs, num_runs, is_row, HAS_RUNS) < own
        first = tl.where(is_less, middle + 1, first)
        first_end = tl.where(is_less, first_end, middle)
        middle = (end + last_end) // 2
        is_inside = is_row & (middle < last_end)
        key = _key(middle, experts, tokens, runs, num_runs, is_inside, HAS_RUNS)
        is_inside = is_inside & (key == own)
        end = tl.where(is_inside, middle + 1, end)
        last_end = tl.where(is_inside, last_end, middle)
    # Every so many rows of a key begin a tile; behind the last are empty ones.
    is_first = is_row & ((row - first) % num_rows == 0)
    number = tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    tl.store(table + number, row.to(tl.int64), mask=is_first)
    tl.store(table + num_tiles + number, (end - row).to(tl.int64), mask=is_first)
    tile = tl.arange(0, TILES)
    is_empty = (tile >= tl.sum(is_first.to(tl.int32), axis=0)) & (tile < num_tiles)
    nothing = tl.zeros((TILES,), dtype=tl.int64)
    tl.store(table + tile, nothing + total - 1, mask=is_empty)
    tl.store(table + num_tiles + tile, nothing, mask=is_empty)


@triton.jit
def _sums(
    rows,
    places,
    shares,
    out,
    row_stride,
    size,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SHARES: tl.constexpr,
):
    # One program per token and BLOCK columns, in float32, in the order of the token's choices.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in tl.static_range(PER_TOKEN):
        place = tl.load(places + token * PER_TOKEN + number)
        values = tl.load(rows + place * row_stride + column, mask=is_in, other=0.0).to(tl.float32)
        # A share is rounded as the rows are, its product is not.
        if HAS_SHARES:
            share = tl.load(shares + token * PER_TOKEN + number)
            values *= share.to(rows.dtype.element_ty).to(tl.float32)
        total += values
    tl.store(out + token * size + column, total, mask=is_in)


@triton.jit
def _weigh(
    rows,
    x,
    shares,
    along,
    row_stride,
    x_stride,
    size,
    BLOCK: tl.constexpr,
):
    # One program per row, BLOCK columns at a time.
    row = tl.program_id(0).to(tl.int64)
    dtype = rows.dtype.element_ty
    share = tl.load(shares + row).to(dtype).to(tl.float32)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(0, size, BLOCK):
        column = at + tl.arange(0, BLOCK)
        is_in = column < size
        to = rows + row * row_stride + column
        values = tl.load(to, mask=is_in, other=0.0).to(tl.float32)
        others = tl.load(x + row * x_stride + column, mask=is_in, other=0.0).to(tl.float32)
        # Products before they are weighed; then the row in place.
        products += values * others
        tl.store(to, values * share, mask=is_in)
    # One number for the row: its product with x.
    tl.store(along + row, tl.sum(products, axis=0))


_CHOOSE, _SORT = Launcher(_choose), Launcher(_sort)
_TILES, _SUMS, _WEIGH = Launcher(_tiles), Launcher(_sums), Launcher(_weigh)
