"""Keys as they are pressed, for commands that show something live on a terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from types import TracebackType
from typing import Any, Self

_NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "k": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "j": "down",
    "\n": "enter",
    "\r": "enter",
    "\x1b": "escape",
}
_MOST_BYTES = 64
_KEY = re.compile(r"\x1b[\[O].|.", re.DOTALL)


class Keyboard:
    """While it is open, keys need no Enter and are not shown. Without a terminal there are none."""

    def __init__(self) -> None:
        self._settings: list[Any] | None = None
        self._pressed: list[str] = []
        """Keys that came with those before them, the first one first."""

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            import termios  # not on every system, but on all that have a terminal
            import tty

            self._settings = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._settings is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)

    def wait(self, seconds: float) -> str | None:
        """The next key, a letter or its name; None when none was pressed for so many seconds."""
        if self._settings is None:
            time.sleep(seconds)
            return None
        if self._pressed:
            return self._pressed.pop(0)
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return None
        # An arrow is several bytes, which come together; so do keys that are pressed quickly.
        pressed = os.read(sys.stdin.fileno(), _MOST_BYTES).decode(errors="replace")
        if not pressed:
            return "q"  # the terminal is gone
        self._pressed = [_NAMES.get(key, key) for key in _KEY.findall(pressed)]
        return self._pressed.pop(0)
