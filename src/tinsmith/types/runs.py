"""Training runs: one per model that was ever created."""

from __future__ import annotations

from datetime import datetime

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


class TrainingRunDetails(TrainingRun):
    """A run, with what the hosted service does not tell."""

    lora_seed: int | None = None
    """What the adapter's first weights were drawn from."""


class TrainingRunsResponse(Response):
    training_runs: list[TrainingRun]
    cursor: Cursor
