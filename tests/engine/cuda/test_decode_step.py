"""The decoding step on a GPU: its kernels against plain torch, and graphs against launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.engine.base import SampleJob
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import ModelInput, SampleResponse, SamplingParams

pytestmark = pytest.mark.gpu

CUDA = LocalEngineConfig(device="cuda", kv_cache_bytes=1 << 28)


def job_of(number: int, **params: Any) -> SampleJob:
    tokens = np.random.default_rng(number).integers(3, 97, 5 + number).tolist()
    return SampleJob(
        job_id=str(number),
        base_model="tiny",
        weights_id=None,
        prompt=ModelInput.from_ints(tokens),
        params=SamplingParams(**{"stop": [], "max_tokens": 30, "seed": number, **params}),
        num_samples=1 + number % 3,
    )


def sample(generator: Generator, jobs: list[tuple[SampleJob, Adapter | None]]) -> dict[str, Any]:
    for job, adapter in jobs:
        generator.submit(job, adapter)
    found: dict[str, Any] = {}
    while generator.busy:
        for job_id, event in generator.step():
            assert isinstance(event, SampleResponse), event
            found[job_id] = [(s.tokens, s.logprobs) for s in event.sequences]
    return found


@pytest.fixture
def decoder(cuda: torch.device, model_folder: Callable[[str], Path]) -> Decoder:
    return Decoder.load(model_folder("qwen3"), device=cuda)


def mixed_jobs(
    decoder: Decoder, new_adapter: Callable[..., Adapter], count: int
) -> list[tuple[SampleJob, Adapter | None]]:
    """Each job under another adapter, of several ranks and parts; some under none."""
    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
    jobs: list[tuple[SampleJob, Adapter | None]] = []
    for number in range(count):
        adapter = None
        if number % 4:
            rank = (3, 8, 16, 40)[number % 4]
            adapter = new_adapter(
                decoder, pool=pool, fill_seed=number, rank=rank, train_mlp=bool(number % 3)
            )
        cut = {"top_p": 0.9} if number % 5 == 1 else {"temperature": 0.0} if number % 5 == 2 else {}
        jobs.append((job_of(number, **cut), adapter))
    return jobs


def test_captured_steps_give_what_launched_ones_give(
    decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    jobs = mixed_jobs(decoder, new_adapter, 9)
    captured = sample(Generator(decoder, CUDA), jobs)
    assert captured == sample(Generator(decoder, CUDA, use_graphs=False), jobs)


def test_more_sequences_and_adapters_than_one_step_has_room_for(
    decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    """Adapters with a row each leave no spare tiles, and take over one another's numbers."""
    jobs = mixed_jobs(decoder, new_adapter, 40)
    together = sample(Generator(decoder, CUDA), jobs)
    generator = Generator(decoder, replace(CUDA, max_running_samples=4))
    for job, adapter in jobs[:12]:
        (alone,) = sample(generator, [(job, adapter)]).values()
        for (tokens, logprobs), (wanted, theirs) in zip(alone, together[job.job_id], strict=True):
            # In float32 rounding may turn a choice, though rarely.
            pairs = enumerate(zip(tokens, wanted, strict=True))
            same = next((n for n, (left, right) in pairs if left != right), len(tokens))
            assert same > 5
            np.testing.assert_allclose(logprobs[:same], theirs[:same], atol=2e-4)


@pytest.mark.parametrize("size", [600, 1024, 2560, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_sum_has_the_bits_of_two_steps(
    cuda: torch.device, stream: torch.dtype, dtype: torch.dtype, size: int
) -> None:
    from tinsmith.engine.local.kernels.pointwise import add_rms_norm, rms_norm

    torch.manual_seed(0)
    x, y = (torch.randn(5, size, device=cuda, dtype=stream) for _ in range(2))
    weight = torch.rand(size, device=cuda, dtype=dtype)
    total = x + y
    found = add_rms_norm(x, y, weight, 1e-6, dtype)
    assert found.dtype == dtype
    assert torch.equal(x, total)
    assert torch.equal(found, rms_norm(total, weight, 1e-6, dtype))
