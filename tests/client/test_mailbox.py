"""Calls from other threads to a loop: none is forgotten, whenever a thread is interrupted."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tinsmith.client.uplink.loop import Mailbox


class InterruptedLoop(asyncio.SelectorEventLoop):
    """Ctrl-C comes while the loop is being told, before or after it hears."""

    def __init__(self, *, hears: bool) -> None:
        super().__init__()
        self.interrupts = 1
        self._hears = hears

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        is_interrupted, self.interrupts = self.interrupts > 0, 0
        if is_interrupted and not self._hears:
            raise KeyboardInterrupt
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        if is_interrupted:
            raise KeyboardInterrupt
        return handle


@pytest.mark.parametrize("hears", [False, True])
def test_after_ctrl_c_in_the_middle_of_a_call_the_next_one_is_heard(hears: bool) -> None:
    loop = InterruptedLoop(hears=hears)
    mailbox = Mailbox(loop)
    heard: list[str] = []
    both = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        mailbox.post(lambda: heard.append("first"))
    runner = threading.Thread(target=loop.run_forever)
    runner.start()
    mailbox.post(lambda: heard.append("second"))
    mailbox.post(both.set)
    was_heard = both.wait(10)
    asyncio.SelectorEventLoop.call_soon_threadsafe(loop, loop.stop)
    runner.join(10)
    loop.close()
    assert was_heard
    assert heard == ["first", "second"]
