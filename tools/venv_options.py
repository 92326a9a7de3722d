"""Print `--system-site-packages` if this Python has the PyTorch that constraints.txt pins.

The environment that the Makefile creates then uses it, instead of fetching gigabytes a second time.
A Python that is itself in a virtual environment cannot hand its packages on.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def options() -> str:
    pinned = re.search(r"^torch==(\S+)", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    assert pinned is not None
    try:
        # The part after the plus is the build: "2.13.0+cpu" is the version 2.13.0.
        has_it = importlib.metadata.version("torch").partition("+")[0] == pinned[1]
    except importlib.metadata.PackageNotFoundError:
        has_it = False
    is_virtual = sys.prefix != sys.base_prefix
    return "--system-site-packages" if has_it and not is_virtual else ""


if __name__ == "__main__":
    print(options())
