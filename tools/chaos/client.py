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
import warnings
from typing import Any

import raw

MODEL = "tiny"
RATE = 0.01
RANKS = {"loop": 64}
"""Large enough that samplers which are never let go would show in the engine's memory."""


def main(package: str, program: str, seed: int, steps: int) -> None:
    tinker = importlib.import_module(package)
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(
        base_model=MODEL, rank=RANKS.get(program, 4), seed=seed
    )
    print("run", client.get_info().model_id, flush=True)
    data = _data(tinker, random.Random(seed))
    PROGRAMS[program](tinker, service, client, data, steps)
    if program not in ("resume", "gaps"):
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


def pipelined(tinker: Any, service: Any, client: Any, data: list[Any], steps: int) -> None:
    """Saves and loads are sent ahead, too: each finds what the one before it left."""
    warnings.simplefilter("ignore", FutureWarning)  # loading into a model is discouraged
    model_id = client.get_info().model_id
    pending = []
    for index in range(max(1, steps // 4)):
        path = f"tinker://{model_id}/weights/step-{index}"
        pending += [
            ("loss", client.forward_backward(data, "cross_entropy")),
            ("step", client.optim_step(_adam(tinker))),
            ("save", client.save_state(f"step-{index}")),
            ("again", client.save_state(f"step-{index}")),
            ("loss", client.forward_backward(data[:2], "cross_entropy")),
            ("step", client.optim_step(tinker.AdamParams(learning_rate=1.0))),
            ("load", client.load_state_with_optimizer(path)),
            ("probe", client.forward(data, "cross_entropy")),
            ("save", client.save_weights_for_sampler(f"sampler-{index}")),
            ("save", client.save_weights_external(f"external-{index}")),
            ("load", client.load_state(path)),
        ]
    for what, future in pending:
        if what in ("loss", "probe"):
            show(what, future.result())
        else:
            print(what, _ended(future), flush=True)


def gaps(tinker: Any, service: Any, client: Any, data: list[Any], steps: int) -> None:
    """Numbers arrive backwards; then one never comes, and those behind it fail in time."""
    tokens = [5, 17, 42, 8]
    model = raw.RawModel(client.get_info().model_id)
    sent = {4: model.optim_step(4, RATE), 3: model.forward_backward(3, tokens)}
    sent |= {2: model.optim_step(2, RATE), 1: model.forward_backward(1, tokens)}
    sent |= {6: model.forward_backward(6, tokens), 7: model.optim_step(7, 1.0)}
    for number in sorted(sent):
        print(number, _outcome(raw.result(sent[number])), flush=True)
    late = model.forward(8, tokens)
    print("after the gap", _outcome(raw.result(late)), flush=True)
    print("saved", "path" in raw.result(model.save(9, "final")), flush=True)
    print("end", flush=True)


def loop(tinker: Any, service: Any, client: Any, data: list[Any], steps: int) -> None:
    """A step, an unnamed sampler and a sample, many times over."""
    for index in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        client.optim_step(_adam(tinker)).result()
        show("loss", passed.result())
        sampler = client.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=3, seed=index, temperature=1.0)
        reply = sampler.sample(data[0].model_input, num_samples=1, sampling_params=params).result()
        print("sampled", list(reply.sequences[0].tokens), flush=True)


def _ended(future: Any) -> str:
    """How an operation without numbers ended; an error by its class, since its words name ids."""
    try:
        future.result()
    except Exception as error:
        return f"failed: {type(error).__name__}"
    return "done"


def _outcome(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"failed: {found.get('category')}"
    return str({k: v for k, v in found.get("metrics", {}).items() if k == "loss:sum"})


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


PROGRAMS = {
    "sft": sft,
    "rl": rl,
    "resume": resume,
    "custom": custom,
    "pipelined": pipelined,
    "gaps": gaps,
    "loop": loop,
}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
