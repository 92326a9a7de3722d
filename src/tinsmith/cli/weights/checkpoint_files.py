"""A checkpoint's files, on this machine.

The service hands out files of external checkpoints only. A training checkpoint is therefore
loaded into a new run, exported from there for a while, fetched, and the export deleted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.fetching import DownloadBars
from tinsmith.cli.output import Output
from tinsmith.errors import TinkerError

if TYPE_CHECKING:
    from tinsmith.client.rest import RestClient
    from tinsmith.types import ExternalWeightsUrlsResponse, ParsedCheckpointTinkerPath

_EXPORT_SECONDS = 3600
_WHICH = (
    "Only training (tinker://run-id/weights/name) and external weights "
    "(tinker://run-id/external_weights/name) checkpoints can be downloaded."
)


def parse_downloadable(path: str) -> ParsedCheckpointTinkerPath:
    """The parts of a path whose files can be fetched."""
    from tinsmith.types import ParsedCheckpointTinkerPath

    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise CommandError(f"Invalid checkpoint path: {error}", _WHICH) from error
    if parsed.checkpoint_type == "sampler":
        raise CommandError(f"Sampler checkpoints cannot be downloaded: {path}", _WHICH)
    return parsed


def fetch(client: RestClient, path: str, folder: Path, output: Output) -> int:
    """Put every file of a checkpoint into `folder`; how many bytes they have."""
    from tinsmith.client.service import ServiceClient

    if parse_downloadable(path).checkpoint_type == "external":
        return _fetch_external(client, path, folder, output)
    output.note(
        f"Exporting {path} as external weights (this starts a training session "
        "on the checkpoint's base model)..."
    )
    service = ServiceClient()
    status: Literal["success", "errored"] = "errored"
    try:
        training = service.create_training_client_from_state(
            path, user_metadata={"created_by": "tinsmith checkpoint download"}
        )
        saved = training.save_weights_external("download", ttl_seconds=_EXPORT_SECONDS).result()
        try:
            size = _fetch_external(client, saved.path, folder, output, is_temporary=True)
        finally:
            _delete(client, saved.path)
        status = "success"
        return size
    finally:
        service.close(status).result()


def check_is_readable(folder: Path, path: str) -> None:
    """Refuse files that were fetched for use and are encrypted."""
    if any(folder.glob("*.age")):
        raise CommandError(
            f"The files of {path} are encrypted",
            "Fetch them with: tinsmith checkpoint download, and decrypt them with: age -d",
        )


def _fetch_external(
    client: RestClient, path: str, folder: Path, output: Output, *, is_temporary: bool = False
) -> int:
    from tinsmith.client.downloads.download import download

    async def sign() -> ExternalWeightsUrlsResponse:
        signed = await client.get_external_weights_urls_async(path)
        if is_temporary:
            await client.set_checkpoint_ttl_from_tinker_path_async(path, _EXPORT_SECONDS)
        if not signed.urls:
            raise CommandError(f"External weights checkpoint has no files: {path}")
        return signed

    with DownloadBars(output) as bars:
        files = client.holder.submit(download, client.holder, path, sign, folder, bars).result()
    return sum(file.stat().st_size for file in files)


def _delete(client: RestClient, path: str) -> None:
    try:
        client.delete_checkpoint_from_tinker_path(path).result()
    except TinkerError as error:
        click.echo(
            f"Warning: failed to delete the temporary export {path} ({error}); "
            f"it expires in {_EXPORT_SECONDS} seconds.",
            err=True,
        )
