"""List every requirement with the tests that cite it (`make requirements`).

A test cites an id by naming it in its docstring, or a module in its own: "S35". Ranges count:
"S30-S39". A requirement that is deliberately not taken over stands, with the reason, in
docs/differences.md under "Requirements not taken over". Any other without a test is an error.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "reference" / "requirements.md"
DIFFERENCES = ROOT / "docs" / "differences.md"
OMISSIONS = "## Requirements not taken over"


def requirements() -> dict[str, str]:
    """id -> its line in the list."""
    return dict(re.findall(r"^- (S\d+) (.+)$", LIST.read_text("utf-8"), flags=re.MULTILINE))


def omissions() -> dict[str, str]:
    """id -> why it is not taken over."""
    _, _, section = DIFFERENCES.read_text("utf-8").partition(OMISSIONS)
    section = section.partition("\n## ")[0]
    return dict(re.findall(r"^- (S\d+): (.+)$", section, flags=re.MULTILINE))


def citations(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """id -> the tests that cite it, as pytest names them."""
    cited: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for name, docstring in _docstrings(path):
            place = str(path.relative_to(folder.parent)) + (f"::{name}" if name else "")
            for number in numbers(docstring):
                cited.setdefault(f"S{number}", []).append(place)
    return cited


def numbers(text: str) -> set[int]:
    """The ids that a text names, ranges unfolded."""
    found: set[int] = set()
    for first, last in re.findall(r"\bS(\d{1,3})(?:[-–]S(\d{1,3}))?\b", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def complaints(
    wanted: dict[str, str], cited: dict[str, list[str]], omitted: dict[str, str]
) -> Iterator[str]:
    """What is wrong, a sentence each."""
    for identifier in wanted:
        if identifier not in cited and identifier not in omitted:
            yield f"{identifier} has no test and is not among the omissions"
        if identifier in cited and identifier in omitted:
            yield f"{identifier} is said not to be taken over, but {cited[identifier][0]} cites it"
    for identifier in sorted((cited.keys() | omitted.keys()) - wanted.keys()):
        places = ", ".join(cited.get(identifier, [DIFFERENCES.name]))
        yield f"there is no requirement {identifier} ({places})"


def main() -> int:
    wanted, cited, omitted = requirements(), citations(), omissions()
    for identifier, text in wanted.items():
        print(f"{identifier:5} {text}")
        if identifier in omitted:
            print(f"      not taken over: {omitted[identifier]}")
        for place in cited.get(identifier, []):
            print(f"      {place}")
    found = list(complaints(wanted, cited, omitted))
    print(
        f"\n{len(wanted)} requirements: {sum(each in cited for each in wanted)} cited by tests, "
        f"{len(omitted)} not taken over"
    )
    for each in found:
        print(f"error: {each}", file=sys.stderr)
    return 1 if found else 0


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Docstrings of a module (under no name) and of its tests."""
    module = ast.parse(path.read_text("utf-8"))
    yield "", ast.get_docstring(module) or ""
    for node in ast.walk(module):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""


if __name__ == "__main__":
    sys.exit(main())
