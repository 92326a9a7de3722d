"""Penalties, biases and min-p: what is chosen against the slow way, what is reported unbent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.sample.sampling_reference import (
    CPU,
    DETERMINISTIC,
    answer,
    answers,
    assert_trainer_agrees,
    job_of,
    tokens_in,
    tokens_of,
    trainer_logits,
)
from tinsmith.engine.base import Shaping
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.sample.generation import Generator

PROMPT = tokens_of(9)
ALL = Shaping(
    min_p=0.05,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias={5: 4.0, 17: -100.0},
)


def shaped_by_hand(
    logits: torch.Tensor, shaping: Shaping, prompt: list[int], sampled: list[int]
) -> torch.Tensor:
    """One row, a token at a time, as the documentation says."""
    row = logits.clone()
    for token in range(len(row)):
        row[token] += shaping.logit_bias.get(token, 0.0)
        if token in prompt or token in sampled:
            factor = shaping.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        if token in sampled:
            row[token] -= shaping.presence_penalty
            row[token] -= shaping.frequency_penalty * sampled.count(token)
    return row


@pytest.mark.parametrize(
    "shaping",
    [
        Shaping(presence_penalty=1.5),
        Shaping(frequency_penalty=0.8),
        Shaping(frequency_penalty=-2.0),
        Shaping(repetition_penalty=1.8),
        Shaping(repetition_penalty=0.6),
        Shaping(logit_bias={11: 3.0, 40: -50.0}),
        ALL,
    ],
    ids=["presence", "frequency", "rewarded", "repetition", "echoing", "bias", "all"],
)
def test_the_likeliest_token_is_that_of_the_logits_shaped_by_hand(
    shaping: Shaping, tiny_decoder: Decoder
) -> None:
    job = job_of("a", PROMPT, temperature=0, max_tokens=30, shaping=shaping)
    response = answer(Generator(tiny_decoder, CPU, prefill_tokens=7), job)
    (tokens,) = tokens_in(response)
    logits = trainer_logits(tiny_decoder, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    for position, token in enumerate(tokens):
        row = shaped_by_hand(logits[position], shaping, PROMPT, tokens[:position])
        assert row[token] >= row.max() - 1e-4
    plain = answer(Generator(tiny_decoder, CPU), job_of("b", PROMPT, temperature=0, max_tokens=30))
    assert tokens_in(plain) != [tokens], "the shaping changed nothing"


def test_min_p_leaves_only_tokens_near_the_likeliest(tiny_decoder: Decoder) -> None:
    shaping = Shaping(min_p=0.4)
    job = job_of("a", PROMPT, temperature=1.3, max_tokens=20, num_samples=20, seed=2)
    kept = answer(Generator(tiny_decoder, CPU), dataclasses.replace(job, shaping=shaping))
    for tokens in tokens_in(kept):
        logits = trainer_logits(tiny_decoder, PROMPT + tokens)[len(PROMPT) - 1 : -1]
        chances = torch.softmax(logits / 1.3, -1)
        chosen = chances[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (chosen >= 0.4 * chances.max(-1).values - 1e-5).all()
    # The same seeds go below that without it.
    free = answer(Generator(tiny_decoder, CPU), job)
    assert tokens_in(free) != tokens_in(kept)


def test_shaped_samples_follow_the_shaped_distribution(tiny_decoder: Decoder) -> None:
    """First tokens of 4,000 samples, against the probabilities worked out by hand."""
    shaping = Shaping(repetition_penalty=1.5, logit_bias={5: 2.0, 6: 1.0, 7: -3.0})
    job = job_of("a", PROMPT, max_tokens=1, num_samples=4000, seed=9, shaping=shaping)
    tokens = np.array(tokens_in(answer(Generator(tiny_decoder, CPU), job)))[:, 0]
    row = shaped_by_hand(trainer_logits(tiny_decoder, PROMPT)[-1], shaping, PROMPT, [])
    wanted = torch.softmax(row, -1).numpy()
    found = np.bincount(tokens, minlength=len(wanted)) / len(tokens)
    assert np.abs(found - wanted).max() < 0.03


def test_reported_log_probabilities_are_the_models_own(tiny_decoder: Decoder) -> None:
    job = job_of("a", PROMPT, temperature=0.8, max_tokens=12, num_samples=3, seed=4, shaping=ALL)
    response = answer(Generator(tiny_decoder, CPU), job)
    assert_trainer_agrees(tiny_decoder, PROMPT, response, temperature=0.8)


_SHAPINGS = st.builds(
    Shaping,
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.dictionaries(st.integers(3, 96), st.floats(-100, 100), max_size=5),
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(shapings=st.lists(st.none() | _SHAPINGS, min_size=2, max_size=5))
def test_neighbours_do_not_change_what_is_chosen(
    shapings: list[Shaping | None], tiny_decoder: Decoder
) -> None:
    jobs = [
        job_of(str(i), tokens_of(5 + i, i), seed=i, num_samples=2, top_k=20, shaping=shaping)
        for i, shaping in enumerate(shapings)
    ]
    together = answers(Generator(tiny_decoder, DETERMINISTIC), [(job, None) for job in jobs])
    batched = answers(Generator(tiny_decoder, CPU), [(job, None) for job in jobs])
    for job in jobs:
        alone = tokens_in(answer(Generator(tiny_decoder, DETERMINISTIC), job))
        assert tokens_in(together[job.job_id]) == alone
        assert tokens_in(batched[job.job_id]) == alone


def test_a_sequence_that_gave_way_goes_on_with_its_penalties(tiny_decoder: Decoder) -> None:
    """The cache has room for few sequences: some are read anew, and their counts stay."""
    small = dataclasses.replace(CPU, kv_cache_bytes=60_000)
    jobs = [job_of(str(i), tokens_of(20, i), seed=i, max_tokens=40, shaping=ALL) for i in range(6)]
    crowded = answers(Generator(tiny_decoder, small), [(job, None) for job in jobs])
    for job in jobs:
        alone = answer(Generator(tiny_decoder, CPU), job)
        assert tokens_in(crowded[job.job_id]) == tokens_in(alone)
