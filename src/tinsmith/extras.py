"""What each extra of the installed package brings, and the line that installs what is missing.

The package is not on PyPI, so the line names the packages that it needs instead of its own.
"""

from __future__ import annotations

import importlib.metadata
import re

_REQUIREMENT = re.compile(r"(?P<spec>(?P<name>[\w.-]+)[^;]*);.*extra == ['\"](?P<extra>\w+)['\"]")


def packages(extra: str) -> dict[str, str]:
    """Name of each package that the extra brings -> the requirement, as pip takes it."""
    try:
        lines = importlib.metadata.requires("tinsmith") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return {}
    found = (_REQUIREMENT.match(line) for line in lines)
    return {each["name"]: each["spec"].strip() for each in found if each and each["extra"] == extra}


def missing(extra: str) -> list[str]:
    """The requirements of the extra whose packages are not installed."""
    return [spec for name, spec in packages(extra).items() if not _is_installed(name)]


def install_line(extra: str) -> str:
    """The command that installs what is missing of the extra."""
    specs = missing(extra)
    if not specs:
        return f"pip install -e '.[{extra}]', in a checkout of Tinsmith"
    return f"pip install {' '.join(repr(spec) for spec in specs)}"


def install_line_for(module: str) -> str:
    """The command that installs a module's package, with what else its extra lacks."""
    name = module.partition(".")[0].replace("_", "-")
    local = ("cli", "server", "engine", "postgres", "grammar", "otel", "age")
    for extra in (*local, "cluster", "ray", "storage"):
        if name in packages(extra):
            return install_line(extra)
    return f"pip install {name}"


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
