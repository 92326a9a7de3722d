"""Ids as people type them: by their beginning, and runs by their name.

`tinker://3f2a/weights/final` means the run whose id begins with 3f2a, `tinker://pirate/weights/final`
the one that was named so. What fits nothing goes to the server as it is, whose answer says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tinsmith.cli.failures import CommandError

if TYPE_CHECKING:
    from tinsmith.client.rest import RestClient
    from tinsmith.types import TrainingRun

_SCHEME = "tinker://"
_WHOLE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(:\w+:\d+)?")
_MOST_SHOWN = 10


def run_name(run: TrainingRun) -> str:
    """What its maker called the run; empty if nothing."""
    return (run.user_metadata or {}).get("name", "")


def run_id(client: RestClient, given: str) -> str:
    """The whole id of a run."""
    if ":" in given and _WHOLE.fullmatch(given):
        return given
    runs = {run.training_run_id: run_name(run) for run in client.iter_training_runs()}
    if given in runs:
        return given
    named = {each: name for each, name in runs.items() if name == given}
    return _only(given, named or _beginning(given, runs), "runs")


def checkpoint_path(client: RestClient, given: str) -> str:
    """The whole path of a checkpoint."""
    check_path(given)
    run, slash, rest = given.removeprefix(_SCHEME).partition("/")
    return f"{_SCHEME}{run_id(client, run)}{slash}{rest}" if run and slash else given


def session_id(client: RestClient, given: str) -> str:
    """The whole id of a session."""
    if _WHOLE.fullmatch(given):
        return given
    return _only(given, _beginning(given, dict.fromkeys(client.iter_sessions(), "")), "sessions")


def trash_entry_id(known: Iterable[str], given: str) -> str:
    """The whole id of an entry of the trash."""
    ids = dict.fromkeys(known, "")
    return given if given in ids else _only(given, _beginning(given, ids), "entries")


def check_path(given: str) -> None:
    if not given.startswith(_SCHEME):
        raise CommandError(
            f"Invalid checkpoint path: {given}",
            "Checkpoint path must be in the format: tinker://run-id/weights/0001",
        )


def _beginning(given: str, known: Mapping[str, str]) -> dict[str, str]:
    return {each: name for each, name in known.items() if given and each.startswith(given)}


def _only(given: str, found: Mapping[str, str], what: str) -> str:
    if len(found) < 2:
        return next(iter(found), given)
    lines = [f"  {each}  {name}".rstrip() for each, name in found.items()]
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"  and {len(lines) - _MOST_SHOWN} more"]
    raise CommandError(f"{given!r} could be one of {len(found)} {what}", "\n".join(lines))
