"""What `pip install tinsmith[all]` brings is enough: it does not take what only developers have."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.tiny_gguf import write_gguf
from tinsmith.engine.local.model.sources import EMBEDDED_FILE

SOURCE = Path(__file__).parents[2] / "src" / "tinsmith"

IMPORT_ALL = """
import importlib, pkgutil, tinsmith
for module in pkgutil.walk_packages(tinsmith.__path__, "tinsmith."):
    if not module.name.endswith(".__main__") and "migrations" not in module.name:
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # The first comes with torch where there is a GPU, the second is an extra of its own.
            if error.name not in ("triton", "ray"):
                raise
"""

CONVERT = """
from pathlib import Path
from tinsmith.engine.local.config import EMBEDDED_SOURCE, LocalEngineConfig
from tinsmith.engine.local.model.sources import model_folder
print(model_folder(EMBEDDED_SOURCE, LocalEngineConfig(cache_folder=Path(%r))))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `tinsmith[all]` needs, directly or not, and nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    places = {"tinsmith": SOURCE}
    for name in needed("tinsmith", frozenset({"all"})) - {"tinsmith"}:
        installed = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            places[top] = Path(str(installed.locate_file(top)))
    for top, place in places.items():
        (folder / top).symlink_to(place)
    return folder


def needed(name: str, extras: frozenset[str]) -> set[str]:
    """The names of a distribution and all it requires, as the installed metadata say."""
    found: dict[str, frozenset[str]] = {}
    waiting = [(canonicalize_name(name), extras)]
    while waiting:
        name, extras = waiting.pop()
        if extras <= found.get(name, frozenset()) and name in found:
            continue
        found[name] = found.get(name, frozenset()) | extras
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            marker = requirement.marker
            wanted = {"", *found[name]}
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return set(found)


def run(packages: Path, program: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],  # without this environment's own packages
        env=kept | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_only_developers_have_is_not_among_them(packages: Path) -> None:
    assert "peft" not in needed("tinsmith", frozenset({"all"}))
    assert "True" in run(packages, "import importlib.util as u; print(u.find_spec('peft') is None)")


def test_every_module_can_be_imported(packages: Path) -> None:
    run(packages, IMPORT_ALL)


@pytest.mark.slow
def test_the_embedded_model_can_be_converted(packages: Path, tmp_path: Path) -> None:
    """A small file takes its place: the packages that read its formats are the same."""
    write_gguf(tmp_path / EMBEDDED_FILE)
    folder = Path(run(packages, CONVERT % str(tmp_path)).strip().splitlines()[-1])
    assert any(folder.glob("*.safetensors")) and (folder / "tokenizer.json").is_file()
