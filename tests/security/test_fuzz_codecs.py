"""A short run of every fuzzing target; `make fuzz` runs each for minutes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

FORKED = ("sh", "-c", '"$@"; exit $?', "sh")
"""A process begins with its parent's peak of memory; with a small one between, with a small one."""

SCRIPT = Path(__file__).with_name("fuzz_codecs.py")
TARGETS = re.findall(r"^def (\w+)\(data: bytes\)", SCRIPT.read_text(), re.MULTILINE)
RUNS = 3000
MAX_INPUT_SECONDS = 10
MAX_MEMORY_MB = 1024


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris has no wheel for this Python or system",
)
@pytest.mark.parametrize("target", TARGETS)
def test_no_bytes_are_too_much_for_a_decoder(target: str, tmp_path: Path) -> None:
    limits = [f"-runs={RUNS}", f"-timeout={MAX_INPUT_SECONDS}", f"-rss_limit_mb={MAX_MEMORY_MB}"]
    done = subprocess.run(
        [*FORKED, sys.executable, str(SCRIPT), target, "-seed=1", *limits],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {RUNS} runs" in done.stderr
