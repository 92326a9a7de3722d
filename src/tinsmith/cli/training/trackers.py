"""Where metrics go besides the run's folder: Weights & Biases, Trackio, TensorBoard."""

from __future__ import annotations

import importlib
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
        more = {"id": _run_id(folder), "resume": "allow"} if package == "wandb" else {}
        self._library.init(
            project=folder.settings.project,
            name=folder.settings.name,
            config=run_settings.saved(folder.settings),
            **more,
        )

    def log(self, line: Mapping[str, float]) -> None:
        values = {name: value for name, value in line.items() if name != "step"}
        self._library.log(values, step=int(line["step"]))

    def close(self) -> None:
        self._library.finish()


class _TensorBoard:
    def __init__(self, folder: RunFolder, package: str) -> None:
        _imported("tensorboard", "tensorboard")
        writing = _imported("torch.utils.tensorboard", "torch")
        self._writer = writing.SummaryWriter(str(folder.path / "tensorboard"))

    def log(self, line: Mapping[str, float]) -> None:
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(line["step"]))

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


def _run_id(folder: RunFolder) -> str:
    """The same when the run is resumed."""
    return f"{folder.settings.name}-{folder.digest}"
