"""Triton kernels that draw the next token of every row, reading its logits once.

The first kernel sums up each chunk of the vocabulary: its largest logit, where that is, and the
weight of all of them. The second finds the chunk in which a row's number in [0, 1) falls, and in
that chunk the token. `choosing.Distributions` does the same in plain torch and is the reference.

Shapes: B rows, V vocabulary, C chunks of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Staged

_CHUNK = 2048


class Drawn(NamedTuple):
    """One choice for each row."""

    tokens: Tensor
    """(B,) int64."""

    facts: Tensor
    """(3, B) float64, to be read at once: token, log-probability, one where the row was finite."""


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Drawn:
    """A token from each whole row of logits (B, V), of any dtype.

    Temperatures and numbers in [0, 1) are float64 (B,). At temperature zero the likeliest token
    is taken, and its log-probability is that of temperature one.
    """
    num_rows, vocabulary = logits.shape
    num_chunks = triton.cdiv(vocabulary, _CHUNK)
    device = logits.device
    peaks = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    totals = torch.empty_like(peaks)
    best = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    facts = torch.empty(3, num_rows, dtype=torch.float64, device=device)
    _sum_up_kernel[(num_rows, num_chunks)](
        logits,
        temperatures,
        peaks,
        totals,
        best,
        vocabulary,
        num_chunks,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    _draw_kernel[(num_rows,)](
        logits,
        temperatures,
        uniforms,
        peaks,
        totals,
        best,
        tokens,
        facts,
        vocabulary,
        num_chunks,
        num_rows,
        CHUNK=_CHUNK,
        CHUNKS_PAD=triton.next_power_of_2(num_chunks),
        num_warps=4,
    )
    return Drawn(tokens, facts)


@triton.jit
def _scaled(logits, temperatures, row, token, vocabulary):
    """Logits of a row by its temperature; minus infinity behind the vocabulary."""
    temperature = tl.load(temperatures + row).to(tl.float32)
    temperature = tl.where(temperature <= 0.0, 1.0, temperature)
    at = logits + row.to(tl.int64) * vocabulary + token
    return tl.load(at, mask=token < vocabulary, other=-float("inf")).to(tl.float32) / temperature


@triton.jit
def _weights(scaled, peak):
    """Against the peak; where all are minus infinity, zeros instead of NaN."""
    return tl.exp(scaled - tl.where(peak == -float("inf"), 0.0, peak))


@Staged
@triton.jit
def _sum_up_kernel(
    logits, temperatures, peaks, totals, best, vocabulary, num_chunks, CHUNK: tl.constexpr
):
    # One program per row and chunk: peak, place of the peak, and total weight against the peak.
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    scaled = _scaled(logits, temperatures, row, token, vocabulary)
    peak = tl.max(scaled, axis=0)
    at = row * num_chunks + chunk
    tl.store(peaks + at, peak)
    tl.store(best + at, chunk * CHUNK + tl.argmax(scaled, axis=0))
    tl.store(totals + at, tl.sum(_weights(scaled, peak), axis=0))


@triton.jit
def _first_above(weights, cumulative, target):
    """Index of the first entry above `target`, never one past the last that adds weight."""
    place = tl.sum((cumulative <= target).to(tl.int32), axis=0)
    last = tl.sum((cumulative < tl.sum(weights, axis=0)).to(tl.int32), axis=0)
    return tl.minimum(place, last)


@Staged
@triton.jit
def _draw_kernel(
    logits,
    temperatures,
    uniforms,
    peaks,
    totals,
    best,
    tokens,
    facts,
    vocabulary,
    num_chunks,
    num_rows,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    # One program per row. Chunks (C,) against the row's own peak.
    row = tl.program_id(0)
    index = tl.arange(0, CHUNKS_PAD)
    is_in = index < num_chunks
    chunk_peaks = tl.load(peaks + row * num_chunks + index, mask=is_in, other=-float("inf"))
    chunk_totals = tl.load(totals + row * num_chunks + index, mask=is_in, other=0.0)
    peak = tl.max(chunk_peaks, axis=0)
    weights = (chunk_totals * _weights(chunk_peaks, peak)).to(tl.float64)
    cumulative = tl.cumsum(weights, axis=0)
    total = tl.sum(weights, axis=0)
    target = tl.load(uniforms + row) * total
    chunk = tl.minimum(_first_above(weights, cumulative, target), num_chunks - 1)
    before = tl.sum(tl.where(index < chunk, weights, 0.0), axis=0)
    # Tokens of that chunk (CHUNK,), against the same peak.
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    scaled = _scaled(logits, temperatures, row, token, vocabulary)
    own = _weights(scaled, peak).to(tl.float64)
    drawn = chunk * CHUNK + _first_above(own, tl.cumsum(own, axis=0), target - before)
    # At temperature zero: the peak, the first one of several.
    first = tl.argmax(chunk_peaks, axis=0)
    likeliest = tl.load(best + row * num_chunks + first)
    drawn = tl.where(tl.load(temperatures + row) <= 0.0, likeliest, drawn)
    drawn = tl.minimum(drawn, vocabulary - 1)
    log_total = peak.to(tl.float64) + tl.log(total)
    logprob = _scaled(logits, temperatures, row, drawn, vocabulary).to(tl.float64) - log_total
    is_finite = tl.abs(log_total) < float("inf")  # false where it is NaN
    tl.store(tokens + row, drawn.to(tl.int64))
    tl.store(facts + row, drawn.to(tl.float64))
    tl.store(facts + num_rows + row, logprob)
    tl.store(facts + 2 * num_rows + row, is_finite.to(tl.float64))
