"""Clones of a sampler, handles, many samples at once, cancelling, losses of the user's own."""

import asyncio
import os
import pickle
import sys

import tinker
from tinker import types

MODEL = os.environ.get("MODEL", "tinsmith/fake")


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=7)
sampler = client.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints([1, 2, 3])
params = types.SamplingParams(max_tokens=8, seed=3, stop=[])
first = sampler.sample(prompt, 2, params).result()
tokens = [s.tokens for s in first.sequences]
assert tokens[0] != tokens[1], "two samples of one seed must differ"

clone = pickle.loads(pickle.dumps(sampler))
assert [s.tokens for s in clone.sample(prompt, 2, params).result().sequences] == tokens
other = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
assert [s.tokens for s in other.sample(prompt, 2, params).result().sequences] == tokens

futures = [sampler.sample(prompt, 1, params) for _ in range(200)]
assert all(f.result().sequences[0].tokens == tokens[0] for f in futures)

asked = types.TensorData(data=[5, -1, 7, 8], dtype="int64", shape=[2, 2])
rich = sampler.sample(
    prompt,
    1,
    params,
    include_prompt_logprobs=True,
    topk_prompt_logprobs=3,
    topk_sample_logprobs=2,
    target_prompt_logprobs=asked,
    prompt_alt_tokens_k=2,
).result()
assert rich.prompt_logprobs[0] is None and len(rich.prompt_logprobs) == 3
assert len(rich.topk_prompt_logprobs[1]) == 3
assert len(rich.sequences[0].topk_logprobs) == 8
assert rich.target_prompt_logprobs.shape == [2, 2]
assert rich.target_prompt_logprobs.data[1] == 0.0
assert rich.prompt_alt_tokens.tokens.shape == [2, 2]
greedy = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
same = sampler.sample(prompt, 3, greedy).result().sequences
assert same[0].tokens == same[1].tokens == same[2].tokens


async def given_up() -> None:
    long = types.SamplingParams(max_tokens=4000, seed=1, stop=[])
    task = asyncio.create_task(sampler.sample_async(prompt, 1, long))
    await asyncio.sleep(0.05)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return
    raise AssertionError("the cancelled sample came back")


asyncio.run(given_up())


def loss(data, logprobs):
    total = -sum(values.sum() for values in logprobs)
    return total, {"custom/total:sum": float(total)}


built_in = service.create_lora_training_client(base_model=MODEL, rank=4, seed=9)
custom = service.create_lora_training_client(base_model=MODEL, rank=4, seed=9)
data = [datum([1, 2, 3]), datum([4, 5, 6, 7])]
built_in.forward_backward(data, "cross_entropy").result()
result = custom.forward_backward_custom(data, loss).result()
assert "surrogate_loss:sum" in result.metrics and "loss:sum" in result.metrics
for each in (built_in, custom):
    each.optim_step(types.AdamParams(learning_rate=0.1)).result()
a, b = (
    each.forward(data, "cross_entropy").result().metrics["loss:sum"] for each in (built_in, custom)
)
assert abs(a - b) < 1e-6 * abs(a), (a, b)

if "jwt" in sys.argv:
    who = tinker.RestClient().whoami().result()
    assert who.user_urn.startswith("tml:organization_user:") and who.org_urn, who
service.close("success").result()
print("ok")
