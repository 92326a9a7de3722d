"""The real OpenAI client against the server in this process: forms, penalties, responses."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support import byte_tokenizer
from tests.support.in_process_server import MODEL, StartServer, TestServer
from tinsmith.engine.base import EngineSampleEvent, Failure, FinishedPass, Pass, SampleJob
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig
from tinsmith.errors import EngineError

openai = pytest.importorskip("openai", reason="the openai package is not installed")
pytest.importorskip("llguidance", reason="grammars need llguidance")

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "seed": 1}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
HOSTILE = {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrstuvwx"]}


class SpeakingEngine(FakeEngine):
    """Whose model has a tokenizer, of bytes."""

    folder: Path

    def __init__(self, config: FakeEngineConfig) -> None:
        (model,) = config.models
        model = dataclasses.replace(model, tokenizer_folder=self.folder)
        super().__init__(dataclasses.replace(config, models=(model,)))


class ListeningEngine(SpeakingEngine):
    """Notes for whom it was asked to work."""

    scopes: list[str]

    def sample(self, job: SampleJob) -> AsyncIterator[EngineSampleEvent]:
        self.scopes.append(job.scope)
        return super().sample(job)

    def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        self.scopes.extend(each.scope for each in passes)
        return super().run_passes(passes)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer.save(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
async def server(
    start_server: StartServer, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> TestServer:
    monkeypatch.setattr(SpeakingEngine, "folder", tokenizer_folder, raising=False)
    return await start_server(engine=SpeakingEngine)


@pytest.fixture
async def client(server: TestServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url="http://server/oai/api/v1",
        api_key=server.api.key,
        max_retries=0,
        http_client=httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app)),
    ) as client:
        yield client


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def test_whatever_is_asked_the_engine_keeps_it_apart_by_owner(
    start_server: StartServer, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its scope: what is remembered of a prompt is found by jobs of the same one only."""
    monkeypatch.setattr(ListeningEngine, "folder", tokenizer_folder, raising=False)
    monkeypatch.setattr(ListeningEngine, "scopes", [], raising=False)
    server = await start_server(engine=ListeningEngine)
    chat, few = {"model": MODEL, "messages": ASK["messages"]}, {"max_tokens": 2}
    for api, owner in ((server.api, "owner"), (await server.other_user(), "somebody-else")):
        session = {"session_id": await api.session(), "sampling_session_seq_id": 0}
        made = await api.ok("/create_sampling_session", {**session, "base_model": MODEL})
        sample = api.sample_body(str(made["sampling_session_id"]))
        promise = await api.ok("/asample", sample)
        await api.result(promise["request_id"])
        await api.result(await api.send_pass(await api.model(), 1))
        requests: dict[str, dict[str, Any]] = {
            "/api/v1/sample_stream": sample,
            "/oai/api/v1/chat/completions": chat | few,
            "/oai/api/v1/completions": {"model": MODEL, "prompt": ["a", "b"]} | few,
            "/oai/api/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 2},
            "/oai/api/inference/v1/generate": {
                "model": MODEL,
                "token_ids": [3, 4],
                "sampling_params": few,
            },
            "/anthropic/v1/messages": chat | few,
        }
        for path, body in requests.items():
            answer = await api.http.post(path, json=body, headers=api.headers)
            assert answer.status_code == 200, (path, answer.text)
        assert len(ListeningEngine.scopes) == 9 and set(ListeningEngine.scopes) == {owner}
        ListeningEngine.scopes.clear()


