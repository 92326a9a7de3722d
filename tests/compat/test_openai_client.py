"""The real OpenAI client pokes at base models and checkpoints."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import tinsmith

openai = pytest.importorskip("openai", reason="the openai package is not installed")

if TYPE_CHECKING:
    from tests.support.server_process import ServerProcess, StartServer

pytestmark = pytest.mark.slow
MODEL = "tiny"


@pytest.fixture
def server(start_local_server: StartServer) -> ServerProcess:
    return start_local_server()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/oai/api/v1", api_key=server.key, max_retries=0
    ) as client:
        yield client


def test_the_openai_client_lists_completes_chats_and_streams(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    path = server.run("save_sampler.py").strip()
    assert [m.id for m in client.models.list()] == [MODEL, path]
    assert [client.models.retrieve(m.id) for m in client.models.list()] == client.models.list().data
    options = {"model": MODEL, "prompt": "ab", "max_tokens": 8, "seed": 1}
    plain = client.completions.create(**options, n=2, logprobs=2)
    assert [c.index for c in plain.choices] == [0, 1]
    assert plain.choices[0].text != plain.choices[1].text
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == 2
    assert plain.usage.total_tokens == 2 + plain.usage.completion_tokens
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) > 0
    assert all(len(row) == 2 for row in logprobs.top_logprobs or [])
    again = client.completions.create(**options)
    assert again.choices[0].text == plain.choices[0].text, "a seed gives the same text again"
    assert client.completions.create(**{**options, "model": path}).choices[0].text

    streamed = list(client.completions.create(**options, stream=True))
    text = "".join(c.choices[0].text for c in streamed)
    assert text == plain.choices[0].text
    assert len(streamed) > 2 and streamed[-1].choices[0].finish_reason in ("stop", "length")

    messages = [{"role": "user", "content": "hi"}]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 6, "seed": 2}
    whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3)
    assert whole.choices[0].message.role == "assistant"
    content = whole.choices[0].logprobs
    assert content is not None and content.content is not None
    assert len(content.content[0].top_logprobs) == 3
    assert whole.usage is not None and whole.usage.prompt_tokens == len("u:hi a:")
    chunks = list(
        client.chat.completions.create(
            **chat,
            logprobs=True,
            top_logprobs=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    streamed_logprobs = [
        token
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed_logprobs == content.content, "a stream has the alternatives, too"
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    stop = plain.choices[0].text[3]
    stopped = client.completions.create(**options, stop=stop)
    assert stopped.choices[0].text == plain.choices[0].text.partition(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"
    events = client.completions.create(**options, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in events) == stopped.choices[0].text


def test_mistakes_come_in_the_shape_that_openai_clients_read(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no/such"):
        client.completions.create(model="no/such", prompt="a")
    with pytest.raises(openai.NotFoundError, match="no/such"):
        client.models.retrieve("no/such")
    with pytest.raises(openai.NotFoundError, match="checkpoint"):
        client.models.retrieve("tinker://a/sampler_weights/b")
    with pytest.raises(openai.NotFoundError, match="checkpoint"):
        client.completions.create(model="tinker://a/sampler_weights/b", prompt="a")
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        client.completions.create(model=MODEL, prompt="a", presence_penalty=3.0)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    wrong = client.with_options(api_key="tml-wrong")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_client_that_goes_away_frees_its_place(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    prompts = ["a"] * 40  # one after another: a stream that would last for seconds
    stream = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=120, stop=None, stream=True, logprobs=0
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            before = _sampled(answer.read().decode())
        time.sleep(0.5)
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            if _sampled(answer.read().decode()) == before:
                return
    raise AssertionError("the server went on sampling for a client that had left")


def _sampled(metrics: str) -> float:
    lines = [x for x in metrics.splitlines() if x.startswith("tinsmith_sampled_tokens_total")]
    return float(lines[0].split()[1]) if lines else 0.0


def test_the_evaluation_harness_reads_the_answers_to_its_requests(server: ServerProcess) -> None:
    """lm-evaluation-harness 0.4.13, `local-completions`: recorded requests, and how it reads."""
    with tinsmith.ServiceClient(base_url=server.url, api_key=server.key) as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        likeliest = sampler.sample(
            tinsmith.ModelInput.from_ints([40, 41, 42]),
            1,
            tinsmith.SamplingParams(max_tokens=6, temperature=0.0),
        ).result()
        best = [40, 41, 42, *likeliest.sequences[0].tokens]
        other = [*best[:-1], (best[-1] + 1) % 100]
        expected = [
            sampler.compute_logprobs(tinsmith.ModelInput.from_ints(tokens)).result()
            for tokens in (best, other)
        ]

    with pytest.raises(urllib.error.HTTPError, match="404"):  # it uses a tokenizer of its own then
        _harness_request(server, "/oai/api/tokenizer_info")

    likelihoods = {
        "model": MODEL,
        "prompt": [best, other],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    found = _harness_request(server, "/oai/api/v1/completions", likelihoods)
    choices = sorted(found["choices"], key=lambda choice: choice["index"])
    read = []
    for choice, logprobs in zip(choices, expected, strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(logprobs) + 1, "one is sampled"
        continued = choice["logprobs"]["token_logprobs"][3:-1]
        assert sum(continued) == pytest.approx(sum(filter(None, logprobs[3:])), abs=1e-4)
        rows = choice["logprobs"]["top_logprobs"][3:-1]
        read.append(all(p == max(row.values()) for p, row in zip(continued, rows, strict=True)))
    assert read == [True, False], "whether the continuation is the likeliest"

    # A text's own likelihood: from its first token on.
    rolling = {**likelihoods, "prompt": [best]}
    (choice,) = _harness_request(server, "/oai/api/v1/completions", rolling)["choices"]
    assert choice["logprobs"]["token_logprobs"][1:-1] == pytest.approx(expected[0][1:], abs=1e-5)

    generation = {
        "prompt": [[40, 41, 42], [50]],
        "model": MODEL,
        "max_tokens": 6,
        "temperature": 0,
        "stop": ["\n"],
        "seed": 1234,
    }
    found = _harness_request(server, "/oai/api/v1/completions", generation)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert all(isinstance(choice["text"], str) for choice in found["choices"])


def _harness_request(
    server: ServerProcess, path: str, body: dict[str, object] | None = None
) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            **({} if body is None else {"Authorization": f"Bearer {server.key}"}),
            "Accept": "*/*",
            "User-Agent": "Python/3.11 aiohttp/3.14.5",
            "Content-Type": "application/json",
        },
    )
    while True:
        try:
            with urllib.request.urlopen(request) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            # The harness, too, asks again.
            error.close()
            time.sleep(float(error.headers["Retry-After"]))


def test_an_echo_repeats_the_prompt_and_cannot_be_streamed(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": "ab", "max_tokens": 4, "temperature": 0}
    plain = client.completions.create(**options)
    echoed = client.completions.create(**options, echo=True)
    assert echoed.choices[0].text == "ab" + plain.choices[0].text
    assert echoed.choices[0].logprobs is None
    only = client.completions.create(**{**options, "max_tokens": 0}, echo=True, logprobs=0)
    assert only.choices[0].text == "ab"
    assert only.choices[0].logprobs is not None
    assert len(only.choices[0].logprobs.token_logprobs or []) == 2
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(**options, echo=True, stream=True)
