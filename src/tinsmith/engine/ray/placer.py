"""The placer: the one process of a server that talks to Ray.

`python -m tinsmith.engine.ray.placer FD`, where the server is at the other end of FD. It may end,
or wait for a cluster that has lost its head, without anything happening to engines that run: they
are detached actors, and talk to the server themselves. It places an engine once and never again;
the server decides whether another is needed.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from tinsmith.engine.cluster import Node
from tinsmith.engine.local.boundary import frames
from tinsmith.engine.ray.host import EngineHost
from tinsmith.engine.ray.messages import (
    Begin,
    Command,
    Ended,
    Key,
    Nodes,
    Place,
    Release,
    Report,
    Unable,
)

LOOK_SECONDS = 0.05
NODES_SECONDS = 1.0

SIGN_SECONDS = 3.0
"""How long the actor of an engine whose connection is gone may take to show that its node lives."""

SUSPECT_SECONDS = 30.0
"""How long nothing is placed on a node whose actor did not: Ray takes about 15 s to notice that a
node has died, and would place engines there meanwhile."""

Ref = Any  # Ray's own types are loose
Send = Callable[[Report], None]


@dataclass(slots=True)
class _Placed:
    host: Any  # an actor's handle
    ended: Ref
    found: Ref | None
    """The pending answer to where it runs."""
    node_id: str = ""


@dataclass(slots=True)
class _Leaving:
    """An engine's connection is gone; whether its node is, too, is not known yet."""

    placed: _Placed
    sign: Ref
    until: float


class Placer:
    def __init__(self, namespace: str, send: Send) -> None:
        self._namespace = namespace
        self._send = send
        self._placed: dict[Key, _Placed] = {}
        self._leaving: list[_Leaving] = []
        self._waiting: list[Place] = []
        self._suspects: dict[str, float] = {}
        """Nodes, and until when nothing is placed on them."""
        self._nodes_at = 0.0

    def resume(self, keys: tuple[Key, ...]) -> None:
        """Go on watching what an earlier placer has placed."""
        for key in keys:
            try:
                host = ray.get_actor(_name(key), namespace=self._namespace)
            except ValueError:
                self._send(Ended(key, "is unknown to the Ray cluster, which was started anew"))
            else:
                self._watch(key, host)

    def take(self, command: Command) -> None:
        if isinstance(command, Place):
            self._waiting.append(command)
        elif isinstance(command, Release):
            self._waiting = [each for each in self._waiting if each.key != command.key]
            placed = self._placed.pop(command.key, None)
            if placed is not None:
                sign = placed.host.node_id.remote()
                self._leaving.append(_Leaving(placed, sign, time.monotonic() + SIGN_SECONDS))

    def look(self) -> None:
        """See what has happened, and place what waits."""
        ready = self._ready()
        for key, placed in list(self._placed.items()):
            self._look_at(key, placed, ready)
        self._leaving = [each for each in self._leaving if not self._has_left(each, ready)]
        if not self._leaving:
            # Not before: the node of an engine that is leaving may have died.
            waiting, self._waiting = self._waiting, []
            for command in waiting:
                self._place(command)
        if time.monotonic() >= self._nodes_at:
            self._send(Nodes(tuple(_nodes())))
            self._nodes_at = time.monotonic() + NODES_SECONDS

    def let_go(self) -> None:
        """The server is gone: its engines end by themselves, and their resources are free."""
        for placed in (*self._placed.values(), *(each.placed for each in self._leaving)):
            _kill(placed.host)

    def _ready(self) -> set[Ref]:
        refs = [placed.ended for placed in self._placed.values()]
        refs += [placed.found for placed in self._placed.values() if placed.found is not None]
        refs += [each.sign for each in self._leaving]
        return set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()

    def _look_at(self, key: Key, placed: _Placed, ready: set[Ref]) -> None:
        if placed.found in ready:
            with contextlib.suppress(RayError):
                placed.node_id = ray.get(placed.found)
            placed.found = None
        if placed.ended in ready:
            del self._placed[key]
            self._send(Ended(key, _reason(placed.ended)))
            _kill(placed.host)

    def _has_left(self, leaving: _Leaving, ready: set[Ref]) -> bool:
        now = time.monotonic()
        if leaving.sign not in ready and now < leaving.until and leaving.placed.node_id:
            return False
        node_id = leaving.placed.node_id
        if node_id and not _is_sign(leaving.sign, ready):
            self._suspects[node_id] = now + SUSPECT_SECONDS
        _kill(leaving.placed.host)
        return True

    def _place(self, command: Place) -> None:
        now = time.monotonic()
        self._suspects = {n: until for n, until in self._suspects.items() if until > now}
        avoided = {"ray.io/node-id": f"!in({','.join(self._suspects)})"} if self._suspects else None
        actors: Any = EngineHost  # Ray's decorator makes it more than its class
        host = actors.options(
            name=_name(command.key),
            namespace=self._namespace,
            lifetime="detached",
            num_cpus=command.num_cpus,
            num_gpus=command.num_gpus,
            scheduling_strategy="SPREAD",
            label_selector=avoided,
        ).remote(command.credentials)
        self._watch(command.key, host)

    def _watch(self, key: Key, host: Any) -> None:
        self._placed[key] = _Placed(host, host.ended.remote(), host.node_id.remote())


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    messages = frames.read(sock)
    begin = next(messages, None)
    if not isinstance(begin, Begin):
        return 0

    def send(report: Report) -> None:
        frames.write(sock, frames.encode(report))

    inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(messages, inbox), name="inbox", daemon=True).start()
    try:
        ray.init(
            address=begin.address,
            namespace=begin.namespace,
            log_to_driver=False,
            logging_level="error",
        )
        placer = Placer(begin.namespace, send)
        placer.resume(begin.placed)
        _work(placer, inbox)
    except BrokenPipeError:
        return 0
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        send(Unable(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _work(placer: Placer, inbox: queue.SimpleQueue[Command | None]) -> None:
    while True:
        with contextlib.suppress(queue.Empty):
            command = inbox.get(timeout=LOOK_SECONDS)
            if command is None:
                placer.let_go()
                return
            placer.take(command)
        placer.look()


def _receive(messages: Iterator[Command], inbox: queue.SimpleQueue[Command | None]) -> None:
    try:
        for message in messages:
            inbox.put(message)
    finally:
        inbox.put(None)


def _name(key: Key) -> str:
    slot, epoch = key
    return f"slot {slot} epoch {epoch}"


def _nodes() -> Iterator[Node]:
    for node in ray.nodes():
        resources = node["Resources"]
        yield Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            is_alive=node["Alive"],
            num_cpus=resources.get("CPU", 0.0),
            num_gpus=resources.get("GPU", 0.0),
            memory_bytes=int(resources.get("memory", 0)),
        )


def _reason(ended: Ref) -> str:
    try:
        return str(ray.get(ended))
    except RayError as error:
        return f"was lost by Ray: {str(error).strip() or type(error).__name__}"


def _is_sign(sign: Ref, ready: set[Ref]) -> bool:
    if sign not in ready:
        return False
    try:
        ray.get(sign)
    except RayError:
        return False
    return True


def _kill(host: Any) -> None:
    # It may be gone already.
    with contextlib.suppress(RayError, ValueError):
        ray.kill(host, no_restart=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