async def test_a_chat_answer_has_the_form_that_was_asked_for(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASK, response_format=named(SCHEMA), n=4)
    texts = [choice.message.content for choice in answer.choices]
    for choice, text in zip(answer.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
    stream = await client.chat.completions.create(**ASK, response_format=named(SCHEMA), stream=True)
    pieces = [c.choices[0].delta.content or "" async for c in stream]
    assert "".join(pieces) == texts[0]
    for said in ({"guided_regex": "[ab]{3}"}, {"structured_outputs": {"choice": ["aba", "bab"]}}):
        short = await client.chat.completions.create(**ASK, extra_body=said)
        assert set(short.choices[0].message.content) <= {"a", "b"}
        assert len(short.choices[0].message.content) == 3
    parsed = await client.completions.create(
        model=MODEL, prompt="x", max_tokens=400, extra_body={"guided_json": SCHEMA}
    )
    jsonschema.validate(json.loads(parsed.choices[0].text), SCHEMA)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "nothing"}, "response_format.json_schema.schema: cannot be compiled"),
        (HOSTILE, "response_format.json_schema.schema: takes more than 0.5 s to compile"),
        ({"enum": ["x" * 70_000]}, "response_format.json_schema.schema: at most 65536 bytes"),
    ],
    ids=["wrong", "hostile", "large"],
)
async def test_a_schema_that_cannot_be_compiled_is_a_400_that_names_it(
    client: openai.AsyncOpenAI, schema: dict[str, Any], problem: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**ASK, response_format=named(schema))
    assert problem in caught.value.message


async def test_penalties_biases_and_min_p_reach_the_engine(client: openai.AsyncOpenAI) -> None:
    greedy = {"model": MODEL, "prompt": "x", "max_tokens": 20, "temperature": 0}
    biased = await client.completions.create(**greedy, logit_bias={"66": 100}, logprobs=0)
    assert set(biased.choices[0].text) == {biased.choices[0].text[0]}
    assert biased.choices[0].logprobs.token_logprobs[0] < -0.1, "not the model's own"
    unlike = {"repetition_penalty": 100.0, "return_token_ids": True}
    free = await client.completions.create(
        **greedy, frequency_penalty=2, presence_penalty=2, extra_body=unlike
    )
    tokens = free.choices[0].to_dict()["token_ids"]
    assert len(set(tokens)) == len(tokens) == 20, "a token came twice"
    sure = {"model": MODEL, "prompt": "x", "max_tokens": 1, "temperature": 2, "seed": 5}
    likeliest = await client.completions.create(**sure, extra_body={"min_p": 1.0})
    plain = await client.completions.create(**{**greedy, "max_tokens": 1})
    assert likeliest.choices[0].text == plain.choices[0].text
    with pytest.raises(openai.BadRequestError, match="presence_penalty: must be between -2 and 2"):
        await client.completions.create(**greedy, presence_penalty=3)


async def test_responses_are_answered_whole_and_as_events(client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": "Hello", "instructions": "Be brief."}
    ask |= {"max_output_tokens": 30, "store": False, "extra_body": {"seed": 3}}
    whole = await client.responses.create(**ask)
    assert whole.status in ("completed", "incomplete")
    assert whole.usage.output_tokens <= 30
    prompt = "system: Be brief.\nuser: Hello\nassistant: "
    assert whole.usage.input_tokens == len(prompt)
    events = [event async for event in await client.responses.create(**ask, stream=True)]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final = events[-1].response
    assert deltas == final.output_text == whole.output_text
    assert (final.status, final.usage) == (whole.status, whole.usage)
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    async with client.responses.stream(model=MODEL, input="Hello", text=form) as stream:
        jsonschema.validate(json.loads((await stream.get_final_response()).output_text), SCHEMA)


async def test_a_response_follows_the_conversation_and_the_form(
    client: openai.AsyncOpenAI,
) -> None:
    said = [
        {"role": "developer", "content": "Be."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yo", "annotations": []}],
        },
        {"role": "user", "content": "Go"},
    ]
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    answer = await client.responses.create(
        model=MODEL, input=said, text={"format": form}, extra_body={"seed": 1}
    )
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    prompt = "system: Be.\nuser: Hi\nassistant: Yo\x00\nuser: Go\nassistant: "
    assert answer.usage.input_tokens == len(prompt)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: this server keeps no"),
        ({"store": True}, "store: this server keeps no responses; send false"),
        ({"input": []}, "input: expected a text or a list of items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: this server keeps no"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]: only text parts",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: only functions"),
        ({"truncation": "auto"}, "truncation: not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary: not supported"),
        ({"reasoning": {"effort": "high"}}, "has no option for reasoning"),
        ({"extra_body": {"nonsense": 1}}, "nonsense: not supported"),
    ],
)
async def test_what_a_response_cannot_have_is_refused_by_name(
    client: openai.AsyncOpenAI, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**{"model": MODEL, "input": "x", **fields})
    assert problem in caught.value.message


