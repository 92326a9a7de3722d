"""Links into the web console: the server's own, or the hosted service's."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

CONSOLE = "https://tinker.thinkingmachines.ai"
_HOSTED = ".thinkingmachines.dev"


def console_of(base_url: str) -> str:
    """Where the console of a service is: servers of ours have their own."""
    is_hosted = (urlsplit(base_url).hostname or "").endswith(_HOSTED)
    return CONSOLE if is_hosted else base_url.rstrip("/")


def session_console_url(session_id: str, console: str = CONSOLE) -> str:
    return f"{console}/sessions/{session_id}"


def training_run_console_url(training_run_id: str, console: str = CONSOLE) -> str:
    return f"{console}/training_runs/{training_run_id}"


def checkpoint_console_url(training_run_id: str, checkpoint_id: str) -> str:
    return (
        f"{CONSOLE}/checkpoints/{quote(training_run_id, safe='')}/{quote(checkpoint_id, safe='')}"
    )


def checkpoint_playground_url(tinker_path: str) -> str:
    return f"{CONSOLE}/playground?mode=checkpoint&checkpoint={quote(tinker_path, safe='')}"
