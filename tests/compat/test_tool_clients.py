"""The real OpenAI and Anthropic clients, with tools, at a model that has learned to call one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tinsmith
from tests.support.server_process import ServerProcess, serving
from tinsmith.types import AdamParams, Datum, ModelInput

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
openai = pytest.importorskip("openai", reason="the openai package is not installed")

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ANSWER = '<tool_call>{"name":"add","arguments":{"a":"<1>"}}</tool_call>'
OPENAI_TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
ANTHROPIC_TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
GREEDY = {"temperature": 0}  # this client's newest release has no argument for it
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tools")
    model = folder / "model"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "data").mkdir()
    options = ("--engine", "local", "--device", "cpu", "--model", f"tiny={model}")
    with serving(folder / "data", *options) as running:
        yield running


@pytest.fixture(scope="module")
def path(server: ServerProcess) -> str:
    """A checkpoint whose likeliest answer to the prompt is the call."""
    service = tinsmith.ServiceClient(base_url=server.url, api_key=server.key)
    training = service.create_lora_training_client("tiny", rank=16, seed=3)
    prompt, answer = _tokens("add<tool_call>u:hi a:"), [*_tokens(ANSWER), 2]
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )
    loss = 99.0
    for _ in range(300):
        done = training.forward_backward([datum], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=0.01))
        loss = done.result().metrics["loss:sum"] / len(answer)
        if loss < 0.02:
            break
    assert loss < 0.02, "the model did not learn its call"
    saved = training.save_weights_for_sampler("caller").result().path
    assert saved is not None
    return saved


def _tokens(text: str) -> list[int]:
    return [3 + ord(character) - 32 for character in text]


@pytest.fixture
def gpt(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key=server.key) as client:
        yield client


@pytest.fixture
def claude(server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=f"{server.url}/anthropic", api_key=server.key) as client:
        yield client


def test_the_openai_client_gets_tool_calls_whole_and_streamed(gpt: Any, path: str) -> None:
    ask = {"model": path, "messages": MESSAGES, "tools": [OPENAI_TOOL], "max_tokens": 80}
    ask["temperature"] = 0
    whole = gpt.chat.completions.create(**ask).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a":"<1>"}')
    chunks = [c.choices[0] for c in gpt.chat.completions.create(**ask, stream=True)]
    (streamed,) = [c.delta.tool_calls[0] for c in chunks if c.delta.tool_calls]
    assert (streamed.index, streamed.function.name) == (0, "add")
    assert streamed.function.arguments == '{"a":"<1>"}'
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(c.delta.content for c in chunks)
    # The answer goes back with the call; the template sees both.
    told = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    plain = gpt.chat.completions.create(**{**ask, "messages": told, "tools": []})
    assert plain.usage.prompt_tokens == len('u:hi a:{"a": "<1>"} t:3 a:')
    named = {"type": "function", "function": {"name": "add"}}
    forced = gpt.chat.completions.create(**ask, tool_choice=named)
    begin = '<tool_call>{"name": "add", "arguments": '
    assert forced.usage.prompt_tokens == len("add<tool_call>u:hi a:" + begin)


def test_the_anthropic_client_gets_tool_uses_whole_and_streamed(claude: Any, path: str) -> None:
    ask = {"model": path, "messages": MESSAGES, "tools": [ANTHROPIC_TOOL], "max_tokens": 80}
    ask["extra_body"] = GREEDY
    whole = claude.messages.create(**ask)
    assert whole.stop_reason == "tool_use"
    (use,) = whole.content
    assert (use.type, use.name, use.input) == ("tool_use", "add", {"a": "<1>"})
    assert whole.usage.input_tokens == len("add<tool_call>u:hi a:")
    assert whole.usage.output_tokens == len(ANSWER) + 1
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert streamed.stop_reason == "tool_use"
    assert [(b.type, b.input) for b in streamed.content] == [("tool_use", {"a": "<1>"})]
    told = [
        *MESSAGES,
        {"role": "assistant", "content": [use.model_dump(exclude_none=True)]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "3"}],
        },
    ]
    hints = {"cache_control": {"type": "ephemeral"}, "output_config": {"effort": "low"}}
    assert claude.messages.create(**ask, **hints).content[0].input == use.input
    counted = claude.messages.count_tokens(model=path, messages=told, system="be")
    assert counted.input_tokens == len('s:be u:hi a:{"a": "<1>"} t:3 a:')


def test_an_answer_that_is_cut_behind_a_call_says_so(gpt: Any, claude: Any, path: str) -> None:
    most = {"model": path, "messages": MESSAGES, "max_tokens": len(ANSWER)}
    theirs = {**most, "tools": [ANTHROPIC_TOOL], "extra_body": GREEDY}
    cut = claude.messages.create(**theirs)
    assert (cut.content[0].name, cut.stop_reason) == ("add", "max_tokens")
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert claude.messages.create(**theirs, tool_choice=one).stop_reason == "tool_use"
    ours = {**most, "tools": [OPENAI_TOOL], "temperature": 0}
    cut = gpt.chat.completions.create(**ours).choices[0]
    assert (cut.message.tool_calls[0].function.name, cut.finish_reason) == ("add", "length")
    *_, last = gpt.chat.completions.create(**ours, stream=True)
    assert last.choices[0].finish_reason == "length"
    single = gpt.chat.completions.create(**ours, parallel_tool_calls=False).choices[0]
    assert single.finish_reason == "tool_calls"


def test_the_anthropic_client_gets_text_whole_and_streamed(claude: Any, path: str) -> None:
    ask = {"model": path, "messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY}
    whole = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason in ("max_tokens", "end_turn")
    assert final.usage.output_tokens == whole.usage.output_tokens
    begun = next(text[:size] for size in range(1, len(text)) if text[size - 1] != " ")
    told = [*MESSAGES, {"role": "assistant", "content": begun}]
    went_on = claude.messages.create(**{**ask, "messages": told})
    assert went_on.usage.input_tokens == len("u:hi a:" + begun)
    assert (begun + went_on.content[0].text).startswith(text)
    stop = text[2:4]
    stopped = claude.messages.create(**ask, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]


def test_what_cannot_be_done_is_refused_by_name(
    server: ServerProcess, path: str, claude: Any, gpt: Any
) -> None:
    ask = {"model": path, "messages": MESSAGES, "max_tokens": 4}
    web = {"type": "web_search_20250305", "name": "web_search"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for change, field in [
        ({"tools": [web]}, "tools"),
        ({"messages": [{"role": "user", "content": [image]}]}, "image"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "other"}},
            "no tool called 'other'",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "reasoning"),
        ({"container": "x"}, "container"),
    ]:
        with pytest.raises(anthropic.BadRequestError, match=field):
            claude.messages.create(**{**ask, **change}, timeout=20)
    with pytest.raises(anthropic.NotFoundError, match="no/such"):
        claude.messages.create(**{**ask, "model": "no/such"})
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="tml-wrong").messages.create(**ask)
    missing = httpx.post(
        f"{server.url}/anthropic/v1/messages",
        json={"model": path, "messages": MESSAGES},
        headers={"x-api-key": server.key},
    )
    assert missing.status_code == 400
    assert missing.json()["error"]["message"].startswith("max_tokens")
    with pytest.raises(openai.BadRequestError, match="enable_thinking"):
        gpt.chat.completions.create(
            model=path,
            messages=MESSAGES,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
