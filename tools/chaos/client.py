"""One client of the chaos run: trains, samples, saves and resumes, and prints what it gets.

    python client.py PACKAGE PROGRAM SEED STEPS

PACKAGE is `tinker` (the official client, as it is installed) or `tinsmith` (ours). Every line but
those that begin with `run` must be the same in every run, whatever happens to the server meanwhile.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from typing import Any

MODEL = "tiny"
RATE = 0.01


def main(package: str, program: str, seed: int, steps: int) -> None:
    tinker = importlib.import_module(package)
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=seed)
    print("run", client.get_info().model_id, flush=True)
    data = _data(tinker, random.Random(seed))
    {"sft": sft, "rl": rl, "custom": custom, "resume": resume}[program](
        tinker, service, client, data, steps
    )
    if program != "resume":
        finish(client, data)


def sft(tinker: Any, service: Any, client: Any, data: list[Any], steps: int) -> None:
    """Everything is sent ahead: at any moment operations of several steps are queued."""
    pending = []
    for index in range(steps):
        passed = client.forward_backward(data[index % 4 :], "cross_entropy")
        pending.append((passed, client.optim_step(_adam(tinker))))
    for index, (passed, stepped) in enumerate(pending):
        show("loss", passed.result())
        stepped.result()
        if index == steps // 2:
            client.save_state("half").result()


def rl(tinker: Any, service: Any, client: Any, data: list[Any], steps: int) -> None:
    prompt = tinker.ModelInput.from_ints([1, 40, 50, 60])
    for round_number in range(max(1, steps // 3)):
        sampler = client.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=6, seed=round_number, temperature=1.0)
        reply = sampler.sample(prompt, num_samples=3, sampling_params=params).result()
        batch = []
        for sequence in reply.sequences:
            tokens = list(sequence.tokens)
            print("sampled", tokens, [p.hex() for p in sequence.logprobs], flush=True)
            whole = [1, 40, 50, 60, *tokens]
            padding = [0.0] * 3
            batch.append(
                tinker.Datum(
                    model_input=tinker.ModelInput.from_ints(whole[:-1]),
                    loss_fn_inputs={
                        "target_tokens": whole[1:],
                        "logprobs": [*padding, *sequence.logprobs],
                        "advantages": [*padding, *([float(sum(tokens) % 7 - 3)] * len(tokens))],
                    },
                )
            )
        passed = client.forward_backward(batch, "importance_sampling")
        stepped = client.optim_step(_adam(tinker))
        show("reward", passed.result())
        stepped.result()


def custom(tinker: Any, service: Any, client: Any, data: list[Any], steps: int) -> None:
    def loss(_: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = sum((p**2).sum() for p in logprobs)
        return total, {"squares": float(total.detach())}

    for _ in range(max(1, steps // 3)):
        passed = client.forward_backward_custom(data, loss)
        stepped = client.optim_step(_adam(tinker))
        print("custom", passed.result().metrics["squares"].hex(), flush=True)
        stepped.result()


def resume(tinker: Any, service: Any, client: Any, data: list[Any], steps: int) -> None:
    """The second half of the steps is taken by another model that begins where the first ended."""
    sft(tinker, service, client, data, steps // 2)
    path = client.save_state("whole").result().path
    second = service.create_training_client_from_state_with_optimizer(path)
    print("run", second.get_info().model_id, flush=True)
    sft(tinker, service, second, data, steps - steps // 2)
    finish(second, data)


def finish(client: Any, data: list[Any]) -> None:
    show("probe", client.forward(data, "cross_entropy").result())
    client.save_state("final").result()
    sampler = client.save_weights_and_get_sampling_client()
    logprobs = sampler.compute_logprobs(data[0].model_input).result()
    print("sampler", [p and p.hex() for p in logprobs], flush=True)
    print("end", flush=True)


def show(what: str, output: Any) -> None:
    """The loss to the last bit, and every log-probability as one checksum."""
    digest = hashlib.sha256()
    for each in output.loss_fn_outputs:
        digest.update(each["logprobs"].to_numpy().astype("float32").tobytes())
    print(what, output.metrics["loss:sum"].hex(), digest.hexdigest()[:16], flush=True)


def _adam(tinker: Any) -> Any:
    return tinker.AdamParams(learning_rate=RATE)


def _data(tinker: Any, source: random.Random) -> list[Any]:
    data = []
    for _ in range(6):
        tokens = [source.randrange(3, 97) for _ in range(source.randrange(4, 20))]
        data.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "weights": [1.0] * (len(tokens) - 1),
                },
            )
        )
    return data


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
