"""Sampling with tiny models, and the trainer's forward pass that it is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import SampleEvent, SampleJob
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import ModelInput, SampleResponse, SamplingParams

CPU = LocalEngineConfig(device="cpu")
DETERMINISTIC = LocalEngineConfig(device="cpu", deterministic=True)
TOLERANCE = 1e-5
"""Mean absolute difference of log-probabilities in float32 that the design allows."""


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, length).tolist()


def job_of(job_id: str, prompt: list[int], **fields: Any) -> SampleJob:
    names = SamplingParams.__annotations__
    params = {name: fields.pop(name) for name in list(fields) if name in names}
    return SampleJob(
        job_id=job_id,
        base_model="tiny",
        weights_id=None,
        prompt=ModelInput.from_ints(prompt),
        params=SamplingParams(**{"stop": [], "max_tokens": 8, **params}),
        **fields,
    )


def finish(generator: Generator) -> dict[str, list[SampleEvent]]:
    """Step until nothing is left to do; every job's events."""
    events: dict[str, list[SampleEvent]] = {}
    while generator.busy:
        for job_id, event in generator.step():
            events.setdefault(job_id, []).append(event)
    return events


def answers(
    generator: Generator, jobs: Iterable[tuple[SampleJob, Adapter | None]]
) -> dict[str, SampleResponse]:
    for job, adapter in jobs:
        generator.submit(job, adapter)
    found: dict[str, SampleResponse] = {}
    for job_id, events in finish(generator).items():
        (response,) = events
        assert isinstance(response, SampleResponse), response
        found[job_id] = response
    return found


def answer(generator: Generator, job: SampleJob, adapter: Adapter | None = None) -> SampleResponse:
    return answers(generator, [(job, adapter)])[job.job_id]


def tokens_in(response: SampleResponse) -> list[list[int]]:
    return [sequence.tokens for sequence in response.sequences]


def trainer_logits(decoder: Decoder, tokens: list[int], adapter: Adapter | None = None) -> Tensor:
    """(T, V): what the forward pass of training gives for one sequence."""
    count = len(tokens)
    segments = AdapterSegments.whole(count, adapter)
    attention = PackedAttention(decoder.config, [count])
    with torch.no_grad():
        ids = torch.tensor(tokens, device=decoder.device)
        positions = torch.arange(count, device=decoder.device)
        return decoder.unembed(decoder.hidden(ids, positions, attention, segments), segments)


def trainer_logprobs(
    decoder: Decoder, tokens: list[int], adapter: Adapter | None = None, temperature: float = 1.0
) -> np.ndarray:
    """(T - 1,): the log-probability of each token after the first."""
    logits = trainer_logits(decoder, tokens, adapter)[:-1] / temperature
    targets = torch.tensor(tokens[1:], device=logits.device)[:, None]
    return torch.log_softmax(logits, -1).gather(1, targets)[:, 0].cpu().numpy()


def assert_trainer_agrees(
    decoder: Decoder,
    prompt: list[int],
    response: SampleResponse,
    adapter: Adapter | None = None,
    temperature: float = 1.0,
    tolerance: float = TOLERANCE,
) -> None:
    for sequence in response.sequences:
        wanted = trainer_logprobs(decoder, prompt + sequence.tokens, adapter, temperature)
        difference = np.abs(wanted[len(prompt) - 1 :] - sequence.logprobs_np)
        assert difference.mean() <= tolerance
