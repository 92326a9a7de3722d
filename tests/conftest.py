"""Keeps the environment clean, and skips what this machine cannot run."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_credentials_from_the_environment() -> None:
    """A developer's own settings must not reach a test, nor a test the developer's account."""
    for name in list(os.environ):
        if name.startswith(("TINKER_", "TINSMITH_")) and name != "TINSMITH_TEST_CACHE":
            del os.environ[name]
    os.environ["TINSMITH_CREDENTIALS_FILE"] = os.devnull + "/none"  # theirs is not read either


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_its_makers() -> Iterator[None]:
    """What a module leaves unclosed is complained of there, not in a test that runs later."""
    yield
    gc.collect()


def pytest_configure() -> None:
    # A shell that starts the tests in the background has them ignore Ctrl-C, and children would
    # inherit that; some tests send it to theirs.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # A million objects, which stay until the end: to look through them took half a second for each
    # module, and as long wherever a test collects garbage itself.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
