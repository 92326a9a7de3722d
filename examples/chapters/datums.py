"""What the chapters share: options, a client, and two ways to make a datum."""

import argparse

import tinsmith
from tinsmith.types import LossFnType

_parser = argparse.ArgumentParser()
_parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
_parser.add_argument("--steps", type=int, default=8)
options = _parser.parse_args()

service = tinsmith.ServiceClient()
training = service.create_lora_training_client(options.model, rank=32, seed=0)
tokenizer = training.get_tokenizer()


def tokens_of(text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def answer(prompt: str, text: str) -> tinsmith.Datum:
    """An answer to learn; the prompt's tokens have no weight."""
    before, after = tokens_of(prompt), [*tokens_of(text), tokenizer.eos_token_id]
    return tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints((before + after)[:-1]),
        loss_fn_inputs={
            "target_tokens": (before + after)[1:],
            "weights": [0.0] * (len(before) - 1) + [1.0] * len(after),
        },
    )


def sampled(
    prompt: str, sequence: tinsmith.SampledSequence, advantages: list[float]
) -> tinsmith.Datum:
    """An answer that was sampled, with how good each of its tokens turned out to be."""
    before, nothing = tokens_of(prompt), [0.0] * (len(tokens_of(prompt)) - 1)
    assert sequence.logprobs is not None
    return tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints((before + sequence.tokens)[:-1]),
        loss_fn_inputs={
            "target_tokens": (before + sequence.tokens)[1:],
            "logprobs": nothing + sequence.logprobs,
            "advantages": nothing + advantages,
        },
    )


def draw(
    sampler: tinsmith.SamplingClient, prompt: str, count: int, max_tokens: int = 16
) -> list[tinsmith.SampledSequence]:
    """`count` answers to a prompt."""
    params = tinsmith.SamplingParams(max_tokens=max_tokens, seed=1, stop=[tokenizer.eos_token_id])
    asked = tinsmith.ModelInput.from_ints(tokens_of(prompt))
    return list(sampler.sample(asked, count, params).result().sequences)


def step(data: list[tinsmith.Datum], loss_fn: LossFnType, learning_rate: float = 3e-4) -> float:
    """One pass and one step; the loss."""
    passed = training.forward_backward(data, loss_fn)
    training.optim_step(tinsmith.AdamParams(learning_rate=learning_rate))
    return passed.result().metrics["loss:sum"]
