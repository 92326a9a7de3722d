"""Trains with the official client while, perhaps, the server is killed under it.

Prints a line per finished step, then the loss on a probe and the sampler's opinion of a prompt.
"""

import os
import sys

import tinker
from tinker import types

MODEL = os.environ.get("MODEL", "tinsmith/fake")


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


steps = int(sys.argv[1])
service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=7)
data = [datum([1 + i, 60, 70 + i]) for i in range(8)]
pending = []
for index in range(steps):
    # Everything is sent ahead: at any moment operations of several steps are queued.
    passed = client.forward_backward(data[index % 8 :], "cross_entropy")
    pending.append((passed, client.optim_step(types.AdamParams(learning_rate=0.05))))
for passed, stepped in pending:
    print("step", passed.result().metrics["loss:sum"].hex(), flush=True)
    stepped.result()
probe = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
print("probe", probe.hex(), flush=True)
sampler = client.save_weights_and_get_sampling_client()
logprobs = sampler.compute_logprobs(types.ModelInput.from_ints([1, 60, 70])).result()
print("sampler", [p and p.hex() for p in logprobs], flush=True)
