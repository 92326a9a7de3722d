"""A proxy between clients and servers that writes down what passes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

from chaos.proxy import FaultProxy
from history.calls import Recorder
from history.listening import Listener


class ListeningProxy:
    """A proxy in a thread of its own that writes a history."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.history = Recorder()
        self._loop = asyncio.new_event_loop()
        self._proxy = FaultProxy(ports, random.Random(1), lambda: Listener(self.history.hear))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> ListeningProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._proxy.start(), self._loop).result(30)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._proxy.close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._proxy.port}"
