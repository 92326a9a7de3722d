"""A run's folder: everything that going on with it needs, and what it has shown so far.

`run.json` has the method, all settings and the progress up to the last checkpoint;
`metrics.jsonl` a line per step; `samples.json` answers before and after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.cli.training import settings as run_settings
from tinsmith.cli.training.settings import Settings
from tinsmith.errors import TinkerError

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.json"

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Best:
    step: int
    value: float
    path: str
    """Sampler weights."""


@dataclass(slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    state_path: str | None = None
    """The newest checkpoint to go on from."""
    sampler_path: str | None = None
    """The weights at the end; None while there is something left to do."""
    start_path: str | None = None
    """Sampler weights of the checkpoint that the run began with, if it did."""
    best: Best | None = None
    num_worse: int = 0
    """Evaluations since the best."""
    kept: list[str] = field(default_factory=list)
    """Training states on the server, the oldest first."""
    obsolete: list[str] = field(default_factory=list)
    """Checkpoints to delete once no resume needs them."""

    @property
    def is_finished(self) -> bool:
        return self.sampler_path is not None


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path
    method: str
    settings: Settings
    digest: str
    """A digest of the training data: with other data it would be another run."""

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run that is in a folder."""
        saved = _read_run(path)
        settings = run_settings.restored(saved["method"], saved["settings"])
        return cls(path, saved["method"], settings, saved["digest"])

    def progress(self) -> Progress:
        """As it was at the last checkpoint; a new run is at its beginning."""
        if not (self.path / RUN_FILE).exists():
            return Progress()
        saved = dict(_read_run(self.path)["progress"])
        best = saved.pop("best")
        return Progress(**saved, best=None if best is None else Best(**best))

    def save(self, progress: Progress) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        content = {
            "method": self.method,
            "settings": run_settings.saved(self.settings),
            "digest": self.digest,
            "progress": asdict(progress),
        }
        temporary = self.path / f".{RUN_FILE}"
        temporary.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        temporary.replace(self.path / RUN_FILE)

    # --- what it has shown --------------------------------------------------------------------

    def add_metrics(self, line: Mapping[str, float]) -> None:
        with (self.path / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(line)) + "\n")

    def metrics(self) -> list[dict[str, float]]:
        """The metrics of every step, also of those before an interruption."""
        return [json.loads(line) for line in self._whole_lines()]

    def drop_metrics_after(self, step: int) -> None:
        """Steps after the last checkpoint are done again, and would be in the file twice."""
        kept = [line for line in self._whole_lines() if json.loads(line)["step"] <= step]
        if kept or (self.path / METRICS_FILE).exists():
            (self.path / METRICS_FILE).write_text("".join(kept), "utf-8")

    def _whole_lines(self) -> list[str]:
        file = self.path / METRICS_FILE
        lines = file.read_text("utf-8").splitlines(keepends=True) if file.exists() else []
        return [line for line in lines if line.endswith("\n")]

    def samples(self) -> dict[str, list[str]]:
        """Under "prompt", "before" and "after"."""
        file = self.path / SAMPLES_FILE
        found: dict[str, list[str]] = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return found

    def save_samples(self, samples: Mapping[str, list[str]]) -> None:
        text = json.dumps({**self.samples(), **samples}, indent=2, ensure_ascii=False)
        (self.path / SAMPLES_FILE).write_text(text + "\n", "utf-8")


def rounded(value: float) -> float:
    """Six digits: more say nothing about a run.

    >>> rounded(2.0794415416798357)
    2.07944
    """
    return float(f"{value:.{_DIGITS}g}")


def _read_run(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / RUN_FILE).read_text("utf-8"))
    except FileNotFoundError:
        raise TinkerError(f"there is no run in {path}: it has no {RUN_FILE}") from None
    except ValueError as error:
        raise TinkerError(f"{path / RUN_FILE} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("method") not in run_settings.METHODS:
        raise TinkerError(f"{path / RUN_FILE} is not the file of a run")
    return found
