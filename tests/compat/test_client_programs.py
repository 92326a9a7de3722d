"""Programs that people already use, against a real server with the real engine.

Those that the test environment does not have are skipped; `make clients` runs them, each with a
package of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jsonschema
import pytest

from tests.support import byte_model
from tests.support.server_process import ServerProcess, serving

pytest.importorskip("torch", reason="the local engine needs torch")
pytest.importorskip("llguidance", reason="grammars need llguidance")

pytestmark = pytest.mark.slow

OLD_OPENAI = "1.109.1"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["a", "ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("programs")
    model = byte_model.write(folder / "model")
    options = ("--engine", "local", "--device", "cpu", "--model", f"tiny={model}")
    with serving(folder, *options) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return f"{server.url}/oai/api/v1"


def old_openai() -> Path:
    """A folder with the first major version that has the Responses API, made once per machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    folder = cache / "tinsmith-tests" / f"openai-{OLD_OPENAI}-{sys.version_info.minor}"
    if not (folder / "finished").exists():
        shutil.rmtree(folder, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
        done = subprocess.run(
            [*install, "--target", str(folder), f"openai=={OLD_OPENAI}"],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            pytest.skip(f"openai {OLD_OPENAI} could not be installed: {done.stderr[-300:]}")
        (folder / "finished").touch()
    return folder


@pytest.mark.parametrize("is_old", [True, False], ids=["1", "installed"])
def test_two_major_versions_of_the_openai_client_work(server: ServerProcess, is_old: bool) -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    server.script_environment = {"PYTHONPATH": str(old_openai())} if is_old else {}
    said = json.loads(server.run("openai_client.py"))
    assert said["version"].startswith("1.") == is_old
    jsonschema.validate(json.loads(said["chat"]), SCHEMA)
    assert said["streamed"] == said["chat"]
    assert set(said["parsed"]) == set(said["response"]) == {"a", "ok"}
    assert said["events"][0] == "response.created"
    assert said["events"][-1] in ("response.completed", "response.incomplete")
    assert said["refused"].startswith("previous_response_id: this server keeps no responses")


def test_openai_agents_run_on_both_apis(server: ServerProcess, url: str) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    answer = pydantic.create_model("Answer", a=(Literal["x", "y"], ...))
    agents.set_tracing_disabled(True)

    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key=server.key) as client:
            found = []
            for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
                model = kind(model="tiny", openai_client=client)
                agent = agents.Agent(name="x", instructions="Be.", model=model, output_type=answer)
                found.append((await agents.Runner.run(agent, "hi")).final_output)
            return found

    assert all(each.a in ("x", "y") for each in asyncio.run(run()))


@pytest.mark.filterwarnings("ignore")  # its own
def test_litellm_chats_streams_and_gets_a_form(server: ServerProcess, url: str) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    ask = {"model": "openai/tiny", "api_base": url, "api_key": server.key, "messages": MESSAGES}
    formed = litellm.completion(**ask, response_format=FORMAT)
    jsonschema.validate(json.loads(formed.choices[0].message.content), SCHEMA)
    shaped = {"presence_penalty": 0.5, "logit_bias": {"70": 1}, "top_p": 0.9, "max_tokens": 9}
    assert litellm.completion(**ask, **shaped).usage.completion_tokens <= 9
    assert list(litellm.completion(**ask, max_tokens=5, stream=True))


@pytest.mark.filterwarnings("ignore")  # its own
def test_inspect_evaluates(
    server: ServerProcess, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = pytest.importorskip("inspect_ai", reason="inspect-ai is not installed")
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes

    monkeypatch.setenv("TINSMITH_BASE_URL", url)
    monkeypatch.setenv("TINSMITH_API_KEY", server.key)
    task = inspect.Task(dataset=[Sample(input="hi", target="x")], scorer=includes())
    options = {"max_tokens": 9, "frequency_penalty": 0.1, "seed": 1}
    (log,) = inspect.eval(
        task,
        model="openai-api/tinsmith/tiny",
        log_dir=str(tmp_path),
        display="none",
        **options,
    )
    assert log.status == "success", log.error


def test_the_renderers_of_verifiers_get_tokens_for_tokens(server: ServerProcess, url: str) -> None:
    renderers = pytest.importorskip("renderers.client", reason="renderers is not installed")
    openai = pytest.importorskip("openai")

    class Renderer:
        """Of prompts that are tokens already."""

        supports_tools = True

        def get_stop_token_ids(self) -> list[int]:
            return [byte_model.END]

        def parse_response(self, ids: list[int], **_: Any) -> SimpleNamespace:
            empty = {"tool_calls": [], "reasoning_content": None, "reasoning_complete": True}
            return SimpleNamespace(content=str(ids), **empty)

    async def run(prompt: list[int]) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key=server.key) as client:
            return await renderers.generate(
                client=client,
                renderer=Renderer(),
                messages=[],
                model="tiny",
                prompt_ids=prompt,
                sampling_params={"temperature": 1.0, "max_tokens": 6, "seed": 1},
            )

    found = asyncio.run(run([70, 71, 72]))
    assert found["prompt_ids"] == [70, 71, 72]
    assert len(found["completion_ids"]) == len(found["completion_logprobs"]) > 0
    with pytest.raises(renderers.OverlongPromptError):
        asyncio.run(run([70] * 600))
