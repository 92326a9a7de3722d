"""Trains a little and prints the path of the weights saved for sampling."""

import os

import tinker
from tinker import types

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=os.environ["MODEL"], rank=4, seed=7)
datum = types.Datum(
    model_input=types.ModelInput.from_ints([40, 41, 42]),
    loss_fn_inputs={"target_tokens": [41, 42, 43], "weights": [1.0, 1.0, 1.0]},
)
for _ in range(5):
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.05)).result()
print(client.save_weights_for_sampler("poke").result().path)
