"""Check that a version can be released, and print its part of the changelog: `… 0.2.0`.

The package has to have that version, and the changelog a part for it with nothing left over under
"Unreleased". The release workflow runs this before it builds anything.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


class NotReadyError(Exception):
    """What has to be done before this can be released."""


def notes(version: str, project: str, changelog: str) -> str:
    """The changelog's part for a version; `project` and `changelog` are the texts of both files."""
    packaged = tomllib.loads(project)["project"]["version"]
    if packaged != version:
        raise NotReadyError(f"pyproject.toml says {packaged}, the tag {version}: make them equal")
    parts = re.split(r"^## +(.+)\n", changelog, flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], (text.strip() for text in parts[2::2]), strict=True))
    if texts.get("Unreleased"):
        raise NotReadyError(f"CHANGELOG.md: move what is under Unreleased to '## {version}'")
    found = next((text for title, text in texts.items() if title.split()[0] == version), "")
    if not found:
        raise NotReadyError(f"CHANGELOG.md has nothing under '## {version}'")
    return found


def main() -> int:
    version = sys.argv[1].removeprefix("v")
    files = (ROOT / "pyproject.toml", ROOT / "CHANGELOG.md")
    try:
        print(notes(version, *(file.read_text("utf-8") for file in files)))
    except NotReadyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
