"""Reinforcement learning with the official client; prints how far sampler and trainer differ.

Twelve answers of several lengths at once, of four prompts, in each of three steps.
"""

import tinker
from tinker import types

PROMPTS = [[5, 6, 7], [5, 6, 7, 8, 9], list(range(3, 60)), [40]]

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
for step in range(3):
    sampler = client.save_weights_and_get_sampling_client()
    futures = [
        sampler.sample(
            types.ModelInput.from_ints(prompt),
            3,
            types.SamplingParams(max_tokens=10 + 20 * number, seed=step, stop=[]),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    data = []
    for prompt, future in zip(PROMPTS, futures, strict=True):
        for number, sequence in enumerate(future.result().sequences):
            tokens = prompt + sequence.tokens
            context = [0.0] * (len(prompt) - 1)
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": context + sequence.logprobs,
                        "advantages": context + [number - 1.0] * len(sequence.tokens),
                    },
                )
            )
    metrics = client.forward_backward(data, "importance_sampling").result().metrics
    client.optim_step(types.AdamParams(learning_rate=0.05)).result()
    print(metrics["kl_q_p:sum"].hex(), metrics["ratio:mean"].hex(), flush=True)
