"""Importing an adapter that was trained elsewhere.

Not part of the protocol: the hosted service has no such calls.
"""

from __future__ import annotations

from typing import Literal

from tinsmith.types.model import Request, Response

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What an adapter consists of; nothing else is taken."""

PIECE_BYTES = 8 * 1024 * 1024
"""What a client sends at once; a server takes pieces of any size that fits a request."""

MAX_PIECES = 16_384


class UploadedFile(Request):
    """A file that was sent in pieces, numbered from 0."""

    name: str
    """One of `ADAPTER_FILES`."""
    num_pieces: int
    sha256: str


class ImportWeightsRequest(Request):
    """Make a checkpoint of an upload. The same request again finds the same checkpoint."""

    upload_id: str
    files: list[UploadedFile]
    base_model: str
    name: str
    kind: Literal["training", "sampler"] = "training"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class ImportWeightsResponse(Response):
    tinker_path: str
    lora_rank: int
    """The largest of the adapter's modules, to which the others were padded with zeros."""
