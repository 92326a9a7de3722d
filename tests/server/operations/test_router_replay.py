"""A pass goes to the experts that the sampler of its tokens went to, also when it is run again.

The engine is the fake one, which reports made-up experts for the tokens that it samples and notes
the passes that it is given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tinsmith.engine.base import ExpertsChosen, SampleJob
from tinsmith.engine.fake import FakeEngine
from tinsmith.server.operations.sampled_experts import named_sequences
from tinsmith.server.sampling.kept_experts import KeptExperts
from tinsmith.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.support.in_process_server import Api, StartServer, TestServer
    from tinsmith.engine.base import EngineSampleEvent, FinishedPass, Pass

PROMPT = [1, 2, 3]
NOTHING = 255


def experts(tokens: Sequence[int]) -> np.ndarray:
    """(T, 2, 2): made of the tokens and their places."""
    places = np.arange(len(tokens))[:, None, None]
    spread = np.arange(4).reshape(2, 2)
    return ((np.array(tokens)[:, None, None] + 7 * places + spread) % 200).astype(np.uint8)


class RoutedEngine(FakeEngine):
    """Has experts, as far as anybody can see from outside."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.passes: list[Pass] = []

    async def sample(self, job: SampleJob) -> AsyncIterator[EngineSampleEvent]:
        async for event in super().sample(job):
            if isinstance(event, SampleResponse) and job.reports_experts:
                prompt = job.prompt.to_ints()
                rows = [experts(prompt + sequence.tokens) for sequence in event.sequences]
                own = tuple(each[len(prompt) : -1] for each in rows)
                yield ExpertsChosen(rows[0][: len(prompt)], own)
            yield event

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        self.passes += passes
        async for finished in super().run_passes(passes):
            yield finished


@pytest.fixture
async def server(start_server: StartServer) -> TestServer:
    return await start_server(engine=RoutedEngine, router_replay=True)


async def sampled(api: Api, **fields: Any) -> SampleResponse:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0}
    body |= {"base_model": "tinsmith/fake"}
    created = await api.ok("/create_sampling_session", body)
    return await api.sample(created["sampling_session_id"], **fields)


def datum_of(tokens: Sequence[int], sequence_id: str, num_prompt: int = 3) -> Datum:
    """`tokens` without the last, said to be a prompt of three tokens and what followed."""
    num_sampled = len(tokens) - 1 - num_prompt
    datum = Datum(ModelInput.from_ints(list(tokens[:-1])), {"target_tokens": list(tokens[1:])})
    spans = [
        PromptProvenanceSpan(sequence_id=sequence_id, length=num_prompt),
        SampledProvenanceSpan(sequence_id=sequence_id, length=num_sampled),
    ]
    return datum.with_provenance(spans, spans)


def passes_of(server: TestServer) -> list[Pass]:
    engine = server.engines[-1]
    assert isinstance(engine, RoutedEngine)
    return engine.passes


async def test_tokens_go_to_the_experts_that_the_sampler_chose(server: TestServer) -> None:
    """Those of each sample to its own; a datum that names nothing is left to the routers."""
    api = server.api
    response = await sampled(api, num_samples=2)
    wholes = [PROMPT + sequence.tokens for sequence in response.sequences]
    data = [
        datum_of(whole, sequence.sequence_id)
        for whole, sequence in zip(wholes, response.sequences, strict=True)
    ]
    plain = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    model = await api.model()
    for seq_id, forward_only in ((1, False), (2, True)):
        await api.output(
            await api.send_pass(model, seq_id, *data, plain, forward_only=forward_only)
        )
        first, second, none = passes_of(server)[-1].choices
        assert first is not None and (first == experts(wholes[0][:-1])).all()
        assert second is not None and (second == experts(wholes[1][:-1])).all()
        assert none is None


async def test_a_pass_that_is_run_again_goes_to_the_same_experts_long_after(
    start_server: StartServer,
) -> None:
    """After the death of an engine, and of the server, which has forgotten what samplers chose and
    is told not to replay any longer."""
    server = await start_server(engine=RoutedEngine, router_replay=True)
    api = server.api
    (sequence,) = (await sampled(api)).sequences
    datum = datum_of(PROMPT + sequence.tokens, sequence.sequence_id)
    model = await api.model()
    await api.output(await api.send_pass(model, 1, datum))
    (before,) = passes_of(server)[0].choices
    assert before is not None
    server.kill_engine()
    loss = await api.loss(model, 2)
    assert [each.is_replay for each in passes_of(server)] == [True, False]
    assert (passes_of(server)[0].choices[0] == before).all()
    await server.stop()
    server = await start_server(engine=RoutedEngine)
    assert await server.api.loss(model, 3) == loss
    replayed = passes_of(server)[0]
    assert replayed.is_replay and (replayed.choices[0] == before).all()
    assert replayed.data[0].model_input == datum.model_input


async def test_a_request_sent_again_finds_the_first_though_its_experts_are_gone(
    start_server: StartServer,
) -> None:
    server = await start_server(engine=RoutedEngine, router_replay=True)
    (sequence,) = (await sampled(server.api)).sequences
    datum = datum_of(PROMPT + sequence.tokens, sequence.sequence_id)
    model = await server.api.model()
    first = await server.api.send_pass(model, 1, datum)
    await server.stop()
    server = await start_server(engine=RoutedEngine, router_replay=True)
    assert await server.api.send_pass(model, 1, datum) == first


