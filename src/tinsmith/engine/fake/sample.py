"""Sampling from the toy model: choosing tokens, growing samples, and answers about a prompt."""

from __future__ import annotations

import numpy as np

from tinsmith.engine.base import SampleJob
from tinsmith.engine.fake.model import Array, Bigram
from tinsmith.engine.grammar import token_masks
from tinsmith.engine.shaping import Shaper
from tinsmith.engine.stopping import StopWatch
from tinsmith.types import (
    PromptAltTokens,
    SampledSequence,
    SamplingParams,
    StopReason,
    TensorData,
    TopkLogprobs,
)
from tinsmith.types.sampling import MASK_LOGPROB


class TokenSource:
    """Draws tokens from a (C, K) table under one set of sampling parameters.

    Log-probabilities are those of the temperature-scaled distribution before top-k and top-p, and
    at temperature 0 those of temperature 1.
    """

    def __init__(self, model: Bigram, logprobs: Array, params: SamplingParams) -> None:
        self._model = model
        self._logprobs = logprobs
        self._params = params
        self._rows: dict[int, tuple[Array, Array]] = {}

    def draw(
        self, previous: int, uniform: float, shaper: Shaper | None = None
    ) -> tuple[int, float]:
        """The token that the number in [0, 1) picks after `previous`, and its log-probability."""
        logprobs, cumulative = self._row(previous)
        choosing = logprobs
        if shaper is not None:
            choosing = self._tempered(_shaped(self._plain_row(previous), shaper))
            cumulative = np.cumsum(self._cut(_above(np.exp(choosing), shaper.shaping.min_p)))
        if self._params.temperature == 0:
            token = int(choosing.argmax())
        else:
            token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return token, float(logprobs[token])

    def top(self, previous: int, k: int) -> tuple[Array, Array]:
        """The k likeliest tokens after `previous`, likeliest first, and their log-probabilities."""
        logprobs, _ = self._row(previous)
        best = np.argsort(-logprobs, kind="stable")[:k]
        return best.astype(np.int32), logprobs[best].astype(np.float32)

    def _row(self, previous: int) -> tuple[Array, Array]:
        context = previous % self._model.num_contexts
        if context not in self._rows:
            logprobs = self._tempered(self._plain_row(previous))
            self._rows[context] = (logprobs, np.cumsum(self._cut(np.exp(logprobs))))
        return self._rows[context]

    def _plain_row(self, previous: int) -> Array:
        return self._model.row(self._logprobs, previous % self._model.num_contexts)

    def _tempered(self, logits: Array) -> Array:
        """Log-probabilities at the request's temperature; as they are where that is 0 or 1."""
        temperature = self._params.temperature
        if temperature in (0, 1):
            return logits
        with np.errstate(over="ignore"):
            scaled = (logits - logits.max()) / temperature
        logprobs: Array = scaled - np.log(np.exp(scaled).sum())
        return np.maximum(logprobs, np.finfo(np.float32).min)

    def _cut(self, probabilities: Array) -> Array:
        """Zero for the tokens that top-k and then top-p leave out."""
        if self._params.top_k < 1 and self._params.top_p == 1:
            return probabilities
        order = np.argsort(-probabilities, kind="stable")
        kept = probabilities[order]
        if 0 < self._params.top_k < len(kept):
            kept[self._params.top_k :] = 0.0
        if self._params.top_p < 1:
            before = np.cumsum(kept) - kept
            is_outside = before >= self._params.top_p * kept.sum()
            is_outside[0] = False  # a product that is rounded to zero
            kept[is_outside] = 0.0
        cut = np.zeros_like(probabilities)
        cut[order] = kept
        return cut


def _shaped(logits: Array, shaper: Shaper) -> Array:
    """One row as the real engine shapes it, but for a constant."""
    edits = shaper.edits()
    values = logits[edits.tokens] + edits.added
    values = np.where(values > 0, values / edits.factor, values * edits.factor) - edits.taken
    logits = logits.copy()
    logits[edits.tokens] = values
    if shaper.matcher is not None:
        (mask,) = token_masks([shaper.matcher], len(logits))
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf
    shaped: Array = logits - logits.max()
    return shaped


def _above(probabilities: Array, min_p: float) -> Array:
    """Zero for the tokens that min-p leaves out."""
    return np.where(probabilities < min_p * probabilities.max(), 0.0, probabilities)


