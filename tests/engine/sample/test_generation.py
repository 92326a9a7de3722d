"""The sampler against `transformers` and against the trainer's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.sample.sampling_reference import (
    CPU,
    DETERMINISTIC,
    answer,
    answers,
    assert_trainer_agrees,
    finish,
    job_of,
    tokens_in,
    tokens_of,
    trainer_logits,
)
from tinsmith.detokenizer import read_detokenize
from tinsmith.engine.base import Failure, SampleJob, TokensSampled
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import EncodedTextChunk, ModelInput, SampleResponse

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
