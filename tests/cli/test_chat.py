"""`tinsmith chat`: the reply is shown while it is made."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import server_process
from tests.support.scripted_server import Answer, Recorded
from tests.support.server_process import ServerProcess
from tests.support.tinker_stub import PROTOBUF, TinkerStub
from tinsmith.client import tokenizers
from tinsmith.client.service import ServiceClient
from tinsmith.types import (
    AdamParams,
    Datum,
    ModelInput,
    SampledSequence,
    SampleResponse,
)
from tinsmith.wire import proto

if TYPE_CHECKING:
    from tests.cli.conftest import Run

FAKE = "tinsmith/fake"
TOKEN_SECONDS = 0.05
NUM_TOKENS = 40


@pytest.fixture
def slow_server(tmp_path: Path) -> Iterator[ServerProcess]:
    option = f"fake-token-seconds={TOKEN_SECONDS}"
    with server_process.serving(tmp_path, "--set", option) as running:
        yield running


def learned_abab(server: ServerProcess, tokenizer: Any) -> str:
    """Weights of a model that says "abab…" whatever it is told."""
    tokens = tokenizer.encode(" " + "ab" * 20)
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client(FAKE, rank=8)
        for _ in range(20):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(AdamParams(learning_rate=0.5))
        return training.save_weights_for_sampler("abab").result().path


def chat_command(model: str, tokenizer: Path, max_tokens: int) -> list[str]:
    return [
        *(sys.executable, "-m", "tinsmith.cli", "chat", model, "--temperature", "0"),
        *("--tokenizer", str(tokenizer), "--max-tokens", str(max_tokens)),
    ]


def test_a_token_is_shown_before_the_next_is_decoded(
    slow_server: ServerProcess, byte_tokenizer: Path
) -> None:
    path = learned_abab(slow_server, tokenizers.load(str(byte_tokenizer)))
    process = subprocess.Popen(
        chat_command(path, byte_tokenizer, NUM_TOKENS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=slow_server.environment,
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(b"hello\n")
    process.stdin.close()
    pieces = []
    while piece := os.read(process.stdout.fileno(), 4096):
        pieces.append((time.monotonic(), piece.decode()))
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(30) == 0, errors
    assert errors == ""
    words = [(moment, text) for moment, text in pieces if text.strip()]
    assert "".join(text for _, text in pieces) == "ab" * (NUM_TOKENS // 2) + "\n"
    assert words[0][1] == "a"
    # The server needs this long for the tokens after the first; a part of it is enough to know.
    assert words[-1][0] - words[0][0] > NUM_TOKENS * TOKEN_SECONDS / 2
    assert len(words) > NUM_TOKENS / 2


def test_an_interrupted_reply_is_no_traceback(
    slow_server: ServerProcess, byte_tokenizer: Path
) -> None:
    path = learned_abab(slow_server, tokenizers.load(str(byte_tokenizer)))
    process = subprocess.Popen(
        chat_command(path, byte_tokenizer, 1000),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=slow_server.environment,
    )
    assert process.stdin and process.stdout
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.read(3) == "aba"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors == "\nAborted!\n"


def test_on_a_terminal_ctrl_c_ends_the_reply_and_not_the_conversation(
    slow_server: ServerProcess, byte_tokenizer: Path
) -> None:
    path = learned_abab(slow_server, tokenizers.load(str(byte_tokenizer)))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        chat_command(path, byte_tokenizer, 1000),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=slow_server.environment,
    )
    os.close(theirs)
    shown = ""

    def read_until(text: str) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(ours, 4096).decode()
        shown = shown.partition(text)[2]

    try:
        read_until("reply.")
        for _ in range(2):
            read_until("> ")
            os.write(ours, b"hello\n")
            read_until("abab")
            process.send_signal(signal.SIGINT)
        read_until("> ")
        os.write(ours, b"/exit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.fixture
def stub() -> Iterator[TinkerStub]:
    running = TinkerStub()
    yield running
    running.close()


def sampled(stub: TinkerStub, tokens: list[int], stop_reason: Any) -> Answer:
    sequence = SampledSequence(
        stop_reason, "", np.array(tokens, "<i4"), np.zeros(len(tokens), "<f4")
    )
    answer = stub.promise(Answer(200, proto.encode_sample(SampleResponse([sequence])), PROTOBUF))
    answer.body = {**answer.body, "sample_sequence_ids": ["x:0"]}  # type: ignore[dict-item]
    return answer


def test_a_service_without_streams_is_asked_for_a_few_tokens_at_a_time(
    stub: TinkerStub, run: Run, byte_tokenizer: Path
) -> None:
    tokenizer = tokenizers.load(str(byte_tokenizer))
    pieces = [tokenizer.encode("The flag"), tokenizer.encode("s are"), [0]]

    def sample(request: Recorded) -> Answer:
        tokens = pieces.pop(0)
        return sampled(stub, tokens, "length" if tokens != [0] else "stop")

    stub.on("/api/v1/asample", sample)
    result = run(
        *("chat", "m", "--tokenizer", str(byte_tokenizer), "--json"),
        env={"TINKER_BASE_URL": stub.url},
        stdin="hello\n",
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"user": "hello", "assistant": "The flags are"}
    asked = [request.json() for request in stub.seen("/asample")]
    assert [len(each["prompt"]["chunks"][0]["tokens"]) for each in asked] == [
        len("user: hello\nassistant: ") + more for more in (0, 8, 13)
    ]
    assert {each["sampling_params"]["max_tokens"] for each in asked} == {8}
    assert stub.count("/sample_stream") == 1


def test_a_reply_that_breaks_off_is_an_error_and_not_begun_again(
    stub: TinkerStub, run: Run, byte_tokenizer: Path
) -> None:
    tokens = tokenizers.load(str(byte_tokenizer)).encode("Oh")
    events = (
        f"event: tokens\ndata: {json.dumps({'index': 0, 'tokens': tokens})}\n\n"
        'event: error\ndata: {"error": "boom", "category": "server"}\n\n'
    )
    kind = {"content-type": "text/event-stream"}
    stub.on("/api/v1/sample_stream", Answer(200, events.encode(), kind))
    result = run(
        *("chat", "m", "--tokenizer", str(byte_tokenizer)),
        env={"TINKER_BASE_URL": stub.url},
        stdin="hello\n",
    )
    assert result.exit_code == 1
    assert result.stdout.startswith("Oh")
    assert "boom" in result.stderr
    assert "Traceback" not in result.output
    assert stub.count("/asample") == 0


def test_a_character_of_two_tokens_is_shown_whole(
    stub: TinkerStub, run: Run, byte_tokenizer: Path
) -> None:
    tokens = tokenizers.load(str(byte_tokenizer)).encode("Ahé!")
    events = "".join(
        f"event: tokens\ndata: {json.dumps({'index': 0, 'tokens': [token]})}\n\n"
        for token in tokens
    )
    events += 'event: finish\ndata: {"index": 0, "stop_reason": "stop"}\n\n'
    kind = {"content-type": "text/event-stream"}
    stub.on("/api/v1/sample_stream", Answer(200, events.encode(), kind))
    result = run(
        *("chat", "m", "--tokenizer", str(byte_tokenizer)),
        env={"TINKER_BASE_URL": stub.url},
        stdin="hello\n",
    )
    assert (result.exit_code, result.stdout) == (0, "Ahé!\n")


def test_two_models_answer_side_by_side_from_one_seed(
    server: ServerProcess, run: Run, byte_tokenizer: Path
) -> None:
    path = learned_abab(server, tokenizers.load(str(byte_tokenizer)))
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "20", "--temperature", "1")
    lines = "hello\nand then?\n"
    same = run("chat", FAKE, "--versus", FAKE, *options, "--json", stdin=lines)
    assert same.exit_code == 0, same.output
    told = [json.loads(line) for line in same.stdout.splitlines()]
    assert [each["user"] for each in told] == ["hello", "and then?"]
    # Of a seed that was drawn nothing else is known: now and then its answer is empty.
    assert all(each["assistant"] == each["versus"] for each in told)
    seed = str(told[0]["seed"])
    again = run("chat", FAKE, "--seed", seed, *options, "--json", stdin=lines)
    assert json.loads(again.stdout.splitlines()[0])["assistant"] == told[0]["versus"]
    given = run("chat", FAKE, "--versus", FAKE, "--seed", "3", *options, "--json", stdin="hello\n")
    answers = json.loads(given.stdout)
    assert answers["assistant"] == answers["versus"] != ""
    # One below the other where there is no terminal, under their names.
    options = (*options[:-1], "0")
    shown = run("chat", path, "--versus", FAKE, *options, stdin="hello\n")
    assert shown.exit_code == 0, shown.output
    assert f"{path}:\n{'ab' * 10}\n\n{FAKE}:\n" in shown.stdout


def test_a_model_that_cannot_answer_ends_both(run: Run, byte_tokenizer: Path) -> None:
    result = run(
        *("chat", FAKE, "--versus", FAKE, "--tokenizer", str(byte_tokenizer)),
        *("--top-k", "-5"),
        stdin="hello\n",
    )
    assert result.exit_code == 1
    assert result.stderr.count("Error: ") == 1
    assert "top_k" in result.stderr


def test_a_service_without_streams_is_asked_once_where_there_is_a_seed(
    stub: TinkerStub, run: Run, byte_tokenizer: Path
) -> None:
    """Each piece would begin with the seed anew, and not be what a sample with it is."""
    tokens = tokenizers.load(str(byte_tokenizer)).encode("The flag")
    stub.on("/api/v1/asample", lambda request: sampled(stub, tokens, "stop"))
    result = run(
        *("chat", "m", "--seed", "3", "--max-tokens", "90", "--tokenizer", str(byte_tokenizer)),
        env={"TINKER_BASE_URL": stub.url},
        stdin="hello\n",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "The flag\n"
    [asked] = [request.json()["sampling_params"] for request in stub.seen("/asample")]
    assert (asked["seed"], asked["max_tokens"]) == (3, 90)


def test_on_a_terminal_two_replies_grow_in_columns_until_ctrl_c(
    slow_server: ServerProcess, byte_tokenizer: Path
) -> None:
    path = learned_abab(slow_server, tokenizers.load(str(byte_tokenizer)))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*chat_command(path, byte_tokenizer, 1000), "--versus", path],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=slow_server.environment | {"TERM": "xterm", "COLUMNS": "90"},
    )
    os.close(theirs)
    shown = ""

    def read_until(pattern: str) -> None:
        nonlocal shown
        while not (found := re.search(pattern, shown)):
            shown += os.read(ours, 4096).decode(errors="replace")
        shown = shown[found.end() :]

    try:
        read_until(r"both\s+with\s+seed\s+\d+")
        read_until("> ")
        os.write(ours, b"hello\n")
        read_until(r"│ abab\S* +│ abab\S* +│")
        process.send_signal(signal.SIGINT)
        read_until("> ")
        os.write(ours, b"/exit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
