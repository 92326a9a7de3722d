"""A run that stops halfway and goes on has the curve of one that did not stop."""

import argparse

import tinsmith

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=6)
options = parser.parse_args()

half = max(1, options.steps // 2)


def train(training: tinsmith.TrainingClient, steps: int) -> list[float]:
    """Losses of a few steps on one sentence."""
    tokens = training.get_tokenizer().encode("Every run can be resumed where it was saved.")
    datum = tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    losses = []
    for _ in range(steps):
        passed = training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinsmith.AdamParams(learning_rate=5e-4))
        losses.append(passed.result().metrics["loss:sum"])
    return losses


with tinsmith.ServiceClient() as service:
    whole = train(service.create_lora_training_client(options.model, seed=1), 2 * half)

with tinsmith.ServiceClient() as service:
    training = service.create_lora_training_client(options.model, seed=1)
    first = train(training, half)
    saved = training.save_state("halfway").result().path

# Another client, as after a crash: all it knows is the checkpoint's path.
with tinsmith.ServiceClient() as service:
    again = service.create_training_client_from_state_with_optimizer(saved)
    second = train(again, half)

for step, (one, other) in enumerate(zip(whole, first + second, strict=True), 1):
    print(f"step {step}: {one:.6f} without a break, {other:.6f} with one")
difference = max(abs(a - b) for a, b in zip(whole, first + second, strict=True))
print(f"largest difference: {difference:.2g}")
