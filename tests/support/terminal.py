"""A command in a terminal of 80 columns, watched as its user would watch it.

Fails on what spoils the first hour: a traceback, a silence without a sign of life, an id that is
cut off or broken over two lines.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

COLUMNS = 80

_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_BEGUN_ID = re.compile(r"(?<![0-9a-f-])[0-9a-f]{8}-[0-9a-f]{4}-")
_CUT_PATH = re.compile(r"tinker://\S*(…|\.\.\.)")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")


def run(
    command: Sequence[str],
    *,
    env: dict[str, str],
    cwd: Path,
    silence_seconds: float = 3.0,
    timeout_seconds: float = 100.0,
) -> str:
    """What the command shows, without colours; an AssertionError tells what is wrong with it."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=child,
        stdout=child,
        stderr=child,
        env={**env, "TERM": "xterm-256color"},
        cwd=cwd,
        start_new_session=True,
    )
    os.close(child)
    started = last = time.monotonic()
    shown, silence, before = b"", 0.0, ""
    try:
        while time.monotonic() - started < timeout_seconds:
            if select.select([parent], [], [], 0.1)[0]:
                piece = _read(parent)
                if not piece:
                    break
                if time.monotonic() - last > silence:
                    silence, before = time.monotonic() - last, _plain(shown)[-300:]
                shown, last = shown + piece, time.monotonic()
        silence = max(silence, time.monotonic() - last)
        text = _plain(shown)
        code = process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    where = f"{' '.join(command)}\n{text}"
    assert code == 0, f"exit code {code}: {where}"
    problem = problem_in(text)
    assert problem is None, f"{problem}: {where}"
    patience = silence_seconds * _slowness()
    assert silence <= patience, f"silent for {silence:.1f} s after {before!r}: {where}"
    return text


def problem_in(text: str) -> str | None:
    """What would spoil the hour of somebody who reads this."""
    if "Traceback (most recent call last)" in text:
        return "a traceback"
    if found := _CUT_PATH.search(text):
        return f"a path that is cut off, {found[0]}"
    for begun in _BEGUN_ID.finditer(text):
        if not re.match(_ID, text[begun.start() :]):
            return f"an id that is cut off, {text[begun.start() : begun.start() + 40]!r}"
    if found := re.search(_ID + "[\U0001f300-\U0001faff]", text):  # `:train:` is a word for one
        return f"an id with a picture in it, {found[0]!r}"
    return None


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


def _plain(shown: bytes) -> str:
    return _CONTROL.sub("", shown.decode(errors="replace"))


def _slowness() -> float:
    """How much longer things take because others use the machine too."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
