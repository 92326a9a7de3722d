"""A real server on the fake engine for each test module, and commands run against it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from tinsmith.cli.__main__ import cli
from tinsmith.client.service import ServiceClient
from tinsmith.types import AdamParams, Datum, ModelInput

FAKE = "tinsmith/fake"


@dataclass(frozen=True)
class Server:
    url: str
    key: str
    data_dir: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))}
        return kept | {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.key,
            "TINKER_TELEMETRY": "0",
            "OMP_NUM_THREADS": "1",
        }


@dataclass(frozen=True)
class Paths:
    """What a little training left on the server."""

    run_id: str
    state: str
    sampler: str
    external: str
    session_id: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    log = (folder / "log").open("w+")
    command = [sys.executable, "-m", "tinsmith.cli", "serve", "--engine", "fake", "--port", "0"]
    with log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(folder / "data")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("TIN")},
        )
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            url, key = (re.split("[= ]", line.strip())[-1] for line in lines[1:])
            _wait_until_ready(url)
            yield Server(url, key, folder / "data")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            process.stdout.close()


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(0.05)
    raise AssertionError("the server did not become ready")


@pytest.fixture(scope="module")
def paths(server: Server) -> Paths:
    """One run with a checkpoint of each kind."""
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client(
            FAKE, rank=8, user_metadata={"purpose": "tests"}
        )
        data = Datum(
            model_input=ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
        )
        training.forward_backward([data], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=0.01))
        state = training.save_state("final", ttl_seconds=7200).result().path
        sampler = training.save_weights_for_sampler("final").result().path
        external = training.save_weights_external("final").result().path
        session_id = service.holder.get_session_id()
    return Paths(training.model_id, state, sampler, external, session_id)


Run = Callable[..., Result]


@pytest.fixture
def run(server: Server) -> Run:
    """Run a command of ours in this process, with the server in its environment."""

    def run(*arguments: str, env: dict[str, str] | None = None, stdin: str | None = None) -> Result:
        environment = {name: server.environment[name] for name in server.environment}
        return CliRunner().invoke(
            cli, list(arguments), env=environment | (env or {}), input=stdin, prog_name="tinsmith"
        )

    return run


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    def run_json(*arguments: str, **options: Any) -> Any:
        result = run("--format", "json", *arguments, **options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run_json


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Official = Callable[..., Finished]


@pytest.fixture(scope="module")
def official(server: Server) -> Iterator[Official]:
    """Run the official `tinker` command against our server."""
    driver = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("official_driver.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=server.environment | {"COLUMNS": "500"},
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    pipes = driver.stdin, driver.stdout

    def official(*arguments: str) -> Finished:
        print(json.dumps(arguments), file=pipes[0], flush=True)
        return Finished(*json.loads(pipes[1].readline()))

    yield official
    driver.communicate()


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder for the fake engine: a token is a byte, and 0 ends a turn."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {letter: i for i, letter in enumerate(alphabet[:255], 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}<end>{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder
