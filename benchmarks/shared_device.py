"""Two engines that share a device, one of which trains and one samples, against one that does both.

    python benchmarks/shared_device.py [--device cuda --shape qwen3-0.6b] [--tenants 1 4]
        [--iterations 6] [--out FILE]

Each tenant is a loop of reinforcement learning through HTTP: weights for sampling, groups of
samples, a pass of policy gradient and a step. Given is how many iterations all tenants together
take in a second. With one tenant the two engines wait for each other; with several, one tenant's
samples run beside another's pass.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinsmith
from reports import write_report
from service import model_source
from serving import serve
from tinsmith import AdamParams, Datum, ModelInput, SamplingParams

KINDS = {
    "one_engine": ["--engines", "1"],
    "train_and_sample": ["--engines", "2", "--roles", "train,sample"],
}


@dataclass(frozen=True, slots=True)
class Sizes:
    groups: int
    samples: int
    """Of each group."""
    prompt_tokens: int
    new_tokens: int


SIZES = {"cuda": Sizes(8, 8, 256, 128), "cpu": Sizes(2, 2, 16, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--shape", help="random weights of this shape; without, SmolLM2-135M")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    sizes = SIZES[arguments.device]
    rates: dict[str, dict[int, float]] = {}
    with model_source(arguments.device, arguments.shape) as (model, source):
        for kind, own in KINDS.items():
            options = ["--model", f"{model}={source}", "--device", arguments.device, *own]
            with serve(*options) as server:
                service = tinsmith.ServiceClient(base_url=server.url, api_key=server.key)
                rates[kind] = {
                    count: iterations_a_second(service, model, count, arguments.iterations, sizes)
                    for count in arguments.tenants
                }
                service.close("success").result(30)
            print(kind, rates[kind], flush=True)
    found = {
        f"{count}_tenants": {
            **{f"{kind}_iterations_s": round(rate[count], 3) for kind, rate in rates.items()},
            "ratio": round(rates["train_and_sample"][count] / rates["one_engine"][count], 2),
        }
        for count in arguments.tenants
    }
    write_report(arguments.out, {"shape": arguments.shape or "SmolLM2-135M", **found})


def iterations_a_second(service: Any, model: str, tenants: int, count: int, sizes: Sizes) -> float:
    clients = [service.create_lora_training_client(model, rank=32, seed=n) for n in range(tenants)]

    async def loops(iterations: int) -> None:
        await asyncio.gather(*[_loop(client, iterations, sizes) for client in clients])

    asyncio.run(loops(1))
    started = time.perf_counter()
    asyncio.run(loops(count))
    return tenants * count / (time.perf_counter() - started)


async def _loop(client: Any, iterations: int, sizes: Sizes) -> None:
    params = SamplingParams(max_tokens=sizes.new_tokens, temperature=1.0, stop=[])
    for number in range(iterations):
        sampler = await client.save_weights_and_get_sampling_client_async()
        prompts = [_prompt(number * sizes.groups + group, sizes) for group in range(sizes.groups)]
        samples = await asyncio.gather(
            *[sampler.sample_async(ModelInput.from_ints(p), sizes.samples, params) for p in prompts]
        )
        data = [
            _datum(prompt, sequence, 1.0 if place % 2 else -1.0)
            for prompt, response in zip(prompts, samples, strict=True)
            for place, sequence in enumerate(response.sequences)
        ]
        passed = await client.forward_backward_async(data, "importance_sampling")
        stepped = await client.optim_step_async(AdamParams(learning_rate=1e-5))
        await passed
        await stepped


def _prompt(number: int, sizes: Sizes) -> list[int]:
    return [(37 * number + 11 * place) % 250 + 1 for place in range(sizes.prompt_tokens)]


def _datum(prompt: list[int], sequence: Any, advantage: float) -> Datum:
    tokens = prompt + list(sequence.tokens)
    zeros = [0.0] * (len(prompt) - 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": zeros + list(sequence.logprobs),
            "advantages": zeros + [advantage] * len(sequence.tokens),
        },
    )


if __name__ == "__main__":
    main()
