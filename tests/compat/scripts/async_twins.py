"""The asynchronous twin of every method, with the values of its sibling."""

import asyncio
import datetime
import os
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")
MODEL = os.environ.get("MODEL", "tinsmith/fake")


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def summed(data, logprobs):
    loss = -sum(values.sum() for values in logprobs)
    return loss, {"mine:mean": 1.5}


async def train(service: tinker.ServiceClient) -> tinker.TrainingClient:
    models = (await service.get_server_capabilities_async()).supported_models
    assert [m.model_name for m in models] == [MODEL]
    client = await service.create_lora_training_client_async(MODEL, rank=4, seed=7)
    assert (await client.get_info_async()).lora_rank == 4
    data = [datum([1, 2, 3]), datum([4, 5, 6])]
    first = await (await client.forward_async(data, "cross_entropy")).result_async()
    passed = await client.forward_backward_async(data, "cross_entropy")
    stepped = await client.optim_step_async(types.AdamParams(learning_rate=0.1))
    assert (await passed).metrics["loss:sum"] == first.metrics["loss:sum"]
    await stepped
    custom = await (await client.forward_backward_custom_async(data, summed)).result_async()
    assert custom.metrics["mine:mean"] == 1.5
    second = await (await client.forward_async(data, "cross_entropy")).result_async()
    assert abs(custom.metrics["loss:sum"] - second.metrics["loss:sum"]) < 1e-3
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"]
    return client


async def save_and_sample(service: tinker.ServiceClient, client: tinker.TrainingClient) -> str:
    state = (await (await client.save_state_async("s")).result_async()).path
    weights = (await (await client.save_weights_for_sampler_async("w")).result_async()).path
    external = (await (await client.save_weights_external_async("e")).result_async()).path
    assert external.endswith("/external_weights/e")
    prompt = types.ModelInput.from_ints([1, 2, 3])
    samplers = [
        await client.save_weights_and_get_sampling_client_async(),
        await client.create_sampling_client_async(weights),
        await service.create_sampling_client_async(model_path=weights),
    ]
    scores = [await sampler.compute_logprobs_async(prompt) for sampler in samplers]
    assert scores[0] == scores[1] == scores[2]
    assert await samplers[1].get_base_model_async() == MODEL
    params = types.SamplingParams(max_tokens=4, seed=3, stop=[])
    answers = [await sampler.sample_async(prompt, 1, params) for sampler in samplers]
    assert len({tuple(answer.sequences[0].tokens) for answer in answers}) == 1
    before = (await (await client.forward_async([datum([1, 2, 3])], "cross_entropy"))).metrics
    await (await client.load_state_async(state)).result_async()
    await (await client.load_state_with_optimizer_async(state)).result_async()
    await client.load_state_with_optimizer(state).result_async()
    after = (await (await client.forward_async([datum([1, 2, 3])], "cross_entropy"))).metrics
    assert before == after
    for resumed in (
        await service.create_training_client_from_state_async(state),
        await service.create_training_client_from_state_with_optimizer_async(state),
    ):
        again = (await (await resumed.forward_async([datum([1, 2, 3])], "cross_entropy"))).metrics
        assert again == before
    return state


async def look_around(client: tinker.TrainingClient, state: str) -> None:
    rest, admin = tinker.RestClient(), tinker.AdminClient()
    run_id = client.model_id
    session_id = run_id.partition(":")[0]
    assert (await rest.get_training_run_async(run_id)).training_run_id == run_id
    assert (await rest.get_training_run_by_tinker_path_async(state)).training_run_id == run_id
    runs = (await rest.list_training_runs_async()).training_runs
    assert run_id in [run.training_run_id for run in runs]
    names = [c.checkpoint_id for c in (await rest.list_checkpoints_async(run_id)).checkpoints]
    assert names == ["external_weights/e", "sampler_weights/w", "weights/s"]
    assert (await rest.list_user_checkpoints_async()).cursor.total_count == 3
    assert session_id in (await rest.list_sessions_async()).sessions
    assert run_id in (await rest.get_session_async(session_id)).training_run_ids
    sampler = (await rest.get_session_async(session_id)).sampler_ids[0]
    assert (await rest.get_sampler_async(sampler)).base_model == MODEL
    await rest.assign_session_project_async(session_id, "p")
    found = await rest.search_sessions_async(types.SessionSearchRequest(project_ids=["p"]))
    assert [s.session_id for s in found.sessions] == [session_id]
    await rest.publish_checkpoint_from_tinker_path_async(state)
    await rest.unpublish_checkpoint_from_tinker_path_async(state)
    await rest.set_checkpoint_ttl_from_tinker_path_async(state, 7200)
    external = f"tinker://{run_id}/external_weights/e"
    assert (await rest.get_external_weights_urls_async(external)).urls
    trace = await rest.export_session_trace_async(session_id)
    assert trace.startswith("http") and rest.export_session_trace
    copied = await rest.copy_weights_async(state, "p")
    assert str(copied if isinstance(copied, str) else await copied).endswith("/weights/s")
    await rest.delete_checkpoint_from_tinker_path_async(state)
    await rest.delete_checkpoint_async(run_id, "external_weights/e")
    hour = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    later = hour + datetime.timedelta(hours=1)
    # get_audit_log_async fails inside the official client itself: it asserts that it runs on the
    # client's own loop, where nobody can call it.
    assert (await admin.get_billing_usage_async(hour, later)).data
    assert (await admin.get_current_checkpoint_storage_usage_async()).data


async def main() -> None:
    service = tinker.ServiceClient()
    client = await train(service)
    state = await save_and_sample(service, client)
    await look_around(client, state)
    print("ok")


asyncio.run(main())
