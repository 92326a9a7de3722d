"""Packages that import `tinker` get ours: module paths, names, metadata."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECKS = """
import tinsmith.compat
tinsmith.compat.install(); tinsmith.compat.install()
import importlib.metadata
import tinker, tinsmith
assert tinker.types.Datum is tinsmith.Datum and tinker.auth and tinker.lib
from tinker import types
from tinker.types import tensor_data, LossFnType
from tinker.types.tensor_data import TensorData
from tinker.types.model_input import ModelInput
from tinker.types.optimizer import AdamOptimizerConfig
from tinker.lib.public_interfaces import APIFuture, AwaitableConcurrentFuture, ServiceClient
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.lib.public_interfaces.sampling_client import SamplingClient
from tinker.lib.public_interfaces.training_client import TrainingClient
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from tinker.lib.retry_handler import RetryConfig, RetryHandler
from tinker.lib.internal_client_holder import InternalClientHolder
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker._exceptions import TinkerError
assert tinker.Datum is tinsmith.Datum and TensorData is tinsmith.TensorData
assert TinkerError is tinsmith.TinkerError and types.Datum is tinsmith.Datum
assert tinker.__version__ == importlib.metadata.version("tinker") == "0.36.0"
assert ServiceClient.__module__.startswith("tinsmith")
try:
    import tinker.no_such_module
except ModuleNotFoundError: pass
else: raise AssertionError
print("good")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_module_paths_names_and_metadata() -> None:
    done = run(CHECKS)
    assert done.stdout.strip() == "good", done.stderr


def test_the_alias_can_be_taken_back() -> None:
    pytest.importorskip("tinker")
    done = run(
        "import tinsmith.compat as c; c.install(); import tinker; ours = tinker; c.uninstall()\n"
        "import tinker; assert tinker is not ours and 'site-packages' in tinker.__file__\n"
        "print('good')"
    )
    assert done.stdout.strip() == "good", done.stderr


def test_two_packages_of_one_name_are_not_mixed() -> None:
    pytest.importorskip("tinker")
    done = run(
        "import tinker, tinsmith.compat as c\ntry: c.install()\nexcept ImportError as e: print(e)"
    )
    assert "already imported" in done.stdout


def test_the_client_is_imported_without_heavy_packages() -> None:
    """S13, S27: no torch, transformers, pydantic or httpx."""
    done = run(
        "import sys, tinsmith.client.service, tinsmith.auth\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'httpx', 'aiohttp', 'google.protobuf'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr
