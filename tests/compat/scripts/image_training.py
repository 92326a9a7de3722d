"""Trains on images with the official client while, perhaps, the server is killed under it.

Prints a line per finished step, then what the sampler says of an image. Reads the image from the
file that it is given.
"""

import pathlib
import sys

import tinker
from tinker import types

steps = int(sys.argv[1])
data = pathlib.Path(sys.argv[2]).read_bytes()


def image(**expected: int) -> types.ImageChunk:
    return types.ImageChunk(data=data, format="png", **expected)


def text(*tokens: int) -> types.EncodedTextChunk:
    return types.EncodedTextChunk(tokens=list(tokens))


service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model="tiny", rank=4, seed=7)
# Six tokens of image, whether or not the client says so.
inputs = [[text(5, 91), image(), text(92, 7)], [text(91), image(expected_tokens=6), text(92, 8, 9)]]
batch = [
    types.Datum(
        model_input=types.ModelInput(chunks=chunks),
        loss_fn_inputs={"target_tokens": [11] * 10, "weights": [1.0] * 10},
    )
    for chunks in inputs
]
pending = []
for _ in range(steps):
    passed = client.forward_backward(batch, "cross_entropy")
    pending.append((passed, client.optim_step(types.AdamParams(learning_rate=0.01))))
for passed, stepped in pending:
    print("step", passed.result().metrics["loss:sum"].hex(), flush=True)
    stepped.result()
sampler = client.save_weights_and_get_sampling_client()
prompt = types.ModelInput(chunks=inputs[0])
params = types.SamplingParams(max_tokens=5, seed=3, stop=[])
(sequence,) = sampler.sample(prompt, 1, params).result().sequences
print("sampler", sequence.tokens, [p.hex() for p in sequence.logprobs], flush=True)
