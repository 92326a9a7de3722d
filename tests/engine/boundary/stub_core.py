"""A core that computes nothing, for tests of the process around it.

Adapter ids say what should happen: `slow:SECONDS`, `parts:N` (a pass of N parts), `raise`,
`exit:STATUS`, `segfault`, `deadlock`; what follows an `@` is the base model. A save is written
when `disk` lets it. Time is a counter (`now`) unless `sleeps` is set: a part of a pass takes 5, a
sampling turn 1.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np

from tinsmith.engine.base import (
    Capabilities,
    Failure,
    FinishedPass,
    Health,
    ImportedAdapter,
    Pass,
    SampleEvent,
    SampleJob,
    SavedAdapter,
    SavedKind,
    Step,
    TokensSampled,
)
from tinsmith.engine.local.boundary.core import Later
from tinsmith.types import ForwardBackwardOutput, LoraConfig, SampledSequence, SampleResponse

PART_SECONDS = 5.0
TURN_SECONDS = 1.0


class StubCore:
    def __init__(self, config: dict[str, float] | None = None) -> None:
        config = config or {}
        if "refuse" in config:
            raise RuntimeError("there is no such device")
        self._sleeps = config.get("sleeps", 0.0)
        self.now = 0.0
        self.log: list[str] = []
        self._jobs: dict[str, list[int]] = {}
        self._base_models: dict[str, str] = {}
        self._streams: set[str] = set()
        self._samplers: set[str] = set()
        self.has_room_for_one = False
        """Whether one base model has room in memory, not several."""
        self.in_use: Counter[str] = Counter()
        self.num_loads = 0
        self.disk = threading.Event()
        self.disk.set()

    def clock(self) -> float:
        return self.now

    def _spend(self, what: str, seconds: float) -> None:
        self.log.append(what)
        self.now += seconds
        if self._sleeps:
            time.sleep(seconds * self._sleeps)

    def has_room_for(self, base_model: str) -> bool:
        return not self.has_room_for_one or self.in_use.keys() <= {base_model}

    def base_model_of(self, adapter_id: str) -> str | None:
        return adapter_id.partition("@")[2] or "base"

    def _use(self, base_model: str) -> None:
        assert self.has_room_for(base_model), f"no room for {base_model} beside {self.in_use}"
        self.num_loads += base_model not in self.in_use
        self.in_use[base_model] += 1

    def _let_go(self, base_model: str) -> None:
        self.in_use[base_model] -= 1
        self.in_use += Counter()  # without zeros

    def capabilities(self) -> Capabilities:
        return Capabilities(models=(), max_lora_rank=64)

    def health(self) -> Health:
        return Health(alive=True, detail=" ".join(self.log), running_samples=len(self._jobs))

    def create_adapter(self, adapter_id: str, base_model: str, lora: LoraConfig) -> Failure | None:
        self.log.append(f"create {adapter_id}")
        kind, _, value = adapter_id.partition(":")
        match kind:
            case "long":
                self.now += float(value)
            case "slow":
                time.sleep(float(value))
            case "raise":
                raise RuntimeError("out of cheese")
            case "exit":
                sys.stderr.write("the disk has melted\n")
                sys.stderr.flush()
                os._exit(int(value))
            case "segfault":
                ctypes.string_at(0)
            case "deadlock":
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
            case "bad":
                return Failure("no such thing", "user")
        return None

    def unload_adapter(self, adapter_id: str) -> None:
        self.log.append(f"unload {adapter_id}")

    def run_passes(self, passes: Sequence[Pass]) -> Generator[FinishedPass | None, None, None]:
        base_models = {self.base_model_of(item.adapter_id) or "" for item in passes}
        for base_model in base_models:
            self._use(base_model)
        try:
            yield from self._run_passes(passes)
        finally:
            for base_model in base_models:
                self._let_go(base_model)

    def _run_passes(self, passes: Sequence[Pass]) -> Generator[FinishedPass | None, None, None]:
        for index, item in enumerate(passes):
            kind, _, value = item.adapter_id.partition("@")[0].partition(":")
            if kind == "raise":
                raise RuntimeError("out of cheese")
            num_parts = int(value) if kind == "parts" else 1
            for _ in range(num_parts):
                self._spend("part", PART_SECONDS)
                yield None
            output = ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": float(index)})
            yield FinishedPass(index, output, num_parts * PART_SECONDS)

    def step(self, steps: Sequence[Step]) -> list[dict[str, float] | Failure]:
        self.log.append("step")
        return [{"step": 1.0} for _ in steps]

    def save(self, adapter_id: str, folder: Path, kind: SavedKind) -> Later[SavedAdapter | Failure]:
        return Later(lambda: self._write(adapter_id), folder)

    def _write(self, adapter_id: str) -> SavedAdapter:
        if adapter_id == "raise":
            raise RuntimeError("out of cheese")
        assert self.disk.wait(10)
        self.log.append(f"write {adapter_id}")
        return SavedAdapter(size_bytes=0, step=0)

    def restore(self, adapter_id: str, folder: Path, kind: SavedKind) -> SavedAdapter | Failure:
        self.log.append(f"restore {adapter_id}")
        return SavedAdapter(size_bytes=0, step=0)

    def import_adapter(
        self, base_model: str, source: Path, folder: Path, kind: SavedKind
    ) -> ImportedAdapter | Failure:
        return Failure("not here", "user")

    def freeze(self, adapter_id: str, weights_id: str) -> Failure | None:
        self.log.append(f"freeze {weights_id}")
        self._samplers.add(weights_id)
        return None

    def load_sampler(self, weights_id: str, base_model: str, folder: Path) -> Failure | None:
        return None

    def unload_sampler(self, weights_id: str) -> None:
        self._samplers.discard(weights_id)

    @property
    def is_sampling(self) -> bool:
        return bool(self._jobs)

    def submit_sample(self, job: SampleJob) -> Failure | None:
        if job.weights_id is not None and job.weights_id not in self._samplers:
            return Failure(f"no sampler called {job.weights_id!r}", "user")
        self._use(job.base_model)
        self._base_models[job.job_id] = job.base_model
        self._jobs[job.job_id] = list(range(job.params.max_tokens or 1))
        if job.stream:
            self._streams.add(job.job_id)
        return None

    def cancel(self, job_id: str) -> None:
        self.log.append(f"cancel {job_id}")
        if self._jobs.pop(job_id, None) is not None:
            self._let_go(self._base_models.pop(job_id))

    def sampling_turn(self, *, ahead: bool) -> list[tuple[str, SampleEvent]]:
        self._spend("turn", TURN_SECONDS)
        if any(job_id.startswith("raise") for job_id in self._jobs):
            raise RuntimeError("out of cheese")
        events: list[tuple[str, SampleEvent]] = []
        for job_id, tokens in list(self._jobs.items()):
            token = tokens.pop()
            if job_id in self._streams:
                values = np.array([token], np.int32), np.zeros(1, np.float32)
                events.append((job_id, TokensSampled(0, *values)))
            if not tokens:
                del self._jobs[job_id]
                self._let_go(self._base_models.pop(job_id))
                sequence = SampledSequence("length", "", np.zeros(1, np.int32))
                count = 4096 if job_id.startswith("many") else 1
                events.append((job_id, SampleResponse([sequence] * count)))
        return events
