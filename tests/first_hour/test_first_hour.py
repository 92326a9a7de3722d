"""The first hour, played: what README, tutorial and guides tell a newcomer to type.

From the wheel, in a terminal of 80 columns, without a hub. What a command must not do is in
`tests/support/terminal.py`, what the blocks of a page need in `tests/support/pages.py`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support import terminal
from tests.support.newcomer import Served
from tests.support.pages import PAGES, ROOT, Part, parts

pytestmark = pytest.mark.slow

_INTERPRETER = """
import json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    exec(json.loads(line), names)
    print("\\0", flush=True)
"""


class Newcomer:
    """Somebody who follows a page from top to bottom."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._environment = environment
        self._folder = folder
        self._server: Served | None = None
        self._python: subprocess.Popen[str] | None = None
        self._shown = ""

    def follow(self, part: Part) -> None:
        if part.mark == "stop":
            self._stop_server()
        elif part.mark.startswith("no-run:"):
            return
        elif part.mark.startswith("check:"):
            expression = part.mark.removeprefix("check:").strip()
            self._execute(f"output = {self._shown!r}\nassert {expression}")
        elif part.mark.startswith("needs:"):
            self._need(part.mark.removeprefix("needs:").strip())
        elif part.mark == "serve":
            self._stop_server()
            self._server = Served(part.code.strip(), self._environment, self._folder)
            self._environment |= self._server.exports
        elif part.mark == "apart":
            (self._folder / "block.py").write_text(part.code)
            self.type("python block.py")
        elif part.language == "python":
            self._execute(part.code)
        elif part.language == "bash":
            self.type(part.code)

    def _need(self, module: str) -> None:
        """The rest of a page is for those who have a module."""
        looked = subprocess.run(
            ["python", "-c", f"import {module}"], env=self._environment, capture_output=True
        )
        if looked.returncode != 0:
            pytest.skip(f"the rest of the page needs {module}")

    def type(self, commands: str) -> str:
        after = self._folder / ".environment"
        line = ["bash", "-euo", "pipefail", "-c", f"{commands}\nenv -0 > {after}"]
        self._shown = terminal.run(line, env=self._environment, cwd=self._folder)
        pairs = (entry.partition("=") for entry in after.read_text().split("\0") if entry)
        self._environment = {name: value for name, _, value in pairs}
        return self._shown

    def leave(self) -> None:
        if self._python is not None:
            self._python.communicate(timeout=60)
        self._stop_server()

    def _execute(self, code: str) -> None:
        """Blocks of a page are one program, which goes on with each of them."""
        if self._python is None:
            with (self._folder / "errors.txt").open("w") as errors:
                self._python = subprocess.Popen(
                    # A warning about what a block itself does is a mistake of the page.
                    ["python", "-W", "error:::__main__", "-c", _INTERPRETER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment,
                    cwd=self._folder,
                    text=True,
                )
        assert self._python.stdin is not None and self._python.stdout is not None
        print(json.dumps(code), file=self._python.stdin, flush=True)
        for line in self._python.stdout:
            if line == "\0\n":
                return
        raise AssertionError(f"{code}\n{(self._folder / 'errors.txt').read_text()}")

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


def test_the_wheel_its_extra_and_the_constraints_fit_together(wheel: Path, installed: Path) -> None:
    """README's line, without a network: pip finds what it needs in the tests' own environment."""
    absent = [name for name in requirements_of(wheel, "all") if not is_installed(name)]
    if absent:
        pytest.skip(f"this environment is older than the wheel: {', '.join(absent)} is not here")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(installed / "python"), "install"),
            *("--dry-run", "--no-index", "-c", str(ROOT / "constraints.txt"), f"{wheel}[all]"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def requirements_of(wheel: Path, extra: str) -> set[str]:
    """The packages that a wheel asks for with an extra, extras of its own followed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    asked = [Requirement(line[15:]) for line in lines if line.startswith("Requires-Dist: ")]
    names, extras, seen = set(), ["", extra], set[str]()
    while extras:
        seen.add(current := extras.pop())
        for each in asked:
            if each.marker is None or each.marker.evaluate({"extra": current}):
                names.add(each.name)
                extras += [more for more in each.extras if each.name == "tinsmith"]
        extras = [each for each in extras if each not in seen]
    return names - {"tinsmith"}


def is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed(page: str, shared_server: dict[str, str], tmp_path: Path) -> None:
    """S45, S117: every block runs, against a real server."""
    found = parts((ROOT / page).read_text("utf-8"))
    environment = dict(shared_server)
    if any(part.mark == "serve" for part in found):
        environment["HOME"] = str(tmp_path)
        del environment["TINKER_BASE_URL"], environment["TINKER_API_KEY"]
    newcomer = Newcomer(environment, tmp_path)
    try:
        for part in found:
            newcomer.follow(part)
    finally:
        newcomer.leave()


def test_a_page_fails_with_its_block(tmp_path: Path) -> None:
    newcomer = Newcomer(dict(os.environ), tmp_path)
    newcomer.follow(Part("", "bash", "export WORD=tin; echo $WORD", 1))
    newcomer.follow(Part("", "bash", 'test "$WORD" = tin', 2))
    with pytest.raises(AssertionError, match="exit code 1"):
        newcomer.follow(Part("", "bash", "false", 3))
    newcomer.follow(Part("", "bash", "echo $WORD", 4))
    newcomer.follow(Part("", "python", "a = 1", 5))
    newcomer.follow(Part("check: a == 1 and 'tin' in output", "", "", 6))
    with pytest.raises(AssertionError, match="assert a == 2"):
        newcomer.follow(Part("check: a == 2", "", "", 7))
    newcomer.leave()


def test_what_somebody_looks_at_who_has_trained_something(
    shared_server: dict[str, str], installed: Path, tmp_path: Path
) -> None:
    newcomer = Newcomer(dict(shared_server), tmp_path)
    found = newcomer.type("python -c 'import tinsmith; print(tinsmith.__file__)'; which tinsmith")
    assert found.count(str(installed.parent)) == 2, "or the source tree would be tried"
    sums = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(4)]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, sums)))
    newcomer.type("tinsmith train sft talk.jsonl --steps 2 --batch-size 2 --output trained")
    for command in (
        "--version",
        "--help",
        "doctor",
        "model list",
        "run list",
        "checkpoint list",
        "session list",
        "auth status",
        "auth whoami",
    ):
        newcomer.type(f"tinsmith {command}")
    shown = newcomer.type("tinsmith checkpoint list")
    assert "tinker://" in shown


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("all is well: 3f2a1b4c-1111-2222-3333-444455556666:train:0", None),
        ("Traceback (most recent call last):", "a traceback"),
        ("tinker://3f2a…", "cut off"),
        ("3f2a1b4c-1111-22…", "cut off"),
        ("3f2a1b4c-1111-2222-3333-44445555\n6666:train:0", "cut off"),
        ("3f2a1b4c-1111-2222-3333-444455556666🚋0", "a picture"),
    ],
)
def test_what_spoils_the_hour_is_noticed(text: str, problem: str | None) -> None:
    found = terminal.problem_in(text)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_a_silence_is_noticed(tmp_path: Path) -> None:
    command = ["bash", "-c", "echo on my way; sleep 2; echo there"]
    with pytest.raises(AssertionError, match=r"silent for \d\.\d s after 'on my way"):
        terminal.run(command, env={}, cwd=tmp_path, silence_seconds=0.2)
