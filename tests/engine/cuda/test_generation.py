"""The sampler on CUDA against the trainer's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.sample.sampling_reference import (
    answers,
    assert_trainer_agrees,
    job_of,
    tokens_of,
    trainer_logprobs,
)
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator

pytestmark = pytest.mark.gpu

SMALL = LocalEngineConfig(device="cuda", kv_cache_bytes=1 << 28)


def test_in_bfloat16_the_sampler_is_as_close_to_float32_as_the_trainer(
    cuda: torch.device, variant: str, model_folder: Callable[[str], Path]
) -> None:
    """These tiny models are hot: rounding alone moves log-probabilities by up to 0.04."""
    exact = Decoder.load(model_folder(variant), device=cuda)
    decoder = Decoder.load(model_folder(variant), device=cuda, dtype=torch.bfloat16)
    generator = Generator(decoder, SMALL, prefill_tokens=9)
    prompt = tokens_of(21)
    jobs = [
        (job_of("one", prompt, max_tokens=40, seed=1), None),
        (job_of("group", prompt, max_tokens=40, num_samples=4, top_p=0.9, seed=2), None),
    ]
    sampler, trainer = [], []
    for response in answers(generator, jobs).values():
        for sequence in response.sequences:
            tokens = prompt + sequence.tokens
            wanted = trainer_logprobs(exact, tokens)[len(prompt) - 1 :]
            sampler.append(np.abs(sequence.logprobs_np - wanted))
            trainer.append(np.abs(trainer_logprobs(decoder, tokens)[len(prompt) - 1 :] - wanted))
    assert np.mean(sampler) <= 1.5 * np.mean(trainer) + 1e-3


def test_on_cuda_in_float32_samples_are_the_trainers(
    cuda: torch.device,
    variant: str,
    model_folder: Callable[[str], Path],
    new_adapter: Callable[..., Adapter],
) -> None:
    decoder = Decoder.load(model_folder(variant), device=cuda)
    adapter = new_adapter(decoder)
    generator = Generator(decoder, SMALL, prefill_tokens=9)
    prompt = tokens_of(21)
    jobs = [
        (job_of("one", prompt, max_tokens=40, seed=1, prompt_alt_tokens_k=2), adapter),
        (job_of("group", prompt, max_tokens=40, num_samples=4, top_p=0.9, seed=2), None),
        (job_of("greedy", prompt, max_tokens=40, temperature=0, topk_sample_logprobs=3), None),
    ]
    found = answers(generator, jobs)
    assert_trainer_agrees(decoder, prompt, found["one"], adapter)
    assert_trainer_agrees(decoder, prompt, found["group"])
    assert_trainer_agrees(decoder, prompt, found["greedy"])


@pytest.mark.real_model
def test_on_cuda_in_bfloat16_sampler_and_trainer_agree_on_the_real_model(
    cuda: torch.device, real_model_folder: Path
) -> None:
    """Mean difference up to 0.02, over prompts of random tokens; on_policy exact has none."""
    decoder = Decoder.load(real_model_folder, device=cuda, dtype=torch.bfloat16)
    draw = np.random.default_rng(0)
    prompts = draw.integers(3, decoder.config.vocab_size, (64, 128)).tolist()
    jobs = [
        (job_of(str(number), prompt, max_tokens=64, seed=number), None)
        for number, prompt in enumerate(prompts)
    ]
    differences = []
    for job_id, response in answers(Generator(decoder, SMALL), jobs).items():
        (sequence,), prompt = response.sequences, prompts[int(job_id)]
        wanted = trainer_logprobs(decoder, prompt + sequence.tokens)[len(prompt) - 1 :]
        differences.append(np.abs(wanted - sequence.logprobs_np))
    mean = np.concatenate(differences).mean()
    print(f"mean difference {mean:.4f}")
    assert mean <= 0.02


def test_the_sampler_s_share_of_memory_does_not_depend_on_what_came_first(
    cuda: torch.device, model_folder: Callable[[str], Path]
) -> None:
    decoder = Decoder.load(model_folder("llama"), device=cuda, dtype=torch.bfloat16)
    config = LocalEngineConfig(device="cuda")
    fresh = Generator(decoder, config).max_cache_bytes
    free, _ = torch.cuda.mem_get_info(cuda)
    left_by_a_large_pass = torch.empty(free * 8 // 10, dtype=torch.uint8, device=cuda)
    del left_by_a_large_pass
    later = Generator(decoder, config).max_cache_bytes
    assert abs(later - fresh) <= 0.1 * fresh
    torch.cuda.empty_cache()
