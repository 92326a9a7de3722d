"""What every engine promises of samples, streams and scores of prompts: run on each.

Numbers are compared with each other, never with constants, so a model may be anything that learns.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from tests.support.engine_calls import (
    CONTEXT_LENGTH,
    EOS_TOKEN,
    FIRST_CHARACTER,
    OTHER,
    SENTENCE,
    VOCAB_SIZE,
    create,
    datum,
    failed_sample,
    job,
    logprobs,
    new_name,
    sample,
    text_of,
    tokens_of,
    train,
)
from tinsmith.engine.base import Engine, Failure, Shaping, TokensSampled
from tinsmith.types import (
    LoraConfig,
    SampleResponse,
    TensorData,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_sample_has_tokens_log_probabilities_and_a_stop_reason(engine: Engine) -> None:
    response = await sample(engine, job(num_samples=3, max_tokens=5))
    assert len(response.sequences) == 3
    assert len({sequence.sequence_id for sequence in response.sequences}) == 3
    for sequence in response.sequences:
        assert sequence.stop_reason == "length"
        assert sequence.tokens_np is not None
        assert sequence.logprobs_np is not None
        assert sequence.tokens_np.shape == sequence.logprobs_np.shape == (5,)
        assert (sequence.logprobs_np <= 0).all()
        assert all(0 <= token < VOCAB_SIZE for token in sequence.tokens)


async def test_seeds_reproduce_whatever_else_runs(engine: Engine) -> None:
    asked = {"seed": 11, "num_samples": 4, "max_tokens": 12}
    alone = await sample(engine, job(**asked))
    crowd = await asyncio.gather(
        *(sample(engine, job(OTHER, num_samples=2, max_tokens=20)) for _ in range(4)),
        sample(engine, job(**asked)),
        sample(engine, job(**{**asked, "seed": 12})),
    )
    assert tokens_of(crowd[4]) == tokens_of(alone)
    assert tokens_of(crowd[5]) != tokens_of(alone)
    # The samples of one request differ among themselves.
    assert len({tuple(tokens) for tokens in tokens_of(alone)}) > 1
    assert alone.sequences[0].logprobs == crowd[4].sequences[0].logprobs


async def test_without_a_seed_samples_differ(engine: Engine) -> None:
    first, second = [tokens_of(await sample(engine, job(max_tokens=30))) for _ in range(2)]
    assert first != second


async def test_temperature_zero_takes_the_likeliest_token(engine: Engine) -> None:
    response = await sample(
        engine, job(temperature=0, num_samples=2, topk_sample_logprobs=3, max_tokens=4)
    )
    first, second = response.sequences
    assert first.tokens == second.tokens
    assert first.topk_logprobs is not None
    for token, logprob, top in zip(
        first.tokens, first.logprobs or [], first.topk_logprobs, strict=True
    ):
        assert top is not None
        assert len(top) == 3
        assert top[0] == (token, pytest.approx(logprob, abs=1e-5))


async def test_top_k_of_one_is_greedy(engine: Engine) -> None:
    greedy = await sample(engine, job(temperature=0))
    cut = await sample(engine, job(top_k=1))
    assert tokens_of(cut) == tokens_of(greedy)
    tiny_nucleus = await sample(engine, job(top_p=1e-6))
    assert tokens_of(tiny_nucleus) == tokens_of(greedy)


async def test_sampled_log_probabilities_are_the_models(engine: Engine, adapter: str) -> None:
    prompt = SENTENCE[:3]
    (sequence,) = (await sample(engine, job(prompt, max_tokens=6))).sequences
    scores = await logprobs(engine, adapter, [*prompt, *sequence.tokens])
    np.testing.assert_allclose(sequence.logprobs_np, scores[len(prompt) - 1 :], atol=1e-5)


async def test_stop_tokens_end_a_sample_and_are_part_of_it(engine: Engine) -> None:
    (free,) = (await sample(engine, job(seed=5, max_tokens=10))).sequences
    stop = free.tokens[3]
    (stopped,) = (await sample(engine, job(seed=5, max_tokens=10, stop=[stop]))).sequences
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


async def test_stop_strings_are_found_across_tokens(engine: Engine) -> None:
    prompt = job(seed=5, max_tokens=40)
    (free,) = (await sample(engine, prompt)).sequences
    tokens = free.tokens
    start = next(i for i in range(len(tokens) - 1) if min(tokens[i : i + 2]) >= FIRST_CHARACTER)
    string = text_of(tokens[start : start + 2])
    (stopped,) = (await sample(engine, job(seed=5, max_tokens=40, stop=string))).sequences
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == tokens[: len(stopped.tokens)]
    assert string in text_of(stopped.tokens)
    assert string not in text_of(stopped.tokens[:-1])


async def test_the_end_of_sequence_token_stops_unless_nothing_may(
    engine: Engine, adapter: str
) -> None:
    sentence = [10, 40, EOS_TOKEN, 20]
    await train(engine, adapter, datum(sentence), num_steps=30)
    sampler = new_name()
    await engine.freeze(adapter, sampler)
    asked = {"weights_id": sampler, "temperature": 0, "max_tokens": 4}
    (stopped,) = (await sample(engine, job([10], **asked, stop=None))).sequences
    assert (stopped.tokens, stopped.stop_reason) == ([40, EOS_TOKEN], "stop")
    (unstopped,) = (await sample(engine, job([10], **asked, stop=[]))).sequences
    assert (len(unstopped.tokens), unstopped.stop_reason) == (4, "length")


async def test_the_context_limits_a_sample(engine: Engine) -> None:
    prompt = [3 + i % 90 for i in range(CONTEXT_LENGTH - 28)]
    (sequence,) = (await sample(engine, job(prompt, max_tokens=None))).sequences
    assert len(sequence.tokens) == 28
    assert sequence.stop_reason == "length"


async def test_a_stream_reports_the_tokens_of_the_final_answer(engine: Engine) -> None:
    events = [event async for event in engine.sample(job(num_samples=3, seed=2, stream=True))]
    response = events.pop()
    assert isinstance(response, SampleResponse)
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    values: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for event in events:
        assert isinstance(event, TokensSampled)
        streamed[event.index] += event.tokens.tolist()
        values[event.index] += event.logprobs.tolist()
    assert list(streamed.values()) == tokens_of(response)
    assert list(values.values()) == [sequence.logprobs for sequence in response.sequences]
    quiet = [event async for event in engine.sample(job(num_samples=3, seed=2))]
    assert len(quiet) == 1
    assert tokens_of(quiet[0]) == tokens_of(response)  # type: ignore[arg-type]


async def test_a_stream_reports_the_alternatives_of_the_final_answer(engine: Engine) -> None:
    asked = job(seed=2, stream=True, topk_sample_logprobs=3)
    *events, response = [event async for event in engine.sample(asked)]
    assert isinstance(response, SampleResponse)
    streamed = [row for event in events for row in event.topk.to_lists()]  # type: ignore[union-attr]
    assert streamed == response.sequences[0].topk_logprobs


async def test_a_cancelled_job_ends_and_frees_its_place(engine: Engine) -> None:
    asked = job(max_tokens=100, num_samples=50, stream=True)
    stream = engine.sample(asked)
    assert isinstance(await anext(stream), TokensSampled)
    await engine.cancel(asked.job_id)
    await engine.cancel(asked.job_id)
    await engine.cancel("unknown")
    rest = [event async for event in stream]
    assert isinstance(rest[-1], Failure)
    assert asked.job_id in rest[-1].message
    health = await engine.health()
    assert health.running_samples == health.waiting_samples == 0


async def test_closing_a_stream_early_frees_its_place(engine: Engine) -> None:
    stream = engine.sample(job(max_tokens=100, num_samples=50, stream=True))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]  # engines give async generators
    health = await engine.health()
    assert health.running_samples == health.waiting_samples == 0


async def test_the_prompt_is_scored_as_asked(engine: Engine, adapter: str) -> None:
    expected = await logprobs(engine, adapter)
    targets = np.array([[40, 7], [-1, 8], [60, -1], [30, 5], [50, 1], [12, 12], [44, 3]])
    response = await sample(
        engine,
        job(
            SENTENCE,
            max_tokens=1,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            target_prompt_logprobs=TensorData.from_numpy(targets),
            prompt_alt_tokens_k=3,
            seed=1,
        ),
    )
    values = response.prompt_logprobs
    assert values is not None
    assert values[0] is None
    np.testing.assert_allclose(values[1:], expected, atol=1e-5)
    topk = response.topk_prompt_logprobs
    assert topk is not None
    assert topk[0] is None
    for row, own in zip(topk[1:], expected, strict=True):
        assert row is not None
        assert len(row) == 2
        assert row[0][1] >= row[1][1]
        assert row[0][1] >= own - 1e-5
    assert response.target_prompt_logprobs is not None
    scores = response.target_prompt_logprobs.numpy
    assert scores.shape == targets.shape
    assert scores[1, 0] == scores[2, 1] == 0
    np.testing.assert_allclose(scores[[0, 2, 3, 4], 0], expected[[0, 2, 3, 4]], atol=1e-5)
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.numpy.shape == (len(SENTENCE) - 1, 3)
    assert (response.prompt_alt_tokens.logprobs.numpy < 0).all()


async def test_sparse_targets_are_answered_in_their_own_layout(engine: Engine) -> None:
    asked = TensorData(
        data=[40, 60, 7],
        dtype="int64",
        shape=[7, 2],
        sparse_crow_indices=[0, 1, 1, 3, 3, 3, 3, 3],
        sparse_col_indices=[0, 0, 1],
    )
    plain = await sample(engine, job(SENTENCE, max_tokens=1, prompt_logprobs=True))
    response = await sample(engine, job(SENTENCE, max_tokens=1, target_prompt_logprobs=asked))
    answer = response.target_prompt_logprobs
    assert answer is not None
    assert answer.sparse_crow_indices == asked.sparse_crow_indices
    assert answer.sparse_col_indices == asked.sparse_col_indices
    assert plain.prompt_logprobs_np is not None
    np.testing.assert_allclose(answer.numpy[:2], plain.prompt_logprobs_np[[1, 3]], atol=1e-5)


async def test_only_the_last_prompt_positions_are_scored_when_asked(engine: Engine) -> None:
    whole = await sample(engine, job(SENTENCE, max_tokens=1, prompt_logprobs=True))
    part = await sample(
        engine, job(SENTENCE, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=3)
    )
    assert whole.prompt_logprobs_np is not None
    assert part.prompt_logprobs_np is not None
    assert np.isnan(part.prompt_logprobs_np[:-3]).all()
    np.testing.assert_allclose(
        part.prompt_logprobs_np[-3:], whole.prompt_logprobs_np[-3:], atol=1e-5
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": [VOCAB_SIZE]},
        {"prompt": [-1]},
        {"prompt": [5] * (CONTEXT_LENGTH + 1)},
        {"num_samples": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"max_tokens": -1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
        {"prompt_logprobs_last_n": 1},
        {"topk_sample_logprobs": -1},
        {"target_prompt_logprobs": TensorData(data=[[5]], dtype="int64", shape=[1, 1])},
    ],
    ids=str,
)
async def test_impossible_samples_are_refused(engine: Engine, fields: dict[str, Any]) -> None:
    failure = await failed_sample(engine, job(**fields))
    assert failure.category == "user"


async def test_concurrent_calls_all_get_their_own_answer(engine: Engine) -> None:
    adapters = [await create(engine, LoraConfig(rank=4, seed=seed)) for seed in range(3)]

    async def train_one(name: str) -> np.ndarray:
        await train(engine, name, num_steps=3)
        return await logprobs(engine, name)

    prompts = [[10 + i, 20 + i, 30 + i] for i in range(20)]
    trained, sampled = await asyncio.gather(
        asyncio.gather(*map(train_one, adapters)),
        asyncio.gather(
            *(
                sample(engine, job(prompt, prompt_logprobs=True, temperature=0))
                for prompt in prompts
            )
        ),
    )
    again = [
        await sample(engine, job(prompt, prompt_logprobs=True, temperature=0)) for prompt in prompts
    ]
    assert [tokens_of(response) for response in sampled] == [tokens_of(r) for r in again]
    for name, values in zip(adapters, trained, strict=True):
        np.testing.assert_array_equal(await logprobs(engine, name), values)


async def test_shaping_changes_what_is_chosen_and_not_what_is_reported(engine: Engine) -> None:
    plain = await sample(engine, job(temperature=0, max_tokens=1))
    (first,) = plain.sequences[0].tokens
    other = (first + 1) % VOCAB_SIZE
    biased = await sample(
        engine, job(temperature=0, max_tokens=1, shaping=Shaping(logit_bias={other: 100.0}))
    )
    assert biased.sequences[0].tokens == [other]
    assert biased.sequences[0].logprobs[0] < plain.sequences[0].logprobs[0] <= 0
    never = Shaping(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=100.0)
    fresh = await sample(engine, job(temperature=0, max_tokens=12, stop=[], shaping=never))
    assert len(set(fresh.sequences[0].tokens)) == 12, "a token came twice"
    likeliest = Shaping(min_p=1.0)
    sure = await sample(engine, job(temperature=1.5, max_tokens=1, seed=1, shaping=likeliest))
    assert sure.sequences[0].tokens == [first]


@pytest.mark.parametrize(
    ("shaping", "problem"),
    [
        (Shaping(min_p=1.5), "min_p: must be between 0 and 1"),
        (Shaping(presence_penalty=3.0), "presence_penalty: must be between -2 and 2"),
        (Shaping(frequency_penalty=math.nan), "frequency_penalty"),
        (Shaping(repetition_penalty=0.0), "repetition_penalty: must be between 0.01 and 100"),
        (Shaping(logit_bias={VOCAB_SIZE: 1.0}), "outside the vocabulary"),
        (Shaping(logit_bias={3: 101.0}), "logit_bias.3: must be between -100 and 100"),
    ],
)
async def test_a_shaping_out_of_range_is_refused_by_name(
    engine: Engine, shaping: Shaping, problem: str
) -> None:
    failure = await failed_sample(engine, job(shaping=shaping))
    assert failure.category == "user"
    assert problem in failure.message
