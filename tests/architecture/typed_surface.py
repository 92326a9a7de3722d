"""What a type checker makes of the public surface; `make types` reads this file.

Nothing here runs. Every line states the type of a call as users write it.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import assert_type

import torch

import tinsmith
from tinsmith import types
from tinsmith.client.calls.custom_loss import LossHandle
from tinsmith.client.paging import Pages
from tinsmith.client.results.streaming import SampleStream, StreamedTokens
from tinsmith.client.uplink.loop import AwaitableFuture
from tinsmith.client.uplink.stats import ClassStats


def service_client(service: tinsmith.ServiceClient) -> None:
    with service as entered:
        assert_type(entered, tinsmith.ServiceClient)
    assert_type(service.get_server_capabilities(), types.GetServerCapabilitiesResponse)
    training = service.create_lora_training_client(
        "m", 8, seed=1, train_mlp=False, user_metadata={"a": "b"}
    )
    assert_type(training, tinsmith.TrainingClient)
    assert_type(service.create_training_client_from_state("t"), tinsmith.TrainingClient)
    assert_type(
        service.create_training_client_from_state_with_optimizer("t"), tinsmith.TrainingClient
    )
    assert_type(service.create_sampling_client(model_path="t"), tinsmith.SamplingClient)
    assert_type(service.copy_weights("t"), tinsmith.AwaitableConcurrentFuture[str])
    assert_type(service.close("success"), tinsmith.AwaitableConcurrentFuture[None])
    assert_type(service.stats(), Mapping[str, ClassStats])
    assert_type(service.get_console_url(), str)

    def loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return logprobs.sum(), {}

    handle = service.create_custom_loss(loss, {"logprobs": 1})
    assert_type(handle, tinsmith.APIFuture[LossHandle])


async def service_client_async(service: tinsmith.ServiceClient) -> None:
    async with service as entered:
        assert_type(entered, tinsmith.ServiceClient)
    assert_type(await service.create_lora_training_client_async("m"), tinsmith.TrainingClient)
    assert_type(await service.create_sampling_client_async(base_model="m"), tinsmith.SamplingClient)


def datums() -> list[tinsmith.Datum]:
    """Lists, arrays and tensors may be given; tensors are kept."""
    datum = tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={
            "target_tokens": [2, 3],
            "weights": torch.ones(2),
            "advantages": tinsmith.TensorData(data=[1.0, 1.0], dtype="float32"),
        },
    )
    assert_type(datum.loss_fn_inputs["weights"], tinsmith.TensorData)
    return [datum]


def training_client(training: tinsmith.TrainingClient) -> None:
    passed = training.forward_backward(datums(), "cross_entropy")
    assert_type(passed, tinsmith.APIFuture[tinsmith.ForwardBackwardOutput])
    assert_type(passed.result(timeout=3), tinsmith.ForwardBackwardOutput)
    assert_type(passed.result().metrics, dict[str, float])
    assert_type(passed.result().loss_fn_outputs, list[dict[str, tinsmith.TensorData]])
    assert_type(
        training.forward(datums(), "ppo", {"clip_low_threshold": 0.8}),
        tinsmith.APIFuture[tinsmith.ForwardBackwardOutput],
    )
    stepped = training.optim_step(tinsmith.AdamParams(learning_rate=1e-4))
    assert_type(stepped, tinsmith.APIFuture[tinsmith.OptimStepResponse])
    saved = training.save_state("a", ttl_seconds=60, overwrite=True)
    assert_type(saved, tinsmith.APIFuture[types.SaveWeightsResponse])
    assert_type(saved.result().path, str)
    assert_type(
        training.save_weights_for_sampler("a").result(), types.SaveWeightsForSamplerResponse
    )
    assert_type(training.save_weights_external("a").result(), types.SaveWeightsExternalResponse)
    assert_type(training.save_weights_and_get_sampling_client(), tinsmith.SamplingClient)
    assert_type(training.get_info(), types.GetInfoResponse)
    assert_type(training.encode("text"), list[int])
    assert_type(training.decode([1]), str)


async def training_client_async(training: tinsmith.TrainingClient) -> None:
    """A twin gives the future, and the future gives the result."""
    future = await training.forward_backward_async(datums(), "cross_entropy")
    assert_type(future, tinsmith.APIFuture[tinsmith.ForwardBackwardOutput])
    assert_type(await future, tinsmith.ForwardBackwardOutput)
    assert_type(await future.result_async(3), tinsmith.ForwardBackwardOutput)
    stepped = await training.optim_step_async(tinsmith.AdamParams())
    assert_type(await stepped, tinsmith.OptimStepResponse)
    assert_type(
        await training.save_weights_and_get_sampling_client_async(), tinsmith.SamplingClient
    )


def sampling_client(sampler: tinsmith.SamplingClient) -> None:
    prompt, params = tinsmith.ModelInput.from_ints([1]), tinsmith.SamplingParams(max_tokens=2)
    sampled = sampler.sample(prompt, num_samples=2, sampling_params=params)
    assert_type(sampled, AwaitableFuture[tinsmith.SampleResponse])
    sequence = sampled.result().sequences[0]
    assert_type(sequence.tokens, list[int])
    assert_type(sequence.logprobs, list[float] | None)
    assert_type(sequence.stop_reason, tinsmith.StopReason)
    assert_type(sampler.compute_logprobs(prompt), AwaitableFuture[list[float | None]])
    assert_type(sampler.stream(prompt, params), SampleStream)
    for piece in sampler.stream(prompt, params):
        assert_type(piece, StreamedTokens)
    assert_type(sampler.get_base_model(), str)
    assert_type(sampler.get_sampler_handle(), str)
    assert_type(tinsmith.SamplingClient.from_sampler_handle("h"), tinsmith.SamplingClient)


async def sampling_client_async(sampler: tinsmith.SamplingClient) -> None:
    prompt, params = tinsmith.ModelInput.from_ints([1]), tinsmith.SamplingParams()
    assert_type(await sampler.sample_async(prompt, 1, params), tinsmith.SampleResponse)
    assert_type(await sampler.compute_logprobs_async(prompt), list[float | None])
    async for piece in sampler.stream(prompt, params):
        assert_type(piece, StreamedTokens)


def rest_client() -> None:
    rest = tinsmith.RestClient(base_url="http://localhost", api_key="tml-x")
    assert_type(rest.list_training_runs(limit=5), Future[types.TrainingRunsResponse])
    assert_type(rest.get_training_run("r"), Future[tinsmith.TrainingRun])
    assert_type(rest.iter_training_runs(), Pages[tinsmith.TrainingRun])
    for checkpoint in rest.iter_checkpoints():
        assert_type(checkpoint, tinsmith.Checkpoint)
    assert_type(rest.list_checkpoints("r"), Future[types.CheckpointsListResponse])
    assert_type(rest.delete_checkpoint_from_tinker_path("t"), Future[None])
    assert_type(
        rest.download_checkpoint("t", "folder"), tinsmith.AwaitableConcurrentFuture[list[Path]]
    )


async def rest_client_async(rest: tinsmith.RestClient) -> None:
    assert_type(await rest.list_training_runs_async(), types.TrainingRunsResponse)
    async for run in rest.iter_training_runs():
        assert_type(run, tinsmith.TrainingRun)


async def futures(future: tinsmith.APIFuture[tinsmith.OptimStepResponse]) -> None:
    assert_type(future.result(), tinsmith.OptimStepResponse)
    assert_type(await future, tinsmith.OptimStepResponse)
    assert_type(future.future(), Future[tinsmith.OptimStepResponse])
    assert_type(future.done(), bool)
    for each in tinsmith.as_completed([future]):
        assert_type(each, tinsmith.APIFuture[tinsmith.OptimStepResponse])
    async for each in tinsmith.as_completed([future]):
        assert_type(each, tinsmith.APIFuture[tinsmith.OptimStepResponse])


def mistakes(training: tinsmith.TrainingClient, sampler: tinsmith.SamplingClient) -> None:
    """Each of these must be an error; a checker that finds none complains about the comment."""
    training.forward_backward(datums(), "cross_entrpy")  # type: ignore[arg-type]
    training.optim_step(1e-4)  # type: ignore[arg-type]
    training.save_state()  # type: ignore[call-arg]
    tinsmith.AdamParams(lr=1e-4)  # type: ignore[call-arg]
    sampler.sample([1, 2], 1, tinsmith.SamplingParams())  # type: ignore[arg-type]
    tinsmith.TensorData(data=[1.0], dtype="float64")  # type: ignore[arg-type]
