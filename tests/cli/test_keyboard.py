"""Keys on a terminal: one after the other, however quickly they were pressed."""

from __future__ import annotations

import os
import pty

import pytest

from tinsmith.cli.keyboard import Keyboard


def test_keys_that_come_together_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        with Keyboard() as keyboard:
            assert keyboard.wait(0.0) is None
            os.write(ours, b"\x1b[B\x1bOBjk\x1b[A\rx\x1b")
            told = [keyboard.wait(30.0) for _ in range(8)]
            assert told == ["down", "down", "down", "up", "up", "enter", "x", "escape"]
            assert keyboard.wait(0.0) is None
    os.close(ours)
