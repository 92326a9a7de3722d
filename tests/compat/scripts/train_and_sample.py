"""The whole way once, with the official client: create, train in parts, save, sample, load."""

import os

import tinker
from tinker import types

MODEL = os.environ.get("MODEL", "tinsmith/fake")
COUNT = int(os.environ.get("COUNT", "2500"))  # several chunks of 1,024


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


assert tinker.__version__ == "0.36.0"
service = tinker.ServiceClient()
models = service.get_server_capabilities().supported_models
assert [m.model_name for m in models] == [MODEL], models

client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=7)
session_id, _, number = client.model_id.rpartition(":train:")
assert number == "0" and session_id, client.model_id
info = client.get_info()
assert (info.model_name, info.lora_rank, info.is_lora) == (MODEL, 4, True), info

data = [datum([1 + i % 50, 60, 30 + i % 50]) for i in range(COUNT)]
first = client.forward(data, "cross_entropy").result()
assert len(first.loss_fn_outputs) == COUNT

before = client.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints([1, 60, 30])
old_logprobs = before.compute_logprobs(prompt).result()
assert old_logprobs[0] is None and len(old_logprobs) == 3, old_logprobs
assert abs(old_logprobs[1] - first.loss_fn_outputs[0]["logprobs"].to_numpy()[0]) < 1e-5

losses = []
for _ in range(3):
    passed = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(
        types.AdamParams(learning_rate=float(os.environ.get("LEARNING_RATE", "0.1")))
    )
    losses.append(passed.result().metrics["loss:sum"])
    stepped.result()
assert abs(losses[0] - first.metrics["loss:sum"]) < 1e-2 * losses[0]
assert losses[0] > losses[1] > losses[2], losses

saved = client.save_state("after-three").result()
assert saved.path == f"tinker://{client.model_id}/weights/after-three", saved.path
after = client.save_weights_and_get_sampling_client()
new_logprobs = after.compute_logprobs(prompt).result()
assert sum(new_logprobs[1:]) > sum(old_logprobs[1:])
# An old sampler is frozen: training on has not changed it.
assert before.compute_logprobs(prompt).result() == old_logprobs

response = after.sample(
    prompt, num_samples=3, sampling_params=types.SamplingParams(max_tokens=5, seed=1, stop=[])
).result()
assert [len(s.tokens) for s in response.sequences] == [5, 5, 5]
assert all(s.stop_reason == "length" for s in response.sequences)
assert len({s.sequence_id for s in response.sequences}) == 3

trained = client.forward(data[:1], "cross_entropy").result().metrics["loss:sum"]
client.forward_backward(data[:1], "cross_entropy").result()
client.optim_step(types.AdamParams(learning_rate=1.0)).result()
assert client.forward(data[:1], "cross_entropy").result().metrics["loss:sum"] != trained
client.load_state(saved.path).result()
assert client.forward(data[:1], "cross_entropy").result().metrics["loss:sum"] == trained

resumed = service.create_training_client_from_state_with_optimizer(saved.path)
assert resumed.forward(data[:1], "cross_entropy").result().metrics["loss:sum"] == trained

named = client.save_weights_for_sampler("final").result()
assert named.path == f"tinker://{client.model_id}/sampler_weights/final"
sampler = service.create_sampling_client(model_path=named.path)
assert sampler.compute_logprobs(prompt).result() == new_logprobs
assert sampler.get_base_model() == MODEL

base = service.create_sampling_client(base_model=MODEL)
assert base.compute_logprobs(prompt).result() != new_logprobs
service.close("success").result()
print("ok")
