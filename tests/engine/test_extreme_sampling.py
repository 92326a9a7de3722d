"""Every finite sampling parameter gives samples, or an error of the user's that names the field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith.engine import checks
from tinsmith.engine.base import Engine, Failure, SampleJob
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.errors import ValidationError
from tinsmith.types import ModelInput, SampleResponse, SamplingParams

EXTREME: list[dict[str, Any]] = [
    *({"temperature": t} for t in (5e-324, 1e-300, 1e-45, 1e-38, 1e-10, 1e-3, 1e10, 1e38, 1.7e308)),
    *({"top_p": p} for p in (5e-324, 1e-300, 1e-9, 1.0 - 1e-16)),
    *({"top_k": k} for k in (1, 10**6, 2**63 - 1, -1)),
    *({"seed": s} for s in (-(2**63), 2**63 - 1)),
    *({"max_tokens": n} for n in (0, 2**63 - 1)),
    {"temperature": 1e-38, "top_p": 1e-300, "top_k": 2},
    {"temperature": 1e300, "top_p": 5e-324, "top_k": 3},
    {"stop": ["x" * 10_000]},
    {"stop": [str(number) for number in range(400_000)]},
]


def job(**params: Any) -> SampleJob:
    return SampleJob(
        job_id="j",
        base_model="tiny",
        weights_id=None,
        prompt=ModelInput.from_ints([10, 40, 20]),
        params=SamplingParams(**{"max_tokens": 4, "seed": 1, "stop": [], **params}),
        topk_sample_logprobs=5,
        prompt_alt_tokens_k=2,
    )


def check(event: object, params: dict[str, Any]) -> None:
    if isinstance(event, Failure):
        assert event.category == "user" and any(name in event.message for name in params), event
        return
    assert isinstance(event, SampleResponse)
    for sequence in event.sequences:
        assert sequence.logprobs_np is not None and np.isfinite(sequence.logprobs_np).all()
        assert sequence.topk_logprobs_np is not None
        assert np.isfinite(sequence.topk_logprobs_np.logprobs).all()


@pytest.fixture(scope="module")
def core(model_folder: Callable[[str], Path]) -> EngineCore:
    models = {"tiny": str(model_folder("llama"))}
    return EngineCore(LocalEngineConfig(models=models, device="cpu"))


def names(params: dict[str, Any]) -> str:
    return ", ".join(f"{name}={str(value)[:12]}" for name, value in params.items())


@pytest.mark.parametrize("params", EXTREME, ids=names)
def test_the_local_engine_answers_or_names_the_field(
    core: EngineCore, params: dict[str, Any]
) -> None:
    refusal = core.submit_sample(job(**params))
    events = [] if refusal is None else [refusal]
    while core.is_sampling:
        events += [event for _, event in core.sampling_turn()]
    (event,) = events
    check(event, params)


@pytest.mark.parametrize("params", EXTREME, ids=names)
async def test_the_fake_engine_answers_or_names_the_field(params: dict[str, Any]) -> None:
    engine: Engine = FakeEngine(FakeEngineConfig(models=(FakeModel(name="tiny"),)))
    (event,) = [event async for event in engine.sample(job(**params))]
    check(event, params)


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 1e-12])
def test_a_temperature_next_to_zero_takes_the_likeliest_token(
    core: EngineCore, temperature: float
) -> None:
    found = []
    for value in (temperature, 0.0):
        assert core.submit_sample(job(temperature=value)) is None
        while core.is_sampling:
            found += [event for _, event in core.sampling_turn()]
    near, greedy = found
    assert isinstance(near, SampleResponse) and isinstance(greedy, SampleResponse)
    assert near.sequences[0].tokens == greedy.sequences[0].tokens


def test_hundreds_of_stop_texts_are_refused_by_their_number() -> None:
    asked = job(stop=["a"] * 257)
    with pytest.raises(ValidationError, match=r"stop: at most 256 texts, got 257"):
        checks.check_sample(asked, vocab_size=100, max_context_length=100)
