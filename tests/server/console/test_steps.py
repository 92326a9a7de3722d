"""What stays of an operation: a point of its run's curves, recorded with its end."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from tests.support.in_process_server import datum
from tinsmith.engine.base import Pass
from tinsmith.server.console.observed import encode_metrics, observed
from tinsmith.types import Datum, ForwardBackwardOutput, ModelInput, TensorData

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer


async def _metrics(api: Api, run: str, **query: Any) -> Any:
    response = await api.get(f"/training_runs/{run}/metrics", **query)
    assert response.status_code == 200, response.text
    return response.json()


async def _operations(api: Api, run: str, **query: Any) -> list[Any]:
    response = await api.get(f"/training_runs/{run}/operations", **query)
    assert response.status_code == 200, response.text
    return list(response.json()["operations"])


async def _train(api: Api, run: str, first: int, rounds: int) -> list[float]:
    losses = []
    for number in range(first, first + 2 * rounds, 2):
        output = await api.output(await api.send_pass(run, number))
        losses.append(output.metrics["loss:sum"] / output.metrics["weights:sum"])
        await api.result(await api.send_step(run, number + 1))
    return losses


async def test_a_runs_losses_are_its_curve(api: Api) -> None:
    run = await api.model()
    losses = await _train(api, run, 1, 3)
    metrics = await _metrics(api, run)
    loss = metrics["series"]["loss"]
    assert loss["x"] == [1, 3, 5] and loss["axis"] == "seq"
    assert loss["mean"] == loss["min"] == loss["max"] == losses
    assert losses == sorted(losses, reverse=True), "it learns"
    assert {"loss", "length:mean", "optim/learning_rate", "unclipped_grad_l2:mean"} <= set(
        metrics["keys"]
    )
    assert metrics["series"]["optim/learning_rate"]["x"] == [2, 4, 6]


async def test_a_curve_is_asked_for_by_key_and_from_a_number_on(api: Api) -> None:
    run = await api.model()
    await _train(api, run, 1, 3)
    metrics = await _metrics(api, run, keys="loss,length:max", after=2)
    assert set(metrics["series"]) == {"loss", "length:max"}
    assert metrics["series"]["loss"]["x"] == [3, 5]


async def test_the_curve_is_kept_when_results_and_log_are_gone(
    start_server: StartServer,
) -> None:
    server = await start_server(
        retrieved_retention_seconds=0.0,
        training_retention_seconds=0.0,
        log_keep_operations=0,
        snapshot_steps=1,
    )
    run = await server.api.model()
    await _train(server.api, run, 1, 4)
    await server.until(lambda: not any(m.is_busy for m in server.service.models))
    await server.service.tidy()
    await server.service.tidy_results()
    assert len(await server.service.store.log.read(run, 0)) < 8, "the log was trimmed"
    assert (await _metrics(server.api, run))["series"]["loss"]["x"] == [1, 3, 5, 7]
    assert [o["seq"] for o in await _operations(server.api, run)] == list(range(8, -1, -1))


async def test_operations_say_when_they_waited_ran_and_how_they_ended(
    server: TestServer, api: Api
) -> None:
    run = await api.model()
    await api.result(await api.send_pass(run, 1))
    bad = datum(1, 2, 3)
    broken = Datum(model_input=bad.model_input, loss_fn_inputs={"target_tokens": [10**6, 1]})
    await api.failure(await api.send_pass(run, 2, broken))
    waiting = await api.send_pass(run, 4)
    found = await _operations(api, run)
    assert [(o["seq"], o["kind"], o["status"]) for o in found] == [
        (4, "forward_backward", "pending"),
        (2, "forward_backward", "failed"),
        (1, "forward_backward", "done"),
        (0, "create_model", "done"),
    ]
    assert "target_tokens" in found[1]["error"]
    done = found[2]
    assert done["submitted"] <= done["started"] <= done["ended"] and done["tokens"] == 4
    assert [o["seq"] for o in await _operations(api, run, status="failed")] == [2]
    assert [o["seq"] for o in await _operations(api, run, status="pending")] == [4]
    assert [o["seq"] for o in await _operations(api, run, before=2, limit=1)] == [1]
    queue = (await api.get(f"/training_runs/{run}/queue")).json()
    assert queue["waiting"] == 1 and queue["place"] is None
    assert "operation 3, which has not arrived" in queue["reason"]
    server_now = (await api.get("/console/server")).json()
    assert server_now["queues"] == [{"run": run, "is_running": False, **queue}]
    await api.send_pass(run, 3)
    await api.result(waiting)


async def test_posted_metrics_join_the_curves_under_their_own_steps(api: Api) -> None:
    run = await api.model()
    await _train(api, run, 1, 1)
    for step, reward in ((0, 0.25), (7, 0.5), (7, 0.75)):
        body = {"step": step, "metrics": {"reward": reward, "loss": 9.0}}
        assert (await api.post(f"/training_runs/{run}/metrics", body)).status_code == 204
    await api.post(f"/training_runs/{run}/metrics", {"step": 7, "metrics": {"kl": 0.5}})
    series = (await _metrics(api, run))["series"]
    assert (series["reward"]["x"], series["reward"]["mean"]) == ([0, 7], [0.25, 0.75])
    assert series["reward"]["axis"] == "step" and series["kl"]["x"] == [7]
    assert series["loss"]["axis"] == "seq" and series["posted/loss"]["mean"] == [9.0, 9.0]


async def test_posted_metrics_are_refused_with_the_limit_that_they_break(
    start_server: StartServer,
) -> None:
    server = await start_server(key_max_posted_bytes=40)
    api = server.api
    run = await api.model()

    async def refused(body: Any) -> str:
        response = await api.post(f"/training_runs/{run}/metrics", body)
        assert response.status_code == 400, response.text
        return str(response.json()["detail"])

    assert "step" in await refused({"step": -1, "metrics": {}})
    assert "limit is 256" in await refused({"step": 1, "metrics": {f"{n}": 1 for n in range(257)}})
    assert "without a comma" in await refused({"step": 1, "metrics": {"a,b": 1.0}})
    for step in range(3):
        body = {"step": step, "metrics": {"reward": 0.125}}
        assert (await api.post(f"/training_runs/{run}/metrics", body)).status_code == 204
    assert "key_max_posted_bytes" in await refused({"step": 4, "metrics": {"reward": 1.0}})


def test_a_policy_pass_tells_of_advantages_and_of_the_gap_to_the_sampler() -> None:
    inputs = {
        "target_tokens": [1, 2, 3, 4],
        "logprobs": [0.0, -1.0, -2.0, -1.0],
        "advantages": [0.0, 1.0, -1.0, 0.0],
    }
    item = Pass(
        adapter_id="a",
        data=[Datum(model_input=ModelInput.from_ints([9, 1, 2, 3]), loss_fn_inputs=inputs)],
        loss_fn="importance_sampling",
    )
    policy = TensorData(data=[-3.0, -1.5, -2.0, -1.25], dtype="float32", shape=[4])
    metrics = observed(
        item, ForwardBackwardOutput("ArrayRecord", [{"logprobs": policy}], {"loss:sum": 2.0})
    )
    assert metrics["advantage:mean"] == 0.0
    assert math.isclose(metrics["advantage:std"], math.sqrt(2 / 3))
    assert math.isclose(metrics["advantage_zero_fraction"], 1 / 3)
    assert math.isclose(metrics["logprob_gap:mean"], 0.25) and metrics["logprob_gap:max"] == 0.5
    assert metrics["length:max"] == 4 and metrics["sequences"] == 1


def test_numbers_that_are_not_finite_are_kept_as_words() -> None:
    metrics = {"a": math.nan, "b": -math.inf, "c": 1.5}
    assert json.loads(encode_metrics(metrics)) == {"a": "NaN", "b": "-Infinity", "c": 1.5}
