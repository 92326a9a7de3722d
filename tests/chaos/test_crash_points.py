"""The process dies before and after each function that writes, in turn; nothing is lost.

`tinsmith.disk.WRITES` and the writer's commit are all the ways to the disk that the server and the
engine have (`test_no_stray_writes`). One run without a fault says how often each is called; then
come a run with a death before the first call of a function, one with a death after it, and in the
server one with a death after a call in the middle.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tinsmith
from tinsmith import AdamParams, Datum, ModelInput

HOOKS = Path(__file__).parent / "hooks"
STEPS = 5


class DyingServer:
    """`tinsmith serve` that dies as planned, and is started again each time it is dead."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        self.data = folder / "data"
        self.plan = folder / "plan"
        self.calls = folder / "calls"
        self.log = folder / "log"
        self.num_starts = 0
        self.key = ""
        self._is_over = False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._command = [
            *(sys.executable, "-m", "tinsmith.cli", "serve", "--port", str(self.port)),
            *("--data-dir", str(self.data), "--set", "snapshot_steps=2", *options),
        ]
        self._ready = threading.Event()
        self.process: subprocess.Popen[str] | None = None
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def start(self) -> DyingServer:
        self._keeper.start()
        assert self._ready.wait(90), self.log.read_text()
        return self

    def service(self) -> tinsmith.ServiceClient:
        return tinsmith.ServiceClient(
            base_url=f"http://127.0.0.1:{self.port}", api_key=self.key, project_id=None
        )

    def rest(self) -> tinsmith.RestClient:
        return tinsmith.RestClient(base_url=f"http://127.0.0.1:{self.port}", api_key=self.key)

    def die_at(self, name: str, when: str, count: int) -> None:
        draft = self.plan.with_suffix(".new")
        draft.write_text(f"{uuid.uuid4().hex} {name} {when} {count}")
        draft.rename(self.plan)

    def counted(self) -> collections.Counter[str]:
        return collections.Counter(self.calls.read_text().split())

    def close(self) -> None:
        self._is_over = True
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
        self._keeper.join(60)

    def _keep(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TINKER_")} | {
            "PYTHONPATH": str(HOOKS),
            "CRASH_PLAN": str(self.plan),
            "CRASH_LOG": str(self.calls),
            "OMP_NUM_THREADS": "1",
        }
        while not self._is_over:
            self.num_starts += 1
            with self.log.open("a") as log:
                self.process = subprocess.Popen(
                    self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
                )
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if found := re.match(r"export TINKER_API_KEY=(.*)", line):
                    self.key = found[1]
                    self._wait_until_ready()
                    self._ready.set()
            self.process.wait()
            self.process.stdout.close()

    def _wait_until_ready(self) -> None:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5):
                    return
            except urllib.error.HTTPError as error:
                error.close()
            except OSError:
                return
            time.sleep(0.1)


def train(server: DyingServer) -> list[str]:
    """Train, save, sample, load: every number to the last bit."""
    service = server.service()
    base = service.get_server_capabilities().supported_models[0].model_name
    client = service.create_lora_training_client(base, rank=4, seed=7)
    # Large enough that requests and results become files of their own.
    wide = Datum(
        model_input=ModelInput.from_ints([n % 90 for n in range(100)] * 40),
        loss_fn_inputs={"target_tokens": [n % 90 for n in range(1, 101)] * 40},
    )
    is_fake = "fake" in base
    data = [_datum([1 + n, 60, 70 + n]) for n in range(4)] + ([wide] * 4 if is_fake else [])
    lines = []
    pending = []
    for _ in range(STEPS):
        passed = client.forward_backward(data, "cross_entropy")
        pending.append((passed, client.optim_step(AdamParams(learning_rate=0.05))))
    saved = client.save_state("half")
    for passed, stepped in pending:
        lines.append(passed.result().metrics["loss:sum"].hex())
        stepped.result()
    path = saved.result().path
    client.forward_backward(data[:1], "cross_entropy").result()
    client.optim_step(AdamParams(learning_rate=1.0)).result()
    client = service.create_training_client_from_state_with_optimizer(path)
    lines.append(client.forward(data, "cross_entropy").result().metrics["loss:sum"].hex())
    sampler = client.save_weights_and_get_sampling_client()
    logprobs = sampler.compute_logprobs(ModelInput.from_ints([1, 60, 70])).result()
    lines += [p.hex() for p in logprobs if p is not None]
    gone = client.save_state("gone").result().path
    # The first try may have ended with the server, after it had done its work.
    with contextlib.suppress(tinsmith.NotFoundError):
        server.rest().delete_checkpoint_from_tinker_path(gone).result()
    service.close("completed")
    return lines


def _datum(tokens: list[int]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )


def num_trashed(data: Path) -> int:
    """How many whole checkpoints are in the trash."""
    return len([*data.glob("trash/*/*/*.safetensors"), *data.glob("trash/*/*/*.npz")])


def drafts(data: Path) -> list[str]:
    return [p.name for p in data.rglob("*") if p.name.endswith(".draft")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DyingServer]]:
    servers: list[DyingServer] = []

    def start_one(*options: str) -> DyingServer:
        servers.append(DyingServer(tmp_path / str(len(servers)), *options).start())
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


POINTS = [
    "commit",
    "publish_file",
    "mark",
    "write_file",
    "create_folder",
    "create_draft",
    "publish_folder",
    "discard_folder",
    "discard_file",
    "move",
]


def test_every_function_that_writes_is_tried() -> None:
    from tinsmith import disk

    assert {"commit", *disk.WRITES} == set(POINTS)


def try_all(server: DyingServer, prefix: str, points: list[str], *, in_the_middle: bool) -> None:
    expected = train(server)
    num_per_checkpoint = num_trashed(server.data)
    assert num_per_checkpoint > 0, "a deleted checkpoint goes to the trash"
    calls = server.counted()
    assert train(server) == expected
    calls = server.counted() - calls
    for name in points:
        point = f"{prefix}.{name}"
        assert calls[point] > 0, f"{point} is never called"
        moments = [("before", 1), ("after", 1)]
        if in_the_middle:
            moments.append(("after", 1 + calls[point] // 2))
        for when, count in moments:
            trashed = num_trashed(server.data) + num_per_checkpoint
            server.die_at(point, when, count)
            assert train(server) == expected, (point, when, count)
            is_alive = server.plan.exists()
            assert not is_alive or count > 1, f"nothing died {when} {point}"
            server.plan.unlink(missing_ok=True)
            assert num_trashed(server.data) >= trashed, (point, when, count)
            assert drafts(server.data) == [], (point, when, count)


@pytest.mark.slow
def test_a_server_that_dies_at_a_write_loses_nothing(start: Callable[..., DyingServer]) -> None:
    """The fake engine lives in the server's process, so its snapshots are written there, too."""
    server = start("--engine", "fake")
    try_all(server, "server", POINTS, in_the_middle=True)
    # Each point was passed three times; a count in the middle may not have been reached.
    assert server.num_starts - 1 >= 2 * len(POINTS)


@pytest.mark.slow
def test_an_engine_that_dies_at_a_write_loses_nothing(
    start: Callable[..., DyingServer], tiny_model: Path
) -> None:
    options = ("--engine", "local", "--device", "cpu", "--deterministic")
    server = start(*options, "--model", f"tiny={tiny_model}")
    points = ["create_draft", "write_file", "publish_folder"]
    try_all(server, "engine", points, in_the_middle=False)
    assert server.num_starts == 1, "the server lives on"
