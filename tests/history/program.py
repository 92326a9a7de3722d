"""Two steps, a sampler in between that is asked twice, and the way back to a checkpoint.

python program.py PACKAGE
"""

from __future__ import annotations

import importlib
import sys


def main(name: str) -> None:
    package = importlib.import_module(name)
    service = package.ServiceClient()
    training = service.create_lora_training_client("tinsmith/fake", rank=4, seed=1)
    data = [
        package.Datum(
            model_input=package.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
        )
    ]
    adam = package.AdamParams(learning_rate=0.05)
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(adam).result()
    path = training.save_state("first").result().path
    sampler = training.save_weights_and_get_sampling_client()
    params = package.SamplingParams(max_tokens=4, seed=3, temperature=1.0)
    for _ in range(2):
        sampler.sample(
            package.ModelInput.from_ints([1, 2]), num_samples=2, sampling_params=params
        ).result()
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(adam).result()
    second = service.create_training_client_from_state_with_optimizer(path)
    second.forward(data, "cross_entropy").result()
    print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
