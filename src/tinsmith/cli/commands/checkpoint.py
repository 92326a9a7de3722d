"""`tinsmith checkpoint`: saved weights."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli import naming
from tinsmith.cli.commands import checkpoint_import
from tinsmith.cli.failures import CommandError
from tinsmith.cli.fetching import all_pages, more_title
from tinsmith.cli.output import Output, Table, size_text, time_text, with_output, yes_or_no

if TYPE_CHECKING:
    from tinsmith.client.rest import RestClient
    from tinsmith.types import Checkpoint

_PAGE_SIZE = 1000
_DELETE_AT_ONCE = 32


@click.group("checkpoint")
def command() -> None:
    """Manage checkpoints."""


command.add_command(checkpoint_import.command)


@command.command("list")
@click.option("--run-id", help="Only those of this training run.")
@click.option(
    "--limit",
    type=int,
    default=20,
    show_default=True,
    help="Most checkpoints to show over all runs; 0 shows all.",
)
@with_output
def list_checkpoints(output: Output, run_id: str | None, limit: int) -> None:
    """List checkpoints of a run, or of all runs, newest first."""
    from tinsmith.client.rest import RestClient

    client = RestClient()

    def fetch(limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        page = client.list_user_checkpoints(limit=limit, offset=offset).result()
        return page.checkpoints, page.cursor.total_count if page.cursor else len(page.checkpoints)

    data: dict[str, Any] = {}
    if run_id:
        run_id = data["run_id"] = naming.run_id(client, run_id)
        found = client.list_checkpoints(run_id).result().checkpoints
        total = len(found)
    else:
        found, total = all_pages(
            fetch, limit=limit, page_size=_PAGE_SIZE, what="checkpoints", output=output
        )
    data["checkpoints"] = [checkpoint.model_dump() for checkpoint in found]
    rows = [
        [
            checkpoint.checkpoint_id,
            checkpoint.checkpoint_type,
            size_text(checkpoint.size_bytes),
            yes_or_no(checkpoint.public),
            time_text(checkpoint.time),
            _expiry(checkpoint),
            checkpoint.tinker_path,
        ]
        for checkpoint in found
    ]
    of_run = f" for run {run_id}" if run_id else ""
    title = f"{len(found)} checkpoint{'' if len(found) == 1 else 's'}{of_run}"
    title = more_title(title, len(found), total) if found else f"No checkpoints found{of_run}"
    columns = ["Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path"]
    output.show(data, Table(columns, rows, title))


@command.command("info")
@click.argument("checkpoint_path")
@with_output
def info(output: Output, checkpoint_path: str) -> None:
    """Show details of a checkpoint, as in tinker://run-id/weights/0001."""
    from tinsmith.cli.commands.run import lora_text
    from tinsmith.client.rest import RestClient
    from tinsmith.types import ParsedCheckpointTinkerPath

    client = RestClient()
    checkpoint_path = naming.checkpoint_path(client, checkpoint_path)
    try:
        run_id = ParsedCheckpointTinkerPath.from_tinker_path(checkpoint_path).training_run_id
    except ValueError as error:
        raise CommandError(
            f"Invalid checkpoint path: {error}",
            "Checkpoint paths should be in the format: tinker://run-id/weights/0001",
        ) from error
    found = client.list_checkpoints(run_id).result().checkpoints
    checkpoint = next((each for each in found if each.tinker_path == checkpoint_path), None)
    if checkpoint is None:
        raise CommandError(f"Checkpoint not found: {checkpoint_path}")
    run = client.get_training_run(run_id).result()
    rows = [
        ["Checkpoint ID", checkpoint.checkpoint_id],
        ["Type", checkpoint.checkpoint_type],
        ["Tinker Path", checkpoint.tinker_path],
    ]
    if checkpoint.size_bytes is not None:
        rows.append(["Size", size_text(checkpoint.size_bytes)])
    rows += [
        ["Public", yes_or_no(checkpoint.public)],
        ["Created", time_text(checkpoint.time)],
        ["Expires", _expiry(checkpoint)],
        ["Training Run ID", run_id],
        ["LoRA", lora_text(run)],
    ]
    output.show(
        {**checkpoint.model_dump(), "is_lora": run.is_lora, "lora_rank": run.lora_rank},
        Table(["Property", "Value"], rows, f"Checkpoint: {checkpoint.checkpoint_id}"),
    )


