"""`tinsmith serve` in a process of its own, for tests that need a real server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_START_SECONDS = 60


@dataclass(frozen=True)
class Server:
    url: str
    key: str
    data_dir: Path
    process: subprocess.Popen[str]

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to use this server and nothing of the developer's."""
        return clean_environment() | {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.key,
            "TINKER_TELEMETRY": "0",
            "OMP_NUM_THREADS": "1",
        }


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))}


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    """A server on the fake engine, ready, with its data under `folder`."""
    command = [sys.executable, "-m", "tinsmith.cli", "serve", "--engine", "fake", "--port", "0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(folder / "data"), *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=clean_environment(),
        )
    assert process.stdout is not None
    try:
        said = "".join(process.stdout.readline() for _ in range(3))
        found = re.findall(r"^export TINKER_(?:BASE_URL|API_KEY)=(\S+)$", said, re.MULTILINE)
        assert len(found) == 2, said + (folder / "log").read_text()
        url, key = found
        _wait_until_ready(url)
        yield Server(url, key, folder / "data", process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.stdout.close()


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(0.05)
    raise AssertionError(f"the server was not ready within {_START_SECONDS} seconds")
