"""One program for both clients: `python either_client.py tinker|tinsmith`. Prints what it computed.

Supervised steps in five chunks, groups of samples and a policy gradient on them, custom losses,
saving, resuming. Everything that can be drawn at random has a seed.
"""

import importlib
import json
import os
import sys
import warnings

warnings.simplefilter("ignore")
sdk = importlib.import_module(sys.argv[1])
types = sdk.types
MODEL = os.environ["MODEL"]
results = {}


def datum(tokens):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0.5] * (len(tokens) - 1)},
    )


def keep(name, output):
    """Every number of a pass's output, to the last bit."""
    outputs = [{k: v.tolist() for k, v in each.items()} for each in output.loss_fn_outputs]
    results[name] = {"metrics": output.metrics, "outputs": outputs}


service = sdk.ServiceClient(user_metadata={"program": "either"})
training = service.create_lora_training_client(MODEL, rank=4, seed=3)

# Supervised: ten datums in chunks of two, each step queued behind its pass.
data = [datum([3 + i, 40, 50 + i, 60 - i, 7]) for i in range(10)]
for step in range(3):
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
    keep(f"supervised {step}", passed.result())
    results[f"step {step}"] = stepped.result().metrics

# Reinforcement: groups of four, even tokens are rewarded, advantages within the group.
for iteration in range(2):
    sampler = training.save_weights_and_get_sampling_client()
    prompts = [[5, 6, 7], [8, 9]]
    params = types.SamplingParams(max_tokens=6, temperature=0.9, seed=11 + iteration, stop=[])
    groups = [
        sampler.sample(types.ModelInput.from_ints(prompt), 4, params).result() for prompt in prompts
    ]
    rollouts = []
    for prompt, group in zip(prompts, groups, strict=True):
        rewards = [sum(token % 2 == 0 for token in each.tokens) for each in group.sequences]
        mean = sum(rewards) / len(rewards)
        for each, reward in zip(group.sequences, rewards, strict=True):
            before = [0.0] * (len(prompt) - 1)
            rollouts.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints((prompt + each.tokens)[:-1]),
                    loss_fn_inputs={
                        "target_tokens": (prompt + each.tokens)[1:],
                        "logprobs": before + list(each.logprobs),
                        "advantages": before + [reward - mean] * len(each.tokens),
                    },
                )
            )
    results[f"samples {iteration}"] = [
        [(each.tokens, list(each.logprobs), each.stop_reason) for each in group.sequences]
        for group in groups
    ]
    loss = ("importance_sampling", "ppo")[iteration]
    passed = training.forward_backward(rollouts, loss)
    stepped = training.optim_step(types.AdamParams(learning_rate=0.01))
    keep(f"reinforced {iteration}", passed.result())
    results[f"reinforced step {iteration}"] = stepped.result().metrics

# Saving, then on from there with and without the optimizer's state.
saved = training.save_state("middle", user_metadata={"k": "v"}).result()
for name, resume in (
    ("resumed", service.create_training_client_from_state_with_optimizer),
    ("restarted", service.create_training_client_from_state),
):
    again = resume(saved.path)
    passed = again.forward_backward(data[:5], "cross_entropy")
    again.optim_step(types.AdamParams(learning_rate=0.01)).result()
    keep(name, passed.result())
    keep(f"{name} later", again.forward(data, "cross_entropy").result())


# Custom losses: a function on all data, and a traced one.
def squares(data, logprobs):
    loss = sum((values**2).sum() for values in logprobs)
    return loss, {"largest": float(max(values.max() for values in logprobs))}


def weighted(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/weighted:sum": loss}


keep("custom", training.forward_backward_custom(data[:3], squares).result())
training.optim_step(types.AdamParams(learning_rate=0.01)).result()
handle = service.create_custom_loss(weighted, input_ranks={"logprobs": 1, "weights": 1}).result()
keep("traced", training.forward_backward_custom(data[:3], handle).result())
training.optim_step(types.AdamParams(learning_rate=0.01)).result()

final = training.save_weights_for_sampler("final").result()
sampler = service.create_sampling_client(model_path=final.path)
prompt = types.ModelInput.from_ints([5, 6, 7, 8])
results["final"] = sampler.compute_logprobs(prompt).result()
rich = sampler.sample(
    prompt,
    2,
    types.SamplingParams(max_tokens=4, temperature=0.0, stop=[]),
    include_prompt_logprobs=True,
    topk_prompt_logprobs=2,
).result()
results["rich"] = [rich.prompt_logprobs, rich.topk_prompt_logprobs]
results["greedy"] = [each.tokens for each in rich.sequences]
service.close("success").result()
print(json.dumps(results))
