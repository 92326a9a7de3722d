"""A small reinforcement-learning loop with the official client: reward for one token."""

import os

import numpy as np
import tinker
from tinker import types

MODEL = os.environ.get("MODEL", "tinsmith/fake")
WANTED, GROUP, STEPS = 7, 16, 12
RATE = float(os.environ.get("LEARNING_RATE", "0.3"))

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1)
prompt = [1, 2, 3]
rewards = []
for step in range(STEPS):
    sampler = client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=3, seed=step, stop=[], top_k=40)
    answer = sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params).result()
    scores = np.array([s.tokens.count(WANTED) / 3 + (s.tokens[0] % 2) for s in answer.sequences])
    rewards.append(scores.mean())
    data = []
    for sequence, advantage in zip(answer.sequences, scores - scores.mean(), strict=True):
        tokens = prompt + sequence.tokens
        context = [0.0] * (len(prompt) - 1)
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": context + sequence.logprobs,
                    "advantages": context + [float(advantage)] * len(sequence.tokens),
                },
            )
        )
    client.forward_backward(data, "importance_sampling")
    client.optim_step(types.AdamParams(learning_rate=RATE)).result()
assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards
print("ok")
