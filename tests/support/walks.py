"""Client, server and local engine in one process, and the modules that a call goes through.

Run by itself it prints the walks as JSON: threads that an earlier test has left, the client's own
among them, cannot be traced afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tinsmith
from tinsmith.engine.base import Engine
from tinsmith.engine.local.boundary import frames
from tinsmith.engine.local.boundary.messages import Patience, Result, Start
from tinsmith.engine.local.boundary.process import Outbox
from tinsmith.engine.local.boundary.remote import RemoteEngine
from tinsmith.engine.local.boundary.worker import Incoming, Worker
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.server.config_sources import build_config
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.serving import serve_alone
from tinsmith.server.tuning import Tuning
from tinsmith.transport.config import ClientConfig
from tinsmith.types import Datum, ModelInput, SamplingParams

ROOT = Path(tinsmith.__file__).parent

TUNING = Tuning(housekeeping_seconds=3600.0, models_seconds=3600.0, health_seconds=3600.0)
"""These come every few seconds, at times in the midst of a walk that has no part in them."""

BESIDE = {"scheduler", "garbage", "lag", "serve", "watching"}
"""Tasks of the server that look after everything every moment, and have no part in a walk either;
the tasks that run operations have other names."""

DATA = [
    Datum(
        model_input=ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
    )
]


class ThreadEngine(RemoteEngine):
    """The local engine with its core in a thread instead of a process."""

    def __init__(self, config: LocalEngineConfig) -> None:
        super().__init__()
        self._config = config

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._work, args=(theirs,), name="engine", daemon=True).start()
        await self.connect(ours, Start("", self._config, Patience()))

    def _work(self, sock: socket.socket) -> None:
        from tinsmith.engine.local.core import EngineCore

        inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        messages = frames.read(sock)
        next(messages)
        outbox = Outbox(sock)
        core = EngineCore(self._config)
        outbox.send([Result(0, None)])

        def receive() -> None:
            with contextlib.suppress(OSError):
                for message in messages:
                    inbox.put(message)
            inbox.put(None)

        threading.Thread(target=receive, name="inbox", daemon=True).start()
        Worker(core, inbox, outbox.send, patience=Patience()).run()
        outbox.close()
        sock.close()

    def die(self) -> None:
        assert self._channel is not None
        self._channel.close()


class House:
    """A running server with its engines, newest last."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.engines: list[ThreadEngine] = []
        self.url = self.key = ""
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._config = build_config({"data_dir": folder, "port": 0})
        self._engine = LocalEngineConfig(
            models={"tiny": str(model)}, device="cpu", deterministic=True
        )
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(60), "the server did not start"

    def kill_engine(self) -> None:
        self._loop.call_soon_threadsafe(self.engines[-1].die)

    def stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            if task.get_name() == "serve":
                self._loop.call_soon_threadsafe(task.cancel)
        self._thread.join(30)

    def _run(self) -> None:
        async def factory(plan: SlotPlan) -> Engine:
            engine = ThreadEngine(self._engine)
            await engine.start()
            self.engines.append(engine)
            return engine

        def announce(url: str, key: str | None, link: str | None) -> None:
            self.url, self.key = url, key or ""
            self._up.set()

        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(
            serve_alone(self._config, lambda: (factory, None), announce, lambda _: None, TUNING),
            name="serve",
        )
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(task)


@contextlib.contextmanager
def running(folder: Path, model: Path) -> Iterator[House]:
    mask = os.umask(0o077)
    house = House(folder, model)
    try:
        house.start()
        yield house
    finally:
        house.stop()
        os.umask(mask)


class Trace:
    """Notes which modules of the package are entered, in order, while `on`. It sees the threads
    that were started after it was made."""

    def __init__(self) -> None:
        self.on = False
        self.modules: list[str] = []
        self._names: dict[str, str | None] = {}
        self._latest = time.monotonic()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def of(self, call: Callable[[], Any]) -> list[str]:
        self._settle()
        self.modules = []
        self.on = True
        try:
            call()
        finally:
            self.on = False
        return self.modules

    def _settle(self) -> None:
        """Wait for what the last call has left to be done after its answer."""
        deadline = time.monotonic() + 30
        while time.monotonic() < min(deadline, self._latest + 0.5):
            time.sleep(0.05)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        file = frame.f_code.co_filename
        if file not in self._names:
            inside = file.startswith(str(ROOT))
            self._names[file] = str(Path(file).relative_to(ROOT)) if inside else None
        name = self._names[file]
        if name is None or _is_beside():
            return
        self._latest = time.monotonic()
        if self.on and name not in self.modules and frame.f_code.co_name != "<module>":
            self.modules.append(name)


def _is_beside() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.get_name() in BESIDE


def walks(folder: Path, model: Path) -> dict[str, list[str]]:
    """What four calls go through, by the call's name."""
    trace = Trace()
    with running(folder, model) as house:
        # Without what a client sends every ten seconds, whatever else it does.
        config = ClientConfig(
            base_url=house.url, api_key=house.key, telemetry=False, heartbeat_seconds=3600.0
        )
        service = tinsmith.ServiceClient(config=config)
        training = service.create_lora_training_client("tiny", rank=4, seed=1)
        base = service.create_sampling_client(base_model="tiny")

        def learn() -> None:
            training.forward_backward(DATA, "cross_entropy").result(60)

        def sample(client: tinsmith.SamplingClient) -> None:
            params = SamplingParams(max_tokens=3, seed=1)
            client.sample(ModelInput.from_ints([5, 6, 7]), 1, params).result(60)

        def rebuild() -> None:
            house.kill_engine()
            learn()

        kept: list[tinsmith.SamplingClient] = []

        def save() -> None:
            # Kept: a client that is dropped tells the server so, during somebody else's walk.
            kept.append(training.save_weights_and_get_sampling_client())
            sample(kept[-1])

        calls: dict[str, Callable[[], Any]] = {
            "forward_backward": learn,
            "sample": lambda: sample(base),
            "save": save,
            "rebuild": rebuild,
        }
        learn()
        sample(base)
        found = {name: trace.of(call) for name, call in calls.items()}
        service.close("success")
    return found


if __name__ == "__main__":
    print(json.dumps(walks(Path(sys.argv[1]), Path(sys.argv[2]))))
