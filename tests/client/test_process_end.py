"""A program that uses the client ends like any other, whatever is still under way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import sys
from pathlib import Path
from tinsmith import types
from tinsmith.client.service import ServiceClient
service = ServiceClient(base_url=sys.argv[1], api_key="tml-x")
sampler = service.create_sampling_client(base_model="m")
prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
futures = [sampler.sample(prompt, 1, params) for _ in range(50)]
for future in futures[: int(sys.argv[2])]:
    future.result()
"""


@pytest.mark.parametrize("awaited", [0, 1, 50])
def test_the_process_ends_cleanly_and_soon(stub: Any, awaited: int) -> None:
    """S77: samples in flight, a session that was not closed."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", PROGRAM, stub.url, str(awaited)],
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert (done.returncode, done.stderr) == (0, "")


BUSY = """
import hashlib, os, threading
from pathlib import Path

def work():
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("tokio-rt-worker")
    is_named.set()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000)  # without the interpreter's lock
    os.write(1, b"released")

is_named = threading.Event()
threading.Thread(target=work, daemon=True).start()
is_named.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux tells of threads")
def test_the_end_waits_for_threads_of_the_http_library_that_are_at_work(stub: Any) -> None:
    """One that wants the interpreter when it is gone aborts the process: 2 of 100 programs did,
    beside others that kept the processors busy. Here one is pretended."""
    command = [sys.executable, "-c", PROGRAM + BUSY, stub.url, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "released", "")
