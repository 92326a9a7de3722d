"""Sampling from models with recurrent layers: a state beside keys and values.

What is sampled is compared with the trainer's forward pass, which knows no states.
"""

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
    job_of,
    tokens_in,
    tokens_of,
    trainer_logprobs,
)
from tests.support.tiny_families import save_tiny
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.choosing import NOT_FINITE
from tinsmith.engine.local.sample.generation import Generator

FAMILIES = ("qwen3_5_text", "nemotron_h", "inkling_text")
NewAdapter = Callable[..., Adapter]


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return load(folder)


def load(folder: Path) -> Decoder:
    return BaseModels(LocalEngineConfig(device="cpu", models={"tiny": str(folder)})).get("tiny")


def test_a_prompt_read_in_pieces_beside_running_sequences_gives_the_trainers_logprobs(
    decoder: Decoder, new_adapter: NewAdapter
) -> None:
    """Of the prompt and of the samples; longer than a chunk, and grown beyond a block."""
    generator = Generator(decoder, CPU, prefill_tokens=16)
    adapter = new_adapter(decoder)
    prompts = {str(n): tokens_of(length, length) for n, length in enumerate((100, 1, 7, 40))}
    jobs = [
        (
            job_of(
                name, prompt, num_samples=1 + int(name) % 2, max_tokens=70, prompt_logprobs=True
            ),
            adapter if int(name) % 2 else None,
        )
        for name, prompt in prompts.items()
    ]
    found = answers(generator, jobs)
    for (job, used), prompt in zip(jobs, prompts.values(), strict=True):
        response = found[job.job_id]
        assert_trainer_agrees(decoder, prompt, response, used)
        scores = response.prompt_logprobs_np
        assert scores is not None
        wanted = trainer_logprobs(decoder, prompt, used)
        np.testing.assert_allclose(scores[1:], wanted, atol=1e-5)


def test_a_known_prompt_is_continued_where_it_ends_and_nowhere_else(decoder: Decoder) -> None:
    """All but the last token of the same prompt; a shorter or other one is read from its start."""
    generator = Generator(decoder, CPU)
    prompt = tokens_of(40)
    first = answer(generator, job_of("a", prompt, seed=1))
    again = answer(generator, job_of("b", prompt, seed=1))
    assert tokens_in(again) == tokens_in(first)
    hits = {"a": first.prompt_cache_hit_tokens, "b": again.prompt_cache_hit_tokens}
    longer = {
        "longer": prompt + tokens_of(20, 9),
        "other": prompt + tokens_of(20, 8),
        "shorter": prompt[:30],
        "branch": prompt[:30] + tokens_of(20, 7),
    }
    for name, tokens in longer.items():
        response = answer(generator, job_of(name, tokens, num_samples=2))
        hits[name] = response.prompt_cache_hit_tokens
        assert_trainer_agrees(decoder, tokens, response)
    # The branch begins with the shorter prompt, which was read in the meantime.
    assert hits == {"a": 0, "b": 39, "longer": 39, "other": 39, "shorter": 0, "branch": 29}


def test_a_known_prompt_is_not_used_beyond_what_has_to_be_scored(decoder: Decoder) -> None:
    generator = Generator(decoder, CPU)
    prompt = tokens_of(40)
    full = answer(generator, job_of("a", prompt, prompt_logprobs=True))
    options = {"prompt_logprobs": True, "prompt_logprobs_last_n": 5}
    last = answer(generator, job_of("b", prompt, **options))
    assert last.prompt_cache_hit_tokens == 0, "the state after 34 tokens is not known"
    longer = prompt + tokens_of(10, 3)
    beyond = answer(generator, job_of("c", longer, **options))
    assert beyond.prompt_cache_hit_tokens == 39
    for response, tokens, first in ((full, prompt, 1), (last, prompt, 35), (beyond, longer, 45)):
        scores = response.prompt_logprobs_np
        assert scores is not None
        wanted = trainer_logprobs(decoder, tokens)
        np.testing.assert_allclose(scores[first:], wanted[first - 1 :], atol=1e-5)


def test_equal_prompts_that_arrive_together_are_read_once(decoder: Decoder) -> None:
    prompt = tokens_of(60)
    jobs = [(job_of(str(i), prompt, seed=i), None) for i in range(5)]
    found = answers(Generator(decoder, CPU, prefill_tokens=16), jobs)
    assert sorted(r.prompt_cache_hit_tokens for r in found.values()) == [0, 59, 59, 59, 59]
    for response in found.values():
        assert_trainer_agrees(decoder, prompt, response)


def test_a_prompt_and_its_state_are_found_by_their_scope_and_adapter_only(
    decoder: Decoder, new_adapter: NewAdapter
) -> None:
    """Others know a prompt of the same length, so that they look for one."""
    generator, first = Generator(decoder, CPU), new_adapter(decoder)
    realms = [("a", first), ("b", first), ("a", new_adapter(decoder, fill_seed=22)), ("a", None)]
    prompts = [tokens_of(40, 1), *[tokens_of(40, 2)] * 3]
    for number, ((scope, adapter), prompt) in enumerate(zip(realms, prompts, strict=True)):
        answer(generator, job_of(f"before {number}", prompt, scope=scope), adapter)
    for number, (scope, adapter) in enumerate(realms):
        asked = job_of(str(number), prompts[0], scope=scope)
        response = answer(generator, asked, adapter)
        assert (response.prompt_cache_hit_tokens > 0) == (number == 0)
        assert_trainer_agrees(decoder, prompts[0], response, adapter)


