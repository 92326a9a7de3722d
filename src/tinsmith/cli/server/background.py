"""A temporary server: `tinsmith serve` as a child process on a loopback port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.cli.failures import CommandError

START_SECONDS = 180.0
"""Longest wait for a server to be ready; loading a model from a cold disk may take a minute."""

_STOP_SECONDS = 40.0
_ENDS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class BackgroundServer:
    url: str
    console_url: str | None
    """A link that signs a browser in; it works once, and only for some minutes."""
    process: subprocess.Popen[str]


@contextmanager
def serving(
    data_dir: Path, *, port: int = 0, options: Sequence[str] = ()
) -> Iterator[BackgroundServer]:
    """A server that is ready when the block begins, and stopped however the block ends."""
    command = [sys.executable, "-m", "tinsmith.cli", "serve", "--data-dir", str(data_dir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--json", *options]
    with tempfile.TemporaryFile("w+") as log, _ended_as_interrupted():
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_plain_environment(),
            process_group=0,  # Ctrl-C is for the command, which stops its server in order
        )
        try:
            said = _announced(process)
            if said is None or not _is_ready(process, said["base_url"]):
                raise CommandError(_last_words(process, log))
            yield BackgroundServer(said["base_url"], said["console_url"], process)
        finally:
            with _handling(signal.SIG_IGN, signal.SIGINT, *_ENDS):
                _stop(process)


def _plain_environment() -> dict[str, str]:
    """Without settings that are meant for another server."""
    return {name: text for name, text in os.environ.items() if not name.startswith("TINSMITH_")}


def _announced(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """What it says when it can be reached, an object over several lines; None if it ends before."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line == "}\n":
            announced: dict[str, Any] = json.loads(text)
            return announced
    process.wait(_STOP_SECONDS)  # it closed its output, so it is about to end
    return None


def _is_ready(process: subprocess.Popen[str], url: str) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=10):
                return True
        except urllib.error.HTTPError as error:
            with error:
                if b"no model" in error.read():
                    return False  # and will not have one
        except OSError:
            pass
        time.sleep(0.1)
    return False


def _last_words(process: subprocess.Popen[str], log: object) -> str:
    log.seek(0)  # type: ignore[attr-defined]  # a temporary file has no public type
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]  # type: ignore[attr-defined]
    if refused := [line for line in lines if line.startswith("Not served: ")]:
        return f"the server has no model. {refused[0]}"
    if process.poll() is None:
        return f"the server was not ready within {START_SECONDS:.0f} seconds; is the machine busy?"
    reason = lines[-1].removeprefix("Error: ") if lines else f"exit code {process.returncode}"
    if "cannot listen" in reason:
        reason += "; choose another with --port, or omit --port to get a free one"
    return f"the server could not start: {reason}"


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


@contextmanager
def _ended_as_interrupted() -> Iterator[None]:
    """SIGTERM must run the clean-up, or the child would live on."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt, *_ENDS):
        yield


@contextmanager
def _handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
