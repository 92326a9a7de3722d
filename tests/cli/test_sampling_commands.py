"""`tinsmith sample` and `chat` against a server on the fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from tinsmith.cli.__main__ import cli
from tinsmith.cli.training import conversation

if TYPE_CHECKING:
    from tests.cli.conftest import Paths, Run, Trained

FAKE = "tinsmith/fake"


def test_samples_come_as_text_and_as_json(run: Run, run_json: Any, byte_tokenizer: Path) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "5", "--seed", "3")
    result = run("sample", FAKE, "hello", *options)
    assert result.exit_code == 0, result.output
    answer = run_json("sample", FAKE, "hello", "-n", "3", *options)
    assert answer["prompt"] == "hello"
    assert len(answer["samples"]) == 3
    first = answer["samples"][0]
    assert len(first["tokens"]) == len(first["logprobs"]) <= 5
    assert first["stop_reason"] in ("stop", "length")
    assert result.stdout.rstrip("\n") == first["text"].rstrip("\n")
    assert "--- 2 ---" in run("sample", FAKE, "hello", "-n", "2", *options).stdout


def test_a_prompt_may_come_from_a_file_and_be_a_message_of_a_chat(
    run_json: Any, run: Run, byte_tokenizer: Path, paths: Paths
) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "4", "--temperature", "0")
    piped = run_json("sample", paths.sampler, "--file", "-", *options, stdin="hello")
    given = run_json("sample", paths.sampler, "hello", *options)
    assert piped["samples"] == given["samples"]
    chat = run("sample", FAKE, "hello", "--chat", "--system", "Be brief.", *options)
    assert chat.exit_code == 0, chat.output
    both = run("sample", FAKE, "hello", "--file", "-", *options, stdin="x")
    assert both.exit_code == 1


def test_a_chat_keeps_its_history(
    run: Run, byte_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    render = conversation.prompt_tokens

    def counted(tokenizer: Any, messages: Any) -> list[int]:
        seen.append(len(messages))
        return render(tokenizer, messages)

    monkeypatch.setattr(conversation, "prompt_tokens", counted)
    result = run(
        *("chat", FAKE, "--tokenizer", str(byte_tokenizer), "--max-tokens", "20"),
        *("--system", "Be brief.", "--json"),
        stdin="one\ntwo\n/reset\nthree\n/exit\nnever\n",
    )
    assert result.exit_code == 0, result.output
    exchanges = [json.loads(line) for line in result.stdout.splitlines()]
    assert [exchange["user"] for exchange in exchanges] == ["one", "two", "three"]
    assert seen == [2, 4, 2]


def test_a_chat_with_saved_weights_prints_the_reply(
    run: Run, byte_tokenizer: Path, paths: Paths
) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "20")
    result = run("chat", paths.sampler, *options, stdin="hello\n")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_the_server_brings_the_tokenizer_wherever_the_command_runs(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder, offline, and a stranger's folder of the model's name in it."""
    (tmp_path / "test" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    env = trained.server.environment | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    done = CliRunner().invoke(
        cli, ["--format", "json", "sample", "test/tiny", "it", "--max-tokens", "3"], env=env
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["samples"][0]["tokens"]