async def generate(server: TestServer, **fields: Any) -> httpx.Response:
    return await server.api.http.post(
        "/oai/api/inference/v1/generate",
        json={"model": MODEL, "token_ids": [3, 4, 5], **fields},
        headers=server.api.headers,
    )


async def test_generate_takes_tokens_and_gives_tokens(server: TestServer) -> None:
    """The request that `verifiers` 0.4 sends with `renderers` 0.1.12, and what it reads of it."""
    params = {"temperature": 1.0, "max_tokens": 20, "seed": 1, "n": 2}
    params |= {"stop_token_ids": [7], "logprobs": 1, "skip_special_tokens": False}
    answer = await generate(server, sampling_params=params, cache_salt="step-1")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["prompt_token_ids"] == [3, 4, 5]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        tokens, content = choice["token_ids"], choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in tokens]
        assert all(entry["logprob"] <= 0 for entry in content)
        assert all(len(entry["top_logprobs"]) == 1 for entry in content)
        assert choice["finish_reason"] == ("stop" if tokens[-1] in (0, 7) else "length")
        assert len(tokens) == 20 or choice["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == 3 + sum(len(c["token_ids"]) for c in body["choices"])
    again = await generate(server, sampling_params=params)
    assert again.json()["choices"] == body["choices"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"token_ids": "text"}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"ignore_eos": True}}, "sampling_params.ignore_eos: not supported"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs: must be between"),
        ({"sampling_params": {"stop": ["a"], "stop_token_ids": [1]}}, "cannot both stop"),
        ({"sampling_params": {}, "stream": True}, "stream: not supported"),
    ],
)
async def test_what_generate_cannot_do_is_refused_by_name(
    server: TestServer, fields: dict[str, Any], problem: str
) -> None:
    answer = await generate(server, **fields)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


async def test_chat_and_completions_give_tokens_beside_text(client: openai.AsyncOpenAI) -> None:
    tokens = {"return_token_ids": True}
    chat = (await client.chat.completions.create(**ASK, max_tokens=9, extra_body=tokens)).to_dict()
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert len(chat["choices"][0]["token_ids"]) == chat["usage"]["completion_tokens"]
    plain = await client.completions.create(
        model=MODEL, prompt=[[3, 4], [5]], max_tokens=5, extra_body=tokens
    )
    choices = plain.to_dict()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[3, 4], [5]]
    with pytest.raises(openai.BadRequestError, match="return_token_ids: cannot be streamed"):
        await client.completions.create(model=MODEL, prompt="x", stream=True, extra_body=tokens)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "the model's context holds"),
    ],
)
async def test_a_stream_that_cannot_be_is_refused_before_it_begins(
    client: openai.AsyncOpenAI, server: TestServer, asked: dict[str, Any], reason: str
) -> None:
    """Programs go by the status; one that has read it as 200 takes what follows for an answer."""
    with pytest.raises(openai.BadRequestError, match=reason):
        await client.chat.completions.create(**(ASK | asked), stream=True)
    if "presence_penalty" not in asked:
        body = {**ASK, "max_tokens": 4, **asked, "stream": True}
        body["max_tokens"] = body.pop("max_completion_tokens", 4)
        del body["seed"]
        answer = await server.api.http.post(
            "/anthropic/v1/messages", json=body, headers=server.api.headers
        )
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


