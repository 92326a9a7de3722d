"""Running packages that were written for `tinker` on this client.

    import tinsmith.compat
    tinsmith.compat.install()      # from here on, `import tinker` gives ours
    import tinker_cookbook

    tinsmith.compat.log_to_console()  # its loops' metrics join the run's curves

Module paths that such packages import from are there too, and so is the distribution's metadata,
for packages that check the version.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tinsmith.client.run_log import RunLogger
from tinsmith.transport.config import PROTOCOL_VERSION

_CLIENT = "tinsmith.client"

MODULES: dict[str, tuple[str, ...]] = {
    "tinker": ("tinsmith",),
    "tinker.types": ("tinsmith.types",),
    "tinker.auth": ("tinsmith.auth",),
    "tinker._exceptions": ("tinsmith.errors",),
    "tinker._version": ("tinsmith",),
    "tinker.lib": (),
    "tinker.lib.api_future_impl": (f"{_CLIENT}.results.queue_state", f"{_CLIENT}.futures"),
    "tinker.lib.chunked_fwdbwd_helpers": (f"{_CLIENT}.calls.combining",),
    "tinker.lib.client_connection_pool_type": ("tinsmith.transport.base",),
    "tinker.lib.credentials": ("tinsmith.transport.credentials",),
    "tinker.lib.experimental": (f"{_CLIENT}.warn",),
    "tinker.lib.internal_client_holder": (f"{_CLIENT}.uplink.uplink",),
    "tinker.lib.public_interfaces": (
        f"{_CLIENT}.futures",
        f"{_CLIENT}.calls.custom_loss",
        f"{_CLIENT}.rest",
        f"{_CLIENT}.admin",
        f"{_CLIENT}.sampling",
        f"{_CLIENT}.training",
        f"{_CLIENT}.service",
    ),
    "tinker.lib.public_interfaces.admin_client": (f"{_CLIENT}.admin",),
    "tinker.lib.public_interfaces.api_future": (f"{_CLIENT}.futures",),
    "tinker.lib.public_interfaces.custom_loss": (f"{_CLIENT}.calls.custom_loss",),
    "tinker.lib.public_interfaces.rest_client": (f"{_CLIENT}.rest",),
    "tinker.lib.public_interfaces.sampling_client": (f"{_CLIENT}.sampling",),
    "tinker.lib.public_interfaces.service_client": (f"{_CLIENT}.service",),
    "tinker.lib.public_interfaces.training_client": (f"{_CLIENT}.training",),
    "tinker.lib.queue_state_logger": (f"{_CLIENT}.results.queue_state",),
    "tinker.lib.retry_handler": (f"{_CLIENT}.results.retries",),
    "tinker.lib.retryable_exception": (),
    "tinker.lib.telemetry": (
        f"{_CLIENT}.uplink.telemetry",
        f"{_CLIENT}.uplink.user_errors",
    ),
}
"""Each module of the official package that others import, and where ours has its names."""

# Names that are called differently here.
RENAMED: dict[str, dict[str, tuple[str, str]]] = {
    "tinker.lib.internal_client_holder": {
        "InternalClientHolder": (f"{_CLIENT}.uplink.uplink", "Uplink"),
    },
    "tinker.lib.retry_handler": {"RetryHandler": (f"{_CLIENT}.results.retries", "SampleRetries")},
    "tinker.lib.retryable_exception": {
        "RetryableException": ("tinsmith.errors", "RetryableException"),
    },
    "tinker.lib.client_connection_pool_type": {
        "ClientConnectionPoolType": ("tinsmith.wire.endpoints", "ConnectionClass"),
    },
    "tinker.lib.chunked_fwdbwd_helpers": {
        "combine_fwd_bwd_output_results": (f"{_CLIENT}.calls.combining", "combine"),
    },
    "tinker.lib.credentials": {
        "JsonCredentialStore": ("tinsmith.transport.credentials", "CredentialsFile"),
    },
}


def install() -> None:
    """Answer `import tinker` with this package. Does nothing the second time.

    Raises `ImportError` if the official package was imported before: its objects and ours must not
    be mixed.
    """
    if any(isinstance(finder, TinkerFinder) for finder in sys.meta_path):
        return
    present = sys.modules.get("tinker")
    if present is not None and not isinstance(present.__loader__, TinkerFinder):
        raise ImportError(
            "tinker was already imported; call tinsmith.compat.install() before anything imports it"
        )
    sys.meta_path.insert(0, TinkerFinder())


def log_to_console() -> None:
    """Have tinker-cookbook's own loops (`train.main(config)`) add their metrics to the curves of
    their run on the server. Does nothing the second time."""
    logs = importlib.import_module("tinker_cookbook.utils.ml_log")
    setup = logs.setup_logging
    if hasattr(setup, "__wrapped__"):
        return

    @functools.wraps(setup)
    def setup_logging(*args: Any, **kwargs: Any) -> Any:  # as in the release that is installed
        logger = setup(*args, **kwargs)
        logger.loggers.append(RunLogger())
        return logger

    vars(logs)["setup_logging"] = setup_logging


def uninstall() -> None:
    """Forget the alias and the modules made for it."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, TinkerFinder)]
    for name, module in list(sys.modules.items()):
        if isinstance(getattr(module, "__loader__", None), TinkerFinder):
            del sys.modules[name]


class TinkerFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules, and the metadata of a distribution called tinker."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "tinker" and not fullname.startswith("tinker."):
            return None
        if fullname not in MODULES and not _is_type_module(fullname):
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES) or (
            fullname == "tinker.types"
        )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for source in MODULES.get(module.__name__, ("tinsmith.types",)):
            _take_names(module, importlib.import_module(source))
        for name, (source, original) in RENAMED.get(module.__name__, {}).items():
            setattr(module, name, getattr(importlib.import_module(source), original))
        if module.__name__ in ("tinker", "tinker._version"):
            vars(module)["__version__"] = PROTOCOL_VERSION
            vars(module)["__title__"] = "tinker"
        if module.__name__ == "tinker":
            # `import tinker` is enough to write `tinker.types.Datum`.
            for name in ("types", "auth", "lib"):
                importlib.import_module(f"tinker.{name}")

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name in (None, "tinker"):
            yield _TinkerDistribution()


def _take_names(module: ModuleType, source: ModuleType) -> None:
    # What `tinsmith` loads on use is in its __all__ alone until then.
    for name in dict.fromkeys([*vars(source), *getattr(source, "__all__", ())]):
        value = getattr(source, name)
        if not name.startswith("__") and not isinstance(value, ModuleType):
            setattr(module, name, value)


def _is_type_module(fullname: str) -> bool:
    """The official package has a module for each type, `tensor_data` for `TensorData`; ours has
    them all in one place."""
    parent, _, last = fullname.rpartition(".")
    if parent != "tinker.types":
        return False
    types = importlib.import_module("tinsmith.types")
    known = {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in types.__all__}
    return last in known | {"optimizer", "provenance_spans", "billing_usage_request"}


class _TinkerDistribution(importlib.metadata.Distribution):
    """Says that tinker is installed, in the version whose protocol we speak."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: tinker\nVersion: {PROTOCOL_VERSION}\n"

    def locate_file(self, path: str | os.PathLike[str]) -> Any:  # typed differently per version
        return Path(__file__).parent / path
