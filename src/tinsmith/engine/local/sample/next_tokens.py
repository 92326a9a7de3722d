"""The next token of many sequences at once, each by its own request's parameters and seed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from tinsmith.engine.local.sample.choosing import Cut, Distributions, uniforms
from tinsmith.engine.local.sample.sequences import Sequence


class NextToken(NamedTuple):
    """What was chosen for a sequence; meaningless unless the logits were finite."""

    sequence: Sequence
    token: int
    logprob: float
    top: tuple[list[int], list[float]] | None
    """The likeliest tokens and their log-probabilities, where the request wants them."""
    is_finite: bool


def next_tokens(logits: Tensor, deciding: list[list[Sequence]]) -> list[NextToken]:
    """Choose from `logits` (M, V) for the sequences that each row decides.

    The sequences of a row are samples of one request. A request that asks for no token gets none.
    """
    wanted = [[s for s in group if s.request.rule.max_tokens] for group in deciding]
    drawing = [sequence for group in wanted for sequence in group]
    if not drawing:
        return []
    rows = np.repeat(np.arange(len(wanted)), [len(group) for group in wanted])
    params = [group[0].request.job.params for group in deciding]
    spread = Distributions(logits, np.array([p.temperature for p in params]))
    numbers = uniforms(
        np.array([sequence.request.seed for sequence in drawing], dtype=np.uint64),
        np.array([sequence.index for sequence in drawing]),
        np.array([len(sequence.tokens) for sequence in drawing]),
    )
    cut = Cut(np.array([p.top_k for p in params]), np.array([p.top_p for p in params]))
    chosen = spread.choose(rows, numbers, cut)
    logprobs = spread.logprobs(rows, chosen).tolist()
    is_finite = spread.is_finite()
    tops = _top_rows(spread, [group[0].request.job.topk_sample_logprobs for group in deciding])
    return [
        NextToken(sequence, token, logprob, tops.get(row), bool(is_finite[row]))
        for sequence, row, token, logprob in zip(
            drawing, rows.tolist(), chosen.tolist(), logprobs, strict=True
        )
    ]


def _top_rows(spread: Distributions, counts: list[int]) -> dict[int, tuple[list[int], list[float]]]:
    """The likeliest tokens, as many as each row's request wants."""
    rows = np.flatnonzero(np.array(counts) > 0)
    if not len(rows):
        return {}
    tokens, logprobs = spread.top(rows, max(counts))
    return {
        row: (ids[: counts[row]], values[: counts[row]])
        for row, ids, values in zip(rows.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)
    }
