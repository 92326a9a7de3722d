"""The kernels where there is no GPU: this folder's tests, in Triton's interpreter.

Each file runs in a process of its own, because whether kernels are interpreted is settled when
they are imported, for a whole process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
NOT_INTERPRETED = {Path(__file__).name, "test_compiled.py", "test_launching.py"}
"""They run kernels nowhere, and need no GPU either."""

FILES = sorted({path.name for path in FOLDER.glob("test_*.py")} - NOT_INTERPRETED)
QUICKEST = "test_decode_attention.py"
"""The others take 8 to 30 seconds each."""

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself"),
    pytest.mark.timeout(1800),
]


@pytest.mark.parametrize(
    "file",
    [pytest.param(name, marks=[] if name == QUICKEST else pytest.mark.slow) for name in FILES],
)
def test_interpreted_kernels_compute_what_plain_torch_does(file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FOLDER / file],
        cwd=FOLDER.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert re.match(r"\d+ passed", summary) and "skipped" not in summary, done.stdout
