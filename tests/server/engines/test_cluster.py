"""`tinsmith serve --cluster manual`: engines that somebody starts, and starts again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
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
from tinsmith.server.config import build_config

STEPS = 6

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
        client.optim_step(types.AdamParams(learning_rate=0.02)).result()
        losses.append(passed.metrics["loss:sum"])
    return losses


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_in_the_next_engine_that_is_started(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    options = ("--model", f"tiny={model}", "--device", "cpu", "--deterministic")
    with serving_by_hand(tmp_path, *options) as (server, attendant):
        service = tinsmith.ServiceClient(base_url=server.url, api_key=server.key)
        calm = service.create_lora_training_client("tiny", rank=4, seed=1)
        expected = train(calm, STEPS)
        disturbed = service.create_lora_training_client("tiny", rank=4, seed=1)
        losses = train(disturbed, STEPS // 2)
        os.kill(attendant.processes[0, 1].pid, signal.SIGKILL)
        losses += train(disturbed, STEPS - STEPS // 2)
        assert losses == expected
        assert (0, 2) in attendant.processes
        service.close("success")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine": "fake"}, "cluster: takes no fake engine"),
        ({"devices": "cuda:0,cuda:1"}, "devices: has no numbers with 'cluster'"),
        ({"engine_host": "0.0.0.0"}, "engine_host: is what engines connect to"),
    ],
)
def test_settings_that_make_no_sense_in_a_cluster_are_refused(
    tmp_path: Path, settings: dict[str, str], problem: str
) -> None:
    config = build_config({"cluster": "manual", "data_dir": tmp_path, **settings})
    with pytest.raises(ValidationError, match=problem):
        engine_factory(config, engine_cluster(config))