async def test_a_stream_has_the_offsets_and_the_bytes_that_a_whole_answer_has(
    client: openai.AsyncOpenAI,
) -> None:
    plain = {"model": MODEL, "prompt": "x", "max_tokens": 12, "seed": 1, "logprobs": 1}
    whole = (await client.completions.create(**plain)).choices[0].logprobs
    usage = {"include_usage": True}
    chunks = [c async for c in await client.completions.create(**plain, stream=True)]
    parts = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset
    assert len(set(whole.text_offset)) > 1
    chat = await client.chat.completions.create(**ASK, logprobs=True, max_tokens=40)
    tokens = chat.choices[0].logprobs.content
    data = b"".join(bytes(token.bytes) for token in tokens)
    assert data.decode(errors="replace") == chat.choices[0].message.content
    assert any(len(token.bytes) == 1 and token.bytes[0] >= 0x80 for token in tokens)
    stream = await client.chat.completions.create(
        **ASK, max_tokens=4, stream=True, stream_options=usage
    )
    *others, last = [chunk.to_dict() async for chunk in stream]
    assert last["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in others)


async def test_models_say_how_much_they_read(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert model.to_dict()["max_model_len"] == 4096


async def test_the_requests_of_open_webui_are_answered(server: TestServer) -> None:
    """What the backend of 0.12.4 sends, by its source: the list of models, a streamed chat with all
    that its settings can add, some of it as custom parameters, and titles without a stream."""
    headers = {"authorization": f"Bearer {server.api.key}"}
    models = await server.api.http.get("/oai/api/v1/models", headers=headers)
    assert [model["id"] for model in models.json()["data"]] == [MODEL]
    chat = {
        "stream": True,
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": "Hi.", "reasoning_content": None},
            {"role": "user", "content": "Go on"},
        ],
        "stream_options": {"include_usage": True},
        "max_tokens": 12,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"70": -1},
        "seed": 0,
        "stop": ["<|end|>"],
        "user": {"name": "A", "id": "1", "email": "a@b.c", "role": "admin"},
    }
    answer = await server.api.http.post("/oai/api/v1/chat/completions", json=chat, headers=headers)
    assert answer.status_code == 200, answer.text
    *events, usage, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] <= 12
    assert json.loads(events[-1].removeprefix("data: "))["choices"][0]["finish_reason"]
    title = {"model": MODEL, "messages": chat["messages"], "stream": False}
    title |= {"max_completion_tokens": 20, "metadata": {"task": "title_generation"}}
    answered = await server.api.http.post(
        "/oai/api/v1/chat/completions", json=title, headers=headers
    )
    assert answered.status_code == 200, answered.text
    assert answered.json()["usage"]["completion_tokens"] <= 20


HELLO = [{"role": "user", "content": "Hello"}]


