"""Four recipes, as a user of the official client writes them; every number they see is printed.

With the argument "tinsmith" the same lines run on our client.
"""

import json
import math
import os
import sys

if sys.argv[1] == "tinsmith":
    import tinsmith.compat

    tinsmith.compat.install()

import tinker  # which package this is was decided above
import torch
from tinker import types

MODEL = os.environ["MODEL"]
ADAM = types.AdamParams(learning_rate=0.01)
service = tinker.ServiceClient()
seen: dict[str, list] = {"client": [tinker.ServiceClient.__module__.partition(".")[0]]}


def datum(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": weights or [1.0] * (len(tokens) - 1),
        },
    )


def supervised() -> list:
    client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=3)
    data = [datum([1 + i, 40, 20 + i, 60, 9 + i]) for i in range(6)]
    facts = []
    for _ in range(3):
        passed = client.forward_backward(data, "cross_entropy")
        client.optim_step(ADAM)
        output = passed.result()
        facts.append(output.metrics["loss:sum"])
        facts += [each["logprobs"].to_numpy().tolist() for each in output.loss_fn_outputs]
    path = client.save_state("halfway").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    resumed.forward_backward(data, "cross_entropy").result()
    resumed.optim_step(ADAM).result()
    facts.append(resumed.forward(data, "cross_entropy").result().metrics["loss:sum"])
    return facts


def reinforcement() -> list:
    client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=3)
    prompt, facts = [1, 2, 3], []
    for step in range(3):
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=4, seed=step, stop=[], temperature=0.8)
        answer = sampler.sample(types.ModelInput.from_ints(prompt), 6, params).result()
        rewards = [float(each.tokens[0] % 2) for each in answer.sequences]
        mean = sum(rewards) / len(rewards)
        data = []
        for sequence, reward in zip(answer.sequences, rewards, strict=True):
            tokens = prompt + sequence.tokens
            nothing = [0.0] * (len(prompt) - 1)
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": nothing + sequence.logprobs,
                "advantages": nothing + [reward - mean] * len(sequence.tokens),
            }
            model_input = types.ModelInput.from_ints(tokens[:-1])
            data.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
            facts += [sequence.tokens, sequence.logprobs, sequence.stop_reason]
        passed = client.forward_backward(data, "importance_sampling")
        client.optim_step(ADAM).result()
        facts.append(passed.result().metrics["loss:sum"])
    return facts


def preferences() -> list:
    client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=3)
    data = [datum([1, 5, 9, 13]), datum([1, 5, 50, 51])]

    def loss(data: list, logprobs: list) -> tuple:
        margin = logprobs[0].sum() - logprobs[1].sum()
        return -torch.nn.functional.logsigmoid(0.1 * margin), {"margin": margin.item()}

    facts = []
    for _ in range(3):
        metrics = client.forward_backward_custom(data, loss).result().metrics
        client.optim_step(ADAM).result()
        facts += [metrics["loss:sum"], metrics["margin"]]
    return facts


def distillation() -> list:
    teacher = service.create_sampling_client(base_model=MODEL)
    student = service.create_lora_training_client(base_model=MODEL, rank=4, seed=3)
    tokens = [1, 7, 30, 31, 32, 33]
    scored = teacher.sample(
        types.ModelInput.from_ints(tokens),
        1,
        types.SamplingParams(max_tokens=1, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    rows = scored.topk_prompt_logprobs[1:]
    inputs = {
        "target_tokens": types.TensorData(
            data=[token for row in rows for token, _ in row], dtype="int64", shape=[len(rows), 3]
        ),
        "weights": types.TensorData(
            data=[math.exp(each) for row in rows for _, each in row],
            dtype="float32",
            shape=[len(rows), 3],
        ),
    }
    lesson = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    facts = [[list(pair) for row in rows for pair in row], scored.prompt_logprobs]
    for _ in range(3):
        facts.append(student.forward_backward([lesson], "cross_entropy").result().metrics)
        student.optim_step(ADAM).result()
    return [each if isinstance(each, list) else each["loss:sum"] for each in facts]


for recipe in (supervised, reinforcement, preferences, distillation):
    seen[recipe.__name__] = recipe()
print(json.dumps(seen))
