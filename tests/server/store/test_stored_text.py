"""Text and numbers that a database cannot hold are refused with the field's name, or stored whole.

NUL is what Postgres refuses and SQLite keeps; numbers beyond 64 bits neither takes. Each request
whose text ends up in the store is sent with each of them, on both databases.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from tinsmith.types import Datum, ForwardBackwardInput, ForwardBackwardRequest, ModelInput
from tinsmith.wire import proto

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer

Send = Callable[["Api", str, str, Any], Awaitable[httpx.Response]]


def _session(**fields: Any) -> Send:
    """`fields` with the odd value in place of `...`."""
    return lambda api, session, model, odd: api.post(
        "/create_session",
        {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", **_filled(fields, odd)},
    )


def _post(path: str, /, **fields: Any) -> Send:
    return lambda api, session, model, odd: api.post(
        path.format(session=session), _filled(fields, odd, session, model)
    )


def _filled(value: Any, odd: Any, session: str = "", model: str = "") -> Any:
    if value is ...:
        return odd
    if isinstance(value, dict):
        return {
            odd if key == "ODD" else key: _filled(each, odd, session, model)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_filled(each, odd, session, model) for each in value]
    return {"SESSION": session, "MODEL": model}.get(value, value) if value else value


LORA = {"rank": 4}
GRAPH = {"nodes": [], "outputs": []}

TEXTS: dict[str, Send] = {
    "session.tags": _session(tags=[...]),
    "session.sdk_version": _session(sdk_version=...),
    "session.project_id": _session(project_id=...),
    "session.display_name": _session(display_name=...),
    "session.user_metadata": _session(user_metadata={"k": ...}),
    "session.user_metadata key": _session(user_metadata={"ODD": 1}),
    "session finish": _post("/sessions/{session}/finish", reason={"type": "error"}, detail=...),
    "model.user_metadata": _post(
        "/create_model",
        session_id="SESSION",
        model_seq_id=7,
        base_model="tinsmith/fake",
        lora_config=LORA,
        user_metadata={"k": ...},
    ),
    "model.base_model": _post(
        "/create_model", session_id="SESSION", model_seq_id=8, base_model=..., lora_config=LORA
    ),
    "save.user_metadata": _post(
        "/save_weights", model_id="MODEL", seq_id=1, path="a", user_metadata={"k": ...}
    ),
    "save.path": _post("/save_weights", model_id="MODEL", seq_id=1, path=...),
    "load.path": _post("/load_weights", model_id="MODEL", seq_id=1, path=..., optimizer=False),
    "unknown field": _post("/optim_step", model_id="MODEL", seq_id=1, adam_params={"ODD": 1}),
    "model_id": _post("/optim_step", model_id=..., seq_id=1, adam_params={}),
    "sampler.model_path": _post(
        "/create_sampling_session",
        session_id="SESSION",
        sampling_session_seq_id=1,
        model_path=...,
    ),
    "loss.name": _post(
        "/create_custom_loss",
        session_id="SESSION",
        custom_loss_seq_id=1,
        name=...,
        inputs=[{"name": "logprobs"}],
        graph=GRAPH,
    ),
    "request_id": _post("/retrieve_future", request_id=...),
    "copy.project": _post("/copy_weights", source_path=..., destination_project_id=...),
}
NUMBERS: dict[str, Send] = {
    "model_seq_id": _post(
        "/create_model",
        session_id="SESSION",
        model_seq_id=...,
        base_model="tinsmith/fake",
        lora_config=LORA,
    ),
    "sampling_session_seq_id": _post(
        "/create_sampling_session",
        session_id="SESSION",
        sampling_session_seq_id=...,
        base_model="tinsmith/fake",
    ),
    "seq_id": _post("/optim_step", model_id="MODEL", seq_id=..., adam_params={}),
    "ttl": _post("/save_weights", model_id="MODEL", seq_id=1, path="a", ttl_seconds=...),
}
ODD_TEXTS = ["a\0b", "\0", "x" * 100_000, "\uffff\U0010ffff", "é" * 5000]
ODD_NUMBERS = [2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]


async def _is_handled(api: Api, response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code == 200 and "request_id" in response.json():
        ended = await api.retrieve(response.json()["request_id"])
        assert ended.status_code < 500, ended.text


@pytest.mark.parametrize("cases", ["texts", "numbers"])
async def test_every_odd_value_is_refused_or_stored(
    start_server: StartServer, database_url: str, cases: str
) -> None:
    server = await start_server(database_url=database_url)
    api = server.api
    sends, odds = (TEXTS, ODD_TEXTS) if cases == "texts" else (NUMBERS, ODD_NUMBERS)
    troubles = []
    for name, send in sends.items():
        for odd in odds:
            session = await api.session()
            model = await api.create_model(session)
            try:
                await _is_handled(api, await send(api, session, model, odd))
            except AssertionError as error:
                troubles.append(f"{name} {odd!r:.30}: {str(error)[:100]}")
    assert troubles == []


async def test_nul_in_stored_text_is_refused_with_the_name_of_the_field(api: Api) -> None:
    body = {"tags": ["fine", "a\0b"], "user_metadata": {}, "sdk_version": "0.36.0"}
    response = await api.post("/create_session", body)
    assert response.status_code == 400
    assert "tags[1]" in response.json()["detail"] and "NUL" in response.json()["detail"]
    body = {"tags": [], "user_metadata": {"a": {"b\0": 1}}, "sdk_version": "0.36.0"}
    response = await api.post("/create_session", body)
    assert response.status_code == 400 and "user_metadata.a" in response.json()["detail"]


async def test_a_text_that_only_spells_an_escape_is_no_nul(api: Api) -> None:
    session = await api.session(display_name=r"\u0000")
    assert session


@pytest.mark.parametrize("name", ["a\0b", "target_tokens\0"])
async def test_a_loss_input_with_nul_in_its_name_ends_and_uses_up_its_number(
    start_server: StartServer, database_url: str, name: str
) -> None:
    server = await start_server(database_url=database_url)
    api = server.api
    model = await api.model()
    odd = Datum(
        model_input=ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [1, 2], name: np.ones(2, np.float32)},
    )
    inputs = ForwardBackwardInput([odd], "cross_entropy")
    body = proto.encode_pass(ForwardBackwardRequest(inputs, model, 1))
    response = await api.post(
        "/forward_backward", body, **{"content-type": "application/x-protobuf"}
    )
    if response.status_code == 200:
        _, category = await api.failure(response.json()["request_id"])
        assert category == "user"
    else:
        assert response.status_code == 400
    assert await api.loss(model, 2) > 0


@pytest.mark.parametrize(
    "path",
    [
        "/sessions/%00",
        "/training_runs/a%00b",
        "/training_runs/%00/checkpoints",
        "/sessions/%ED%A0%80",
    ],
)
async def test_an_address_with_nul_is_not_found(
    start_server: StartServer, database_url: str, path: str
) -> None:
    server = await start_server(database_url=database_url)
    response = await server.api.get(path)
    assert response.status_code in (400, 404), response.text