def test_a_prompt_that_only_begins_like_another_does_not_wait_for_it(decoder: Decoder) -> None:
    """What the other leaves is of no use: its state is that of its end."""
    steps = []
    for others_prompt in (tokens_of(60, 1), tokens_of(50, 2) + tokens_of(10, 3)):
        generator = Generator(decoder, CPU)
        generator.submit(job_of("a", others_prompt), None)
        generator.submit(job_of("b", tokens_of(60, 2)), None)
        steps.append(0)
        while generator.busy:
            generator.step()
            steps[-1] += 1
    assert steps[0] == steps[1]


@pytest.mark.parametrize("config", [CPU, DETERMINISTIC], ids=["packed", "deterministic"])
@pytest.mark.parametrize("length", [1, 12])
def test_a_prompt_that_is_only_scored_ends_though_nothing_is_left_to_read(
    decoder: Decoder, config: LocalEngineConfig, length: int
) -> None:
    generator = Generator(decoder, config)
    for name in ("first", "again"):
        response = answer(generator, job_of(name, tokens_of(length), max_tokens=0, num_samples=2))
        assert tokens_in(response) == [[], []]
    assert not generator.busy


def test_with_little_memory_sequences_give_way_and_go_on_with_the_trainers_logprobs(
    decoder: Decoder, new_adapter: NewAdapter
) -> None:
    """Two scopes take rows from each other, and blocks have to be given up and read again."""
    state, config = decoder.config.state, decoder.config
    assert state is not None
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    room = 4 * (64 * per_token + state.nbytes)
    small = LocalEngineConfig(device="cpu", kv_cache_bytes=room, max_running_samples=3)
    generator = Generator(decoder, small, prefill_tokens=16)
    adapters = [None, new_adapter(decoder)]
    jobs = [
        (
            job_of(str(i), tokens_of(10 + 5 * i, i), max_tokens=40, scope="ab"[i % 2]),
            adapters[i // 2 % 2],
        )
        for i in range(6)
    ]
    for job, adapter in jobs:
        generator.submit(job, adapter)
    found: dict[str, Any] = {}
    most_bytes = 0
    while generator.busy:
        found.update(generator.step())
        most_bytes = max(most_bytes, generator.cache_bytes)
    assert most_bytes <= room
    for job, adapter in jobs:
        assert_trainer_agrees(decoder, job.prompt.to_ints(), found[job.job_id], adapter)


def test_the_memory_of_states_is_counted(decoder: Decoder) -> None:
    """A remembered prompt of 20 tokens holds two blocks of 16, and one state."""
    generator = Generator(decoder, CPU)
    config, state = decoder.config, decoder.config.state
    assert state is not None
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    answer(generator, job_of("a", tokens_of(20), num_samples=3))
    assert generator.cache_bytes == 2 * 16 * per_token + state.nbytes
    empty = Generator(decoder, CPU)
    answer(empty, job_of("b", tokens_of(1)))
    assert empty.cache_bytes == 0, "of a prompt of one token there is nothing to remember"


def test_an_adapter_that_has_diverged_fails_alone_and_leaves_no_trace(
    decoder: Decoder, new_adapter: NewAdapter
) -> None:
    """Its blocks are taken by others later on: nothing that is not finite may be left there."""
    generator = Generator(decoder, CPU)
    broken = new_adapter(decoder)
    broken.flat.fill_(float("nan"))
    prompt = tokens_of(12)
    generator.submit(job_of("broken", prompt), broken)
    generator.submit(job_of("beside", prompt, seed=1), None)
    found: dict[str, Any] = {}
    while generator.busy:
        found.update(generator.step())
    assert found["broken"].message == NOT_FINITE
    later = answer(generator, job_of("later", tokens_of(9), num_samples=3))
    assert_trainer_agrees(decoder, prompt, found["beside"])
    assert_trainer_agrees(decoder, tokens_of(9), later)


def test_a_model_of_recurrent_layers_without_experts_is_served(tmp_path: Path) -> None:
    """Nemotron-H's settings speak of experts also where none of its layers has any."""
    kinds = ["mamba", "mlp", "attention", "mamba"]
    save_tiny("nemotron_h", tmp_path, layers_block_type=kinds)
    modules = {name for p in load(tmp_path).config.projections for name in p.modules}
    assert "model.layers.1.mixer.up_proj" in modules


def test_a_model_that_also_sees_images_serves_its_language_part(tmp_path: Path) -> None:
    """As Qwen3.5 is published: the text model under `text_config` and `model.language_model`."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = save_tiny("qwen3_5_text", tmp_path / "text").config.to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    torch.manual_seed(3)
    config = Qwen3_5Config(text_config=text, vision_config={**vision, "out_hidden_size": 32})
    reference = Qwen3_5ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path / "whole")
    decoder = load(tmp_path / "whole")
    tokens = tokens_of(30)
    response = answer(Generator(decoder, CPU), job_of("a", tokens, temperature=0.0))
    assert_trainer_agrees(decoder, tokens, response)
    with torch.no_grad():
        whole = torch.tensor([tokens + response.sequences[0].tokens])
        logits = reference(input_ids=whole).logits[0]
    assert logits.argmax(-1)[len(tokens) - 1 : -1].tolist() == response.sequences[0].tokens
    modules = {name for p in decoder.config.projections for name in p.modules}
    assert "model.layers.0.linear_attn.in_proj_q" in modules
    assert not any("visual" in name for name in modules)
