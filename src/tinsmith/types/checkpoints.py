"""Checkpoints: how they are named, listed and handed out."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Self

from tinsmith.errors import ValidationError
from tinsmith.types.model import Request, Response

CheckpointType = Literal["training", "sampler", "external"]

KIND_SEGMENTS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""The middle segment of a tinker path, and the type it stands for."""


class Cursor(Response):
    """Where a page of a list lies in the whole."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(Response):
    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    """None: never."""


class ParsedCheckpointTinkerPath(Response):
    """A path `tinker://<training run>/<kind>/<name>`, taken apart."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """
        >>> ParsedCheckpointTinkerPath.from_tinker_path("tinker://run/weights/a").checkpoint_id
        'weights/a'
        """
        scheme = "tinker://"
        segments = tinker_path.removeprefix(scheme).split("/")
        if not tinker_path.startswith(scheme) or len(segments) != 3:
            raise ValidationError(
                f"{tinker_path[:200]!r} is not a path tinker://<training run>/<kind>/<name>"
            )
        run_id, kind, name = segments
        if kind not in KIND_SEGMENTS:
            known = ", ".join(KIND_SEGMENTS)
            raise ValidationError(
                f"unknown kind {kind[:40]!r} in {tinker_path[:200]!r}; known: {known}"
            )
        return cls(
            tinker_path=tinker_path,
            training_run_id=run_id,
            checkpoint_type=KIND_SEGMENTS[kind],
            checkpoint_id=f"{kind}/{name}",
        )


class CheckpointsListResponse(Response):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class SetCheckpointTtlRequest(Request):
    """When a checkpoint expires; null: never."""

    __explicit_null__ = frozenset({"ttl_seconds"})

    ttl_seconds: int | None = None


class ExternalWeightsUrlsResponse(Response):
    """Where each file of an external checkpoint can be fetched, and until when."""

    urls: dict[str, str]
    expires: datetime


class CheckpointArchiveUrlResponse(Response):
    """Where a checkpoint can be fetched as a tar archive (clients up to 0.35.0)."""

    url: str
    expires: datetime
