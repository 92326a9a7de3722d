"""A tiny model for any engine, and short ways to ask an engine for things.

The model has 97 tokens, of which 3 and up are characters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny_llama
from tests.support.remote_engines import cluster_by_hand, connected
from tinsmith.engine.base import Engine, Failure, Pass, SampleJob, Step
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.engine import CORE, LocalEngine
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

BASE_MODEL = "tiny"
VOCAB_SIZE = 97
CONTEXT_LENGTH = 128
EOS_TOKEN = 2
FIRST_CHARACTER = 3

LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=0.02, beta1=0.9, beta2=0.95)
SENTENCE = [10, 40, 20, 60, 30, 50, 12, 44]
OTHER = [70, 11, 35, 62, 15, 81]


def text_of(tokens: list[int]) -> str:
    return "".join(chr(29 + token) for token in tokens if token >= FIRST_CHARACTER)


@functools.cache
def write_tiny_model(folder: Path) -> Path:
    """A random two-layer Llama with a tokenizer of one token per character."""
    tiny_llama.save(
        folder,
        seed=7,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN,
        pad_token_id=0,
    )
    letters = [text_of([token]) for token in range(FIRST_CHARACTER, VOCAB_SIZE)]
    return tiny_llama.save_tokenizer(folder, letters)


@contextlib.asynccontextmanager
async def running(kind: str, folder: Path) -> AsyncIterator[Engine]:
    """An engine of a kind: fake, local, of two ranks, or remote, which is a local one over TCP."""
    async with contextlib.AsyncExitStack() as stack:
        if kind == "fake":
            engine: Engine = _fake()
        elif kind == "local":
            engine = await LocalEngine.start(tiny_config(folder))
        elif kind == "two_ranks":
            engine = await LocalEngine.start(dataclasses.replace(tiny_config(folder), ranks=2))
        else:
            cluster, _ = await stack.enter_async_context(cluster_by_hand(folder / "remote"))
            engine = await connected(cluster, CORE, tiny_config(folder))
        stack.push_async_callback(engine.close)
        yield engine


def _fake() -> FakeEngine:
    model = FakeModel(
        name=BASE_MODEL,
        vocab_size=VOCAB_SIZE,
        max_context_length=CONTEXT_LENGTH,
        eos_token_ids=(EOS_TOKEN,),
    )
    return FakeEngine(FakeEngineConfig(models=(model,), detokenize=text_of))


def tiny_config(folder: Path) -> LocalEngineConfig:
    pytest.importorskip("torch", reason="the local engine needs torch")
    models = {BASE_MODEL: str(write_tiny_model(folder))}
    return LocalEngineConfig(models=models, device="cpu", deterministic=True, cache_folder=folder)


_names = itertools.count()


def new_name() -> str:
    return f"n{next(_names)}"


async def create(engine: Engine, lora: LoraConfig = LORA) -> str:
    name = new_name()
    assert await engine.create_adapter(name, BASE_MODEL, lora) is None
    return name


def datum(tokens: Sequence[int] = SENTENCE, **inputs: Any) -> Datum:
    """Predict each token from those before it."""
    return Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), **inputs},
    )


def forward_backward(adapter_id: str, *data: Datum, **more: Any) -> Pass:
    return Pass(adapter_id=adapter_id, data=list(data), **{"loss_fn": "cross_entropy", **more})


async def run(engine: Engine, *passes: Pass) -> list[ForwardBackwardOutput | Failure]:
    """Results in the order of the passes."""
    results = {p.index: p.result async for p in engine.run_passes(passes)}
    assert sorted(results) == list(range(len(passes)))
    return [results[index] for index in range(len(passes))]


async def done(engine: Engine, *passes: Pass) -> list[ForwardBackwardOutput]:
    results = []
    for result in await run(engine, *passes):
        assert isinstance(result, ForwardBackwardOutput), result
        results.append(result)
    return results


async def logprobs(engine: Engine, adapter_id: str, tokens: Sequence[int] = SENTENCE) -> np.ndarray:
    """What the adapter thinks of the tokens now; leaves no trace."""
    (output,) = await done(engine, forward_backward(adapter_id, datum(tokens), forward_only=True))
    return output.loss_fn_outputs[0]["logprobs"].numpy


async def step(engine: Engine, adapter_id: str, params: AdamParams = ADAM) -> dict[str, float]:
    (metrics,) = await engine.step([Step(adapter_id=adapter_id, params=params)])
    assert isinstance(metrics, dict), metrics
    return metrics


async def train(engine: Engine, adapter_id: str, *data: Datum, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        await done(engine, forward_backward(adapter_id, *(data or (datum(),))))
        await step(engine, adapter_id)


def job(prompt: Sequence[int] = SENTENCE[:3], **fields: Any) -> SampleJob:
    """Fields of the job, and of its sampling parameters."""
    params = {
        name: fields.pop(name)
        for name in ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
        if name in fields
    }
    settings = {"job_id": new_name(), "base_model": BASE_MODEL, "weights_id": None, **fields}
    return SampleJob(
        prompt=ModelInput.from_ints(list(prompt)),
        params=SamplingParams(**{"max_tokens": 8, "stop": [], **params}),
        **settings,
    )


async def sample(engine: Engine, job: SampleJob) -> SampleResponse:
    events = [event async for event in engine.sample(job)]
    assert isinstance(events[-1], SampleResponse), events[-1]
    return events[-1]


async def failed_sample(engine: Engine, job: SampleJob) -> Failure:
    (event,) = [event async for event in engine.sample(job)]
    assert isinstance(event, Failure)
    return event


def tokens_of(response: SampleResponse) -> list[list[int]]:
    return [sequence.tokens for sequence in response.sequences]


async def drain(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]
