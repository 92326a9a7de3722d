"""The sampler against `transformers` and against the trainer's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.sample.sampling_reference import (
    CPU,
    DETERMINISTIC,
    TOLERANCE,
    answer,
    answers,
    assert_trainer_agrees,
    finish,
    job_of,
    tokens_in,
    tokens_of,
    trainer_logits,
    trainer_logprobs,
)
from tinsmith.detokenizer import read_detokenize
from tinsmith.engine.base import Failure, SampleEvent, SampleJob, TokensSampled
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import EncodedTextChunk, ModelInput, SampleResponse, TensorData


@pytest.fixture
def generator(tiny_decoder: Decoder, tiny_llama_folder: Path) -> Generator:
    return Generator(tiny_decoder, CPU, read_detokenize(tiny_llama_folder), prefill_tokens=16)


# Against transformers


@pytest.mark.parametrize("config", [CPU, DETERMINISTIC], ids=["batched", "deterministic"])
def test_greedy_tokens_equal_those_of_transformers(
    variant: str,
    config: LocalEngineConfig,
    model_folder: Callable[[str], Path],
    reference_model: Callable[[str], Any],
) -> None:
    """Prompts and continuations are longer than the sliding windows (8) and the chunks (7)."""
    generator = Generator(Decoder.load(model_folder(variant)), config, prefill_tokens=7)
    model = reference_model(variant)
    prompts = {"short": tokens_of(3, 1), "long": tokens_of(33, 2), "group": tokens_of(20, 3)}
    jobs = [
        job_of(name, prompt, temperature=0, max_tokens=40, num_samples=3 if name == "group" else 1)
        for name, prompt in prompts.items()
    ]
    found = answers(generator, [(job, None) for job in jobs])
    for name, prompt in prompts.items():
        with torch.no_grad():
            wanted = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=40,
                min_new_tokens=40,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
        for tokens in tokens_in(found[name]):
            # `min_new_tokens` keeps transformers from taking the end-of-sequence token.
            agreed = next((i for i, t in enumerate(tokens) if t == 2), len(tokens))
            assert tokens[:agreed] == wanted[:agreed]


# Against the trainer


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_sampled_logprobs_are_the_trainers_at_the_requests_temperature(
    variant: str, temperature: float, model_folder: Callable[[str], Path]
) -> None:
    decoder = Decoder.load(model_folder(variant))
    prompt = tokens_of(21)
    job = job_of("a", prompt, temperature=temperature, max_tokens=30, num_samples=3, seed=4)
    response = answer(Generator(decoder, CPU, prefill_tokens=9), job)
    assert_trainer_agrees(decoder, prompt, response, temperature=temperature)


def test_at_temperature_zero_logprobs_are_untempered(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(9)
    response = answer(generator, job_of("a", prompt, temperature=0, num_samples=3))
    assert_trainer_agrees(tiny_decoder, prompt, response)
    assert len({tuple(tokens) for tokens in tokens_in(response)}) == 1


def test_top_k_logprobs_of_samples_are_the_trainers(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(9)
    job = job_of("a", prompt, temperature=0.8, top_k=3, topk_sample_logprobs=5, num_samples=2)
    for sequence in answer(generator, job).sequences:
        logits = trainer_logits(tiny_decoder, prompt + sequence.tokens)[len(prompt) - 1 : -1]
        wanted = torch.log_softmax(logits / 0.8, -1).topk(5)
        top = sequence.topk_logprobs_np
        assert top is not None
        assert top.token_ids.tolist() == wanted.indices.tolist()
        assert np.abs(top.logprobs - wanted.values.numpy()).max() < 1e-4
        for chosen, ids in zip(sequence.tokens, top.token_ids.tolist(), strict=True):
            assert chosen in ids[:3]


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


def test_alternatives_follow_the_distribution_at_the_requests_temperature(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(4)
    job = job_of("a", prompt, prompt_alt_tokens_k=20_000, temperature=0.6, top_k=2, max_tokens=1)
    drawn = answer(generator, job).prompt_alt_tokens
    assert drawn is not None
    probs = torch.softmax(trainer_logits(tiny_decoder, prompt)[:-1] / 0.6, -1).numpy()
    for row in range(3):
        counts = np.bincount(drawn.tokens.numpy[row], minlength=97)
        expected = probs[row] * 20_000
        common = expected >= 8
        chi_square = ((counts[common] - expected[common]) ** 2 / expected[common]).sum()
        assert chi_square < common.sum() + 4 * np.sqrt(2 * common.sum())


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (5, 1.0), (-1, 0.7), (8, 0.8)])
def test_sampled_frequencies_match_the_models_distribution(
    generator: Generator, tiny_decoder: Decoder, top_k: int, top_p: float
) -> None:
    prompt, count, temperature = tokens_of(6, 5), 8000, 0.6
    job = job_of(
        "a",
        prompt,
        num_samples=count,
        max_tokens=1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=11,
    )
    first = np.concatenate(tokens_in(answer(generator, job)))
    probs = torch.softmax(
        trainer_logits(tiny_decoder, prompt)[-1].double() / temperature, -1
    ).numpy()
    order = np.argsort(-probs)
    kept = order[:top_k] if top_k > 0 else order
    before = np.cumsum(probs[kept]) - probs[kept]
    kept = kept[before < top_p * probs[kept].sum()]
    assert set(first) <= set(kept.tolist())
    expected = probs[kept] / probs[kept].sum() * count
    observed = np.bincount(first, minlength=97)[kept]
    common = expected >= 8
    chi_square = ((observed[common] - expected[common]) ** 2 / expected[common]).sum()
    assert chi_square < common.sum() + 4 * np.sqrt(2 * common.sum())


# Seeds and groups


def test_a_seed_gives_the_same_samples_whatever_else_runs(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    job = job_of("a", tokens_of(12), seed=42, num_samples=4, max_tokens=20)
    alone = answer(Generator(tiny_decoder, CPU), job)
    others = [
        (job_of(f"b{i}", tokens_of(5 + i, i), num_samples=2, max_tokens=9 + i), None)
        for i in range(6)
    ]
    other_adapter = (job_of("c", tokens_of(30), max_tokens=25), new_adapter(tiny_decoder))
    beside = answers(Generator(tiny_decoder, CPU), [*others, (job, None), other_adapter])["a"]
    assert tokens_in(alone) == tokens_in(beside)


def test_samples_of_one_seed_differ_and_the_first_ones_do_not_depend_on_how_many(
    generator: Generator,
) -> None:
    job = job_of("a", tokens_of(12), seed=42, num_samples=8, max_tokens=12)
    many = tokens_in(answer(generator, job))
    few = tokens_in(
        answer(generator, job_of("b", tokens_of(12), seed=42, num_samples=3, max_tokens=12))
    )
    assert len({tuple(tokens) for tokens in many}) == 8
    assert many[:3] == few


def test_without_a_seed_two_requests_differ(generator: Generator) -> None:
    jobs = [(job_of(name, tokens_of(12), max_tokens=20), None) for name in "ab"]
    found = answers(generator, jobs)
    assert tokens_in(found["a"]) != tokens_in(found["b"])


def test_a_group_larger_than_the_running_limit_is_completed(tiny_decoder: Decoder) -> None:
    config = LocalEngineConfig(device="cpu", max_running_samples=3)
    job = job_of("a", tokens_of(12), seed=1, num_samples=10)
    limited = Generator(tiny_decoder, config)
    limited.submit(job, None)
    most = 0
    found: list[SampleEvent] = []
    while limited.busy:
        found += [event for _, event in limited.step()]
        most = max(most, limited.num_running)
    (response,) = found
    assert isinstance(response, SampleResponse)
    assert most == 3
    assert tokens_in(response) == tokens_in(answer(Generator(tiny_decoder, CPU), job))


# Adapters


def test_adapters_and_the_bare_model_share_a_batch(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    adapters: list[Adapter | None] = [
        new_adapter(tiny_decoder, fill_seed=1),
        None,
        new_adapter(tiny_decoder, fill_seed=2, rank=8, train_mlp=False),
        new_adapter(tiny_decoder, fill_seed=3, train_unembed=True),
    ]
    jobs = [
        (
            job_of(f"{a}/{i}", tokens_of(7 + 5 * i, i), seed=i, num_samples=1 + i, max_tokens=15),
            adapter,
        )
        for a, adapter in enumerate(adapters)
        for i in range(3)
    ]
    together = answers(Generator(tiny_decoder, CPU, prefill_tokens=16), jobs)
    for job, adapter in jobs:
        alone = answer(Generator(tiny_decoder, CPU), job, adapter)
        assert tokens_in(together[job.job_id]) == tokens_in(alone)
        prompt = job.prompt.to_ints()
        assert_trainer_agrees(tiny_decoder, prompt, together[job.job_id], adapter)


# Prefix reuse


def test_a_prompt_that_continues_a_known_one_is_not_read_again(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(40)
    first = answer(generator, job_of("a", prompt, seed=1))
    assert first.prompt_cache_hit_tokens == 0
    again = answer(generator, job_of("b", prompt, seed=1))
    assert again.prompt_cache_hit_tokens == 39
    assert tokens_in(again) == tokens_in(first)
    longer = answer(generator, job_of("c", prompt + tokens_of(20, 9), seed=1))
    assert longer.prompt_cache_hit_tokens == 40
    fresh = answer(Generator(tiny_decoder, CPU), job_of("c", prompt + tokens_of(20, 9), seed=1))
    assert tokens_in(longer) == tokens_in(fresh)
    branching = answer(generator, job_of("d", prompt[:25] + tokens_of(9, 8), seed=1, num_samples=3))
    assert branching.prompt_cache_hit_tokens == 25
    assert_trainer_agrees(tiny_decoder, prompt[:25] + tokens_of(9, 8), branching)


def test_a_prefix_is_reused_only_under_the_same_adapter(
    generator: Generator, tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    one, two = new_adapter(tiny_decoder, fill_seed=1), new_adapter(tiny_decoder, fill_seed=2)
    prompt = tokens_of(40)
    for adapter in (None, one, two):
        response = answer(generator, job_of("a", prompt), adapter)
        assert response.prompt_cache_hit_tokens == 0
        assert_trainer_agrees(tiny_decoder, prompt, response, adapter)
    generator.forget(one)
    assert answer(generator, job_of("a", prompt), one).prompt_cache_hit_tokens == 0
    assert answer(generator, job_of("a", prompt), two).prompt_cache_hit_tokens == 39


def test_scores_of_a_known_prompt_are_complete(generator: Generator) -> None:
    """What is asked about the prompt limits how much of it can come from the cache."""
    prompt = tokens_of(40)
    full = answer(generator, job_of("a", prompt, prompt_logprobs=True))
    again = answer(generator, job_of("b", prompt, prompt_logprobs=True))
    assert again.prompt_cache_hit_tokens == 0
    last = answer(generator, job_of("c", prompt, prompt_logprobs=True, prompt_logprobs_last_n=5))
    assert last.prompt_cache_hit_tokens == 34
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
    assert answer(generator, job).prompt_cache_hit_tokens == 30


def test_equal_prompts_that_arrive_together_are_read_once(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(60)
    found = answers(generator, [(job_of(str(i), prompt, seed=i), None) for i in range(5)])
    assert sorted(r.prompt_cache_hit_tokens for r in found.values()) == [0, 59, 59, 59, 59]
    for response in found.values():
        assert_trainer_agrees(tiny_decoder, prompt, response)


# Joining, cancelling, memory


def test_a_short_request_joins_and_leaves_while_a_long_one_runs(generator: Generator) -> None:
    generator.submit(job_of("long", tokens_of(10), max_tokens=100), None)
    for _ in range(5):
        assert generator.step() == []
    generator.submit(job_of("short", tokens_of(4), max_tokens=3), None)
    events: list[tuple[str, SampleEvent]] = []
    for _ in range(4):
        events += generator.step()
    assert [job_id for job_id, _ in events] == ["short"]
    assert generator.num_running == 1


def test_a_long_prompt_holds_up_neither_runners_nor_short_requests(generator: Generator) -> None:
    generator.submit(job_of("runner", tokens_of(4), max_tokens=100, stream=True), None)
    generator.step()
    generator.submit(job_of("long", tokens_of(110), max_tokens=2), None)
    generator.submit(job_of("short", tokens_of(6), max_tokens=2), None)
    seen: list[str] = []
    for _ in range(4):
        seen += [job_id for job_id, _ in generator.step()]
    assert seen.count("runner") == 4
    assert "short" in seen
    assert "long" not in seen


def test_cancelling_frees_the_place_and_ends_the_events(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    kept = job_of("kept", tokens_of(9), seed=3, num_samples=2, max_tokens=20)
    for name, prompt, count in (("running", 9, 4), ("reading", 110, 1)):
        generator.submit(job_of(name, tokens_of(prompt, 7), num_samples=count, max_tokens=50), None)
    generator.submit(kept, None)
    for _ in range(3):
        generator.step()
    before = generator.num_running
    for name in ("running", "reading", "unknown"):
        generator.cancel(name)
    assert (before, generator.num_running, generator.num_waiting) == (6, 2, 0)
    events = finish(generator)
    assert list(events) == ["kept"]
    (response,) = events["kept"]
    assert isinstance(response, SampleResponse)
    assert tokens_in(response) == tokens_in(answer(Generator(tiny_decoder, CPU), kept))


def test_all_memory_but_remembered_prompts_is_given_back(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompts = [tokens_of(20, seed) for seed in range(3)]
    answers(
        generator, [(job_of(str(i), p, num_samples=1 + i), None) for i, p in enumerate(prompts)]
    )
    config = tiny_decoder.config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert generator.cache_bytes == 60 * per_token


@pytest.mark.parametrize("room_for", [150, 300, 600])
def test_with_little_memory_requests_take_turns_and_results_stay_the_same(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], room_for: int
) -> None:
    """Sequences grow past their slots, so some have to give way and are taken up again."""
    shape = tiny_decoder.config
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    config = LocalEngineConfig(device="cpu", kv_cache_bytes=room_for * per_token)
    adapters = [None, new_adapter(tiny_decoder)]
    jobs = [
        (
            job_of(str(i), tokens_of(10 + 7 * i, i), seed=i, max_tokens=70, num_samples=1 + i % 3),
            adapters[i % 2],
        )
        for i in range(6)
    ]
    small = Generator(tiny_decoder, config, prefill_tokens=32)
    found = answers(small, jobs)
    wanted = answers(Generator(tiny_decoder, CPU), jobs)
    for job, adapter in jobs:
        assert tokens_in(found[job.job_id]) == tokens_in(wanted[job.job_id])
        assert_trainer_agrees(tiny_decoder, job.prompt.to_ints(), found[job.job_id], adapter)
    assert small.cache_bytes <= room_for * per_token


def test_in_deterministic_mode_company_changes_not_a_bit(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    job = job_of("a", tokens_of(30), seed=5, num_samples=3, max_tokens=20, prompt_logprobs=True)
    adapter = new_adapter(tiny_decoder)
    alone = answer(Generator(tiny_decoder, DETERMINISTIC, prefill_tokens=16), job, adapter)
    busy = Generator(tiny_decoder, DETERMINISTIC, prefill_tokens=16)
    answer(busy, job_of("before", tokens_of(30)), adapter)
    others = [(job_of(f"b{i}", tokens_of(5 + 9 * i, i), num_samples=2), None) for i in range(4)]
    beside = answers(busy, [*others, (job, adapter)])["a"]
    assert beside == alone
    assert beside.prompt_cache_hit_tokens == 0


# Ends


def test_the_end_of_sequence_token_is_kept_and_ends_with_stop(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(9)
    free = answer(generator, job_of("a", prompt, seed=1, max_tokens=60, num_samples=8))
    stopped = answer(
        generator, job_of("b", prompt, seed=1, max_tokens=60, num_samples=8, stop=None)
    )
    eos = tiny_decoder.config.eos_token_ids
    assert eos == (2,)
    reasons = set()
    for whole, cut in zip(free.sequences, stopped.sequences, strict=True):
        end = whole.tokens.index(2) + 1 if 2 in whole.tokens else len(whole.tokens)
        assert cut.tokens == whole.tokens[:end]
        assert cut.stop_reason == ("stop" if 2 in whole.tokens else "length")
        assert whole.stop_reason == "length"
        reasons.add(cut.stop_reason)
    assert reasons == {"stop", "length"}


def test_a_stop_string_ends_with_the_token_that_completes_it(
    generator: Generator, tiny_llama_folder: Path
) -> None:
    prompt = tokens_of(9)
    whole = answer(generator, job_of("a", prompt, seed=1, max_tokens=30)).sequences[0]
    text_of = read_detokenize(tiny_llama_folder)
    assert text_of is not None
    stop = text_of(whole.tokens[10:13])
    for given in (stop, [stop], ["no such text", stop]):
        cut = answer(generator, job_of("b", prompt, seed=1, max_tokens=30, stop=given)).sequences[0]
        assert cut.tokens == whole.tokens[:13]
        assert cut.stop_reason == "stop"
        assert len(cut.logprobs_np) == 13


def test_stop_token_ids_end_a_sequence(generator: Generator) -> None:
    whole = answer(generator, job_of("a", tokens_of(9), seed=1, max_tokens=30)).sequences[0].tokens
    stop = whole[6]
    cut = answer(generator, job_of("b", tokens_of(9), seed=1, max_tokens=30, stop=[stop]))
    assert tokens_in(cut) == [whole[: whole.index(stop) + 1]]


def test_without_max_tokens_the_context_is_the_limit(generator: Generator) -> None:
    response = answer(generator, job_of("a", tokens_of(100), max_tokens=None, num_samples=2))
    assert [len(tokens) for tokens in tokens_in(response)] == [28, 28]
    assert {sequence.stop_reason for sequence in response.sequences} == {"length"}


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


def test_every_chunk_of_a_prompt_counts(generator: Generator) -> None:
    tokens = tokens_of(30)
    whole = answer(generator, job_of("a", tokens, temperature=0))
    chunks = [EncodedTextChunk(tokens=tokens[:3]), EncodedTextChunk(tokens=tokens[3:])]
    job = job_of("b", tokens, temperature=0)
    job = SampleJob(
        job_id="b",
        base_model="tiny",
        weights_id=None,
        prompt=ModelInput(chunks=chunks),
        params=job.params,
    )
    assert tokens_in(answer(generator, job)) == tokens_in(whole)


# Streams and failures


def test_streamed_tokens_add_up_to_the_answer(generator: Generator) -> None:
    generator.submit(job_of("a", tokens_of(9), num_samples=3, max_tokens=6, stream=True), None)
    *pieces, response = finish(generator)["a"]
    assert isinstance(response, SampleResponse)
    for index, sequence in enumerate(response.sequences):
        own = [
            piece for piece in pieces if isinstance(piece, TokensSampled) and piece.index == index
        ]
        assert np.concatenate([piece.tokens for piece in own]).tolist() == sequence.tokens
        logprobs = np.concatenate([piece.logprobs for piece in own])
        assert logprobs.tolist() == sequence.logprobs
        assert sequence.sequence_id == f"a:{index}"


def test_a_diverged_adapter_fails_alone(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    broken = new_adapter(tiny_decoder)
    broken.flat.fill_(float("nan"))
    generator = Generator(tiny_decoder, CPU)
    job = job_of("good", tokens_of(9), seed=2, max_tokens=30)
    generator.submit(job, None)
    generator.step()
    for name, fields in (("bad", {}), ("scored", {"prompt_logprobs": True})):
        generator.submit(job_of(name, tokens_of(9), num_samples=2, **fields), broken)
    events = finish(generator)
    for name in ("bad", "scored"):
        (failure,) = events[name]
        assert isinstance(failure, Failure)
        assert "not finite" in failure.message
    (response,) = events["good"]
    assert isinstance(response, SampleResponse)
    assert tokens_in(response) == tokens_in(answer(Generator(tiny_decoder, CPU), job))
    assert answer(generator, job_of("after", tokens_of(9), seed=2)).sequences[0].tokens


def test_a_turn_that_breaks_fails_its_requests_and_leaves_the_sampler_usable(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(tiny_decoder, CPU)
    generator.submit(job_of("a", tokens_of(9), num_samples=3), None)
    generator.step()
    with monkeypatch.context() as patch:
        patch.setattr(tiny_decoder, "hidden", _run_out_of_memory)
        ((job_id, failure),) = generator.step()
    assert job_id == "a"
    assert isinstance(failure, Failure)
    assert (failure.category, "out of memory" in failure.message) == ("server", True)
    assert not generator.busy
    assert len(answer(generator, job_of("b", tokens_of(9))).sequences[0].tokens) == 8


def _run_out_of_memory(*_: Any, **__: Any) -> Tensor:
    raise torch.OutOfMemoryError("out of memory")


def test_memory_that_the_machine_does_not_have_fails_one_request(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(tiny_decoder, CPU)
    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.engine.local.sample.kvcache.Span", _run_out_of_memory)
        generator.submit(job_of("a", tokens_of(9)), None)
        ((_, failure),) = generator.step()
    assert isinstance(failure, Failure)
    assert generator.cache_bytes == 0
    assert len(answer(generator, job_of("b", tokens_of(9))).sequences[0].tokens) == 8


def test_what_cannot_run_is_reported_as_the_users_mistake(tiny_decoder: Decoder) -> None:
    generator = Generator(tiny_decoder, CPU)
    generator.submit(job_of("long", tokens_of(129)), None)
    generator.submit(job_of("text", tokens_of(5), stop="x"), None)
    events = finish(generator)
    for name, part in (("long", "context"), ("text", "tokenizer")):
        (failure,) = events[name]
        assert isinstance(failure, Failure)
        assert failure.category == "user"
        assert part in failure.message


# The real model


@pytest.mark.real_model
@pytest.mark.slow
def test_the_real_models_greedy_answer_equals_that_of_transformers(real_model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text)
    generator = Generator(Decoder.load(real_model_folder), CPU, tokenizer.decode)
    job = job_of("a", prompt, temperature=0, max_tokens=24, stop=None)
    (sequence,) = answer(generator, job).sequences
    model = AutoModelForCausalLM.from_pretrained(real_model_folder)
    ids = torch.tensor([prompt])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
    )
    assert sequence.tokens == wanted[0, len(prompt) :].tolist()
    assert sequence.stop_reason == "stop"
    assert "Paris" in tokenizer.decode(sequence.tokens)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
def test_sampler_and_trainer_agree_on_the_real_model(real_model_folder: Path, packs: bool) -> None:
    decoder = Decoder.load(real_model_folder)
    if packs:
        decoder.allow_packing()
    prompt = list(range(1000, 1300, 7))
    job = job_of("a", prompt, max_tokens=24, num_samples=2, seed=1)
    response = answer(Generator(decoder, CPU, prefill_tokens=17), job)
    assert_trainer_agrees(decoder, prompt, response)
