"""Tinsmith as it is installed: the wheel, in an environment of its own, and a newcomer's home."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.newcomer import Served, newcomer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel in it.

    Installed as README says, with the extra and the constraints. What the wheel requires pip finds
    in the tests' own environment, and it ends with an error if that is not what the wheel and the
    constraints ask for; fetching it would take minutes, and a network. Of Tinsmith itself nothing
    is found there, for it is installed from its source.
    """
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run(
        [
            *(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation"),
            *("--wheel-dir", str(folder), str(ROOT)),
        ],
        check=True,
    )
    (wheel,) = folder.glob("tinsmith-*.whl")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run(
        [
            *(*pip, "--python", str(python), "install", "--no-index"),
            *("-c", str(ROOT / "constraints.txt"), f"{wheel}[all]"),
        ],
        check=True,
    )
    return python.parent


@pytest.fixture(scope="session")
def home(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    environment = newcomer(tmp_path_factory.mktemp("home"))
    # The standard names lead to the installed environment, also `python`.
    path = f"{installed}{os.pathsep}{environment['PATH']}"
    return environment | {"PATH": path, "VIRTUAL_ENV": str(installed.parent)}


@pytest.fixture(scope="session")
def shared_server(
    home: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The environment of clients of a server that was started as the tutorial says."""
    server = Served("tinsmith serve", home, tmp_path_factory.mktemp("server"))
    yield home | server.exports
    server.stop()
