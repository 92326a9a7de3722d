"""The code blocks of README, tutorial and guides.

What a block needs is said in a comment before it:

    <!-- no-run: needs a GPU -->      it is not run, for this reason
    <!-- serve -->                    it starts a server, which serves the rest of the page
    <!-- stop -->                     the page's server is stopped here
    <!-- apart -->                    it is Python that runs in a process of its own
    <!-- check: losses[0] > 1 -->     must hold after the block above
    <!-- needs: llguidance -->        the rest of the page is run where this module is installed

The Python blocks of a page share their names, the shell blocks their folder and what they export.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/index.md",
    "docs/tutorial.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "how-to").glob("*.md")),
]
RUN = ("python", "bash")
SHOWN = ("text", "json", "toml", "yaml")

_PART = re.compile(
    r"^[ ]*<!-- (?P<mark>serve|stop|apart|no-run: .+?|check: .+?|needs: .+?) -->$"
    r"|^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^[ ]*```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Part:
    """A block of code with the mark before it, or a mark that stands for itself."""

    mark: str
    language: str
    code: str
    line: int


def parts(text: str) -> list[Part]:
    found = []
    mark = ""
    for match in _PART.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["mark"]:
            if match["mark"].startswith(("check:", "needs:", "stop")):
                found.append(Part(match["mark"], "", "", line))
            else:
                mark = match["mark"]
            continue
        code = "".join(
            each.removeprefix(match["indent"]) for each in match["code"].splitlines(keepends=True)
        )
        found.append(Part(mark, match["language"], code, line))
        mark = ""
    return found
