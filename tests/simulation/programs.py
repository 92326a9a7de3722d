"""What clients do: programs whose results are known before anything runs.

A program is a list of operations of one model, and what each has to give when they are carried out
one after another on an engine that never dies. It is written for a model whose id is filled in
later. There are a few programs, so that in one life several models go through the same states: that
is what the checker of histories compares.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import orjson

from tests.support.sequential import (
    MODEL,
    Operation,
    Outcome,
    Sequential,
    load,
    random_pass,
    save,
    save_for_sampler,
    step,
)
from tinsmith.engine.base import SampleJob
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig
from tinsmith.types import LoraConfig, ModelInput, SampleResponse, SamplingParams
from tinsmith.types.protocol import JSON, PROTOBUF

NUM_PROGRAMS = 12
LENGTH = 100
ANY_MODEL = "00000000-0000-4000-8000-000000000000:train:0"
"""As long as every model's id, so that a request can be filled in without encoding it again."""

LORA = LoraConfig(rank=4, seed=1)


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: tuple[int, ...]
    params: dict[str, float | int]
    value: str


@dataclass(frozen=True, slots=True)
class Planned:
    """One numbered operation and how it ends."""

    seq_id: int
    kind: str
    path: str
    content_type: str
    body: bytes
    outcome: Outcome
    asks: str
    """The same for two that ask the same, whatever they are asked of."""
    loads: str | None
    samples: tuple[Sample, ...]
    """What the sampler that it makes has to say."""

    @property
    def is_pass(self) -> bool:
        return self.content_type == PROTOBUF

    def body_for(self, model_id: str) -> bytes:
        return self.body.replace(ANY_MODEL.encode(), model_id.encode())

    def outcome_for(self, model_id: str) -> Outcome:
        if isinstance(self.outcome, bytes):
            return self.outcome
        filled = orjson.dumps(self.outcome).replace(ANY_MODEL.encode(), model_id.encode())
        outcome: Outcome = orjson.loads(filled)
        return outcome

    def loads_for(self, model_id: str) -> str | None:
        return None if self.loads is None else self.loads.replace(ANY_MODEL, model_id)


@cache
def program(number: int) -> tuple[Planned, ...]:
    with tempfile.TemporaryDirectory(prefix="tinsmith-program-") as folder:
        return asyncio.run(_Planner(number, Path(folder)).plan())


class _Planner:
    def __init__(self, number: int, folder: Path) -> None:
        self._random = random.Random(number)
        self._reference = Sequential(folder)
        self._sampling = FakeEngine(FakeEngineConfig(models=(MODEL,)))

    async def plan(self) -> tuple[Planned, ...]:
        await self._reference.create(ANY_MODEL, LORA)
        return tuple([await self._planned(seq_id) for seq_id in range(1, LENGTH + 1)])

    async def _planned(self, seq_id: int) -> Planned:
        operation = self._operation(seq_id)
        operation.seq_id = seq_id
        outcome = await self._reference.run(ANY_MODEL, operation)
        samples: tuple[Sample, ...] = ()
        if operation.kind == "save_weights_for_sampler" and isinstance(outcome, dict):
            samples = await self._samples(outcome["path"])
        is_pass = operation.is_pass
        about = [datum.to_wire() for datum in operation.data] if is_pass else operation.fields
        return Planned(
            seq_id=seq_id,
            kind=operation.kind,
            path=f"/api/v1/{'forward_backward' if is_pass else operation.kind}",
            content_type=PROTOBUF if is_pass else JSON,
            body=operation.body(ANY_MODEL),
            outcome=outcome,
            asks=_digest(operation.kind, repr(about)),
            loads=operation.fields.get("path") if operation.kind == "load_weights" else None,
            samples=samples,
        )

    def _operation(self, seq_id: int) -> Operation:
        kind = self._random.randrange(100)
        if kind < 50:
            return random_pass(self._random, "forward_backward")
        if kind < 60:
            return random_pass(self._random, "forward")
        if kind < 92:
            return step(self._random.choice((1e-3, 1e-2)))
        if kind < 95:
            name = f"at{seq_id if self._random.random() < 0.7 else seq_id % 7}"
            return save(name, overwrite=self._random.random() < 0.5)
        if kind < 97:
            return save_for_sampler(f"at{seq_id}")
        missing = f"tinker://{ANY_MODEL}/weights/missing"
        path = self._random.choice([*self._reference.paths_of(ANY_MODEL), missing])
        return load(path, optimizer=self._random.random() < 0.5)

    async def _samples(self, path: str) -> tuple[Sample, ...]:
        folder = self._reference.saved[path].folder
        assert await self._sampling.load_sampler(path, MODEL.name, folder) is None
        return tuple([await self._sample(path, seed) for seed in range(2)])

    async def _sample(self, path: str, seed: int) -> Sample:
        prompt = tuple(self._random.randrange(MODEL.vocab_size) for _ in range(3))
        params: dict[str, float | int] = {"max_tokens": 5, "seed": seed, "temperature": 1.0}
        job = SampleJob(
            job_id=path,
            base_model=MODEL.name,
            weights_id=path,
            prompt=ModelInput.from_ints(prompt),
            params=SamplingParams(**params),
        )
        [said] = [event async for event in self._sampling.sample(job)]
        assert isinstance(said, SampleResponse), said
        return Sample(prompt, params, value_of(said))


def value_of(said: SampleResponse) -> str:
    """The tokens and their probabilities, without the ids of the request."""
    told = [(list(each.tokens), list(each.logprobs or [])) for each in said.sequences]
    return _digest(repr(told))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
