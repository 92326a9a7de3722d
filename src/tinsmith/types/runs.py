"""Training runs: one per model that was ever created."""

from __future__ import annotations

from datetime import datetime

from tinsmith.types import notebook
from tinsmith.types.checkpoints import Checkpoint, Cursor
from tinsmith.types.model import Response


class TrainingRun(Response):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None

    def _repr_html_(self) -> str:
        """For notebooks."""
        saved = self.last_checkpoint, self.last_sampler_checkpoint
        paths = [None if checkpoint is None else checkpoint.tinker_path for checkpoint in saved]
        rows: dict[str, object] = {
            "Base model": self.base_model,
            "LoRA rank": self.lora_rank,
            "Status": "Failed" if self.corrupted else "OK",
            "Last request": f"{self.last_request_time:%Y-%m-%d %H:%M:%S %Z}",
            "Last checkpoint": paths[0],
            "Last sampler checkpoint": paths[1],
            **(self.user_metadata or {}),
        }
        return notebook.table(rows, f"Training run {self.training_run_id}")


class TrainingRunDetails(TrainingRun):
    """A run, with what the hosted service does not tell."""

    lora_seed: int | None = None
    """What the adapter's first weights were drawn from."""


class TrainingRunsResponse(Response):
    training_runs: list[TrainingRun]
    cursor: Cursor
