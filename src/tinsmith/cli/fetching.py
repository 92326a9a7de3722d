"""Lists that come in pages, and files, with progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinsmith.cli.output import Output

if TYPE_CHECKING:
    from tinsmith.client.downloads.file import Progress

T = TypeVar("T")


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


class DownloadBars:
    """A progress bar for each file of a download; given to it as its `on_progress`."""

    def __init__(self, output: Output) -> None:
        self._is_hidden = output.is_json
        self._file = ""
        self._bar: Any = None  # click names its class in a private module

    def __enter__(self) -> DownloadBars:
        return self

    def __call__(self, progress: Progress) -> None:
        if self._bar is None or progress.file != self._file:
            self.close()
            self._file = progress.file
            self._bar = click.progressbar(
                length=progress.total or 0,
                label=progress.file,
                hidden=self._is_hidden,
                file=sys.stderr,
            )
            self._bar.__enter__()
        self._bar.update(progress.done - self._bar.pos)

    def close(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)

    __exit__ = close


def more_title(title: str, shown: int, total: int) -> str:
    """The title of a list that is not shown whole."""
    hidden = total - shown
    if hidden <= 0:
        return title
    return f"{title} ({hidden} more not shown, use --limit to see more)"
