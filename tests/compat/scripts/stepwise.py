"""A step for each line that is read: trains, samples from the new weights, prints every bit."""

import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")

datum = types.Datum(
    model_input=types.ModelInput.from_ints([5, 6, 7, 8]),
    loss_fn_inputs={"target_tokens": [6, 7, 8, 9], "weights": [1.0, 1.0, 1.0, 1.0]},
)
params = types.SamplingParams(max_tokens=6, seed=1, temperature=1.0)
service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model="tiny", rank=4, seed=7)
for _ in sys.stdin:
    passed = client.forward_backward([datum], "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=0.02))
    loss = passed.result().metrics["loss:sum"]
    stepped.result()
    sampler = client.save_weights_and_get_sampling_client()
    (sequence,) = sampler.sample(datum.model_input, 1, params).result().sequences
    print(loss.hex(), list(sequence.tokens), [p.hex() for p in sequence.logprobs], flush=True)
