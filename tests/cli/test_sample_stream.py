"""`tinsmith sample`: text as it comes, given up at the server too, without transformers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import server_process
from tests.support.server_process import ServerProcess
from tinsmith.cli.sampling.tokenizer import PlainTokenizer
from tinsmith.client import tokenizers

FAKE = "tinsmith/fake"


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Twenty tokens a second."""
    folder = tmp_path_factory.mktemp("server")
    with server_process.serving(folder, "--set", "fake_token_seconds=0.05") as running:
        yield running


def start(server: ServerProcess, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tinsmith", "sample", FAKE, "hello", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=server.environment,
    )


def metric(server: ServerProcess, name: str) -> float:
    request = urllib.request.Request(f"{server.url}/metrics", headers={"X-API-Key": server.key})
    with urllib.request.urlopen(request) as response:
        lines = response.read().decode().splitlines()
    (line,) = [each for each in lines if each.startswith(f"tinsmith_{name} ")]
    return float(line.split()[-1])


def is_decoding(server: ServerProcess) -> bool:
    """Whether tokens are made; the server asks its engine about that every second."""
    before = metric(server, "engine_decoded_tokens")
    time.sleep(1.5)
    return metric(server, "engine_decoded_tokens") > before


def comes_true(what: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return False


def test_a_sample_is_shown_as_it_comes(slow_server: ServerProcess, byte_tokenizer: Path) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "30", "--seed", "1")
    with start(slow_server, *options) as process:
        assert process.stdout is not None
        moments = []
        while os.read(process.stdout.fileno(), 4096):
            moments.append(time.monotonic())
    assert process.returncode == 0
    assert len(moments) >= 5 and moments[-1] - moments[0] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", ["1", "2"])
def test_a_sample_that_is_abandoned_ends_at_the_server(
    slow_server: ServerProcess, byte_tokenizer: Path, num_samples: str
) -> None:
    """It ran on for minutes."""
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "4000", "-n", num_samples)
    # At temperature 0 the fake model never ends by itself; drawn tokens do, once in 256.
    endless = ("--stop", "no such text", "--temperature", "0")
    with start(slow_server, *options, *endless) as process:
        assert process.stdout is not None
        if num_samples == "1":
            assert os.read(process.stdout.fileno(), 1)
        else:
            assert comes_true(lambda: metric(slow_server, "running_samples") > 0)
        before = metric(slow_server, "engine_decoded_tokens")
        assert comes_true(lambda: metric(slow_server, "engine_decoded_tokens") > before)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert b"Traceback" not in errors
    assert process.returncode != 0
    assert comes_true(lambda: not is_decoding(slow_server))


CHAT = """
import sys
sys.modules["transformers"] = sys.modules["torch"] = None
from tinsmith.cli.__main__ import main
main(["chat", "tinsmith/fake", "--tokenizer", sys.argv[1], "--max-tokens", "4", "--json"])
"""


def test_a_chat_needs_neither_transformers_nor_torch(
    slow_server: ServerProcess, byte_tokenizer: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHAT, str(byte_tokenizer)],
        input="hello\n",
        capture_output=True,
        text=True,
        env=slow_server.environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert '"user": "hello"' in done.stdout


def test_the_plain_tokenizer_does_what_that_of_transformers_does(byte_tokenizer: Path) -> None:
    plain, theirs = PlainTokenizer("m", byte_tokenizer), tokenizers.load(str(byte_tokenizer))
    text = "Ahoy, naïve world…"
    assert plain.encode(text) == theirs.encode(text)
    assert plain.decode(plain.encode(text)) == theirs.decode(theirs.encode(text))
    assert (plain.eos_token_id, plain.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    messages = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho!"}]
    for is_open in (True, False):
        options = {"tokenize": False, "add_generation_prompt": is_open}
        assert plain.apply_chat_template(messages, **options) == theirs.apply_chat_template(
            messages, **options
        )


def test_a_tokenizer_that_needs_transformers_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="transformers"):
        PlainTokenizer("m", tmp_path)