TEXTS = [
    ("/oai/api/v1/completions", {"prompt": "Hello", "max_tokens": 2}),
    ("/oai/api/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
    ("/oai/api/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
    ("/anthropic/v1/messages", {"messages": HELLO, "max_tokens": 2}),
    ("/anthropic/v1/messages/count_tokens", {"messages": HELLO}),
]


@pytest.mark.parametrize(("path", "body"), TEXTS)
async def test_a_request_for_text_is_read_in_its_owners_turn(
    server: TestServer, path: str, body: dict[str, Any]
) -> None:
    """One may have a hundred thousand messages."""
    release = threading.Event()
    run = server.service.texts.run
    others = [asyncio.create_task(run(f"other {n // 2}", release.wait, 10)) for n in range(4)]
    asked = {"model": MODEL, **body, "temperature": "warm"}
    sent = asyncio.create_task(server.api.http.post(path, json=asked, headers=server.api.headers))
    try:
        await asyncio.wait([sent], timeout=0.3)
        assert not sent.done(), "read on the event loop"
    finally:
        release.set()
    await asyncio.gather(*others)
    assert (await sent).status_code == 400


@pytest.mark.parametrize(("path", "body"), TEXTS)
async def test_a_request_for_text_does_not_wait_for_anothers_large_body(
    server: TestServer, path: str, body: dict[str, Any]
) -> None:
    """Large bodies have one thread, and decoding one takes up to a second."""
    release = threading.Event()
    other = asyncio.create_task(server.service.workers.run("other", release.wait, 60))
    try:
        async with asyncio.timeout(30):
            asked = {"model": MODEL, **body}
            answer = await server.api.http.post(path, json=asked, headers=server.api.headers)
        assert answer.status_code == 200 and not other.done()
    finally:
        release.set()
    await other


async def test_an_echo_of_very_many_log_probabilities_is_refused_with_the_limit(
    client: openai.AsyncOpenAI,
) -> None:
    """Each choice repeats those of its prompt: a small request took gigabytes."""
    said = {"model": MODEL, "prompt": "ab" * 1000, "max_tokens": 1, "echo": True}
    whole = await client.completions.create(**said, logprobs=20, n=2)
    assert len(whole.choices[1].logprobs.tokens) == 2001
    with pytest.raises(openai.BadRequestError, match=r"echo: .* 5376000 .* at most 2000000"):
        await client.completions.create(**said, logprobs=20, n=128)
    assert await client.completions.create(**said, n=128)


async def test_the_jobs_of_many_prompts_begin_a_few_at_a_time(server: TestServer) -> None:
    begun, most = 0, 0
    started = server.service.sampling.stream

    def stream(*given: Any) -> Any:
        nonlocal begun
        begun += 1
        return started(*given)

    async def others() -> None:
        nonlocal begun, most
        while True:
            most, begun = max(most, begun), 0
            await asyncio.sleep(0)

    server.service.sampling.stream = stream  # type: ignore[method-assign]
    watching = asyncio.create_task(others())
    body = {"model": MODEL, "prompt": ["ab"] * 300, "max_tokens": 1}
    path = "/oai/api/v1/completions"
    response = await server.api.http.post(path, json=body, headers=server.api.headers)
    watching.cancel()
    assert response.status_code == 200 and len(response.json()["choices"]) == 300
    assert 0 < most <= 32


class SilentEngine(SpeakingEngine):
    """Whose samples never end, and that hears of those given up."""

    num_begun = 0
    num_given_up = 0

    async def sample(self, job: SampleJob) -> AsyncIterator[EngineSampleEvent]:
        type(self).num_begun += 1
        await asyncio.Event().wait()
        yield Failure("never", "server")

    async def cancel(self, job_id: str) -> None:
        type(self).num_given_up += 1


async def test_the_jobs_of_many_prompts_are_given_up_a_few_at_a_time(
    start_server: StartServer, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the one who asked for them leaves; he leaves at once."""
    monkeypatch.setattr(SpeakingEngine, "folder", tokenizer_folder, raising=False)
    server = await start_server(engine=SilentEngine)
    most, before = 0, 0

    async def others() -> None:
        nonlocal most, before
        while True:
            most, before = max(most, SilentEngine.num_given_up - before), SilentEngine.num_given_up
            await asyncio.sleep(0)

    body = {"model": MODEL, "prompt": ["ab"] * 300, "max_tokens": 1}
    path = "/oai/api/v1/completions"
    asking = asyncio.create_task(server.api.http.post(path, json=body, headers=server.api.headers))
    await server.until(lambda: SilentEngine.num_begun == 300)
    watching = asyncio.create_task(others())
    asking.cancel()
    await server.until(lambda: SilentEngine.num_given_up == 300)
    watching.cancel()
    assert 0 < most <= 32
    assert server.service.sampling.has_room("owner", server.service.config.max_queued_samples // 2)


async def test_of_many_prompts_that_fail_one_error_is_told_and_none_is_left_in_the_log(
    server: TestServer,
) -> None:
    """The others fail as they are given up, when nobody waits for them any more."""
    unheard, num_begun = list[str](), 0
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: unheard.append(context["message"])
    )

    async def stream(*_: object) -> AsyncIterator[object]:
        nonlocal num_begun
        num_begun += 1
        if num_begun < 300:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise EngineError("the engine died") from None
        yield Failure("this prompt fails", "user")

    server.service.sampling.stream = stream  # type: ignore[method-assign]
    body = {"model": MODEL, "prompt": ["ab"] * 300, "max_tokens": 1}
    path = "/oai/api/v1/completions"
    response = await server.api.http.post(path, json=body, headers=server.api.headers)
    assert response.status_code == 400 and "fails" in response.text
    await asyncio.sleep(0.1)
    gc.collect()
    assert unheard == []


@pytest.mark.parametrize("outcome", ["raised", "failure", "nothing"])
async def test_who_is_to_ask_again_because_of_the_engine_is_told_when(
    server: TestServer, outcome: str
) -> None:
    async def stream(*_: object) -> AsyncIterator[object]:
        if outcome == "raised":
            raise EngineError("the engine died")
        if outcome == "failure":
            yield Failure("the engine failed", "server")

    server.service.sampling.stream = stream  # type: ignore[method-assign]
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 1}
    path = "/oai/api/v1/completions"
    response = await server.api.http.post(path, json=body, headers=server.api.headers)
    assert response.status_code == 503 and "the engine" in response.text
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("1", "1000")
