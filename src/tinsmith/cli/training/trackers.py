"""Where metrics go besides the run's folder: Weights & Biases, Trackio, TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tinsmith.cli.training import settings as run_settings
from tinsmith.cli.training.run_folder import RunFolder
from tinsmith.errors import TinkerError


class Tracker(Protocol):
    def log(self, line: Mapping[str, float]) -> None:
        """Metrics of a step; `step` is one of them."""

    def close(self) -> None: ...


def build(folder: RunFolder) -> tuple[Tracker, ...]:
    """Those that the settings name; an error if one is not installed."""
    return tuple(_TRACKERS[name](folder, name) for name in folder.settings.log)


def close(trackers: Sequence[Tracker]) -> None:
    for each in trackers:
        each.close()


class _Run:
    """Weights & Biases, and Trackio, which has the same calls."""

    def __init__(self, folder: RunFolder, package: str) -> None:
        self._library = _imported(package, package)
        # Trackio knows a run by its name alone, which another folder's run may have had.
        is_begun = folder.progress().step > 0
        more = {"id": _run_id(folder)} if package == "wandb" else {}
        with _talking_aside():
            self._library.init(
                project=folder.settings.project,
                name=folder.settings.name,
                config=run_settings.saved(folder.settings),
                resume="allow" if is_begun or package == "wandb" else "never",
                **more,
            )

    def log(self, line: Mapping[str, float]) -> None:
        values = {name: value for name, value in line.items() if name != "step"}
        with _talking_aside():
            self._library.log(values, step=int(line["step"]))

    def close(self) -> None:
        with _talking_aside():
            self._library.finish()


class _TensorBoard:
    def __init__(self, folder: RunFolder, package: str) -> None:
        summary = _imported("tensorboard.summary", package)
        self._writer = summary.Writer(str(folder.path / package))

    def log(self, line: Mapping[str, float]) -> None:
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, step=int(line["step"]))

    def close(self) -> None:
        self._writer.close()


_TRACKERS: dict[str, Callable[[RunFolder, str], Tracker]] = {
    "wandb": _Run,
    "trackio": _Run,
    "tensorboard": _TensorBoard,
}


def _imported(module: str, package: str) -> Any:  # a library that is not ours to type
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise TinkerError(
            f"--log {package} needs the package {package}, which is not installed: "
            f"pip install {package}"
        ) from error


def _talking_aside() -> contextlib.redirect_stdout[Any]:  # of any stream
    """What a library prints is not the result, which may go through a pipe."""
    return contextlib.redirect_stdout(sys.stderr)


def _run_id(folder: RunFolder) -> str:
    """The same when the run is resumed."""
    return f"{folder.settings.name}-{folder.digest}"
