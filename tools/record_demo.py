"""Record `tinsmith demo` in a terminal of its own and draw what it showed as an SVG.

    python tools/record_demo.py docs/demo.svg

The picture is of a real run: live lines are kept as they were at the end, and the key is hidden.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 110


def record(data_dir: Path) -> str:
    """Everything that the demo wrote to its terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    command = [sys.executable, "-m", "tinsmith.cli", "demo", "--data-dir", str(data_dir)]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    if process.wait():
        sys.exit(shown.decode(errors="replace"))
    return shown.decode(errors="replace")


def last_frames(shown: str) -> list[str]:
    """The lines as they were at the end: a live line is written over and over."""
    lines = []
    for line in re.split(r"\r?\n", shown):
        # Only colours are kept of the escape sequences; the others move the cursor.
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-ln-z]", "", line)
        frame = plain.rstrip("\r").rpartition("\r")[2]
        is_passing = re.match(r"(\x1b\[[0-9;]*m)*[⠁-⣿]", frame)
        if not is_passing:
            lines.append(re.sub(r"tml-[\w-]+", "tml-…", frame))
    return lines


def draw(lines: list[str], target: Path) -> None:
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    console.print("$ tinsmith demo", style="bold")
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=False)
    target.write_text(console.export_svg(title="tinsmith demo"), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        shown = record(Path(folder) / "demo")
        shown = shown.replace(f"{folder}/demo", "~/.local/share/tinsmith/demo")
        draw(last_frames(shown), Path(sys.argv[1]))
