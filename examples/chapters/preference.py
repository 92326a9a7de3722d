"""Preferences: of two answers the better one is made likelier, with a loss of your own (DPO)."""

import torch
from datums import answer, options, training

import tinsmith

data = [answer("Say hello.\n", "Hello!"), answer("Say hello.\n", "Greetings, esteemed visitor.")]
weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
before = training.forward(data, "cross_entropy").result().loss_fn_outputs
known = [(out["logprobs"].to_torch() * w).sum() for out, w in zip(before, weights, strict=True)]


def dpo(
    data: list[tinsmith.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    better, worse = ((p * w).sum() - k for p, w, k in zip(logprobs, weights, known, strict=True))
    return -torch.nn.functional.logsigmoid(0.1 * (better - worse)), {}


for number in range(options.steps):
    passed = training.forward_backward_custom(data, dpo)
    training.optim_step(tinsmith.AdamParams(learning_rate=2e-4)).result()
    print(f"step {number + 1}: loss {passed.result().metrics['loss:sum']:.4f}")
