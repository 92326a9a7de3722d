"""Samples before, during and after a restart of the server, all waited for with one question.

Prints a line after the first; the test then kills the server while the others are under way.
"""

import os

import tinker

MODEL = os.environ.get("MODEL", "tinsmith/fake")
NEW_TOKENS = int(os.environ.get("NEW_TOKENS", "400"))
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])

sampler = tinker.ServiceClient().create_sampling_client(base_model=MODEL)


def sample(max_tokens):
    params = tinker.SamplingParams(max_tokens=max_tokens, seed=1, stop=[])
    return sampler.sample(PROMPT, num_samples=1, sampling_params=params)


for _ in range(5):
    sample(4).result()
waiting = [sample(NEW_TOKENS) for _ in range(3)]
print("under way", flush=True)
for future in waiting:
    assert len(future.result().sequences[0].tokens) == NEW_TOKENS
assert len(sample(4).result().sequences[0].tokens) == 4
print("ok")