@command.command("publish")
@click.argument("checkpoint_path")
@with_output
def publish(output: Output, checkpoint_path: str) -> None:
    """Let everybody on the server read a checkpoint."""
    from tinsmith.client.rest import RestClient

    client = RestClient()
    path = naming.checkpoint_path(client, checkpoint_path)
    client.publish_checkpoint_from_tinker_path(path).result()


@command.command("unpublish")
@click.argument("checkpoint_path")
@with_output
def unpublish(output: Output, checkpoint_path: str) -> None:
    """Make a checkpoint private again."""
    from tinsmith.client.rest import RestClient

    client = RestClient()
    path = naming.checkpoint_path(client, checkpoint_path)
    client.unpublish_checkpoint_from_tinker_path(path).result()


@command.command("set-ttl")
@click.argument("checkpoint_path")
@click.option("--ttl", type=int, help="Seconds from now until it expires.")
@click.option("--remove", is_flag=True, help="Never expire.")
@with_output
def set_ttl(output: Output, checkpoint_path: str, ttl: int | None, remove: bool) -> None:
    """Say when a checkpoint expires."""
    from tinsmith.client.rest import RestClient

    naming.check_path(checkpoint_path)
    which = "Use --ttl to set an expiration or --remove to clear it"
    if ttl is None and not remove:
        raise CommandError("Must specify either --ttl <seconds> or --remove", which)
    if ttl is not None and remove:
        raise CommandError("Cannot specify both --ttl and --remove", which)
    client = RestClient()
    path = naming.checkpoint_path(client, checkpoint_path)
    client.set_checkpoint_ttl_from_tinker_path(path, ttl).result()


@command.command("delete")
@click.argument("checkpoint_paths", nargs=-1)
@click.option("--run-id", help="All checkpoints of this training run.")
@click.option(
    "--type", "kind", help="Of the run's: only weights, sampler_weights or external_weights."
)
@click.option("--before", help="Of the run's: only those made before this moment (ISO 8601, UTC).")
@click.option("--after", help="Of the run's: only those made after this moment (ISO 8601, UTC).")
@click.option("--yes", "-y", is_flag=True, help="Do not ask first.")
@with_output
def delete(
    output: Output,
    checkpoint_paths: tuple[str, ...],
    run_id: str | None,
    kind: str | None,
    before: str | None,
    after: str | None,
    yes: bool,
) -> None:
    """Delete checkpoints for good.

    \b
    tinsmith checkpoint delete tinker://run-id/weights/0001 tinker://run-id/weights/0002
    tinsmith checkpoint delete --run-id RUN --type weights --before 2026-06-01T08:00:00Z
    """
    from tinsmith.client.rest import RestClient

    _check_what_to_delete(checkpoint_paths, run_id, bool(kind or before or after))
    client = RestClient()
    found: list[Checkpoint] | None = None
    if run_id:
        run_id = naming.run_id(client, run_id)
        found = _selected(
            client.list_checkpoints(run_id).result().checkpoints,
            kind,
            _parse_date(before) if before else None,
            _parse_date(after) if after else None,
        )
        if not found:
            click.echo(f"No checkpoints found for run {run_id} matching filters")
            return
        paths = [checkpoint.tinker_path for checkpoint in found]
    else:
        paths = [naming.checkpoint_path(client, path) for path in checkpoint_paths]
    if not yes and not _confirm(paths, found):
        click.echo("Deletion cancelled.")
        return
    _delete_all(client, paths, output)


