"""A run while it goes on: a curve that grows on a terminal, plain lines elsewhere.

Everything goes to the error stream, so that results can be piped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import click

from tinsmith.cli.training.methods import Chart
from tinsmith.cli.training.plot import plot, thinned


class Display(Protocol):
    def step(self, done: int, total: int, line: Mapping[str, float]) -> None:
        """Step `done` of `total` has these metrics."""

    def note(self, text: str) -> None:
        """Something that happened beside the steps."""


@contextmanager
def showing(
    shown: Sequence[str], chart: Chart, earlier: Sequence[Mapping[str, float]], *, is_quiet: bool
) -> Iterator[Display]:
    """`shown` are the metrics to show, `earlier` the lines before an interruption."""
    if is_quiet:
        yield _Silent()
    elif sys.stderr.isatty():
        with _live(shown, chart, earlier) as display:
            yield display
    else:
        yield _Lines(shown)


def facts(shown: Sequence[str], line: Mapping[str, float]) -> str:
    """
    >>> facts(["loss", "eval_loss"], {"step": 3, "loss": 1.23456})
    'loss 1.235'
    """
    return ", ".join(f"{name} {line[name]:.4g}" for name in shown if name in line)


class _Silent:
    def step(self, done: int, total: int, line: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Lines:
    def __init__(self, shown: Sequence[str]) -> None:
        self._shown = shown
        self._pace = _Pace()

    def step(self, done: int, total: int, line: Mapping[str, float]) -> None:
        told = facts([*self._shown, "tokens_per_second"], line)
        click.echo(f"step {done}/{total}: {told}{self._pace.left(done, total)}", err=True)

    def note(self, text: str) -> None:
        click.echo(text, err=True)


class _Pace:
    """How long a run will still take, from the steps since it was begun or resumed."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._num_steps = 0

    def left(self, done: int, total: int) -> str:
        self._num_steps += 1
        seconds = (time.monotonic() - self._started) / self._num_steps * (total - done)
        return f", {seconds:.0f} s left" if done < total else ""


@contextmanager
def _live(
    shown: Sequence[str], chart: Chart, earlier: Sequence[Mapping[str, float]]
) -> Iterator[Display]:
    from rich.console import Console
    from rich.live import Live

    # Ids contain words between colons, which rich would take for emoji and for markup.
    console = Console(stderr=True, emoji=False, markup=False, highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        yield _Curve(live, shown, chart, earlier)


class _Curve:
    def __init__(
        self,
        live: Any,  # rich is not imported to name it
        shown: Sequence[str],
        chart: Chart,
        earlier: Sequence[Mapping[str, float]],
    ) -> None:
        self._live = live
        self._shown = shown
        self._title = chart.title
        self._key = next(iter(chart.curves.values()))
        self._values = [line[self._key] for line in earlier if self._key in line]
        self._pace = _Pace()

    def step(self, done: int, total: int, line: Mapping[str, float]) -> None:
        from rich.text import Text

        if self._key in line:
            self._values.append(line[self._key])
        width = max(10, min(72, self._live.console.width - 12))
        told = facts([*self._shown, "tokens_per_second"], line)
        head = f"step {done}/{total}: {told}{self._pace.left(done, total)}"
        drawn = plot(thinned(self._values, width), title=self._title)
        self._live.update(Text(f"{drawn}\n{head}"), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(text, soft_wrap=True)
