"""What a request asks about its prompt: how likely its tokens were, and what else was likely.

Row i of the prefill predicts prompt token i + 1. Logits come in a few rows at a time and only what
was asked for is kept. All log-probabilities here are untempered. Draws of alternatives use the
request's temperature but neither top-k nor top-p: they describe the distribution itself.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import SampleJob
from tinsmith.engine.local.sample.choosing import NOT_FINITE, Distributions, uniforms
from tinsmith.types import PromptAltTokens, TensorData, TopkLogprobs
from tinsmith.types.sampling import MASK_LOGPROB

_DRAWN_AT_ONCE = 4096
"""Alternatives: each takes a few kilobytes meanwhile, the more the larger the vocabulary."""


class PromptScores:
    """The answers about one prompt, filled in as its prefill goes on."""

    def __init__(self, job: SampleJob, tokens: np.ndarray, seed: int) -> None:
        """`tokens` are those of the prompt, and of an image the one that stands for it in texts:
        clients weigh log-probabilities, and none there would spoil a sum in which it has no weight.
        """
        self._job = job
        self._tokens = tokens
        self._seed = seed
        length = len(tokens)
        last_row = length - 1
        scored = length - 1 if job.prompt_logprobs_last_n is None else job.prompt_logprobs_last_n
        self._first_scored = max(0, last_row - scored)
        starts = [last_row]
        if job.prompt_logprobs or job.topk_prompt_logprobs > 0:
            starts.append(self._first_scored)
        if job.target_prompt_logprobs is not None:
            starts.append(_first_target(job.target_prompt_logprobs))
        if job.prompt_alt_tokens_k > 0:
            starts.append(0)
        self.first_row = min(starts)
        """The first row whose logits are needed; the last row, if nothing was asked."""

    # What is answered is made when it is first written, or asked for: thousands of requests may
    # wait, and each may ask for much more than its prompt takes.

    @cached_property
    def logprobs(self) -> np.ndarray | None:
        if not self._job.prompt_logprobs:
            return None
        return np.full(len(self._tokens), np.nan, dtype=np.float32)

    @cached_property
    def topk(self) -> TopkLogprobs | None:
        if self._job.topk_prompt_logprobs <= 0:
            return None
        shape = (len(self._tokens), self._job.topk_prompt_logprobs)
        blank = np.full(shape, MASK_LOGPROB, dtype=np.float32)
        return TopkLogprobs(np.zeros(shape, dtype=np.int32), blank)

    @property
    def targets(self) -> TensorData | None:
        return None if self._targets is None else self._targets.answer()

    @property
    def alternatives(self) -> PromptAltTokens | None:
        if self._drawn is None:
            return None
        tokens, logprobs = self._drawn
        return PromptAltTokens(TensorData.from_numpy(tokens), TensorData.from_numpy(logprobs))

    @cached_property
    def _targets(self) -> _Targets | None:
        asked = self._job.target_prompt_logprobs
        return None if asked is None else _Targets(asked)

    @cached_property
    def _drawn(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Alternatives and their log-probabilities."""
        if self._job.prompt_alt_tokens_k <= 0:
            return None
        shape = (max(len(self._tokens) - 1, 0), self._job.prompt_alt_tokens_k)
        return np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)

    def rows_within(self, start: int, stop: int) -> range:
        """Which of the prompt's rows start to stop have to be scored."""
        return range(max(start, self.first_row), min(stop, len(self._tokens) - 1))

    def add(self, first: int, logits: Tensor) -> None:
        """Take the logits (R, V) of rows `first` and following.

        Raises `FloatingPointError` when one of them is no distribution.
        """
        plain = Distributions(logits)
        if not plain.is_finite().all():
            raise FloatingPointError(NOT_FINITE)
        rows = np.arange(len(logits))
        is_scored = rows + first >= self._first_scored
        if self.logprobs is not None and is_scored.any():
            chosen = rows[is_scored]
            positions = chosen + first + 1
            wanted = self._tokens[positions].astype(np.int64)
            tokens = torch.from_numpy(wanted).to(plain.scaled.device)
            self.logprobs[positions] = plain.logprobs(chosen, tokens).cpu().numpy()
        if self.topk is not None and is_scored.any():
            chosen = rows[is_scored]
            ids, values = plain.top(chosen, self.topk.token_ids.shape[1])
            cells = np.ix_(chosen + first + 1, np.arange(ids.shape[1]))
            self.topk.token_ids[cells] = ids.cpu().numpy()
            self.topk.logprobs[cells] = values.cpu().numpy()
        if self._targets is not None:
            self._targets.add(first, plain)
        if self._drawn is not None:
            self._draw_alternatives(first, logits, plain, *self._drawn)

    def _draw_alternatives(
        self,
        first: int,
        logits: Tensor,
        plain: Distributions,
        alt_tokens: np.ndarray,
        alt_logprobs: np.ndarray,
    ) -> None:
        count = alt_tokens.shape[1]
        tempered = Distributions(logits, np.full(len(logits), self._job.params.temperature))
        rows = np.repeat(np.arange(len(logits)), count)
        # Samples use the streams from zero up.
        streams = np.tile(-1 - np.arange(count), len(logits))
        seed = np.array(self._seed, dtype=np.uint64)
        parts = [
            slice(start, start + _DRAWN_AT_ONCE) for start in range(0, len(rows), _DRAWN_AT_ONCE)
        ]
        tokens = torch.cat(
            [
                tempered.choose(rows[each], uniforms(seed, streams[each], rows[each] + first))
                for each in parts
            ]
        )
        kept = slice(first, first + len(logits))
        alt_tokens[kept] = tokens.cpu().numpy().reshape(-1, count)
        alt_logprobs[kept] = plain.logprobs(rows, tokens).cpu().numpy().reshape(-1, count)


def _first_target(asked: TensorData) -> int:
    """The first row that has a token to score; behind the last where none has."""
    cells_of_row = _cells_of_row(asked)
    wanted = np.flatnonzero(asked.numpy.ravel() >= 0)
    if not len(wanted):
        return len(cells_of_row)
    return int(np.searchsorted(np.cumsum(cells_of_row), wanted[0], side="right"))


def _cells_of_row(asked: TensorData) -> np.ndarray:
    if asked.sparse_crow_indices is not None:
        return np.diff(asked.sparse_crow_indices)
    num_rows, width = asked.numpy.shape
    return np.full(num_rows, width)


class _Targets:
    """Named tokens to score: cells of a dense matrix or a CSR list, -1 for none."""

    def __init__(self, asked: TensorData) -> None:
        self._asked = asked
        self._values = asked.numpy.ravel()
        cells_of_row = _cells_of_row(asked)
        self._rows = np.repeat(np.arange(len(cells_of_row)), cells_of_row)
        self._scores = np.zeros(len(self._values), dtype=np.float32)

    def add(self, first: int, plain: Distributions) -> None:
        rows = self._rows - first
        cells = np.flatnonzero((rows >= 0) & (rows < len(plain.scaled)) & (self._values >= 0))
        if len(cells):
            tokens = torch.from_numpy(self._values[cells]).to(plain.scaled.device)
            self._scores[cells] = plain.logprobs(rows[cells], tokens).cpu().numpy()

    def answer(self) -> TensorData:
        asked = self._asked
        return TensorData(
            data=self._scores if asked.is_sparse else self._scores.reshape(asked.numpy.shape),
            dtype="float32",
            shape=asked.shape,
            sparse_crow_indices=asked.sparse_crow_indices,
            sparse_col_indices=asked.sparse_col_indices,
        )
