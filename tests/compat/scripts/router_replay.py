"""Reinforcement learning on a model with experts, by the official client, with provenance.

The answers are those of a sampler that a few large steps have left behind. Prints how many tokens
went to the sampler's experts and the loss, then "trained", and when the server has had time to die
the loss of the weights that came of it.
"""

import time

import tinker
from tinker import types

PROMPTS = [[5, 6, 7], [5, 6, 7, 8, 9], list(range(3, 40))]

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
sampler = client.save_weights_and_get_sampling_client()
params = types.SamplingParams(max_tokens=12, seed=3, stop=[])
data = []
for prompt in PROMPTS:
    for sequence in (
        sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result().sequences
    ):
        tokens = prompt + sequence.tokens
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        name, count = sequence.sequence_id, len(sequence.tokens)
        read = [
            types.PromptProvenanceSpan(sequence_id=name, length=len(prompt)),
            types.SampledProvenanceSpan(sequence_id=name, length=count - 1),
        ]
        scored = [
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=len(prompt) - 1),
            types.SampledProvenanceSpan(sequence_id=name, length=count),
        ]
        data.append(datum.with_provenance(read, scored))
for _ in range(3):
    metrics = client.forward_backward(data, "cross_entropy").result().metrics
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    replayed = metrics.get("experts/replayed_tokens:sum")
    print(replayed, metrics["loss:sum"].hex(), flush=True)
print("trained", flush=True)
time.sleep(1.0)
plain = [types.Datum(datum.model_input, datum.loss_fn_inputs) for datum in data]
print(client.forward(plain, "cross_entropy").result().metrics["loss:sum"].hex(), flush=True)
