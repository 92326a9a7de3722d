"""The engine works with the oldest `transformers` that we allow, and tinker-cookbook allows it too.

So one environment holds the cookbook and the server. That release is fetched from the package
index once per machine.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.engine.families.test_families import FAMILIES
from tinsmith.engine.local.model.model_types import MODEL_TYPES

ROOT = Path(__file__).parents[3]

COOKBOOK_WANTS = (
    "transformers!=5.4.*,!=5.5.0,!=5.5.1,!=5.5.2,!=5.5.3,<=5.5.4,>=4.57.6",
    "torch>=2.10",
    "numpy>=1.24.0",
    "rich>=13.0.0",
    "safetensors>=0.4.0",
    "tinker>=0.34.0",
)
"""Of what tinker-cookbook 0.5.8 requires, that which we or our tests require too."""

LOAD_EACH = """
import json, sys, tempfile, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import transformers
from tests.engine.families.test_families import load
from tests.support.tiny_families import save_tiny
from tinsmith.engine.local.model.model_types import needed_transformers
from tinsmith.errors import EngineError
assert transformers.__version__ == sys.argv[1], transformers.__version__
for model_type in sys.argv[2:]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if needed_transformers(model_type) is None:
            save_tiny(model_type, folder)
        else:
            (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        try:
            load(folder)
            print(model_type, "runs")
        except EngineError as error:
            print(model_type, str(error).replace(" ", "_"))
"""
"""Loading compares a model's logits with those of the library's own code."""


def ours() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    return {each.name: each for each in map(Requirement, lines)}


def oldest_transformers() -> str:
    (floor,) = ours()["transformers"].specifier
    assert floor.operator == ">="
    return floor.version


@pytest.fixture(scope="module")
def oldest() -> Path:
    """A folder with that release, to come before what is installed."""
    version = oldest_transformers()
    cache = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    folder = cache / "tinsmith-tests" / f"transformers-{version}"
    if not folder.exists():
        fetching = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        # The newest that this release takes of the two that it checks when it is imported.
        wanted = [f"transformers=={version}", "tokenizers<0.23", "huggingface_hub<2"]
        fetched = subprocess.run(
            [*command, str(fetching), *wanted], capture_output=True, text=True, timeout=600
        )
        if fetched.returncode != 0:
            shutil.rmtree(fetching, ignore_errors=True)
            pytest.skip(f"transformers {version} could not be fetched: {fetched.stderr[-300:]}")
        fetching.rename(folder)
    return folder


@pytest.mark.slow
def test_every_family_runs_with_the_oldest_transformers_or_names_the_one_that_it_needs(
    oldest: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD_EACH, oldest_transformers(), *FAMILIES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{oldest}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    words = done.stdout.split()
    told = dict(zip(words[::2], words[1::2], strict=True))
    newer = {
        each.name: each.transformers
        for each in MODEL_TYPES
        if each.transformers is not None and each.name in FAMILIES
    }
    assert {name for name, answer in told.items() if answer == "runs"} == set(FAMILIES) - set(newer)
    for name, release in newer.items():
        assert told[name].startswith(f"{name}_needs_transformers_{release}_or_later,_and_")


def test_the_cookbook_and_the_engine_fit_into_one_environment() -> None:
    """What pip finds by resolving both, seen in the two lists of requirements."""
    shared = [Requirement(line) for line in COOKBOOK_WANTS]
    common = {each.name: each for each in shared if each.name in ours()}
    assert set(common) >= {"transformers", "torch", "numpy", "safetensors"}
    for name, theirs in common.items():
        both = theirs.specifier & ours()[name].specifier
        candidates = {each.version.removesuffix(".*") for each in both}
        assert any(both.contains(version) for version in candidates), f"no {name} suits both"
