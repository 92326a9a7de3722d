"""Ends a process before or after a function that writes; Python loads this file by its name.

The file that CRASH_PLAN names holds `ID NAME WHEN COUNT`: the process is killed `before` or `after`
the function is called for the COUNT-th time since the plan was made. The plan is removed first, so
the next process goes on. In the file CRASH_LOG every call leaves its name.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

PLAN = Path(os.environ["CRASH_PLAN"])
LOG = Path(os.environ["CRASH_LOG"])
LOCK = threading.Lock()
COUNTS: dict[str, int] = {}


def guarded(name: str, function: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        when = planned(name)
        if when == "before":
            die()
        result = function(*arguments, **options)
        if when == "after":
            die()
        return result

    return call


def planned(name: str) -> str | None:
    """Whether the process is to die before or after this call."""
    with LOCK:
        with LOG.open("a") as log:
            log.write(f"{name}\n")
        try:
            plan = PLAN.read_text()
        except FileNotFoundError:
            return None
        _, wanted, when, count = plan.split()
        if wanted != name:
            return None
        COUNTS[plan] = COUNTS.get(plan, 0) + 1
        return when if COUNTS[plan] == int(count) else None


def die() -> None:
    PLAN.unlink()
    os.kill(os.getpid(), signal.SIGKILL)
    # The signal may come a moment later, and what follows must not happen.
    threading.Event().wait()


def install() -> None:
    from tinsmith import disk

    who = "engine" if "tinsmith.engine.local.boundary.process" in sys.orig_argv else "server"
    for name in disk.WRITES:
        setattr(disk, name, guarded(f"{who}.{name}", getattr(disk, name)))
    if "serve" in sys.orig_argv:
        from tinsmith.server.store import writer

        writer.commit = guarded("server.commit", writer.commit)


if "tinsmith.cli" in sys.orig_argv or "tinsmith.engine.local.boundary.process" in sys.orig_argv:
    install()
