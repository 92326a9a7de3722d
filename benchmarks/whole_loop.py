"""The whole loop through HTTP with the official client, on SmolLM2-135M.

    python benchmarks/whole_loop.py [--steps 6] [--out FILE]

Supervised: `forward_backward` of 8 sequences of 256 tokens and `optim_step`, submitted together,
as the official documentation advises. Reinforcement: four groups of four short samples, then
one pass of policy gradient and a step. Beside the rates stands the share of wall time in which
the engine did not compute (`tinsmith_engine_busy_seconds`): what HTTP, the store, the queue and
the client cost.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import tinker
import torch

from reports import write_report
from serving import Server, serve

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HEALTH_SECONDS = 3.0
"""The server hears from its engine every two seconds."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--out", type=Path)
    arguments = options.parse_args()
    with serve() as server:
        started = time.perf_counter()
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        training = service.create_lora_training_client(base_model=MODEL, rank=32)
        supervised_step(training, batch(1, 32))
        result: dict[str, Any] = {
            "server_ready_s": round(server.ready_after, 2),
            "first_training_step_s": round(time.perf_counter() - started, 2),
        }
        data = batch(8, 256)
        supervised_step(training, data)
        result["supervised_8x256"] = measured(
            server, arguments.steps, lambda: supervised_step(training, data)
        )
        reinforcement_step(training)
        result["reinforcement_4x4"] = measured(
            server, arguments.steps, lambda: reinforcement_step(training)
        )
    for name, value in result.items():
        print(f"{name:24} {value}")
    write_report(arguments.out, result)


def measured(server: Server, steps: int, step: Any) -> dict[str, float]:
    time.sleep(HEALTH_SECONDS)
    busy, started = server.metric("engine_busy_seconds"), time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - started
    time.sleep(HEALTH_SECONDS)
    busy = server.metric("engine_busy_seconds") - busy
    return {
        "per_second": round(steps / seconds, 3),
        "percent_outside_engine": round((1 - busy / seconds) * 100, 2),
    }


def batch(sequences: int, length: int) -> list[tinker.Datum]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 49152, (sequences, length + 1), generator=generator).tolist()
    return [datum(row[:-1], target_tokens=row[1:], weights=[1.0] * length) for row in tokens]


def datum(tokens: list[int], **inputs: list[Any]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            name: tinker.TensorData(
                data=values,
                dtype="int64" if name == "target_tokens" else "float32",
                shape=[len(values)],
            )
            for name, values in inputs.items()
        },
    )


def supervised_step(training: tinker.TrainingClient, data: list[tinker.Datum]) -> None:
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()


def reinforcement_step(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=16, temperature=1.0)
    prompts = [list(range(100 * group + 1, 100 * group + 17)) for group in range(4)]
    waiting = [sampler.sample(tinker.ModelInput.from_ints(p), 4, params) for p in prompts]
    data = []
    for prompt, future in zip(prompts, waiting, strict=True):
        for number, sequence in enumerate(future.result().sequences):
            tokens = prompt + list(sequence.tokens)
            zeros = [0.0] * (len(prompt) - 1)
            advantage = 1.0 if number % 2 else -1.0
            data.append(
                datum(
                    tokens[:-1],
                    target_tokens=tokens[1:],
                    logprobs=zeros + list(sequence.logprobs or []),
                    advantages=zeros + [advantage] * len(sequence.tokens),
                )
            )
    passed = training.forward_backward(data, "importance_sampling")
    stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()


if __name__ == "__main__":
    main()