@command.command("download")
@click.argument("checkpoint_path")
@click.option(
    "--output",
    "-o",
    "parent",
    type=click.Path(path_type=Path),
    help="The folder in which the checkpoint's own is made.  [default: the current folder]",
)
@click.option("--force", is_flag=True, help="Replace the folder if it exists.")
@with_output
def download(output: Output, checkpoint_path: str, parent: Path | None, force: bool) -> None:
    """Download the files of a training or external checkpoint.

    They go into a folder named after the checkpoint: tinker://run-1/weights/final becomes
    ./run-1_weights_final/. A training checkpoint is exported first, which starts a session on
    its base model; the export is deleted afterwards.
    """
    from tinsmith.cli.weights import checkpoint_files
    from tinsmith.client.rest import RestClient

    checkpoint_files.parse_downloadable(checkpoint_path)
    client = RestClient()
    checkpoint_path = naming.checkpoint_path(client, checkpoint_path)
    name = checkpoint_path.removeprefix("tinker://").replace("/", "_")
    folder = (parent or Path.cwd()) / name
    if folder.exists():
        if not force:
            raise CommandError(
                f"Target directory already exists: {folder}",
                "Use --force to overwrite or choose a different output directory.",
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        size = checkpoint_files.fetch(client, checkpoint_path, folder, output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    data: dict[str, Any] = {"checkpoint_path": checkpoint_path, "destination": str(folder)}
    rows = [["Checkpoint Path", checkpoint_path]]
    if size > 0:
        data["file_size_bytes"] = size
        rows.append(["Total Size", size_text(size)])
    rows.append(["Downloaded to", str(folder)])
    title = f"Checkpoint Download: {checkpoint_path}"
    output.show(data, Table(["Property", "Value"], rows, title))


@command.command("push-hf")
@click.argument("checkpoint_path")
@click.option("--repo", "-r", "repo_id", help="Repository, as in user/name; default: from the run.")
@click.option("--public", is_flag=True, help="A public repository; default: a private one.")
@click.option("--revision", help="Branch to upload to.")
@click.option("--commit-message", help="Message of the upload.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of pushing.")
@click.option("--allow-pattern", "allow", multiple=True, help="Only files like this; repeatable.")
@click.option("--ignore-pattern", "ignore", multiple=True, help="No files like this; repeatable.")
@click.option("--no-model-card", is_flag=True, help="Write no README.md.")
@with_output
def push_hf(
    output: Output,
    checkpoint_path: str,
    repo_id: str | None,
    public: bool,
    revision: str | None,
    commit_message: str | None,
    create_pr: bool,
    allow: tuple[str, ...],
    ignore: tuple[str, ...],
    no_model_card: bool,
) -> None:
    """Upload a training or external checkpoint to the Hugging Face Hub as a PEFT adapter."""
    from tinsmith.cli.weights import hub
    from tinsmith.client.rest import RestClient

    client = RestClient()
    if checkpoint_path.startswith("tinker://"):
        checkpoint_path = naming.checkpoint_path(client, checkpoint_path)
    pushed_to = hub.push(
        client,
        checkpoint_path,
        hub.Upload(
            repo_id=repo_id,
            is_private=not public,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            allow=allow,
            ignore=ignore,
            with_model_card=not no_model_card,
        ),
    )
    data: dict[str, Any] = {"checkpoint_path": checkpoint_path, "repo_id": pushed_to}
    rows = [["Checkpoint Path", checkpoint_path], ["Repo ID", pushed_to]]
    if revision is not None:
        data["revision"] = revision
        rows.append(["Revision", revision])
    data["public"] = public
    rows.append(["Public", yes_or_no(public)])
    title = f"Checkpoint Hub Upload: {checkpoint_path}"
    output.show(data, Table(["Property", "Value"], rows, title))


def _expiry(checkpoint: Checkpoint) -> str:
    return time_text(checkpoint.expires_at) if checkpoint.expires_at else "Never"


# --- deleting ---------------------------------------------------------------------------------


def _check_what_to_delete(paths: tuple[str, ...], run_id: str | None, is_filtered: bool) -> None:
    if not paths and not run_id:
        raise CommandError(
            "Must specify checkpoint paths or --run-id",
            "Examples:\n"
            "  tinsmith checkpoint delete tinker://run-id/weights/0001\n"
            "  tinsmith checkpoint delete --run-id <run-id> --type weights --before 2026-06-01",
        )
    if paths and run_id:
        raise CommandError(
            "Cannot specify both checkpoint paths and --run-id",
            "Use either explicit paths or --run-id with optional filters",
        )
    if is_filtered and not run_id:
        raise CommandError("--type, --before, and --after require --run-id")


def _parse_date(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise CommandError(
            f"Invalid date: {text}", "Use ISO 8601 format: 2026-01-01, 2026-01-01T12:00:00Z"
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _selected(
    checkpoints: Sequence[Checkpoint],
    kind: str | None,
    before: datetime | None,
    after: datetime | None,
) -> list[Checkpoint]:
    from tinsmith.types.checkpoints import KIND_SEGMENTS

    # Both words are understood: that of the path, and that of the list.
    types: dict[str, str] = {**KIND_SEGMENTS, **{each: each for each in KIND_SEGMENTS.values()}}
    if kind and kind not in types:
        raise CommandError(
            f"Invalid checkpoint type: {kind}", f"Valid types: {', '.join(KIND_SEGMENTS)}"
        )
    return [
        each
        for each in checkpoints
        if (not kind or each.checkpoint_type == types[kind])
        and (before is None or each.time < before)
        and (after is None or each.time > after)
    ]


def _confirm(paths: Sequence[str], found: Sequence[Checkpoint] | None) -> bool:
    click.echo(f"Will delete {len(paths)} checkpoint(s):")
    if found is None:
        for path in paths:
            click.echo(f"  - {path}")
        click.echo()
    else:
        for each in found:
            facts = f"{size_text(each.size_bytes)}, created {time_text(each.time)}"
            click.echo(f"  - {each.tinker_path} ({facts})")
        click.echo(f"\nTotal size: {size_text(sum(each.size_bytes or 0 for each in found))}")
    click.echo("WARNING: This action is permanent and cannot be undone.")
    return click.confirm(f"Are you sure you want to delete {len(paths)} checkpoint(s)?")


def _delete_all(client: RestClient, paths: Sequence[str], output: Output) -> None:
    """All of them, whatever becomes of one. The exit code is 1 if none could be deleted."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from tinsmith.errors import TinkerError

    def delete_one(path: str) -> tuple[str, str] | None:
        try:
            client.delete_checkpoint_from_tinker_path(path).result()
        except (TinkerError, ValueError) as error:
            return path, str(error)
        return None

    failed = []
    with (
        ThreadPoolExecutor(_DELETE_AT_ONCE) as pool,
        click.progressbar(
            length=len(paths),
            label="Deleting checkpoints",
            show_pos=True,
            hidden=output.is_json,
            file=sys.stderr,
        ) as bar,
    ):
        for future in as_completed([pool.submit(delete_one, path) for path in paths]):
            if (failure := future.result()) is not None:
                failed.append(failure)
            bar.update(1)
    num_deleted = len(paths) - len(failed)
    if output.is_json:
        reasons = [{"tinker_path": path, "error": error} for path, error in failed]
        click.echo(json.dumps({"deleted_count": num_deleted, "failed": reasons}))
    else:
        click.echo(f"Deleted {num_deleted} checkpoint(s)")
        if failed:
            click.echo(f"Failed to delete {len(failed)} checkpoint(s):")
            for path, error in failed:
                click.echo(f"  - {path}: {error}")
    if num_deleted == 0:
        sys.exit(1)
