"""The kernels compile for GPUs that are not there, and fit into the shared memory that they have.

The interpreter, in which kernels are tested without a GPU (`test_interpreted.py`), compiles nothing
and has memory without end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

TOO_LARGE_FOR_99_KIB = ["delta_rule._walk_back_kernel, Qwen3.5-4B, float32"]
"""It has one stage anyway, and would have to hold less at a time; see docs/how-to/gpu.md."""


def compiled_for(capability: int, max_shared: int, cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", f"{__package__}.compiling", str(capability), str(max_shared)]
    env = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["compiled"] > 90
    return found


def names(found: list[str]) -> list[str]:
    """Kernels and sizes, without the bytes, which depend on Triton's release."""
    return [each.partition(":")[0] for each in found]


def test_kernels_compile_for_hopper_and_have_all_their_stages(tmp_path: Path) -> None:
    found = compiled_for(90, 232_448, tmp_path)
    assert found["failed"] == []
    # More ranks than the default allows.
    assert names(found["staged"]) == ["decode_lora._shrink_kernel, Qwen3-8B, rank 512"]


def test_kernels_compile_for_gpus_with_99_kib_of_shared_memory(tmp_path: Path) -> None:
    found = compiled_for(89, 101_376, tmp_path)
    assert names(found["failed"]) == TOO_LARGE_FOR_99_KIB, found["failed"]
    # Without fewer stages, this would not run at all.
    assert "low_rank._shrink, Qwen3-4B, rank 32, 64 rows, float32" in names(found["staged"])
