"""A script written for the official `tinker` package, unchanged.

It needs two environment variables and nothing else: TINKER_BASE_URL and TINKER_API_KEY, which
`tinsmith serve` prints. With `--client tinsmith` the same lines run on our client.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--client", choices=["tinker", "tinsmith"], default="tinker")
options = parser.parse_args()

if options.client == "tinsmith":
    import tinsmith.compat

    tinsmith.compat.install()

# From here on: existing code.
import tinker  # noqa: E402  # which package this is was decided above
from tinker import types  # noqa: E402

service_client = tinker.ServiceClient()
training_client = service_client.create_lora_training_client(base_model=options.model, rank=16)
tokenizer = training_client.get_tokenizer()

tokens = tokenizer.encode("The quick brown fox jumps over the lazy dog.")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
        "weights": types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32"),
    },
)
for step in range(options.steps):
    forward_backward = training_client.forward_backward([datum], "cross_entropy")
    optim_step = training_client.optim_step(types.AdamParams(learning_rate=1e-3))
    loss = forward_backward.result().metrics["loss:sum"] / len(tokens)
    optim_step.result()
    print(f"step {step + 1}: loss {loss:.3f}")

sampling_client = training_client.save_weights_and_get_sampling_client()
result = sampling_client.sample(
    prompt=types.ModelInput.from_ints(tokens[:4]),
    num_samples=1,
    sampling_params=types.SamplingParams(max_tokens=8, temperature=0.0),
).result()
print(tokenizer.decode(tokens[:4]), "→", tokenizer.decode(result.sequences[0].tokens))
print("client:", tinker.ServiceClient.__module__.partition(".")[0])
