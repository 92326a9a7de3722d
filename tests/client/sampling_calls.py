"""Samplers of a scripted server, and what they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tinsmith.client.results.retries import RetryConfig
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.types import ModelInput, SamplingParams

ASAMPLE = "/api/v1/asample"


RETRIEVE = "/api/v1/retrieve_future"


PROMPT = ModelInput.from_ints([1, 2, 3])


PARAMS = SamplingParams(max_tokens=5)


QUICK = RetryConfig(retry_delay_base=0.001, retry_delay_max=0.002)


def make_sampler(
    stub: Any, make_service: Callable[..., ServiceClient], **flags: Any
) -> SamplingClient:
    stub.flags = flags
    return make_service().create_sampling_client(base_model="m", retry_config=QUICK)


def sample(sampler: SamplingClient, prompt: ModelInput = PROMPT) -> Future[Any]:
    return sampler.sample(prompt, 1, PARAMS)


async def comes_true(condition: Callable[[], bool]) -> bool:
    for _ in range(500):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False
