"""Mistakes reach the official client as prompt errors that name them, never as a hang."""

import os
import time
import warnings

import numpy as np
import tinker
from tinker import types

warnings.simplefilter("ignore")
MODEL = os.environ.get("MODEL", "tinsmith/fake")
PROMPT_SECONDS = float(os.environ.get("PROMPT_SECONDS", "10"))


def datum(**inputs: object) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)


def fails(call, *words: str, kind: type[BaseException] = tinker.TinkerError) -> None:
    started = time.monotonic()
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        assert time.monotonic() - started < PROMPT_SECONDS, "the mistake was retried"
        return
    raise AssertionError(f"{words} was accepted")


service = tinker.ServiceClient()
fails(lambda: service.create_lora_training_client(base_model="no/such"), "no/such", MODEL)
fails(lambda: service.create_lora_training_client(base_model=MODEL, rank=100_000), "rank")
fails(lambda: service.create_lora_training_client(base_model=MODEL, seed=-(2**40)), "seed")
fails(lambda: service.create_sampling_client(base_model="no/such"), "no/such", MODEL)
fails(lambda: service.create_sampling_client(model_path="tinker://a/weights/b"), "checkpoint")
dimuon = tinker.DimuonOptimizerConfig()
fails(lambda: service.create_lora_training_client(base_model=MODEL, optimizer=dimuon), "dimuon")

client = service.create_lora_training_client(base_model=MODEL, rank=4)
good = datum(target_tokens=[2, 3], weights=[1.0, 1.0])


def passes(data, loss_fn="cross_entropy", config=None):
    return lambda: client.forward_backward(data, loss_fn, config).result()


failed = tinker.RequestFailedError
fails(passes([datum(weights=[1.0, 1.0])]), "target_tokens", kind=failed)
fails(passes([datum(target_tokens=[2, 5000], weights=[1.0, 1.0])]), "5000", kind=failed)
fails(passes([datum(target_tokens=[2, -1], weights=[1.0, 1.0])]), "-1", kind=failed)
fails(passes([datum(target_tokens=[2, 3], weights=[1.0])]), "weights", kind=failed)
fails(passes([datum(target_tokens=[2, 3], weights=[1.0, float("nan")])]), "finite", kind=failed)
outside = types.Datum(
    model_input=types.ModelInput.from_ints([1, 5000]), loss_fn_inputs={"target_tokens": [2, 3]}
)
fails(passes([good, outside]), "5000", "1", kind=failed)
empty = types.Datum(model_input=types.ModelInput.empty(), loss_fn_inputs={"target_tokens": []})
fails(passes([empty]), "no tokens", kind=failed)
picture = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=2)])
image = types.Datum(model_input=picture, loss_fn_inputs={"target_tokens": [2, 3]})
fails(passes([image]), "image")
floats = datum(target_tokens=np.array([2.0, 3.0], dtype=np.float32))
fails(passes([floats]), "target_tokens", kind=failed)
fails(passes([datum(target_tokens=np.ones((2, 2, 2), dtype=np.int64))]), "target", kind=failed)
unknown = datum(target_tokens=[2, 3], surprise=np.ones(2, dtype=np.float32))
fails(passes([unknown]), "surprise", kind=failed)
fails(passes([good], "ppo"), "logprobs", kind=failed)
infinite = datum(target_tokens=[2, 3], logprobs=[-1.0, -1.0], advantages=[float("inf"), 1.0])
fails(passes([infinite], "importance_sampling"), "advantages", kind=failed)
fails(passes([good], "stable_reinforce"), "stable_reinforce")
fails(passes([good], "cross_entropy", {"nonsense": 1.0}), "nonsense", kind=failed)
fails(passes([good], "custom", {"loss_id": "nothing"}), "nothing", kind=failed)
fails(lambda: client.optim_step(types.AdamParams(beta1=2.0)).result(), "beta1", kind=failed)
other = tinker.DimuonParams(learning_rate=0.1)
fails(lambda: client.optim_step(other).result(), "dimuon")
fails(lambda: client.save_state("a/b").result(), "name")
fails(lambda: client.save_state("..").result(), "name")
fails(lambda: client.save_state("t", ttl_seconds=3).result(), "ttl")
client.save_state("twice").result()
fails(lambda: client.save_state("twice").result(), "exists", kind=failed)
client.save_state("twice", overwrite=True).result()
fails(lambda: client.load_state("tinker://nobody/weights/x").result(), "checkpoint")
fails(
    lambda: client.save_weights_external("e", age_encryption_recipients=["x"]).result(), "encrypt"
)
# The client still works: every mistake used up its number and nothing else.
assert client.forward_backward([good], "cross_entropy").result().metrics["loss:sum"] > 0
client.optim_step(types.AdamParams()).result()

sampler = client.save_weights_and_get_sampling_client()


def samples(tokens, **params):
    prompt = types.ModelInput.from_ints(tokens)
    return lambda: sampler.sample(prompt, 1, types.SamplingParams(**params)).result()


fails(samples([1, 5000], max_tokens=1), "5000", kind=failed)
fails(samples([], max_tokens=1), "token", kind=failed)
fails(samples([1], max_tokens=1, temperature=-1.0), "temperature", kind=failed)
fails(samples([1], max_tokens=1, top_p=0.0), "top_p", kind=failed)
fails(samples([1] * 5000, max_tokens=1), "context", kind=failed)
print("ok")
