"""Agents that people use go round: question, call of a tool, its result, answer."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import scripted_model
from tests.support.server_process import ServerProcess, serving

pytest.importorskip("torch", reason="the local engine needs torch")

pytestmark = pytest.mark.slow

COMMAND = "echo tin > made.txt; cat made.txt"
ANSWER = "It says tin."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("agents")
    first = scripted_model.call("Bash", {"command": COMMAND, "description": "make a file"})
    model = scripted_model.write(folder / "model", first=first, after_tool=ANSWER)
    options = ("--engine", "local", "--device", "cpu", "--model", f"scripted={model}")
    with serving(folder, *options) as running:
        yield running


def test_claude_code_runs_the_command_and_says_what_came(
    server: ServerProcess, tmp_path: Path
) -> None:
    program = shutil.which("claude")
    if program is None:
        pytest.skip("Claude Code is not installed: make clients CLIENTS=claude")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    done = subprocess.run(
        [program, "-p", "hi", "--output-format", "json", "--allowedTools", "Bash"],
        cwd=work,
        env={
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "ANTHROPIC_BASE_URL": f"{server.url}/anthropic",
            "ANTHROPIC_API_KEY": server.key,
            "ANTHROPIC_MODEL": "scripted",
            "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # Nothing but this server can be reached.
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert (said["is_error"], said["result"], said["num_turns"]) == (False, ANSWER, 2)
    assert (work / "made.txt").read_text() == "tin\n"


def test_openai_agents_call_a_function_and_answer(server: ServerProcess) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    @agents.function_tool(name_override="Bash")  # type: ignore[untyped-decorator]
    def bash(command: str, description: str) -> str:
        """Run a command."""
        asked.append(command)
        return "tin"

    async def run() -> list[str]:
        url = f"{server.url}/oai/api/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=server.key) as client:
            answers = []
            for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
                model = kind(model="scripted", openai_client=client)
                agent = agents.Agent(name="x", instructions="Be.", model=model, tools=[bash])
                answers.append((await agents.Runner.run(agent, "hi")).final_output)
            return answers

    assert asyncio.run(run()) == [ANSWER, ANSWER]
    assert asked == [COMMAND, COMMAND]