class Continuation:
    """One sample as it grows; `stop_reason` is None until it has ended."""

    def __init__(
        self,
        *,
        source: TokenSource,
        watch: StopWatch,
        random: np.random.Generator,
        previous: int,
        is_empty: bool,
        shaper: Shaper | None = None,
    ) -> None:
        self._source = source
        self._shaper = shaper
        self._watch = watch
        self._random = random
        self._before = [previous]
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self.stop_reason: StopReason | None = "length" if is_empty else None

    def grow(self) -> tuple[int, float]:
        token, logprob = self._source.draw(self._before[-1], self._random.random(), self._shaper)
        if self._shaper is not None:
            self._shaper.see(token)
        self._before.append(token)
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self.stop_reason = self._watch.see(token)
        matcher = None if self._shaper is None else self._shaper.matcher
        if self.stop_reason is None and matcher is not None and matcher.is_at_end:
            self.stop_reason = "stop"
        return token, logprob

    @property
    def problem(self) -> str | None:
        """Why its grammar cannot be followed further."""
        matcher = None if self._shaper is None else self._shaper.matcher
        return None if matcher is None else matcher.problem

    def finish(self, sequence_id: str, k: int) -> SampledSequence:
        assert self.stop_reason is not None, "the sample has ended"
        return SampledSequence(
            stop_reason=self.stop_reason,
            sequence_id=sequence_id,
            tokens_np=np.array(self._tokens, dtype=np.int32),
            logprobs_np=np.array(self._logprobs, dtype=np.float32),
            topk_logprobs_np=self.topk(k, first=0),
        )

    def topk(self, k: int, *, first: int) -> TopkLogprobs | None:
        """The likeliest tokens from position `first` on."""
        if not k:
            return None
        rows = [self._source.top(previous, k) for previous in self._before[:-1][first:]]
        return TopkLogprobs(
            np.array([ids for ids, _ in rows], dtype=np.int32).reshape(-1, k),
            np.array([values for _, values in rows], dtype=np.float32).reshape(-1, k),
        )


class PromptScores:
    """What a job asks about its prompt; untempered log-probabilities, as in the real engine."""

    def __init__(
        self, job: SampleJob, prompt: Array, model: Bigram, logprobs: Array, seed: int
    ) -> None:
        self._job = job
        self._prompt = prompt
        self._model = model
        self._table = logprobs
        self._plain = TokenSource(model, logprobs, SamplingParams())
        self._seed = seed
        last_n = job.prompt_logprobs_last_n
        self._first = 1 if last_n is None else max(1, len(prompt) - last_n)

    def logprobs(self) -> Array | None:
        if not self._job.prompt_logprobs:
            return None
        scores = np.full(len(self._prompt), np.nan, dtype=np.float32)
        if len(self._prompt) > 1:
            cells = self._model.cells(self._prompt[:-1], self._prompt[1:])
            scores[self._first :] = self._table.ravel()[cells][self._first - 1 :]
        return scores

    def topk(self) -> TopkLogprobs | None:
        k = self._job.topk_prompt_logprobs
        if not k:
            return None
        shape = (len(self._prompt), k)
        topk = TopkLogprobs(np.zeros(shape, np.int32), np.full(shape, MASK_LOGPROB, np.float32))
        for position in range(self._first, len(self._prompt)):
            ids, values = self._plain.top(int(self._prompt[position - 1]), k)
            topk.token_ids[position, : len(ids)] = ids
            topk.logprobs[position, : len(ids)] = values
        return topk

    def targets(self) -> TensorData | None:
        asked = self._job.target_prompt_logprobs
        if asked is None:
            return None
        if asked.sparse_crow_indices is not None:
            rows = np.repeat(
                np.arange(len(asked.sparse_crow_indices) - 1), np.diff(asked.sparse_crow_indices)
            )
        else:
            rows = np.arange(len(asked.numpy))[:, None]
        cells = self._model.cells(self._prompt[rows], np.maximum(asked.numpy, 0))
        return TensorData(
            data=np.where(asked.numpy < 0, 0.0, self._table.ravel()[cells]),
            dtype="float32",
            shape=asked.shape,
            sparse_crow_indices=asked.sparse_crow_indices,
            sparse_col_indices=asked.sparse_col_indices,
        )

    def alternatives(self) -> PromptAltTokens | None:
        k = self._job.prompt_alt_tokens_k
        if not k:
            return None
        tempered = TokenSource(
            self._model, self._table, SamplingParams(temperature=self._job.params.temperature)
        )
        random = np.random.default_rng([self._seed & (2**64 - 1), 2**32])
        tokens = np.array(
            [
                [tempered.draw(int(previous), random.random())[0] for _ in range(k)]
                for previous in self._prompt[:-1]
            ],
            dtype=np.int64,
        ).reshape(len(self._prompt) - 1, k)
        cells = self._model.cells(self._prompt[:-1, None], tokens)
        return PromptAltTokens(
            TensorData.from_numpy(tokens), TensorData.from_numpy(self._table.ravel()[cells])
        )
