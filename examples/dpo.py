"""A loss of your own: direct preference optimization.

The loss compares how likely the model finds a preferred answer and a rejected one, each against
what the untrained model thought of it. It is ordinary PyTorch on log-probabilities.
"""

import argparse

import torch

import tinsmith

PAIRS = [
    ("Say hello.", "Hello!", "Greetings, most esteemed and honourable visitor of mine."),
    ("Name a colour.", "Blue.", "There are ever so many colours that one could go on to name."),
    ("What is 1 + 1?", "2.", "To answer this we must first consider what a number is."),
]
BETA = 0.1

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()


def datum(question: str, answer: str) -> tinsmith.Datum:
    before = tokenizer.encode(f"{question}\n")
    after = tokenizer.encode(answer)
    tokens = before + after
    return tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(before) - 1) + [1.0] * len(after),
        },
    )


def answer_logprobs(data: list[tinsmith.Datum], logprobs: list[torch.Tensor]) -> torch.Tensor:
    """The log-probability of each whole answer."""
    return torch.stack(
        [
            (values * each.loss_fn_inputs["weights"].to_torch()).sum()
            for each, values in zip(data, logprobs, strict=True)
        ]
    )


def preference_loss(
    data: list[tinsmith.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Preferred answers are at even places, rejected ones at odd places."""
    gained = answer_logprobs(data, logprobs) - reference
    margins = BETA * (gained[0::2] - gained[1::2])
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    return loss, {"margin": margins.mean().item()}


with tinsmith.ServiceClient() as service:
    training = service.create_lora_training_client(options.model, rank=16, seed=0)
    tokenizer = training.get_tokenizer()
    data = [datum(question, answer) for question, *answers in PAIRS for answer in answers]

    before = training.forward(data, "cross_entropy").result()
    reference = answer_logprobs(
        data, [output["logprobs"].to_torch() for output in before.loss_fn_outputs]
    )
    for step in range(options.steps):
        passed = training.forward_backward_custom(data, preference_loss)
        training.optim_step(tinsmith.AdamParams(learning_rate=2e-4)).result()
        metrics = passed.result().metrics
        print(f"step {step + 1}: loss {metrics['loss:sum']:.4f}, margin {metrics['margin']:.4f}")
