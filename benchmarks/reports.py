"""A run's own report: the figures, and what is needed to repeat the run."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LOAD_BEFORE = round(os.getloadavg()[0], 1)
"""How busy the machine was when the run began, by others."""

BUSY_LOAD = 1.5 * (os.cpu_count() or 1)


def write_report(path: Path | None, result: dict[str, Any], machine: str | None = None) -> None:
    """One JSON object: in `path`, or on stdout without one."""
    report = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_options()]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": os.environ.get("TINSMITH_COMMIT") or _commit(),
        "machine": machine or f"{os.cpu_count()} CPU cores{_load()}",
        "load_before": LOAD_BEFORE,
        "result": result,
    }
    text = json.dumps(report, indent=2)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", "utf-8")


def _load() -> str:
    """Said where others had more to do than there are cores: figures are then of a busy machine."""
    return f", busy with other work (load {LOAD_BEFORE:g})" if LOAD_BEFORE > BUSY_LOAD else ""


def _options() -> list[str]:
    """The arguments without the report's own place; of other places on this machine the name."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
