"""Eight adapters on one base model: all at once, against one after the other.

The server packs the passes of all of them into one, so that together they take far less than
eight times as long; what each learns does not depend on the others.
"""

import argparse
import time

import tinsmith

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--tenants", type=int, default=8)
options = parser.parse_args()


Passed = tinsmith.APIFuture[tinsmith.ForwardBackwardOutput]


def step(training: tinsmith.TrainingClient, datum: tinsmith.Datum) -> Passed:
    """Queue a pass and a step; nothing is waited for."""
    passed = training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinsmith.AdamParams(learning_rate=5e-4))
    return passed


def loss(passed: Passed) -> float:
    return passed.result().metrics["loss:sum"]


with tinsmith.ServiceClient() as service:
    tenants = [
        service.create_lora_training_client(options.model, rank=8, seed=number)
        for number in range(options.tenants)
    ]
    tokenizer = tenants[0].get_tokenizer()
    data = []
    for number in range(options.tenants):
        tokens = tokenizer.encode(f"Tenant number {number} has a sentence of its own to learn.")
        data.append(
            tinsmith.Datum(
                model_input=tinsmith.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "weights": [1.0] * (len(tokens) - 1),
                },
            )
        )
    num_tokens = options.steps * sum(datum.model_input.length for datum in data)

    started = time.monotonic()
    for tenant, datum in zip(tenants, data, strict=True):
        for _ in range(options.steps):
            last = loss(step(tenant, datum))
    one_by_one = num_tokens / (time.monotonic() - started)

    started = time.monotonic()
    for _ in range(options.steps):
        futures = [step(tenant, datum) for tenant, datum in zip(tenants, data, strict=True)]
        losses = [loss(future) for future in futures]
    together = num_tokens / (time.monotonic() - started)

print("losses:", *(f"{value:.2f}" for value in losses))
print(f"one by one: {one_by_one:.0f} tokens/s, together: {together:.0f} tokens/s")
