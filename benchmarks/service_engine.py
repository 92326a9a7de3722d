"""The engine's side of `service.py`: the same jobs, given to the engine in this process.

    python benchmarks/service_engine.py JSON

The argument is an `EngineErrand`, and what is printed last is what was measured. No server, no
client and no other process: what is left is the engine's own time.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import machine
from tinsmith.engine.base import Pass, SampleJob, Step
from tinsmith.engine.local.boundary.core import Later
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)
from trainers import RANK, make_data


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineErrand:
    device: str
    model: str
    source: str
    cases: list[str]
    samples: list[int]
    """How many at once, case by case."""
    prompt_tokens: int
    new_tokens: int
    tenants: int
    tenant_batch: tuple[int, int]
    """Sequences and tokens of each."""
    train_batch: tuple[int, int]
    rounds: int
    on_policy: Literal["close", "exact"] = "close"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def main() -> None:
    errand = EngineErrand(**json.loads(sys.argv[1]))
    side = EngineSide(errand)
    result: dict[str, Any] = {}
    if "sample" in errand.cases:
        result["sample"] = {str(count): side.sample(count) for count in errand.samples}
    if "tenants" in errand.cases:
        result["tenants"] = side.train(errand.tenants, *errand.tenant_batch)
    if "train" in errand.cases:
        result["train"] = side.train(1, *errand.train_batch)
    if "save" in errand.cases:
        result["save"] = side.save()
    if "difference" in errand.cases:
        result["difference"] = side.difference(errand.samples[0])
    print(json.dumps({"machine": side.machine, "vocab_size": side.vocab_size, "found": result}))


def rounds_of(count: int, rounds: int) -> int:
    """How often so many samples at once are measured: often enough of them steady one round."""
    return rounds if count <= 256 else 1


class EngineSide:
    def __init__(self, errand: EngineErrand) -> None:
        self._errand = errand
        self._device = torch.device(errand.device)
        config = LocalEngineConfig(
            models={errand.model: errand.source},
            device="cuda" if errand.device == "cuda" else "cpu",
            verify_models=False,
            on_policy=errand.on_policy,
        )
        self._core = EngineCore(config)
        (info,) = self._core.capabilities().models
        self.vocab_size = info.vocab_size
        self.machine = f"{machine.describe(self._device)}, torch {torch.__version__}"
        self._random = np.random.default_rng(0)
        self._num_jobs = 0

    def sample(self, count: int) -> dict[str, float]:
        num_rounds = rounds_of(count, self._errand.rounds) + 1
        rates = [self._sample_once(count) for _ in range(num_rounds)]
        return {"tokens_per_s": round(statistics.median(rates[1:]), 1)}

    def _sample_once(self, count: int) -> float:
        started = time.perf_counter()
        sampled = self._sampled(count)
        return sum(len(tokens) for _, tokens, _ in sampled) / (time.perf_counter() - started)

    def _sampled(self, count: int) -> list[tuple[list[int], list[int], np.ndarray]]:
        """Prompts with the tokens that were sampled, and their log-probabilities."""
        core, found = self._core, []
        prompts = self._random.integers(3, self.vocab_size, (count, self._errand.prompt_tokens))
        by_id: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts.tolist()):
            self._num_jobs += 1
            by_id[str(self._num_jobs)] = prompt
            job = SampleJob(
                job_id=str(self._num_jobs),
                base_model=self._errand.model,
                weights_id=None,
                prompt=ModelInput.from_ints(prompt),
                params=SamplingParams(max_tokens=self._errand.new_tokens, stop=[], seed=number),
            )
            failure = core.submit_sample(job)
            assert failure is None, failure
        while core.is_sampling:
            for job_id, event in core.sampling_turn():
                assert isinstance(event, SampleResponse), event
                (sequence,) = event.sequences
                found.append((by_id[job_id], sequence.tokens, sequence.logprobs_np))
        return found

    def difference(self, count: int) -> dict[str, float]:
        """How far log-probabilities of sampled tokens are from what the trainer says of them."""
        lora = LoraConfig(rank=RANK, seed=0)
        failure = self._core.create_adapter("none", self._errand.model, lora)
        assert failure is None, failure
        differences = []
        for prompt, tokens, ours in self._sampled(count):
            whole = prompt + tokens
            datum = Datum(
                model_input=ModelInput.from_ints(whole[:-1]),
                loss_fn_inputs={"target_tokens": np.array(whole[1:])},
            )
            one = Pass(adapter_id="none", data=[datum], loss_fn="cross_entropy", forward_only=True)
            for finished in self._core.run_passes([one]):
                if finished is not None:
                    assert isinstance(finished.result, ForwardBackwardOutput), finished.result
                    theirs = finished.result.loss_fn_outputs[0]["logprobs"].numpy
                    differences.append(np.abs(ours - theirs[-len(ours) :]))
        every = np.concatenate(differences)
        return {
            "mean": float(every.mean()),
            "largest": float(every.max()),
            "equal_bits": round(float((every == 0).mean()), 4),
        }

    def train(self, num_models: int, sequences: int, length: int) -> dict[str, float]:
        """All models' passes in one call and then their steps; beside it the passes alone."""
        names = [f"{sequences}x{length} {number}" for number in range(num_models)]
        for number, name in enumerate(names):
            lora = LoraConfig(rank=RANK, seed=number, train_unembed=False)
            failure = self._core.create_adapter(name, self._errand.model, lora)
            assert failure is None, failure
        data = {
            name: make_data([length] * sequences, self.vocab_size, seed=number)
            for number, name in enumerate(names)
        }
        works = {
            "passes": lambda: self._passes(data),
            "passes_and_steps": lambda: (self._passes(data), self._steps(names)),
        }
        times = machine.interleaved(works, self._device, self._errand.rounds)
        num_tokens = num_models * sequences * length
        return {
            "tokens_per_s": round(num_tokens / statistics.median(times["passes_and_steps"])),
            "passes_tokens_per_s": round(num_tokens / statistics.median(times["passes"])),
        }

    def save(self) -> dict[str, float]:
        """A model's weights for a sampler: how long other work waits for it, until the files are on
        disk, and how long a copy that stays on the device takes."""
        data = {"saved": make_data([32], self.vocab_size)}
        lora = LoraConfig(rank=RANK, seed=0, train_unembed=False)
        failure = self._core.create_adapter("saved", self._errand.model, lora)
        assert failure is None, failure
        held, written, copied = [], [], []
        with tempfile.TemporaryDirectory(prefix="tinsmith-bench-saves-") as folder:
            for number in range(7):
                self._passes(data)
                self._steps(["saved"])
                machine.synchronize(self._device)
                started = time.perf_counter()
                rest = self._core.save("saved", Path(folder, str(number)), "sampler")
                held.append(time.perf_counter() - started)
                assert isinstance(rest, Later), rest
                rest.finish()
                written.append(time.perf_counter() - started)
                started = time.perf_counter()
                failure = self._core.freeze("saved", f"frozen {number}")
                machine.synchronize(self._device)
                copied.append(time.perf_counter() - started)
                assert failure is None, failure
        names = ("held_s", "written_s", "frozen_s")
        times = (held, written, copied)
        return {n: round(statistics.median(t), 4) for n, t in zip(names, times, strict=True)}

    def _passes(self, data: dict[str, Any]) -> None:
        passes = [Pass(adapter_id=i, data=d, loss_fn="cross_entropy") for i, d in data.items()]
        for finished in self._core.run_passes(passes):
            if finished is not None:
                assert isinstance(finished.result, ForwardBackwardOutput), finished.result

    def _steps(self, names: list[str]) -> None:
        adam = AdamParams(learning_rate=1e-4)
        for result in self._core.step([Step(adapter_id=name, params=adam) for name in names]):
            assert isinstance(result, dict), result


if __name__ == "__main__":
    machine.let_threads_wait_passively()
    main()
