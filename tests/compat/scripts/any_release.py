"""What every official release from 0.3.0 on can do: train in chunks, save, resume, sample."""

import os
import sys
import tarfile
import tempfile
import urllib.request
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")
MODEL = os.environ.get("MODEL", "tinsmith/fake")
STEP = types.AdamParams(learning_rate=float(os.environ.get("LEARNING_RATE", "0.1")))
assert tinker.__version__ == sys.argv[1], tinker.__version__
version = tuple(int(part) for part in tinker.__version__.split("."))


def datum(first: int) -> types.Datum:
    target = types.TensorData(data=[60, 70], dtype="int64", shape=[2])
    weights = types.TensorData(data=[1.0, 1.0], dtype="float32", shape=[2])
    return types.Datum(
        model_input=types.ModelInput.from_ints([first, 60]),
        loss_fn_inputs={"target_tokens": target, "weights": weights},
    )


service = tinker.ServiceClient()
assert service.get_server_capabilities().supported_models[0].model_name == MODEL
client = service.create_lora_training_client(base_model=MODEL, rank=4, seed=7)
assert client.get_info().model_data.model_name == MODEL
data = [datum(1 + i % 50) for i in range(300 if version < (0, 7) else 1100)]
losses = []
for _ in range(3):
    passed = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(STEP)
    output = passed.result()
    assert len(output.loss_fn_outputs) == len(data)
    losses.append(output.metrics["loss:sum"])
    stepped.result()
assert losses[0] > losses[1] > losses[2], losses
state = client.save_state("state").result().path
trained = client.forward(data[:5], "cross_entropy").result()

plain = service.create_training_client_from_state(state)
assert plain.forward(data[:5], "cross_entropy").result().metrics == trained.metrics
if version >= (0, 7):
    full = service.create_training_client_from_state_with_optimizer(state)
    for each in (client, full):
        each.forward_backward(data[:5], "cross_entropy").result()
        each.optim_step(STEP).result()
    results = [c.forward(data[:5], "cross_entropy").result().metrics for c in (client, full)]
    assert results[0] == results[1], "the optimizer's state was restored"

prompt = types.ModelInput.from_ints([1, 60, 70])
path = plain.save_weights_for_sampler("named").result().path
for sampler in (
    plain.save_weights_and_get_sampling_client("unnamed"),
    service.create_sampling_client(model_path=path),
):
    logprobs = sampler.compute_logprobs(prompt).result()
    assert logprobs[0] is None and len(logprobs) == 3
    given = trained.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert abs(logprobs[1] - given[0]) < 1e-5 and abs(logprobs[2] - given[1]) < 1e-5
    params = types.SamplingParams(max_tokens=6, seed=1, temperature=0.7, stop=[])
    sampled = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    assert [len(s.tokens) for s in sampled.sequences] == [6, 6]
    assert [len(s.logprobs) for s in sampled.sequences] == [6, 6]
    assert all(s.stop_reason == "length" for s in sampled.sequences)

rest = service.create_rest_client()
assert state in [c.tinker_path for c in rest.list_checkpoints(client.model_id).result().checkpoints]
if (0, 4) <= version < (0, 36):
    answer = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    with tempfile.NamedTemporaryFile() as file:
        file.write(urllib.request.urlopen(answer.url).read())
        file.flush()
        with tarfile.open(file.name) as tar:
            assert "adapter_config.json" in tar.getnames()
print("ok")
