"""A child process whose output is read line by line while it runs, and to its end.

Reading a pipe by lines and then calling `communicate()` loses what the file object had read ahead,
half a line on a loaded machine. Here one thread per pipe reads all of it; a test takes from that.
"""

from __future__ import annotations

import itertools
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import IO, Any


def ended_well(code: int, errors: str) -> bool:
    """Whether a program with the official client in it did all it had to do.

    The client's HTTP library, pyqwest, hands an answer to Python from a thread of its own. If the
    interpreter is ending at that moment, CPython before 3.14 ends the thread, and because its code
    is in Rust the process aborts: without a word, after the program's last line. Ours waits for
    these threads. What goes wrong before that is said on stderr.
    """
    return code == 0 or (code in (-signal.SIGABRT, -signal.SIGSEGV) and not errors)


class Child:
    def __init__(self, command: list[str], **options: Any) -> None:
        """`options` are those of `subprocess.Popen`; stdout and stderr are read here."""
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        self.out = _Lines(self.process.stdout)
        self.err = _Lines(self.process.stderr)

    def finish(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the end; what it said on each stream since a test last looked."""
        self.process.wait(timeout)
        return self.out.rest(), self.err.rest()


class _Lines:
    """The lines of a pipe, those that nobody has taken yet first."""

    def __init__(self, pipe: IO[str] | None) -> None:
        assert pipe is not None
        self._pipe = pipe
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[str]:
        while (line := self._lines.get()) is not None:
            yield line

    def take(self, count: int) -> list[str]:
        """The next lines, without their ends; fewer only if the stream ends before."""
        return [line.rstrip("\n") for line in itertools.islice(self, count)]

    def rest(self) -> str:
        self._thread.join(30)
        return "".join(self)

    def _read(self) -> None:
        with self._pipe:
            for line in self._pipe:
                self._lines.put(line)
        self._lines.put(None)