async def test_another_owners_sequence_is_never_found(server: TestServer) -> None:
    (sequence,) = (await sampled(server.api)).sequences
    datum = datum_of(PROMPT + sequence.tokens, sequence.sequence_id)
    other = await server.other_user()
    await other.output(await other.send_pass(await other.model(), 1, datum))
    assert passes_of(server)[-1].choices == ()
    await server.api.output(await server.api.send_pass(await server.api.model(), 1, datum))
    assert len(passes_of(server)[-1].choices) == 1


async def test_a_sequence_of_another_base_model_is_not_followed() -> None:
    kept = KeptExperts(10_000, 60.0)
    job = SampleJob(
        job_id="a",
        base_model="m",
        weights_id=None,
        prompt=ModelInput.from_ints(PROMPT),
        params=SamplingParams(),
    )
    sampled_tokens = SampledSequence(
        stop_reason="length", sequence_id="a:0", tokens_np=np.array([4, 5], np.int32)
    )
    chosen = ExpertsChosen(experts(PROMPT), (experts([4]),))
    kept.keep("one", job, SampleResponse(sequences=[sampled_tokens]), chosen)
    inputs = ForwardBackwardInput([datum_of([*PROMPT, 4, 5], "a:0")], "cross_entropy")
    request = ForwardBackwardRequest(inputs, "model")
    assert set(named_sequences(request, kept, "one", "m")) == {"a:0"}
    assert named_sequences(request, kept, "one", "another") == {}


async def test_without_the_setting_nothing_is_asked_or_kept(start_server: StartServer) -> None:
    server = await start_server(engine=RoutedEngine)
    (sequence,) = (await sampled(server.api)).sequences
    datum = datum_of(PROMPT + sequence.tokens, sequence.sequence_id)
    await server.api.output(await server.api.send_pass(await server.api.model(), 1, datum))
    assert passes_of(server)[-1].choices == ()


async def test_what_was_kept_too_long_is_gone(start_server: StartServer) -> None:
    server = await start_server(
        engine=RoutedEngine, router_replay=True, router_replay_seconds=0.001
    )
    (sequence,) = (await sampled(server.api)).sequences
    datum = datum_of(PROMPT + sequence.tokens, sequence.sequence_id)
    await server.api.output(await server.api.send_pass(await server.api.model(), 1, datum))
    assert passes_of(server)[-1].choices == ()


@pytest.mark.parametrize(
    "change", ["a token", "a token before", "the place", "the offset", "the id"]
)
async def test_tokens_that_the_sampler_has_not_read_so_are_left_to_the_routers(
    server: TestServer, change: str
) -> None:
    (sequence,) = (await sampled(server.api, sampling_params={"max_tokens": 6})).sequences
    tokens = PROMPT + sequence.tokens
    expected = experts(tokens[:-1])
    sequence_id, num_prompt = sequence.sequence_id, 3
    assert sequence_id is not None
    if change == "a token":
        tokens[4] += 1
        expected[3:] = NOTHING
    elif change == "a token before":
        tokens[1] += 1
        expected[:] = NOTHING
    elif change == "the place":
        tokens, num_prompt = tokens[1:], 2
        expected = np.full_like(expected[1:], NOTHING)
    elif change == "the offset":
        expected[:3] = NOTHING
    else:
        sequence_id = sequence_id.rpartition(":")[0] + ":1"
        expected[:] = NOTHING
    datum = datum_of(tokens, sequence_id, num_prompt)
    if change == "the offset":
        first, *others = datum.model_input_spans or []
        spans = [replace(first, offset=1), *others]
        datum = datum.with_provenance(spans, spans)
    await server.api.output(await server.api.send_pass(await server.api.model(), 1, datum))
    choices = passes_of(server)[-1].choices
    if (expected == NOTHING).all():
        assert choices == ()
    else:
        assert choices[0] is not None and (choices[0] == expected).all()


async def test_the_last_token_of_a_sample_is_left_to_the_router_where_a_datum_goes_on(
    server: TestServer,
) -> None:
    """As in a conversation, whose next message follows behind it."""
    (sequence,) = (await sampled(server.api)).sequences
    tokens = [*PROMPT, *sequence.tokens, 9]
    datum = datum_of(tokens, str(sequence.sequence_id))
    await server.api.output(await server.api.send_pass(await server.api.model(), 1, datum))
    (choices,) = passes_of(server)[-1].choices
    assert choices is not None and (choices[:-1] == experts(tokens[:-2])).all()
    assert (choices[-1] == NOTHING).all()


async def test_no_client_can_name_experts_itself(server: TestServer) -> None:
    model = await server.api.model()
    content_type = {"content-type": "application/x-tinsmith-pass"}
    body = {"model_id": model, "seq_id": 1, "body": 0, "choices": []}
    response = await server.api.post("/forward_backward", body, **content_type)
    assert response.status_code == 400 and "expected application/x-protobuf" in response.text
