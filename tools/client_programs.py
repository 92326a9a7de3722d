"""Run the tests of programs that people use, each with a package of its own: `make clients`.

They ask for other versions of the same packages, of `openai` above all, so each is installed into
a folder of its own, once per machine, and comes first on the path of the tests that need it. So
does the block of its page in `docs/how-to`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "tinsmith-tests"

PACKAGES = {
    "litellm": ("litellm==1.106.2", "litellm"),
    "inspect": ("inspect-ai==0.3.285", "inspect_ai"),
    "agents": ("openai-agents==0.24.0", "agents"),
    "verifiers": ("renderers==0.1.12", "renderers.client"),
}
"""From a word in the names of its tests to what is installed, and what is imported."""

CLAUDE_CODE = "@anthropic-ai/claude-code@2.1.197"

TESTS = (
    "tests/compat/test_client_programs.py",
    "tests/compat/test_agents.py",
    "tests/first_hour/test_first_hour.py",
)


def installed(package: str, install: Callable[[Path], None]) -> Path:
    """The folder that has a package and what it needs."""
    folder = CACHE / f"{package.replace('/', '-')}-{sys.version_info.minor}"
    if not (folder / "finished").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        install(folder)
        (folder / "finished").touch()
    return folder


def test_package(name: str) -> None:
    package, module = PACKAGES[name]

    def install(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, "--target", str(folder), package], check=True)

    environment = {"PYTHONPATH": str(installed(package, install))}
    # Otherwise its tests would be skipped, and nothing said.
    run([sys.executable, "-c", f"import {module}"], environment)
    run_tests(name, environment)


def test_claude_code() -> None:
    def install(folder: Path) -> None:
        subprocess.run(["npm", "install", "--prefix", str(folder), CLAUDE_CODE], check=True)
        # What npm itself does only where it is told to trust the package.
        package = folder / "node_modules" / "@anthropic-ai" / "claude-code"
        subprocess.run(["node", "install.cjs"], cwd=package, check=True)

    if shutil.which("npm") is None:
        sys.exit("Claude Code is installed with npm, which is not here")
    programs = installed(CLAUDE_CODE, install) / "node_modules" / ".bin"
    environment = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    run(["claude", "--version"], environment)
    run_tests("claude", environment)


def run_tests(name: str, environment: dict[str, str]) -> None:
    run([sys.executable, "-m", "pytest", "-q", "-k", name, *TESTS], environment)


def run(command: list[str], environment: dict[str, str]) -> None:
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    if subprocess.run(command, cwd=ROOT, env=whole).returncode != 0:
        sys.exit(f"{' '.join(command)} failed")


def main() -> None:
    for name in sys.argv[1:] or [*PACKAGES, "claude"]:
        if name == "claude":
            test_claude_code()
        else:
            test_package(name)


if __name__ == "__main__":
    main()
