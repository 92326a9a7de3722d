"""The embedded model's folder, fetched and converted by a child process the first time.

So this process does not carry torch and a second copy of the weights. Whatever ends this one ends
the child too, and a child that is ended leaves nothing half done.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.cli.failures import CommandError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tinsmith.cli.progress import Stage


_EXIT_SECONDS = 10.0


def fetch(showing: AbstractContextManager[Stage]) -> Path:
    """The folder; `showing` is entered while there is something to wait for."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with showing as stage, ours:
        process = context.Process(target=_fetch_in_child, args=(theirs,), daemon=True)
        # A terminal sends Ctrl-C to the child as well, where it would end in a traceback. What
        # is blocked when a process starts stays blocked in it; here it is only put off.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            kind, value = _last_word(ours, stage)
            # It ends by itself; by force it would leave behind what it shares with this process.
            process.join(_EXIT_SECONDS)
        except EOFError:
            process.join()
            raise CommandError(
                f"the process that fetches the model ended early (exit code {process.exitcode}); "
                "a machine short of memory does that: the model needs about 2 GB while it is "
                "converted"
            ) from None
        finally:
            process.terminate()
            process.join()
    if kind == "error":
        raise CommandError(value)
    return Path(value)


def _last_word(connection: Connection, stage: Stage) -> tuple[str, str]:
    """Shows the progress; in the end ("folder", its path) or ("error", the reason)."""
    while True:
        kind, *values = connection.recv()
        if kind != "progress":
            return kind, values[0]
        stage.update(values[1], values[0])


def _fetch_in_child(connection: Connection) -> None:
    from tinsmith.engine.local.config import EMBEDDED_SOURCE, LocalEngineConfig
    from tinsmith.engine.local.model.sources import model_folder
    from tinsmith.errors import TinkerError

    def end(number: int, frame: Any) -> None:
        sys.exit(1)  # so that temporary files are removed and pip is stopped on the way out

    signal.signal(signal.SIGTERM, end)

    def tell(what: str, fraction: float) -> None:
        connection.send(("progress", what, fraction))

    try:
        connection.send(("folder", str(model_folder(EMBEDDED_SOURCE, LocalEngineConfig(), tell))))
    except (TinkerError, OSError) as error:
        connection.send(("error", str(error)))
    # All is said: from here on it may be ended on the spot.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
