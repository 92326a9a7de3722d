"""Lists that come in pages, and files that come over HTTP, each with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output

T = TypeVar("T")

_PIECE_BYTES = 256 * 1024


def all_pages(
    fetch: Callable[[int, int], tuple[list[T], int]],
    *,
    limit: int,
    page_size: int,
    what: str,
    output: Output,
) -> tuple[list[T], int]:
    """Up to `limit` items (0: all of them), and how many there are.

    `fetch(limit, offset)` gives a page and the number of items in the whole list.
    """
    items, total = fetch(min(page_size, limit) if limit > 0 else page_size, 0)
    wanted = min(limit, total) if limit > 0 else total
    if len(items) >= wanted:
        return items, total
    label = f"Fetching {'all' if limit == 0 else wanted} {what}"
    with click.progressbar(
        length=wanted, label=label, show_pos=True, hidden=output.is_json, file=sys.stderr
    ) as bar:
        bar.update(len(items))
        while len(items) < wanted:
            asked = min(page_size, wanted - len(items))
            page, _ = fetch(asked, len(items))
            items += page
            bar.update(len(page))
            if len(page) < asked:
                break
    return items, total


def download(url: str, target: Path, *, label: str, what: str, hint: str, output: Output) -> int:
    """Fetch a signed URL into a file; how many bytes it has."""
    import urllib.error
    import urllib.request

    if not url.startswith(("https://", "http://")):
        raise CommandError(
            f"Failed to download {what}: {url[:40]!r} is no address of a server", hint
        )
    written = 0
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            length = int(response.headers.get("Content-Length", 0))
            with (
                target.open("wb") as file,
                click.progressbar(
                    length=length, label=label, hidden=output.is_json, file=sys.stderr
                ) as bar,
            ):
                while piece := response.read(_PIECE_BYTES):
                    file.write(piece)
                    written += len(piece)
                    bar.update(len(piece))
    except urllib.error.URLError as error:
        raise CommandError(f"Failed to download {what}: {error}", hint) from error
    except OSError as error:
        raise CommandError(
            f"Failed to save {what}: {error}",
            f"Please check that you have write permissions to {target.parent}",
        ) from error
    return written


def more_title(title: str, shown: int, total: int) -> str:
    """The title of a list of which not everything is shown."""
    hidden = total - shown
    if hidden <= 0:
        return title
    return f"{title} ({hidden} more not shown, use --limit to see more)"
