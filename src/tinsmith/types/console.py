"""Links into the hosted service's web console, for those who use this client with it."""

from __future__ import annotations

from urllib.parse import quote

CONSOLE = "https://tinker.thinkingmachines.ai"


def session_console_url(session_id: str) -> str:
    return f"{CONSOLE}/sessions/{session_id}"


def training_run_console_url(training_run_id: str) -> str:
    return f"{CONSOLE}/training_runs/{training_run_id}"


def checkpoint_console_url(training_run_id: str, checkpoint_id: str) -> str:
    return (
        f"{CONSOLE}/checkpoints/{quote(training_run_id, safe='')}/{quote(checkpoint_id, safe='')}"
    )


def checkpoint_playground_url(tinker_path: str) -> str:
    return f"{CONSOLE}/playground?mode=checkpoint&checkpoint={quote(tinker_path, safe='')}"
