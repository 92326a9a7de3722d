"""A `tinsmith serve` of its own for a benchmark, on a free port, in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    key: str
    pid: int
    ready_after: float
    """Seconds from the start of the process to `/readyz`."""

    def metric(self, name: str) -> float:
        """The value of one of the server's numbers, 0 if it has not been counted yet."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(rf"^tinsmith_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def cpu_seconds(self) -> float:
        """Processor time of the server process itself; its engine is another process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024


@contextlib.contextmanager
def serve(*options: str, data_dir: str | None = None) -> Iterator[Server]:
    """Start a server with these options, and stop it at the end.

    Without a data folder it has one of its own, which goes with it. In one that was used before,
    no key is made, and the server has none to tell.
    """
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as folder:
        command = [sys.executable, "-m", "tinsmith.cli", "serve", "--port", "0"]
        command += ["--data-dir", str(data_dir or Path(folder, "data")), *options]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))}
        is_new = data_dir is None or not any(Path(data_dir).iterdir())
        started = time.monotonic()
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=kept
            )
        try:
            assert process.stdout is not None
            exported: dict[str, str] = {}
            for line in process.stdout:
                if found := re.match(r"export (TINKER_\w+)=(.*)", line):
                    exported[found[1]] = found[2]
                if len(exported) == (2 if is_new else 1):
                    break
            else:
                raise SystemExit(Path(folder, "log").read_text())
            _wait_until_ready(exported["TINKER_BASE_URL"])
            ready_after = time.monotonic() - started
            url, key = exported["TINKER_BASE_URL"], exported.get("TINKER_API_KEY", "")
            yield Server(url, key, process.pid, ready_after)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(0.02)
    raise SystemExit("the server did not become ready")
