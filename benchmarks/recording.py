"""A benchmark's results with what is needed to judge them: command, date, commit, machine."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def write(result: dict[str, Any], *, command: str, load: float, output: Path | None) -> None:
    """Print, or write to `output`. `load` is the machine's before the run."""
    record = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "machine": f"{os.cpu_count()} CPU cores, load {load:.1f} before the run",
        "result": result,
    }
    text = json.dumps(record, indent=2)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n")


def load_now() -> float:
    """How many processes wanted the CPU in the last minute."""
    return os.getloadavg()[0]


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
