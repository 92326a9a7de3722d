"""How far long work has come: a live line per stage on a terminal, plain lines elsewhere.

Everything goes to the error stream, so that results can be piped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import click

Tell = Callable[[int, int, str], None]
"""Called with how many tensors are done, how many there are, and the name of the last."""


class Stage(Protocol):
    def update(self, done: float, facts: str = "") -> None:
        """`done` of the stage's total is done; `facts` says more, as in "loss 1.32"."""


class Progress:
    """Stages one after the other, each with the time it took.

    with progress.stage("training", total=20) as stage:
        stage.update(3, "loss 1.32")
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._is_live = sys.stderr.isatty()

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Stage]:
        if self._is_quiet:
            yield _Silent()
        elif self._is_live:
            with _live(name, total) as stage:
                yield stage
        else:
            started = time.monotonic()
            click.echo(f"{name} ...", err=True)
            yield _Lines(name, total, started)
            click.echo(f"{name}: done in {time.monotonic() - started:.1f} s", err=True)


class _Silent:
    def update(self, done: float, facts: str = "") -> None:
        pass


class _Lines:
    def __init__(self, name: str, total: float | None, started: float) -> None:
        self._name = name
        self._total = total
        self._started = started

    def update(self, done: float, facts: str = "") -> None:
        parts = [facts] if facts else []
        if self._total is not None and 0 < done < self._total:
            left = (time.monotonic() - self._started) / done * (self._total - done)
            parts.append(f"{left:.0f} s left")
        how_far = "" if self._total is None else f" {_share(done, self._total)}"
        click.echo(f"{self._name}{how_far}: {', '.join(parts)}", err=True)


@contextmanager
def _live(name: str, total: float | None) -> Iterator[Stage]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    bar_width = 24 if console.width >= 100 else 0
    # What the other columns take; a longer fact would wrap and make the view jump.
    facts_width = max(8, console.width - bar_width - 55)
    columns = [SpinnerColumn(finished_text="[green]✓[/green]"), TextColumn("{task.description}")]
    if total is not None:
        columns += [BarColumn(bar_width=bar_width)] if bar_width else []
        columns.append(TextColumn("{task.fields[share]}"))
    columns += [TextColumn("{task.fields[facts]}", style="dim", markup=False), TimeElapsedColumn()]
    if total is not None:
        columns.append(TimeRemainingColumn())
    with Bars(*columns, console=console) as bars:
        share = "" if total is None else _share(0, total)
        task = bars.add_task(f"{name:<28}", total=total, facts="", share=share)

        class Live:
            def update(self, done: float, facts: str = "") -> None:
                facts = facts if len(facts) <= facts_width else facts[: facts_width - 1] + "…"
                if total is None:
                    bars.update(task, facts=facts)
                else:
                    bars.update(task, completed=done, facts=facts, share=_share(done, total))

        yield Live()
        # The total of a stage without one is set at its end, which stops the spinner.
        share = "" if total is None else _share(total, total)
        bars.update(task, total=total or 1, completed=total or 1, share=share)


def _share(done: float, total: float) -> str:
    """The part that is done: a count of several things, a share of one."""
    return f"{done:.0%}" if total == 1.0 else f"{done:g}/{total:g}"
