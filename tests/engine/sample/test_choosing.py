"""Choosing tokens: distributions, cuts, random streams. Frequencies are tested with chi-square."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinsmith.engine.local.sample.choosing import (
    Cut,
    Distributions,
    fresh_seed,
    uniforms,
)

VOCAB = 300  # not a multiple of the block over which the inverse is taken


def logits_of(rows: int, spread: float = 2.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * spread


def draw(
    logits: torch.Tensor, count: int, temperature: float, top_k: int, top_p: float
) -> np.ndarray:
    """`count` draws from a single row."""
    spread = Distributions(logits, np.array([temperature]))
    numbers = uniforms(np.array([9]), np.zeros(count, dtype=int), np.arange(count))
    cut = Cut(np.array([top_k]), np.array([top_p]))
    return spread.choose(np.zeros(count, dtype=int), numbers, cut).numpy()


def reference(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution that draws should follow, token by token in plain Python."""
    probs = torch.softmax(logits[0].double() / temperature, -1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = order[:top_k] if top_k > 0 else order
    mass = sum(probs[token] for token in kept)
    nucleus, filled = [], 0.0
    for token in kept:
        if filled >= top_p:
            break
        nucleus.append(token)
        filled += probs[token] / mass
    result = np.zeros(len(probs))
    result[nucleus] = [probs[token] for token in nucleus]
    return result / result.sum()


def chi_square_z(tokens: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations chi-square is above its mean; rare tokens share a cell."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    assert counts[expected == 0].sum() == 0, "a token outside the cut was drawn"
    wanted = expected * len(tokens)
    common = wanted >= 8
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(-1, 1.0), (20, 1.0), (0, 0.8), (30, 0.7), (-1, 0.999), (VOCAB, 1.0)]
)
def test_frequencies_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = logits_of(1)
    tokens = draw(logits, 40_000, temperature, top_k, top_p)
    assert abs(chi_square_z(tokens, reference(logits, temperature, top_k, top_p))) < 4


def test_a_nucleus_wider_than_the_first_tries_is_still_complete() -> None:
    logits = logits_of(1, spread=0.1, vocab=3000)
    tokens = draw(logits, 60_000, 1.0, -1, 0.9)
    expected = reference(logits, 1.0, -1, 0.9)
    assert (expected > 0).sum() > 1024
    assert abs(chi_square_z(tokens, expected)) < 4


def test_rows_with_different_settings_are_chosen_as_if_each_were_alone() -> None:
    logits = logits_of(5)
    temperature = np.array([0.0, 0.7, 1.0, 1.3, 1.0])
    cut = Cut(np.array([-1, 5, -1, 40, -1]), np.array([1.0, 1.0, 0.6, 0.9, 1.0]))
    numbers = uniforms(np.arange(5), np.zeros(5, dtype=int), np.zeros(5, dtype=int))
    together = Distributions(logits, temperature).choose(np.arange(5), numbers, cut)
    for row in range(5):
        one = slice(row, row + 1)
        alone = Distributions(logits[one], temperature[one]).choose(
            np.zeros(1, dtype=int), numbers[one], Cut(cut.top_k[one], cut.top_p[one])
        )
        assert together[row] == alone[0]


def test_temperature_zero_takes_the_likeliest_token_whatever_the_number() -> None:
    logits = logits_of(2)
    spread = Distributions(logits, np.zeros(2))
    rows = np.array([0, 0, 0, 1, 1])
    tokens = spread.choose(rows, np.array([0.0, 0.5, 0.999, 0.1, 0.9]))
    assert tokens.tolist() == logits.argmax(-1)[rows].tolist()


def test_logprobs_are_of_the_tempered_distribution_and_untempered_at_zero() -> None:
    logits = logits_of(3)
    temperature = np.array([0.0, 0.5, 2.0])
    tokens = torch.tensor([4, 5, 6])
    found = Distributions(logits, temperature).logprobs(np.arange(3), tokens)
    divisor = torch.tensor([1.0, 0.5, 2.0])[:, None]
    wanted = torch.log_softmax(logits.double() / divisor, -1)[torch.arange(3), tokens]
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)


def test_the_likeliest_tokens_come_first_with_their_logprobs() -> None:
    logits = logits_of(3)
    tokens, logprobs = Distributions(logits).top(np.array([2, 0]), 4)
    wanted = torch.log_softmax(logits[[2, 0]], -1).topk(4)
    assert torch.equal(tokens, wanted.indices)
    torch.testing.assert_close(logprobs, wanted.values, atol=1e-6, rtol=0)


def test_extreme_numbers_never_choose_a_token_without_probability() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 17] = 0.0
    logits[0, 150] = 1.0
    numbers = np.array([0.0, 1.0 - 2.0**-53, 0.2, 0.5])
    tokens = Distributions(logits).choose(np.zeros(4, dtype=int), numbers)
    assert set(tokens.tolist()) == {17, 150}


def test_a_row_that_is_no_distribution_is_told_apart() -> None:
    logits = logits_of(3)
    logits[1, 5] = torch.nan
    assert Distributions(logits).is_finite().tolist() == [True, False, True]


def test_random_numbers_are_a_function_of_seed_stream_and_position() -> None:
    seeds = np.array([1, 1, 1, 2, -1], dtype=np.int64)
    streams, positions = np.array([0, 0, 1, 0, 0]), np.array([0, 1, 0, 0, 0])
    together = uniforms(seeds, streams, positions)
    alone = [uniforms(*triple)[0] for triple in zip(seeds, streams, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 5
    assert ((together >= 0) & (together < 1)).all()


def test_random_numbers_are_uniform_along_each_of_their_arguments() -> None:
    count, cells = 64_000, 64
    fixed, moving = np.zeros(count, dtype=int), np.arange(count)
    for arguments in [(moving, fixed, fixed), (fixed, moving, fixed), (fixed, fixed, moving)]:
        numbers = uniforms(*arguments)
        pairs = (numbers[:-1] * 8).astype(int) * 8 + (numbers[1:] * 8).astype(int)
        for cell in ((numbers * cells).astype(int), pairs):
            assert abs(chi_square_z(cell, np.full(cells, 1 / cells))) < 4.5


def test_fresh_seeds_differ() -> None:
    assert len({fresh_seed() for _ in range(100)}) == 100
