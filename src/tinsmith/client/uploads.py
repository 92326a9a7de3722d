"""Sending an adapter's files to a server, piece by piece, to have a checkpoint made of them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from pathlib import Path
from typing import Literal

from tinsmith.client.downloads.file import Progress, ProgressCallback
from tinsmith.client.uplink.uplink import Uplink
from tinsmith.types.imports import (
    ADAPTER_FILES,
    PIECE_BYTES,
    ImportWeightsRequest,
    ImportWeightsResponse,
    UploadedFile,
)
from tinsmith.wire import endpoints

_IMPORT_SECONDS = 600.0
"""How long the server may take to read, check and write an adapter of some gigabytes."""


async def import_adapter(
    uplink: Uplink,
    folder: Path,
    *,
    base_model: str,
    name: str,
    kind: Literal["training", "sampler"] = "training",
    ttl_seconds: int | None = None,
    user_metadata: dict[str, str] | None = None,
    on_progress: ProgressCallback | None = None,
) -> ImportWeightsResponse:
    """Make a checkpoint of the PEFT adapter in `folder`."""
    upload_id = uuid.uuid4().hex
    files = [await _send(uplink, upload_id, folder / each, on_progress) for each in ADAPTER_FILES]
    message = ImportWeightsRequest(
        upload_id=upload_id,
        files=files,
        base_model=base_model,
        name=name,
        kind=kind,
        ttl_seconds=ttl_seconds,
        user_metadata=user_metadata,
    )
    return await uplink.api.call(endpoints.IMPORT_WEIGHTS, message, timeout_seconds=_IMPORT_SECONDS)


async def _send(
    uplink: Uplink, upload_id: str, path: Path, on_progress: ProgressCallback | None
) -> UploadedFile:
    digest, number, done = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            endpoint = endpoints.UPLOAD_PIECE.at(
                upload_id=upload_id, name=path.name, number=str(number)
            )
            await uplink.api.send(endpoint, piece)
            digest.update(piece)
            number, done = number + 1, done + len(piece)
            if on_progress is not None:
                on_progress(Progress(path.name, done, total))
    return UploadedFile(name=path.name, num_pieces=number, sha256=digest.hexdigest())
