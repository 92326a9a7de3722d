"""Images at the edge: refused in words before anything is recorded, counted where they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.test_images import RULES, png
from tests.support.in_process_server import datum
from tinsmith.engine.base import Capabilities
from tinsmith.engine.fake import FakeEngine
from tinsmith.types import Datum, EncodedTextChunk, ImageChunk, ModelInput

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer


class SeeingEngine(FakeEngine):
    """Says that its models read images; what becomes of these is not asked here."""

    async def capabilities(self) -> Capabilities:
        found = await super().capabilities()
        return replace(found, models=tuple(replace(m, images=RULES) for m in found.models))


def picture(**fields: Any) -> ImageChunk:
    return ImageChunk(data=png(640, 480), format="png", **fields)


def with_image(chunk: ImageChunk, num_tokens: int = 301) -> Datum:
    model_input = ModelInput(chunks=[EncodedTextChunk(tokens=[1]), chunk])
    return Datum(model_input, {"target_tokens": [2] * num_tokens, "weights": [1.0] * num_tokens})


async def test_a_model_without_eyes_refuses_an_image_and_goes_on_behind_it(api: Api) -> None:
    model = await api.model()
    refused = await api.post_pass(model, 1, [datum(1, 2), with_image(picture())])
    assert refused.status_code == 400
    assert refused.json()["detail"] == (
        "data[1].model_input.chunks[1]: a chunk of type 'image' cannot be used: this model reads "
        "text only"
    )
    await api.output(await api.send_pass(model, 2))


@pytest.mark.parametrize("path", ["/asample", "/sample_stream"])
async def test_a_sampler_without_eyes_refuses_an_image(api: Api, path: str) -> None:
    sampler = await new_sampler(api)
    prompt = ModelInput(chunks=[picture(expected_tokens=300)]).model_dump(mode="json")
    refused = await api.post(path, api.sample_body(sampler, prompt=prompt))
    assert refused.status_code == 400
    assert refused.json()["detail"] == (
        "prompt.chunks[0]: a chunk of type 'image' cannot be used: this model reads text only"
    )


async def test_a_wrong_number_of_tokens_is_refused_with_both_numbers(
    start_server: StartServer,
) -> None:
    api = (await start_server(engine=SeeingEngine)).api
    model = await api.model()
    refused = await api.post_pass(model, 1, [with_image(picture(expected_tokens=7))])
    assert (refused.status_code, refused.json()["detail"]) == (
        400,
        "data[0].model_input.chunks[1].expected_tokens: says 7, and this model makes 300 tokens of "
        "an image of 640 x 480 pixels",
    )
    sampler = await new_sampler(api)
    prompt = ModelInput(chunks=[picture(expected_tokens=7)]).model_dump(mode="json")
    refused = await api.post("/asample", api.sample_body(sampler, prompt=prompt))
    assert refused.status_code == 400
    assert "prompt.chunks[0].expected_tokens: says 7, and" in refused.json()["detail"]


async def test_images_count_as_the_model_counts_also_where_their_sender_does_not(
    start_server: StartServer,
) -> None:
    """Turns of a device are given by tokens."""
    server = await start_server(engine=SeeingEngine)
    model = await server.api.model()
    request_id = await server.api.send_pass(model, 1, with_image(picture()))
    operation = await server.service.store.log.get(request_id)
    assert operation is not None and operation.num_tokens == 301


async def new_sampler(api: Api) -> str:
    body = {
        "session_id": await api.session(),
        "sampling_session_seq_id": 0,
        "base_model": "tinsmith/fake",
    }
    return str((await api.ok("/create_sampling_session", body))["sampling_session_id"])
