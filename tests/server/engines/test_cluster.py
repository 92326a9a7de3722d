"""`tinsmith serve --cluster manual`: engines that somebody starts, and starts again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tinsmith
from tests.support.engine_calls import write_tiny_model
from tests.support.remote_engines import engine_process
from tests.support.server_process import ServerProcess
from tinsmith import types
from tinsmith.assembly import engine_cluster, engine_factory
from tinsmith.engine.remote.credentials import Credentials
from tinsmith.errors import ValidationError
from tinsmith.server.config_sources import build_config

STEPS = 6
ADAM = types.AdamParams(learning_rate=0.02)

DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7, 8]),
        loss_fn_inputs={"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4},
    )
]


class Attendant(threading.Thread):
    """Starts an engine for every slot that waits for one, as an operator's script does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="attendant")
        self._folder = folder
        self._is_over = threading.Event()
        self.processes: dict[tuple[int, int], subprocess.Popen[str]] = {}

    def run(self) -> None:
        while not self._is_over.wait(0.05):
            for file in self._folder.glob("slot-*.json"):
                # Between two looks it may have been used.
                with contextlib.suppress(ValidationError):
                    found = Credentials.load(file)
                    place = (found.slot, found.epoch)
                    if place not in self.processes:
                        self.processes[place] = engine_process(file)

    def stop(self) -> None:
        self._is_over.set()
        self.join()
        for process in self.processes.values():
            process.kill()
            process.communicate()


@contextlib.contextmanager
def serving_by_hand(folder: Path, *options: str) -> Iterator[tuple[ServerProcess, Attendant]]:
    data = folder / "data"
    data.mkdir()
    attendant = Attendant(data / "engines")
    server = ServerProcess(data, "--engine", "local", "--cluster", "manual", *options)
    attendant.start()
    try:
        server.start()
        yield server, attendant
    finally:
        if server.process is not None:
            server.stop()
        attendant.stop()


def train(client: tinsmith.TrainingClient, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        passed = client.forward_backward(DATA, "cross_entropy").result()
        client.optim_step(ADAM).result()
        losses.append(passed.metrics["loss:sum"])
    return losses


@dataclass(frozen=True)
class Place:
    """A server whose engines are started by hand, and what an undisturbed run gave there."""

    attendant: Attendant
    service: tinsmith.ServiceClient
    weights: Path
    losses: list[float]

    def new_run(self) -> tinsmith.TrainingClient:
        return self.service.create_lora_training_client("tiny", rank=4, seed=1)

    def engine(self) -> tuple[tuple[int, int], subprocess.Popen[str]]:
        """The newest, with its slot and epoch."""
        return max(self.attendant.processes.items())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("by_hand")
    model = write_tiny_model(folder / "model")
    options = ["--model", f"tiny={model}", "--device", "cpu", "--deterministic"]
    options += ["--set", "engine_silence_seconds=5"]
    with serving_by_hand(folder, *options) as (server, attendant):
        service = tinsmith.ServiceClient(base_url=server.url, api_key=server.key)
        place = Place(attendant, service, folder / "data" / "weights", [])
        place.losses.extend(train(place.new_run(), STEPS))
        yield place
        service.close("success")


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_in_the_next_engine_that_is_started(place: Place) -> None:
    run = place.new_run()
    losses = train(run, STEPS // 2)
    killed, process = place.engine()
    os.kill(process.pid, signal.SIGKILL)
    losses += train(run, STEPS - STEPS // 2)
    assert losses == place.losses
    assert place.engine()[0] > killed


@pytest.mark.slow
def test_an_engine_that_comes_back_when_it_was_replaced_changes_nothing(place: Place) -> None:
    """It is stopped with work before it: a pass, a step, and weights to be written."""
    run = place.new_run()
    losses = train(run, STEPS // 2)
    stopped, zombie = place.engine()
    os.kill(zombie.pid, signal.SIGSTOP)
    passed = run.forward_backward(DATA, "cross_entropy")
    stepped = run.optim_step(ADAM)
    saved = run.save_state("middle")
    losses.append(passed.result().metrics["loss:sum"])
    stepped.result()
    path = saved.result().path
    assert place.engine()[0] > stopped, "another has done it"
    before = checksums(place.weights)
    os.kill(zombie.pid, signal.SIGCONT)
    assert zombie.wait(60) == 0, "it sees that it is no longer wanted"
    assert before.items() <= checksums(place.weights).items(), "what was written is untouched"
    again = place.service.create_training_client_from_state_with_optimizer(path)
    rest = STEPS - len(losses)
    assert losses + train(again, rest) == losses + train(run, rest) == place.losses


def checksums(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine": "fake"}, "cluster: works with the local engine only"),
        ({"devices": "cuda:0,cuda:1"}, "devices: cannot name numbers"),
        ({"engine_host": "0.0.0.0"}, "engine_host: must be an address of this machine"),
    ],
)
def test_settings_that_make_no_sense_in_a_cluster_are_refused(
    tmp_path: Path, settings: dict[str, str], problem: str
) -> None:
    config = build_config({"cluster": "manual", "data_dir": tmp_path, **settings})
    with pytest.raises(ValidationError, match=problem):
        engine_factory(config, engine_cluster(config))
