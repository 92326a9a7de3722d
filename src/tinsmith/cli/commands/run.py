"""`tinsmith run`: training runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from tinsmith.cli import naming
from tinsmith.cli.commands import run_show
from tinsmith.cli.failures import CommandError
from tinsmith.cli.fetching import all_pages, more_title
from tinsmith.cli.output import Output, Table, time_text, with_output

if TYPE_CHECKING:
    from tinsmith.types import TrainingRun

_PAGE_SIZE = 100

_COLUMNS: dict[str, tuple[str, Callable[[TrainingRun], str], str]] = {
    "id": ("Run ID", lambda run: run.training_run_id, "the run's id"),
    "name": ("Name", naming.run_name, "what it was named"),
    "model": ("Base Model", lambda run: run.base_model, "its base model"),
    "owner": ("Owner", lambda run: run.model_owner, "who it belongs to"),
    "lora": ("LoRA", lambda run: _lora(run), "whether it trains an adapter, and its rank"),
    "updated": ("Last Update", lambda run: time_text(run.last_request_time), "last request"),
    "status": ("Status", lambda run: _status(run), "OK or Failed"),
    "checkpoint": (
        "Last Checkpoint",
        lambda run: run.last_checkpoint.checkpoint_id if run.last_checkpoint else "None",
        "newest training checkpoint",
    ),
    "checkpoint_time": (
        "Checkpoint Time",
        lambda run: time_text(run.last_checkpoint.time if run.last_checkpoint else None),
        "when that was saved",
    ),
}
_DEFAULT_COLUMNS = "id,model,lora,updated,status"


@click.group("run")
def command() -> None:
    """Manage training runs."""


command.add_command(run_show.command)


@command.command("list")
@click.option(
    "--limit", type=int, default=20, show_default=True, help="Most runs to fetch; 0 fetches all."
)
@click.option(
    "--columns",
    "-c",
    default=_DEFAULT_COLUMNS,
    show_default=True,
    help="Columns of the table, separated by commas: "
    + ", ".join(f"{name} ({about})" for name, (_, _, about) in _COLUMNS.items())
    + ".",
)
@with_output
def list_runs(output: Output, limit: int, columns: str) -> None:
    """List training runs."""
    from tinsmith.client.rest import RestClient

    names = [name.strip() for name in (columns or _DEFAULT_COLUMNS).split(",")]
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown:
        raise CommandError(
            f"Unknown column(s): {', '.join(unknown)}. Available: {', '.join(_COLUMNS)}"
        )
    client = RestClient()

    def fetch(limit: int, offset: int) -> tuple[list[TrainingRun], int]:
        page = client.list_training_runs(limit=limit, offset=offset).result()
        return page.training_runs, page.cursor.total_count

    runs, total = all_pages(
        fetch, limit=limit, page_size=_PAGE_SIZE, what="training runs", output=output
    )
    title = f"{len(runs)} training run{'' if len(runs) == 1 else 's'}"
    title = more_title(title, len(runs), total) if runs else "No training runs found"
    if (columns or _DEFAULT_COLUMNS) == _DEFAULT_COLUMNS and any(map(naming.run_name, runs)):
        names.insert(1, "name")
    output.show(
        {"runs": [run.model_dump() for run in runs]},
        Table(
            [_COLUMNS[name][0] for name in names],
            [[_COLUMNS[name][1](run) for name in names] for run in runs],
            title,
        ),
    )


@command.command("info")
@click.argument("run_id")
@with_output
def info(output: Output, run_id: str) -> None:
    """Show details of a run."""
    from tinsmith.client.rest import RestClient
    from tinsmith.types.runs import TrainingRunDetails

    client = RestClient()
    run = client.get_training_run(naming.run_id(client, run_id)).result()
    rows = [
        ["Run ID", run.training_run_id],
        ["Base Model", run.base_model],
        ["Owner", run.model_owner],
        ["LoRA", lora_text(run)],
        ["Last Update", time_text(run.last_request_time)],
        ["Status", _status(run)],
    ]
    if isinstance(run, TrainingRunDetails) and run.lora_seed is not None:
        rows.insert(4, ["LoRA Seed", str(run.lora_seed)])
    for kind, checkpoint in (
        ("Training", run.last_checkpoint),
        ("Sampler", run.last_sampler_checkpoint),
    ):
        if checkpoint is not None:
            rows += [
                [f"Last {kind} Checkpoint", checkpoint.checkpoint_id],
                ["  - Time", time_text(checkpoint.time)],
                ["  - Path", checkpoint.tinker_path],
            ]
    if run.user_metadata:
        rows.append(["Metadata", ""])
        rows += [[f"  - {name}", value] for name, value in run.user_metadata.items()]
    output.show(
        run.model_dump(),
        Table(["Property", "Value"], rows, f"Training Run: {run.training_run_id}"),
    )


def lora_text(run: TrainingRun) -> str:
    """As in a page about one run."""
    if run.is_lora and run.lora_rank:
        return f"Yes (Rank {run.lora_rank})"
    return "Yes" if run.is_lora else "No"


def _lora(run: TrainingRun) -> str:
    if run.is_lora and run.lora_rank:
        return f"Rank {run.lora_rank}"
    return "Yes" if run.is_lora else "No"


def _status(run: TrainingRun) -> str:
    return "Failed" if run.corrupted else "OK"
