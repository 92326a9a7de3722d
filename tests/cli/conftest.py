"""A real server on the fake engine for each test module, and commands run against it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support import byte_tokenizer as byte_tokens
from tests.support import server_process, tiny_llama
from tests.support.newcomer import newcomer
from tests.support.server_process import ServerProcess
from tinsmith.cli.__main__ import cli
from tinsmith.client.service import ServiceClient
from tinsmith.types import AdamParams, Datum, ModelInput

FAKE = "tinsmith/fake"


@dataclass(frozen=True)
class Paths:
    """What a little training left on the server."""

    run_id: str
    state: str
    sampler: str
    external: str
    session_id: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process.serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def paths(server: ServerProcess) -> Paths:
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
def run(server: ServerProcess) -> Run:
    """Run a command of ours in this process, with the server in its environment."""

    def run(*arguments: str, env: dict[str, str] | None = None, stdin: str | None = None) -> Result:
        return CliRunner().invoke(
            cli,
            list(arguments),
            env=server.environment | (env or {}),
            input=stdin,
            prog_name="tinsmith",
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
def official(server: ServerProcess) -> Iterator[Official]:
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

    def official(*arguments: str, stdin: str = "") -> Finished:
        print(json.dumps([arguments, stdin]), file=pipes[0], flush=True)
        return Finished(*json.loads(pipes[1].readline()))

    yield official
    driver.communicate()


@pytest.fixture(scope="session")
def newcomer_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of somebody whose embedded model is a tiny one: for demonstrations that need not learn."""
    return newcomer(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder for the fake engine."""
    return byte_tokens.save(tmp_path_factory.mktemp("tokenizer"))


@dataclass(frozen=True)
class Trained:
    """Checkpoints on a server with the tiny model, and what the sampler makes of some tokens."""

    server: ServerProcess
    run_id: str
    state: str
    external: str
    tokens: list[int]
    scores: list[float | None]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model of random numbers, with a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama.save(
        folder,
        seed=0,
        vocab_size=258,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return byte_tokens.save(folder, merges=[("i", "t")])


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A server on the local engine, whose checkpoints are PEFT adapters."""
    with training_on(tiny_model, tmp_path_factory.mktemp("server")) as found:
        yield found


@contextlib.contextmanager
def training_on(model: Path, folder: Path, learning_rate: float = 0.05) -> Iterator[Trained]:
    options = ("--engine", "local", "--device", "cpu", "--model", f"test/tiny={model}")
    tokens = list(range(3, 20))
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    with server_process.serving(folder, *options) as server:
        with ServiceClient(base_url=server.url, api_key=server.key) as service:
            training = service.create_lora_training_client("test/tiny", rank=4, seed=1)
            for _ in range(5):
                training.forward_backward([datum], "cross_entropy")
                training.optim_step(AdamParams(learning_rate=learning_rate))
            state = training.save_state("final").result().path
            external = training.save_weights_external("final").result().path
            sampler = training.save_weights_and_get_sampling_client()
            scores = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()[1:]
        yield Trained(server, training.model_id, state, external, tokens, scores)
