"""`tinsmith session`: sessions of clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tinsmith.cli import naming
from tinsmith.cli.fetching import DownloadBars
from tinsmith.cli.output import Output, Table, size_text, with_output


@click.group("session")
def command() -> None:
    """Manage sessions."""


@command.command("list")
@click.option(
    "--limit", type=click.IntRange(0), default=20, show_default=True, help="Most to show; 0: all."
)
@with_output
def list_sessions(output: Output, limit: int) -> None:
    """List your sessions, newest first."""
    from itertools import islice

    from tinsmith.client.rest import RestClient

    sessions = list(islice(RestClient().iter_sessions(), limit or None))
    title = f"{len(sessions)} session{'' if len(sessions) == 1 else 's'}"
    rows = [[session_id] for session_id in sessions]
    output.show({"sessions": sessions}, Table(["Session ID"], rows, title))


@command.command("export-trace")
@click.argument("session_id")
@click.option(
    "--output",
    "-o",
    "path",
    type=click.Path(path_type=Path),
    help="Output file.  [default: ./<session-id>.pftrace]",
)
@click.option("--url-only", is_flag=True, help="Print the trace's address and do not fetch it.")
@with_output
def export_trace(output: Output, session_id: str, path: Path | None, url_only: bool) -> None:
    """Export a session's timeline as a Perfetto trace, for https://ui.perfetto.dev."""
    from tinsmith.client.downloads.file import fetch, forget_version
    from tinsmith.client.rest import RestClient

    client = RestClient()
    session_id = naming.session_id(client, session_id)
    output.note(f"Exporting trace for session {session_id} (this may take a while)...")
    url = client.export_session_trace(session_id).result()
    if url_only:
        if output.is_json:
            output.show_json({"session_id": session_id, "url": url})
        else:
            click.echo(url)
        return
    target = path or Path.cwd() / f"{session_id}.pftrace"
    with DownloadBars(output) as bars:
        client.holder.submit(fetch, client.holder, url, target.name, target, bars).result()
    forget_version(target)
    size = target.stat().st_size
    data: dict[str, Any] = {"session_id": session_id, "destination": str(target)}
    rows = [["Session ID", session_id], ["Saved to", str(target)]]
    if size > 0:
        data["file_size_bytes"] = size
        rows.append(["Size", size_text(size)])
    output.show(data, Table(["Property", "Value"], rows, f"Trace Export: {session_id}"))
