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


_PIP = (sys.executable, "-m", "pip", "--quiet")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(*_PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation"),
            *("--wheel-dir", str(folder), str(ROOT)),
        ],
        check=True,
    )
    (built,) = folder.glob("tinsmith-*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel in it.

    What the wheel requires comes from the tests' own environment: fetching it would take minutes,
    and a network. Of Tinsmith itself nothing is found there, for it is installed from its source.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run(
        [*_PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
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
