"""A loss of the user's own, traced by the official client and run by the server."""

import os
import sys

import tinker
from tinker import types

MODEL = os.environ["MODEL"]


def neg_ll(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss}


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0.5] * (len(tokens) - 1)},
    )


service = tinker.ServiceClient()
ranks = {"logprobs": 1, "weights": 1}
handle = service.create_custom_loss(neg_ll, input_ranks=ranks).result()
assert (handle.loss_id is not None) == (sys.argv[1] == "uploaded"), handle
data = [datum([3, 4, 5, 6]), datum([7, 8, 9])]
built_in = service.create_lora_training_client(base_model=MODEL, rank=4, seed=9)
custom = service.create_lora_training_client(base_model=MODEL, rank=4, seed=9)
expected = built_in.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
metrics = custom.forward_backward_custom(data, handle).result().metrics
assert abs(metrics["custom/neg_ll:sum"] - expected) < 1e-4, (metrics, expected)
for each in (built_in, custom):
    each.optim_step(types.AdamParams(learning_rate=0.01)).result()
losses = [
    each.forward(data, "cross_entropy").result().metrics["loss:sum"] for each in (built_in, custom)
]
assert abs(losses[0] - losses[1]) < 1e-4 and losses[0] < expected, losses
print("ok")
