"""What a user installs, and what a developer needs: one command, and no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)], check=True
    )
    (built,) = folder.glob("tinsmith-*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in (source / "tinsmith").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == wanted


def test_the_installed_wheel_is_one_command_that_works_anywhere(
    wheel: Path, tmp_path: Path
) -> None:
    """S107: installed apart from the source tree, with nothing but its dependencies beside it."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))}
    environment = kept | {"PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = str(site / "bin" / "tinsmith")
    where = run(sys.executable, "-c", "import tinsmith.cli; print(tinsmith.cli.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    assert re.fullmatch(r"tinsmith \d+\.\d+\.\d+\n", run(command, "version"))
    assert "Commands:" in run(command, "--help")
    # Opening a data folder runs the migrations, which have to be in the wheel.
    (tmp_path / "data").mkdir()
    assert run(command, "key", "create", "--data-dir", str(tmp_path / "data")).startswith("tml-")


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite",
    ["tests/client/test_streaming.py", "tests/compat/test_our_client.py"],
    ids=["mocked server", "running server"],
)
def test_both_kinds_of_suite_run_without_a_network(suite: str) -> None:
    """S108: unit tests against a mocked HTTP server, integration tests against a real one."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", suite, "-q", "-p", "tests.support.no_network"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-p no:cacheprovider"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 4


def test_every_module_that_is_run_as_a_program_is_required_or_ours() -> None:
    """An environment of uv has no pip unless somebody asks for it."""
    sources = (path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    run = {name for text in sources for name in re.findall(r'"-m", "([\w.]+)"', text)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    required = {Requirement(line).name for line in lines}
    assert "pip" in run
    assert {name for name in run if not name.startswith("tinsmith")} <= required
