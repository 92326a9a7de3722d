"""Choosing tokens: from logits and a random number per choice to a token and its log-probability.

Many rows are treated at once, each with its own temperature, top-k and top-p. Randomness comes in
as numbers in [0, 1) that are a function of (seed, stream, position), so a choice depends on nothing
else that runs. Which rows belong to which request is the generator's business.

Log-probabilities are those of the whole temperature-scaled distribution, before top-k and top-p cut
it: what the model thought of the token, not how the cut was made. At temperature 0 the likeliest
token is taken, and the log-probability is that of temperature 1.

Shapes: M rows, V vocabulary, D choices (several choices may be made from one row).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.invariant import row_sums

NOT_FINITE = "the model gave logits that are not finite; its adapter's weights may have diverged"

SMALL_TEMPERATURE = 1e-3
"""Below, a row's peak is taken off before it is divided: quotients would leave float32."""

_BLOCK = 128
_NUCLEUS_TRIES = (64, 1024)
"""How many of the likeliest tokens are tried for a nucleus before the vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Top-k and top-p of M rows."""

    top_k: np.ndarray
    """(M,) int; zero or less is no limit."""

    top_p: np.ndarray
    """(M,) float; 1 is no limit. Applied to what top-k has left."""


class Distributions:
    """The next-token distributions of M rows."""

    def __init__(
        self,
        logits: Tensor,
        temperature: np.ndarray | None = None,
        min_p: np.ndarray | None = None,
    ) -> None:
        """`logits` (M, V) float32; `temperature` (M,), None for 1 everywhere.

        Tokens below `min_p` (M,) times the likeliest one's probability have none.
        """
        if logits.device.type == "mps":
            logits = logits.cpu()  # sums of probabilities are float64, which Apple's GPUs lack
        self._is_greedy = np.zeros(len(logits), dtype=bool)
        if temperature is not None:
            self._is_greedy = temperature <= 0
            logits = _scale(logits, np.where(self._is_greedy, 1.0, temperature))
        self.scaled = logits
        self._peak = logits.amax(dim=-1)
        if min_p is not None and (min_p > 0).any():
            with np.errstate(divide="ignore"):
                lowest = self._peak + _tensor(np.log(min_p), logits, torch.float32)
            logits = logits.masked_fill(logits < lowest[:, None], -torch.inf)
        self._weights = (logits - self._peak[:, None]).exp_()
        self._total = row_sums(self._weights)[:, 0]
        # By the kernel for training where there is one, so that log-probabilities are the same.
        self._log_total = (
            kernels.module("scores").normalizers(logits)
            if kernels.are_usable(logits)
            else self._peak + self._total.log()
        )

    def is_finite(self) -> np.ndarray:
        """(M,) False where the model gave no usable distribution."""
        return torch.isfinite(self._log_total).cpu().numpy()

    def logprobs(self, rows: np.ndarray, tokens: Tensor) -> Tensor:
        """(D,) log-probability of `tokens` (D,) in `rows` (D,)."""
        index = _tensor(rows, self.scaled, torch.int64)
        return self.scaled[index, tokens] - self._log_total[index]

    def top(self, rows: np.ndarray, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest tokens of some rows, likeliest first, and their log-probabilities."""
        index = _tensor(rows, self.scaled, torch.int64)
        values, tokens = self.scaled[index].topk(min(k, self.scaled.shape[1]), dim=-1)
        return tokens, values - self._log_total[index, None]

    def choose(self, rows: np.ndarray, uniform: np.ndarray, cut: Cut | None = None) -> Tensor:
        """(D,) tokens: one for each of `rows` (D,), by its number in [0, 1) from `uniform` (D,)."""
        index = _tensor(rows, self.scaled, torch.int64)
        numbers = _tensor(uniform, self.scaled, torch.float64)
        tokens = torch.empty_like(index)
        greedy = np.flatnonzero(self._is_greedy[rows])
        if len(greedy):
            where = _tensor(greedy, self.scaled, torch.int64)
            tokens[where] = self.scaled[index[where]].argmax(dim=-1)
        is_cut = np.zeros(len(self.scaled), dtype=bool)
        if cut is not None:
            has_limit = (cut.top_k > 0) & (cut.top_k < self.scaled.shape[1])
            is_cut = (has_limit | (cut.top_p < 1.0)) & ~self._is_greedy
        whole = np.flatnonzero(~(is_cut | self._is_greedy)[rows])
        if len(whole):
            where = _tensor(whole, self.scaled, torch.int64)
            tokens[where] = self._draw(index[where], numbers[where])
        if cut is not None and is_cut.any():
            for candidates in self._candidates(cut, has_limit & is_cut, ~has_limit & is_cut):
                place = candidates.place_of_row[rows]
                chosen = np.flatnonzero(place >= 0)
                where = _tensor(chosen, self.scaled, torch.int64)
                at = _tensor(place[chosen], self.scaled, torch.int64)
                tokens[where] = candidates.draw(at, numbers[where])
        return tokens

    def _draw(self, rows: Tensor, uniform: Tensor) -> Tensor:
        """Inverse of the cumulative distribution, first over blocks of tokens, then within one."""
        weights = self._weights
        rest = -weights.shape[1] % _BLOCK
        if rest:
            weights = torch.nn.functional.pad(weights, (0, rest))
        blocks = weights.view(len(weights), -1, _BLOCK)
        cumulative = blocks.sum(dim=-1).double().cumsum(dim=-1)[rows]
        target = uniform * cumulative[:, -1]
        block = _first_above(cumulative, target)
        before = torch.where(
            block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)[:, None])[:, 0], 0.0
        )
        within = blocks[rows, block].double().cumsum(dim=-1)
        return block * _BLOCK + _first_above(within, target - before)

    def _candidates(
        self, cut: Cut, limited: np.ndarray, nucleus_only: np.ndarray
    ) -> Iterator[_Candidates]:
        """The tokens that the cut leaves, for all rows that are cut.

        Without a top-k the nucleus is looked for among few tokens first: sorting a whole
        vocabulary takes longer than all else that is done with a row.
        """
        rows = np.flatnonzero(limited)
        if len(rows):
            weights, tokens = self._top_weights(rows, int(cut.top_k[rows].max()))
            rank = torch.arange(weights.shape[1], device=weights.device)
            weights *= rank < _tensor(cut.top_k[rows], weights, torch.int64)[:, None]
            nucleus = cut.top_p[rows] * weights.sum(dim=-1, dtype=torch.float64).cpu().numpy()
            yield _Candidates(rows, len(limited), weights, tokens, nucleus)
        rows = np.flatnonzero(nucleus_only)
        for width in (*_NUCLEUS_TRIES, self.scaled.shape[1]):
            if not len(rows):
                return
            weights, tokens = self._top_weights(rows, width)
            held = weights.sum(dim=-1, dtype=torch.float64).cpu().numpy()
            nucleus = cut.top_p[rows] * self._total.cpu().numpy()[rows]
            done = (held >= nucleus) | (width >= self.scaled.shape[1])
            keep = _tensor(np.flatnonzero(done), weights, torch.int64)
            yield _Candidates(rows[done], len(limited), weights[keep], tokens[keep], nucleus[done])
            rows = rows[~done]

    def _top_weights(self, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
        index = _tensor(rows, self._weights, torch.int64)
        weights, tokens = self._weights[index].topk(min(width, self._weights.shape[1]), dim=-1)
        return weights, tokens


class _Candidates:
    """For some rows, the likeliest tokens and how they share the probability."""

    def __init__(
        self, rows: np.ndarray, num_rows: int, weights: Tensor, tokens: Tensor, nucleus: np.ndarray
    ) -> None:
        """`weights` (m, width) fall along a row; the first that fill `nucleus` (m,) count."""
        self.place_of_row = np.full(num_rows, -1)
        self.place_of_row[rows] = np.arange(len(rows))
        cumulative = weights.double().cumsum(dim=-1)
        # A token belongs to the nucleus when those before it have not filled it yet.
        is_inside = (cumulative - weights) < _tensor(nucleus, weights, torch.float64)[:, None]
        self._cumulative = (weights * is_inside).double().cumsum(dim=-1)
        self._tokens = tokens

    def draw(self, places: Tensor, uniform: Tensor) -> Tensor:
        cumulative = self._cumulative[places]
        rank = _first_above(cumulative, uniform * cumulative[:, -1])
        return self._tokens[places, rank]


def _scale(logits: Tensor, temperature: np.ndarray) -> Tensor:
    """Logits (M, V) by temperature (M,), above zero, in numbers that are all finite.

    Towards zero the likeliest tokens share the probability, far up all tokens do.
    """
    if (temperature == 1.0).all():
        return logits
    limits = torch.finfo(torch.float32)
    divisor = _tensor(np.maximum(temperature, limits.tiny), logits, torch.float32)[:, None]
    is_small = temperature < SMALL_TEMPERATURE
    if not is_small.any():
        return logits / divisor
    peak = logits.amax(dim=-1, keepdim=True)
    shift = torch.where(_tensor(is_small, logits)[:, None], peak, 0.0)
    return ((logits - shift) / divisor).clamp_(min=limits.min)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """(D,) index of the first entry above `target`, never one past the last that adds weight."""
    place = torch.searchsorted(cumulative, target[:, None].contiguous(), right=True)[:, 0]
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(place, last)


def _tensor(values: np.ndarray, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.as_tensor(values, dtype=dtype, device=like.device)


def fresh_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(63)


def uniforms(seed: np.ndarray, stream: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), float64: a fixed function of three integers, equidistributed in each.

    A stream is one sample of a request; a position is the index of the token within it. Arguments
    broadcast. Counter-based, so that nothing is kept between calls and no order is assumed.
    """
    with np.errstate(over="ignore"):
        state = _mix(_as_words(seed) + _GOLDEN)
        state = _mix(state ^ (_as_words(stream) * _STREAM_STEP + _GOLDEN))
        state = _mix(state ^ (_as_words(position) * _POSITION_STEP + _GOLDEN))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STREAM_STEP = np.uint64(0xD1342543DE82EF95)
_POSITION_STEP = np.uint64(0xF1357AEA2E62A9C5)


def _as_words(values: np.ndarray) -> np.ndarray:
    """64-bit words; negative numbers by two's complement."""
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)


def _mix(words: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every input bit moves about half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
