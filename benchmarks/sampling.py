"""Sampling against `transformers` generate, and against the machine's memory bandwidth.

    python benchmarks/sampling.py [--device cuda --shape qwen3-0.6b] [--cases 1,16,64,group,mixed]
        [--rounds N] [--llama-python PATH] [--out FILE]

A case that is a number decodes so many different prompts at once. `group` is 8 samples each of
prompts of 512 tokens, `mixed` has adapters of rank 32: the same rows under one and under eight,
`prefill` reads long prompts. Ours and theirs take turns, and ratios are medians over rounds.
Tokens a second count a whole run, prompts included; a step is the median turn while all
sequences run. Its floor is the time to read weights and cache once at the measured bandwidth, or
to do the products at the measured rate, whichever is longer. With the Python of an environment
that has `xllamacpp`, the same model's GGUF file runs through llama.cpp too, four bits a weight as
it is stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import machine
from tinsmith.engine.base import SampleJob
from tinsmith.engine.local.config import LocalEngineConfig, default_cache_folder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.sources import embedded_gguf
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import LoraConfig, ModelInput, SampleResponse, SamplingParams
from trainers import SHAPES, Ours, load_transformers

GROUP_SIZE, GROUP_PROMPT = 8, 512
NUM_ADAPTERS, RANK = 8, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape")
    parser.add_argument("--cases", default="1,8,16,64,group,mixed,prefill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, help="64 on the CPU, 128 on CUDA")
    parser.add_argument("--new-tokens", type=int, help="48 on the CPU, 256 on CUDA")
    parser.add_argument("--without-generate", action="store_true")
    parser.add_argument("--llama-python", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    is_cuda = device.type == "cuda"
    ours = Ours(device, arguments.shape)
    side = Side(
        ours,
        prompt_tokens=arguments.prompt_tokens or (128 if is_cuda else 64),
        new_tokens=arguments.new_tokens or (256 if is_cuda else 48),
    )
    theirs = None
    if not arguments.without_generate:
        theirs = Generate(load_transformers(device, arguments.shape), side)
    limits = Limits(machine.bandwidth(device), machine.matmul_rate(device))
    result: dict[str, Any] = {
        "bandwidth_gb_s": round(limits.bandwidth / 1e9, 1),
        "matmul_tflops": round(limits.matmul_rate / 1e12, 3),
    }
    for case in arguments.cases.split(","):
        result[case] = run_case(case, side, theirs, limits, arguments.rounds)
        print(json.dumps({case: result[case]}), flush=True)
    if arguments.llama_python is not None:
        result["llama.cpp"] = llama_cpp(arguments.llama_python, side)
    print_table(result)
    machine.write_report(arguments.out, device, result)


class Limits(NamedTuple):
    """What the machine can do at most: bytes and operations a second."""

    bandwidth: float
    matmul_rate: float


def run_case(
    case: str, side: Side, theirs: Generate | None, limits: Limits, rounds: int
) -> dict[str, float]:
    if case == "group":
        return run_groups(side, theirs, rounds)
    if case == "mixed":
        return run_mixed(side, rounds)
    if case == "prefill":
        return run_prefill(side, rounds)
    count = int(case)
    works: dict[str, Any] = {"ours": lambda: side.decode(count)}
    if theirs is not None:
        works["theirs"] = lambda: theirs.decode(count)
    times = machine.interleaved(works, side.device, rounds)
    rate = count * side.new_tokens / statistics.median(times["ours"])
    step = statistics.median(side.steps)
    floor = side.floor_seconds(count, limits)
    found = {
        "tokens_per_s": round(rate, 1),
        "step_ms": round(step * 1e3, 3),
        "decode_tokens_per_s": round(count / step, 1),
        "floor_ms": round(floor * 1e3, 3),
        "of_floor": round(floor / step, 3),
    }
    if theirs is not None:
        their_rate = count * theirs.new_tokens / statistics.median(times["theirs"])
        scale = side.new_tokens / theirs.new_tokens
        found["generate_tokens_per_s"] = round(their_rate, 1)
        found["times_generate"] = round(
            machine.median_ratio(times["theirs"], times["ours"]) * scale, 2
        )
    return found


def run_groups(side: Side, theirs: Generate | None, rounds: int) -> dict[str, float]:
    """Two groups decoded; and what one token of a group costs beside one of a single sample."""
    works: dict[str, Any] = {
        "ours": lambda: side.decode(2, samples=GROUP_SIZE, prompt_tokens=GROUP_PROMPT),
        "one_token": lambda: side.decode(1, prompt_tokens=GROUP_PROMPT, new_tokens=1),
        "one_token_each": lambda: side.decode(
            1, samples=GROUP_SIZE, prompt_tokens=GROUP_PROMPT, new_tokens=1
        ),
    }
    if theirs is not None:
        works["theirs"] = lambda: theirs.decode(2, GROUP_SIZE, GROUP_PROMPT)
    times = machine.interleaved(works, side.device, rounds)
    count = 2 * GROUP_SIZE
    found = {
        "tokens_per_s": round(count * side.new_tokens / statistics.median(times["ours"]), 1),
        "prefills_a_group": round(
            machine.median_ratio(times["one_token_each"], times["one_token"]), 2
        ),
    }
    if theirs is not None:
        scale = side.new_tokens / theirs.new_tokens
        found["times_generate"] = round(
            machine.median_ratio(times["theirs"], times["ours"]) * scale, 2
        )
    return found


def run_mixed(side: Side, rounds: int) -> dict[str, float]:
    """The same number of rows under no adapter, one, and eight."""
    count = 64 if side.device.type == "cuda" else 16
    adapters = side.adapters(NUM_ADAPTERS)
    works: dict[str, Any] = {
        "none": lambda: side.decode(count),
        "one": lambda: side.decode(count, adapters=adapters[:1]),
        "eight": lambda: side.decode(count, adapters=adapters),
    }
    times = machine.interleaved(works, side.device, rounds)
    found = {
        f"{name}_tokens_per_s": round(count * side.new_tokens / statistics.median(taken), 1)
        for name, taken in times.items()
    }
    found["eight_over_one"] = round(machine.median_ratio(times["eight"], times["one"]), 3)
    found["one_over_none"] = round(machine.median_ratio(times["one"], times["none"]), 3)
    return found


def run_prefill(side: Side, rounds: int) -> dict[str, float]:
    count, length = (16, 1024) if side.device.type == "cuda" else (2, 512)
    work = {"prefill": lambda: side.decode(count, prompt_tokens=length, new_tokens=1)}
    times = machine.interleaved(work, side.device, rounds)["prefill"]
    return {"tokens_per_s": round(count * length / statistics.median(times), 1)}


class Side:
    """Our sampler, called directly."""

    def __init__(self, ours: Ours, *, prompt_tokens: int, new_tokens: int) -> None:
        self.decoder = ours.decoder
        self.device = ours.decoder.device
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.steps: list[float] = []
        """Seconds of the last run's turns in which every sequence was decoded."""
        self._pool = ours.pool
        self._base_weights = ours.base_weights()
        self._adapters: list[Adapter] = []
        self._generator = Generator(ours.decoder, LocalEngineConfig(device=self.device.type))
        self._random = np.random.default_rng(0)
        self._num_jobs = 0

    def prompts(self, count: int, length: int) -> np.ndarray:
        return self._random.integers(3, self.decoder.config.vocab_size, (count, length))

    def adapters(self, count: int) -> list[Adapter]:
        while len(self._adapters) < count:
            adapter = self._pool.create("benchmark", LoraConfig(rank=RANK, seed=0))
            adapter.flat.normal_(0, 0.01)
            self._adapters.append(adapter)
        return self._adapters[:count]

    def decode(
        self,
        count: int,
        *,
        samples: int = 1,
        prompt_tokens: int | None = None,
        new_tokens: int | None = None,
        adapters: list[Adapter] | None = None,
    ) -> None:
        """`samples` of each of `count` new prompts, to the end."""
        new_tokens = new_tokens or self.new_tokens
        for number, prompt in enumerate(self.prompts(count, prompt_tokens or self.prompt_tokens)):
            adapter = adapters[number * len(adapters) // count] if adapters else None
            self._num_jobs += 1
            job = SampleJob(
                job_id=str(self._num_jobs),
                base_model="benchmark",
                weights_id=None,
                prompt=ModelInput.from_ints(prompt.tolist()),
                params=SamplingParams(max_tokens=new_tokens, stop=[], seed=number),
                num_samples=samples,
            )
            self._generator.submit(job, adapter)
        self.steps = []
        while self._generator.busy:
            is_full = self._generator.num_running == count * samples
            start = time.perf_counter()
            for _, event in self._generator.step():
                assert isinstance(event, SampleResponse), event
            if is_full:
                self.steps.append(time.perf_counter() - start)

    def floor_seconds(self, count: int, limits: Limits) -> float:
        """To read every weight once, and the cache as it is half-way through a run; or to multiply
        every weight once with each row."""
        config, item = self.decoder.config, self.decoder.dtype.itemsize
        a_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * item
        context = self.prompt_tokens + self.new_tokens / 2
        numbers = sum(weight.numel() for weight in self._base_weights)
        reading = (numbers * item + count * context * a_token) / limits.bandwidth
        return max(reading, 2 * count * numbers / limits.matmul_rate)


class Generate:
    """`transformers`' own loop over the same prompts, padded to nothing: they are equally long."""

    def __init__(self, model: Any, side: Side) -> None:
        self._model = model.eval()
        self._side = side
        self.new_tokens = min(side.new_tokens, 48)

    def decode(self, count: int, samples: int = 1, prompt_tokens: int | None = None) -> None:
        side = self._side
        prompts = side.prompts(count, prompt_tokens or side.prompt_tokens)
        ids = torch.from_numpy(prompts).to(side.device)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                num_return_sequences=samples,
                min_new_tokens=self.new_tokens,
                max_new_tokens=self.new_tokens,
                pad_token_id=0,
            )


def llama_cpp(python: Path, side: Side) -> dict[str, float]:
    """Tokens a second for 1 and 16 at once, from a process of its own."""
    script = Path(__file__).with_name("llama_sampling.py")
    gguf = embedded_gguf(default_cache_folder())
    command = [str(python), str(script), str(gguf), str(side.prompt_tokens), str(side.new_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def print_table(result: dict[str, Any]) -> None:
    for case, found in result.items():
        if isinstance(found, dict):
            print(f"{case:>9}  " + "  ".join(f"{name} {value}" for name, value in found.items()))
        else:
            print(f"{case} {found}")


if __name__ == "__main__":
    main()
