"""The engine's own process: `python -m tinsmith.engine.local.boundary.process FD`.

FD is a connected socket whose other end belongs to the caller (`engine.py`); an engine on another
machine has connected to its caller (`engine/remote/joining.py`). The first message says which core
to build; after it one thread receives requests, one sends replies, and the main thread
works (`worker.py`). A thread of its own sends signs of life, which also say how long the present
turn has taken and may take; by them the caller tells a process that hangs from one that has much to
do.

The process ends when the socket closes, which also happens when the caller dies: no orphans.
It ignores Ctrl-C, because when to stop is for the caller to decide. The mathematics is the core's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tinsmith.engine.local import progress
from tinsmith.engine.local.boundary import frames
from tinsmith.engine.local.boundary.core import Core
from tinsmith.engine.local.boundary.garbage import Garbage
from tinsmith.engine.local.boundary.messages import Reply, Result, Start, Trouble
from tinsmith.engine.local.boundary.worker import Incoming, Worker, describe
from tinsmith.errors import EngineError

logger = logging.getLogger(__name__)

EXIT_GRACE_SECONDS = 2.0
"""How long a turn may go on after the socket closed before the process ends in the midst of it."""


BEAT_SECONDS = 1.0
"""Time between two signs of life."""


class Outbox:
    """Sends frames from a thread of its own, so that a slow caller never delays the core."""

    def __init__(self, stream: frames.Stream) -> None:
        self._stream = stream
        self._pieces: queue.SimpleQueue[list[frames.Buffer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._thread.start()

    def send(self, replies: list[Reply]) -> None:
        try:
            pieces = frames.encode(replies)
        except Exception as error:
            logger.exception("a reply cannot be sent")
            text = f"the reply cannot be sent: {describe(error)}"
            pieces = frames.encode([Trouble(reply.number, text) for reply in replies])
        self._pieces.put(pieces)

    def close(self) -> None:
        """Return when everything is sent."""
        self._pieces.put(None)
        self._thread.join()

    def _write(self) -> None:
        # A closed socket is noticed, and acted upon, by the thread that reads.
        with contextlib.suppress(OSError):
            while (pieces := self._pieces.get()) is not None:
                frames.write(self._stream, pieces)


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return work(socket.socket(fileno=fd))


def work(stream: frames.Stream, epoch: int = 1) -> int:
    """Serve the other end of the stream as its engine, until it closes; the exit status."""
    faulthandler.enable()
    be_first_to_go()
    logging.basicConfig(level=logging.INFO, format=progress.LOG_FORMAT)
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    messages = frames.read(stream)
    start = next(messages, None)
    if not isinstance(start, Start):
        return _refused(start)
    threading.Thread(target=_receive, args=(messages, inbox), name="inbox", daemon=True).start()
    outbox = Outbox(stream)
    try:
        _check(start, epoch)
        core = _build(start)
    except Exception as error:
        logger.exception("the engine could not start")
        outbox.send([Trouble(0, f"the engine could not start: {describe(error)}")])
        outbox.close()
        return 1
    outbox.send([Result(0, None)])
    settle = Garbage().settle
    worker = Worker(core, inbox, outbox.send, patience=start.patience, on_idle=settle)
    threading.Thread(target=_beat, args=(worker, outbox), name="pulse", daemon=True).start()
    worker.run()
    return 0


def _beat(worker: Worker, outbox: Outbox) -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        outbox.send([worker.beat()])


def be_first_to_go() -> None:
    """When memory runs out the kernel is to end this process, not the server beside it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _refused(message: list[Reply] | None) -> int:
    """There is nothing to start: the caller has gone, or says why it does not want this engine."""
    if message is None:
        logger.error("the server closed the connection before it said what to start")
    for reply in message or ():
        if isinstance(reply, Trouble):
            logger.error("%s", reply.text)
    return 1


def _check(start: Start, epoch: int) -> None:
    if start.epoch < epoch:
        raise EngineError(
            f"this engine was made for epoch {epoch} of its slot; a server that is at epoch "
            f"{start.epoch} no longer has the slot"
        )
    if start.shared is not None:
        path, text = start.shared
        try:
            found = Path(path).read_text()
        except OSError as error:
            found = ""
            problem = str(error)
        else:
            problem = f"{path} has other content than the server's"
        if found != text:
            raise EngineError(
                f"{socket.gethostname()} does not see the server's data folder ({problem}); it "
                "must be there under the same path, on a file system that both share"
            )


def _build(start: Start) -> Core:
    module, _, name = start.core.partition(":")
    core: Core = getattr(importlib.import_module(module), name)(start.config)
    return core


def _receive(messages: Iterator[Incoming], inbox: queue.SimpleQueue[Incoming]) -> None:
    try:
        for message in messages:
            inbox.put(message)
    except OSError as error:
        logger.warning("the socket to the engine's caller failed: %s", error)
    finally:
        inbox.put(None)
    # The main thread normally ends the process before this does, unless its turn is a long one.
    # Cutting that short is safe: nobody waits for it, and files appear whole or not at all.
    time.sleep(EXIT_GRACE_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
