"""A run that is killed halfway and goes on has the curve of one that was left alone."""

import argparse
import subprocess
import sys
from collections.abc import Iterator

import tinsmith

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--victim", action="store_true", help="be the run that is killed")
options = parser.parse_args()
half = max(1, options.steps // 2)


def train(training: tinsmith.TrainingClient, steps: int) -> Iterator[float]:
    """Learn one sentence, and give the loss of each step."""
    tokens = training.get_tokenizer().encode("Every run can be resumed where it was saved.")
    datum = tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    for _ in range(steps):
        passed = training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinsmith.AdamParams(learning_rate=5e-4)).result()
        yield passed.result().metrics["loss:sum"]


if options.victim:
    with tinsmith.ServiceClient() as service:
        training = service.create_lora_training_client(options.model, seed=1)
        for step, loss in enumerate(train(training, 1_000_000), 1):
            print(loss, training.save_state(f"step-{step}").result().path, flush=True)

with tinsmith.ServiceClient() as service:
    training = service.create_lora_training_client(options.model, seed=1)
    whole = list(train(training, 2 * half))

command = [sys.executable, __file__, "--victim", "--model", options.model]
victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
assert victim.stdout is not None
told = [next(victim.stdout).split() for _ in range(half)]
victim.kill()
victim.communicate()
first = [float(loss) for loss, _ in told]

# All that is known after the crash is the path of the last checkpoint.
with tinsmith.ServiceClient() as service:
    training = service.create_training_client_from_state_with_optimizer(told[-1][1])
    second = list(train(training, half))

for step, (one, other) in enumerate(zip(whole, first + second, strict=True), 1):
    print(f"step {step}: {one:.6f} without a break, {other:.6f} with one")
difference = max(abs(a - b) for a, b in zip(whole, first + second, strict=True))
print(f"largest difference: {difference:.2g}")
