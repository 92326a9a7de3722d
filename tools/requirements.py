"""List every requirement with the tests that cite it (`make requirements`).

A test cites an id by naming it in its docstring or in a comment: "S35". Ranges count: "S30-S39".
With `--require S1-S29,S109`, exit with an error if one of those has no test.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "reference" / "requirements.md"


def requirements() -> dict[str, str]:
    """id -> its line in the list."""
    found = re.findall(r"^- (S\d+) (.+)$", LIST.read_text(), flags=re.MULTILINE)
    return dict(found)


def citations() -> dict[str, list[str]]:
    """id -> the test files that cite it."""
    cited: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number in numbers(path.read_text()):
            cited.setdefault(f"S{number}", []).append(str(path.relative_to(ROOT)))
    return cited


def numbers(text: str) -> set[int]:
    """The ids that a text names, ranges unfolded."""
    found: set[int] = set()
    for first, last in re.findall(r"\bS(\d{1,3})(?:[-–]S(\d{1,3}))?\b", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require", default="", help="ids that must have a test, as S1-S29,S109")
    wanted = numbers(parser.parse_args().require)
    cited = citations()
    missing = 0
    for identifier, text in requirements().items():
        tests = cited.get(identifier, [])
        print(f"{identifier:5} {text}")
        print(f"      {', '.join(tests) or '(no test yet)'}")
        missing += int(identifier[1:]) in wanted and not tests
    covered = sum(identifier in cited for identifier in requirements())
    print(f"\n{covered} of {len(requirements())} requirements are cited by a test")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
