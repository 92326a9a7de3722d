"""Log-probabilities of prompts: the trainer's, complete, and as many as were asked for."""

from __future__ import annotations

import numpy as np
import torch

from tests.engine.sample.sampling_reference import (
    TOLERANCE,
    answer,
    job_of,
    tokens_of,
    trainer_logits,
    trainer_logprobs,
)
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import TensorData


def test_prompt_scores_are_the_trainers(generator: Generator, tiny_decoder: Decoder) -> None:
    """Over several chunks, with everything asked for at once."""
    prompt = tokens_of(50)
    targets = np.random.default_rng(1).integers(-1, 97, (49, 4))
    job = job_of(
        "a",
        prompt,
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        target_prompt_logprobs=TensorData.from_numpy(targets),
        prompt_alt_tokens_k=6,
        temperature=0.5,
        seed=3,
    )
    response = answer(generator, job)
    logprobs = torch.log_softmax(trainer_logits(tiny_decoder, prompt)[:-1], -1)

    found = response.prompt_logprobs_np
    assert found is not None
    assert (found.dtype, len(found), np.isnan(found).sum()) == (np.float32, 50, 1)
    assert np.isnan(found[0])
    assert np.abs(found[1:] - trainer_logprobs(tiny_decoder, prompt)).mean() <= TOLERANCE

    top = response.topk_prompt_logprobs_np
    assert top is not None
    assert top.token_ids[0].tolist() == [0, 0, 0]
    assert top.logprobs[0].tolist() == [-99999.0] * 3
    assert top.token_ids[1:].tolist() == logprobs.topk(3).indices.tolist()
    assert response.topk_prompt_logprobs is not None
    assert response.topk_prompt_logprobs[0] is None

    scored = response.target_prompt_logprobs
    assert scored is not None
    assert (scored.dtype, scored.shape) == ("float32", [49, 4])
    wanted = logprobs.gather(1, torch.from_numpy(targets).clamp(min=0)).numpy()
    assert np.abs(scored.numpy - np.where(targets >= 0, wanted, 0)).max() < 1e-4
    assert (scored.numpy[targets < 0] == 0).all()

    other = response.prompt_alt_tokens
    assert other is not None
    assert (other.tokens.dtype, other.tokens.shape) == ("int64", [49, 6])
    assert other.logprobs.shape == [49, 6]
    wanted = logprobs.gather(1, torch.from_numpy(other.tokens.numpy.copy())).numpy()
    assert np.abs(other.logprobs.numpy - wanted).max() < 1e-4


def test_sparse_targets_are_answered_in_their_own_layout(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(30)
    crow = [0] * 10 + [2] * 15 + [3] * 4 + [4]
    asked = TensorData(
        data=[5, -1, 7, 8],
        dtype="int64",
        shape=[29, 9],
        sparse_crow_indices=crow,
        sparse_col_indices=[1, 4, 0, 8],
    )
    scored = answer(
        generator, job_of("a", prompt, target_prompt_logprobs=asked)
    ).target_prompt_logprobs
    assert scored is not None
    assert scored.sparse_crow_indices == crow
    assert scored.sparse_col_indices == [1, 4, 0, 8]
    logprobs = torch.log_softmax(trainer_logits(tiny_decoder, prompt)[:-1], -1)
    wanted = [logprobs[9, 5], 0.0, logprobs[24, 7], logprobs[28, 8]]
    assert np.abs(scored.numpy - np.array(wanted)).max() < 1e-4


def test_only_the_last_prompt_tokens_are_scored_when_asked(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(40)
    job = job_of(
        "a", prompt, prompt_logprobs=True, prompt_logprobs_last_n=7, topk_prompt_logprobs=2
    )
    response = answer(generator, job)
    found, top = response.prompt_logprobs_np, response.topk_prompt_logprobs
    assert found is not None
    assert top is not None
    assert np.isnan(found[:33]).all()
    assert np.abs(found[33:] - trainer_logprobs(tiny_decoder, prompt)[32:]).mean() <= TOLERANCE
    assert [row is None for row in top] == [True] * 33 + [False] * 7


def test_scores_of_a_known_prompt_are_complete(generator: Generator) -> None:
    """What is asked about the prompt limits how much of it can come from the cache."""
    prompt = tokens_of(40)
    full = answer(generator, job_of("a", prompt, prompt_logprobs=True))
    again = answer(generator, job_of("b", prompt, prompt_logprobs=True))
    assert again.prompt_cache_hit_tokens == 0
    last = answer(generator, job_of("c", prompt, prompt_logprobs=True, prompt_logprobs_last_n=5))
    assert last.prompt_cache_hit_tokens == 32
    assert full.prompt_logprobs_np is not None
    assert again.prompt_logprobs_np is not None
    assert last.prompt_logprobs_np is not None
    np.testing.assert_allclose(again.prompt_logprobs_np, full.prompt_logprobs_np, atol=1e-4)
    np.testing.assert_allclose(
        last.prompt_logprobs_np[35:], full.prompt_logprobs_np[35:], atol=1e-4
    )
    targets = np.full((39, 1), -1)
    targets[30] = 5
    job = job_of("d", prompt, target_prompt_logprobs=TensorData.from_numpy(targets))
    assert answer(generator, job).prompt_cache_hit_tokens == 16


def test_a_prompt_that_fills_the_context_is_scored_and_not_continued(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    """What `compute_logprobs` asks: one value for every prompt token."""
    prompt = tokens_of(128)
    response = answer(generator, job_of("a", prompt, max_tokens=1, prompt_logprobs=True))
    (sequence,) = response.sequences
    assert (sequence.tokens, sequence.stop_reason) == ([], "length")
    assert response.prompt_logprobs is not None
    assert len(response.prompt_logprobs) == 128
    assert response.prompt_logprobs[0] is None
    wanted = trainer_logprobs(tiny_decoder, prompt)
    assert np.abs(np.array(response.prompt_logprobs[1:]) - wanted).mean() <= TOLERANCE


def test_a_prompt_of_one_token_has_no_scores_and_can_be_continued(generator: Generator) -> None:
    response = answer(
        generator, job_of("a", [5], prompt_logprobs=True, topk_prompt_logprobs=2, max_tokens=3)
    )
    assert response.prompt_logprobs == [None]
    assert response.topk_prompt_logprobs == [None]
    assert len(response.sequences[0].tokens) == 3
