"""Training requests in the forms that clients of every release send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.in_process_server import MODEL

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer


async def test_old_clients_send_passes_as_json_and_forward_by_its_own_path(api: Api) -> None:
    model = await api.model()
    inputs = {
        "data": [
            {
                "model_input": {"chunks": [{"tokens": [1, 2]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
                    "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
                },
            }
        ],
        "loss_fn": "cross_entropy",
        "loss_fn_config": None,
    }
    body = {"forward_input": inputs, "model_id": model, "seq_id": 1}
    before = await api.output((await api.ok("/forward", body))["request_id"])
    body = {"forward_backward_input": inputs, "model_id": model, "seq_id": 2}
    passed = await api.output((await api.ok("/forward_backward", body))["request_id"])
    assert passed.metrics == before.metrics
    await api.result(await api.send_step(model, 3))
    body = {"forward_input": inputs, "model_id": model, "seq_id": 4}
    after = await api.output((await api.ok("/forward", body))["request_id"])
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]


async def test_training_all_parameters_is_refused_in_plain_words(api: Api) -> None:
    body = {"session_id": await api.session(), "model_seq_id": 0, "base_model": MODEL}
    response = await api.post("/create_model", body)
    assert response.status_code == 400
    assert response.json()["detail"] == (
        "lora_config: without it all parameters would be trained, and this server trains LoRA "
        'adapters only; give it a rank, as in {"rank": 32}'
    )


async def test_a_custom_loss_is_uploaded_once_and_kept(start_server: StartServer) -> None:
    server = await start_server(custom_loss_server_side=True)
    api = server.api
    session = await api.session()
    upload = {
        "session_id": session,
        "custom_loss_seq_id": 0,
        "name": "n",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": [{"op": "output", "name": "o", "target": "output"}]},
    }
    promises = [await api.ok("/create_custom_loss", upload) for _ in range(2)]
    assert promises[0] == promises[1]
    result = await api.result(promises[0]["request_id"])
    assert result["loss_id"] == f"{session}:loss:0"
    assert await server.service.store.losses.get(result["loss_id"]) is not None
