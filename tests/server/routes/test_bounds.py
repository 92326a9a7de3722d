"""What a request holds is bounded before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.in_process_server import PROTO, datum
from tinsmith.types import Datum, ForwardBackwardInput, ForwardBackwardRequest
from tinsmith.wire import proto

if TYPE_CHECKING:
    from tests.support.in_process_server import Api

SESSION = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}


@pytest.mark.parametrize("field", ["display_name", "sdk_version", "project_id"])
async def test_a_text_with_nul_is_refused_with_the_reason(api: Api, field: str) -> None:
    response = await api.post("/create_session", {**SESSION, field: "a\0b"})
    assert response.status_code == 400 and "NUL" in response.text
    # Six characters that look like the escape are a text like any other.
    assert (await api.post("/create_session", {**SESSION, field: r"a\u0000b"})).status_code == 200


async def test_nul_in_the_name_of_a_loss_input_is_refused_and_the_number_is_used_up(
    api: Api,
) -> None:
    model = await api.model()
    plain = datum(1, 2, 3)
    named = Datum(
        model_input=plain.model_input,
        loss_fn_inputs={**plain.loss_fn_inputs, "w\0": plain.loss_fn_inputs["weights"]},
    )
    inputs = ForwardBackwardInput([named], "cross_entropy")
    body = proto.encode_pass(ForwardBackwardRequest(inputs, model, 1))
    response = await api.post("/forward_backward", body, **{"content-type": PROTO})
    assert response.status_code == 400 and "NUL" in response.text
    await api.result(await api.send_pass(model, 2))


@pytest.mark.parametrize(
    "stop", [["x"] * 2000, list(range(2000)), ["x" * 5000]], ids=["many", "tokens", "long"]
)
async def test_stop_texts_are_bounded(api: Api, stop: list[Any]) -> None:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0}
    created = await api.ok("/create_sampling_session", {**body, "base_model": "tinsmith/fake"})
    sample = {
        "sampling_session_id": created["sampling_session_id"],
        "seq_id": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 1, "stop": stop},
    }
    response = await api.post("/asample", sample)
    assert response.status_code == 400 and "sampling_params.stop" in response.text
