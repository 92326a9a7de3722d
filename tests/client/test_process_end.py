"""A program that uses the client ends like any other, whatever is still under way."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import sys
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
