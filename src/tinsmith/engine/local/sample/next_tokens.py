"""The next token of many sequences at once, each by its own request's parameters and seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.sample.choosing import Cut, Distributions, uniforms
from tinsmith.engine.local.sample.sequences import Sequence
from tinsmith.engine.local.sample.shaped_logits import shaped_logits
from tinsmith.engine.shaping import Shaper

Top = tuple[np.ndarray, np.ndarray]
"""The likeliest tokens of one position and their log-probabilities."""


class NextToken(NamedTuple):
    """What was chosen for a sequence; meaningless unless the logits were finite."""

    sequence: Sequence
    token: int
    logprob: float
    top: Top | None
    """The likeliest tokens and their log-probabilities, where the request wants them."""
    is_finite: bool


def next_tokens(logits: Tensor, deciding: list[list[Sequence]]) -> list[NextToken]:
    """Choose from `logits` (M, V) for the sequences that each row decides.

    The sequences of a row are samples of one request, and have the same tokens so far. A request
    that asks for no token gets none.
    """
    wanted = [[s for s in group if s.request.rule.max_tokens] for group in deciding]
    drawing = [sequence for group in wanted for sequence in group]
    if not drawing:
        return []
    rows = np.repeat(np.arange(len(wanted)), [len(group) for group in wanted])
    choices = _Choices.of(rows, drawing, [group[0] for group in deciding])
    spread = Distributions(logits, choices.temperature)
    chosen = spread.choose(rows, choices.numbers, choices.cut)
    is_finite = spread.is_finite()
    shapers = {row: s for row, group in enumerate(deciding) if (s := group[0].shaper) is not None}
    if shapers:
        _choose_shaped(logits, shapers, choices, chosen, is_finite)
    # Of the model's own distribution, however the choice was shaped.
    logprobs = spread.logprobs(rows, chosen).tolist()
    tops = _top_rows(spread, [group[0].request.job.topk_sample_logprobs for group in deciding])
    return [
        NextToken(sequence, token, logprob, tops.get(row), bool(is_finite[row]))
        for sequence, row, token, logprob in zip(
            drawing, rows.tolist(), chosen.tolist(), logprobs, strict=True
        )
    ]


@dataclass(frozen=True, slots=True)
class _Choices:
    """D choices from M rows."""

    rows: np.ndarray
    """(D,) the row of each choice."""
    numbers: np.ndarray
    """(D,) in [0, 1): what decides it."""
    temperature: np.ndarray
    """(M,)"""
    cut: Cut

    @classmethod
    def of(cls, rows: np.ndarray, drawing: list[Sequence], first: list[Sequence]) -> _Choices:
        """`drawing` (D,) and, for the parameters of each row, one of its sequences (M,)."""
        params = [sequence.request.job.params for sequence in first]
        return cls(
            rows,
            uniforms(
                np.array([sequence.request.seed for sequence in drawing], dtype=np.uint64),
                np.array([sequence.index for sequence in drawing]),
                np.array([len(sequence.tokens) for sequence in drawing]),
            ),
            np.array([p.temperature for p in params]),
            Cut(np.array([p.top_k for p in params]), np.array([p.top_p for p in params])),
        )


def _choose_shaped(
    logits: Tensor,
    shapers: dict[int, Shaper],
    choices: _Choices,
    chosen: Tensor,
    is_finite: np.ndarray,
) -> None:
    """Choose again from the rows that have a shaper, in their order."""
    own = np.array(list(shapers))
    shaped = shaped_logits(logits[torch.from_numpy(own).to(logits.device)], [*shapers.values()])
    min_p = np.array([shaper.shaping.min_p for shaper in shapers.values()])
    spread = Distributions(shaped, choices.temperature[own], min_p)
    places = np.flatnonzero(np.isin(choices.rows, own))
    chosen[torch.from_numpy(places).to(chosen.device)] = spread.choose(
        np.searchsorted(own, choices.rows[places]),
        choices.numbers[places],
        Cut(choices.cut.top_k[own], choices.cut.top_p[own]),
    )
    is_finite[own] &= spread.is_finite()


def _top_rows(spread: Distributions, counts: list[int]) -> dict[int, Top]:
    """The likeliest tokens, as many as each row's request wants. Copies: a sequence keeps its own,
    and not those of all that were chosen with it."""
    rows = np.flatnonzero(np.array(counts) > 0)
    if not len(rows):
        return {}
    top_tokens, top_logprobs = spread.top(rows, max(counts))
    tokens = top_tokens.cpu().numpy().astype(np.int32)
    logprobs = top_logprobs.float().cpu().numpy()
    return {
        row: (ids[: counts[row]].copy(), values[: counts[row]].copy())
        for row, ids, values in zip(rows.tolist(), tokens, logprobs, strict=True)
    }
