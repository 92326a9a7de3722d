"""Every Python and shell block of README, tutorial and guides runs, against a real server.

What a block needs is said in `tests/support/pages.py`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import PAGES, ROOT, RUN, SHOWN, Part, parts


class PageRun:
    """One page from top to bottom."""

    def __init__(self, page: str, environment: dict[str, str], folder: Path, serve: Any) -> None:
        self._page = page
        self._environment = dict(environment)
        self._folder = folder
        self._serve = serve
        self._server: Any = None
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, part: Part, set_environment: Callable[[dict[str, str]], None]) -> None:
        where = f"{self._page}:{part.line}"
        if part.mark == "stop":
            self.stop()
        elif part.mark.startswith("check:"):
            expression = part.mark.removeprefix("check:").strip()
            assert eval(expression, self._names), f"{where}: {expression}"  # noqa: S307  # our own page
        elif part.mark.startswith("needs:"):
            module = part.mark.removeprefix("needs:").strip()
            pytest.importorskip(module, reason=f"{where} needs {module}")
        elif part.mark.startswith("no-run:") or part.language not in RUN:
            return
        elif part.mark == "serve":
            self.stop()
            self._server = self._serve(part.code.strip(), self._environment, self._folder)
            self._environment |= self._server.exports
        elif part.mark == "apart":
            (self._folder / "block.py").write_text(part.code)
            self._shell("python block.py", where)
        elif part.language == "python":
            set_environment(self._environment)
            code = compile("\n" * part.line + part.code, str(ROOT / self._page), "exec")
            exec(code, self._names)  # noqa: S102  # our own page
        else:
            self._shell(part.code, where)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _shell(self, code: str, where: str) -> None:
        after = self._folder / ".environment"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{code}\nenv -0 > {after}"],
            env=self._environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, f"{where}\n{code}\n{done.stdout}\n{done.stderr}"
        pairs = (entry.partition("=") for entry in after.read_text().split("\0") if entry)
        self._environment = {name: value for name, _, value in pairs}
        self._names["output"] = done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(
    page: str,
    shared_server: dict[str, str],
    served: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S45, S117"""
    monkeypatch.chdir(tmp_path)

    def set_environment(wanted: dict[str, str]) -> None:
        for name in set(os.environ) - set(wanted):
            monkeypatch.delenv(name)
        for name, value in wanted.items():
            monkeypatch.setenv(name, value)

    found = parts((ROOT / page).read_text("utf-8"))
    environment = dict(shared_server)
    if any(part.mark == "serve" for part in found):
        # Its servers keep their data in a home of their own.
        environment["HOME"] = str(tmp_path)
        del environment["TINKER_BASE_URL"], environment["TINKER_API_KEY"]
    run = PageRun(page, environment, tmp_path, served)
    try:
        for part in found:
            run.run(part, set_environment)
    finally:
        run.stop()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    for part in parts((ROOT / page).read_text("utf-8")):
        if part.language or part.code:
            assert part.language in RUN + SHOWN, f"{page}:{part.line}: {part.language!r}"


def test_a_block_that_is_not_run_gives_its_reason() -> None:
    text = "<!-- no-run: needs a GPU -->\n```bash\nnvidia-smi\n```\n\n```python\n1 / 0\n```\n"
    first, second = parts(text)
    assert (first.mark, first.code) == ("no-run: needs a GPU", "nvidia-smi\n")
    assert (second.mark, second.language) == ("", "python")


def test_a_page_fails_with_its_block(tmp_path: Path) -> None:
    run = PageRun("page.md", dict(os.environ), tmp_path, None)
    run.run(Part("", "bash", "export WORD=tin", 1), lambda _: None)
    run.run(Part("", "bash", 'test "$WORD" = tin', 2), lambda _: None)
    with pytest.raises(AssertionError, match=r"page\.md:3"):
        run.run(Part("", "bash", "false", 3), lambda _: None)
    run.run(Part("", "python", "a = 1", 4), lambda _: None)
    with pytest.raises(AssertionError, match=r"page\.md:5"):
        run.run(Part("check: a == 2", "", "", 5), lambda _: None)
