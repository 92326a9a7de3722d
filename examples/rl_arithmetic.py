"""Reinforcement learning: the model learns to add from reward alone.

For each sum a group of answers is sampled. An answer's advantage is how much better it did than
the mean of its group, and the policy gradient makes the better ones likelier.
"""

import argparse
import random
import re

import tinsmith

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--problems", type=int, default=16)
parser.add_argument("--group", type=int, default=6)
options = parser.parse_args()


def reward(answer: str, total: int) -> float:
    """1 for an answer whose last number is right."""
    return float(re.findall(r"\d+", answer)[-1:] == [str(total)])


def prompt(a: int, b: int) -> list[int]:
    text = f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def rollout(
    asked: list[int], sequence: tinsmith.SampledSequence, advantage: float
) -> tinsmith.Datum:
    """A sampled answer as a datum: the prompt has no part in the gradient."""
    assert sequence.logprobs is not None
    tokens = asked + sequence.tokens
    nothing = [0.0] * (len(asked) - 1)
    return tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": nothing + sequence.logprobs,
            "advantages": nothing + [advantage] * len(sequence.tokens),
        },
    )


with tinsmith.ServiceClient() as service:
    training = service.create_lora_training_client(options.model, rank=32, seed=0)
    tokenizer = training.get_tokenizer()
    numbers = random.Random(0)

    for step in range(options.steps):
        sampler = training.save_weights_and_get_sampling_client()
        sums = [(numbers.randint(0, 9), numbers.randint(0, 9)) for _ in range(options.problems)]
        prompts = [prompt(a, b) for a, b in sums]
        # All are under way at once; the server decodes them together.
        futures = [
            sampler.sample(
                tinsmith.ModelInput.from_ints(asked),
                options.group,
                tinsmith.SamplingParams(max_tokens=12, stop=[tokenizer.eos_token_id]),
            )
            for asked in prompts
        ]
        data, rewards = [], []
        for asked, (a, b), future in zip(prompts, sums, futures, strict=True):
            answers = future.result().sequences
            group = [reward(tokenizer.decode(each.tokens), a + b) for each in answers]
            mean = sum(group) / len(group)
            rewards.append(mean)
            data += [
                rollout(asked, each, score - mean)
                for each, score in zip(answers, group, strict=True)
                if score != mean
            ]
        if data:
            training.forward_backward(data, "importance_sampling")
            training.optim_step(tinsmith.AdamParams(learning_rate=3e-4)).result()
        print(f"step {step + 1}: mean reward {sum(rewards) / len(rewards):.2f}", flush=True)
