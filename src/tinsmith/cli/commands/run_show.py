"""`tinsmith run show`: a run's curve in the terminal, once or as it grows."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli import naming
from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, time_text, with_output

if TYPE_CHECKING:
    from tinsmith.cli.server.runs import RunNow
    from tinsmith.client.rest import RestClient

_MARGIN = 14
"""Columns beside a curve: its scale."""
_MOST_COLUMNS = 240
_MOST_POINTS = 5000
_TITLES = {"loss": "Loss per token"}


@click.command("show")
@click.argument("run_id")
@click.option(
    "--metric",
    default="loss",
    show_default=True,
    help="Which metric to draw; one that your program logged works, too.",
)
@click.option("--follow", is_flag=True, help="Keep up with the run until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    help="Seconds between updates, with --follow.",
)
@with_output
def command(output: Output, run_id: str, metric: str, follow: bool, interval: float) -> None:
    """Draw how a run learns: its loss per token, or another of its metrics.

    With --follow the curve grows on a terminal; a pipe gets a line for each point, and with --json
    a line of JSON.
    """
    from tinsmith.client.rest import RestClient

    client = RestClient()
    run_id = naming.run_id(client, run_id)
    if not follow:
        _show(output, client, run_id, metric)
        return
    with suppress(KeyboardInterrupt):
        if sys.stdout.isatty() and not output.is_json:
            _draw_again_and_again(client, run_id, metric, interval)
        else:
            _tell_points(output, _new_points(client, run_id, metric, interval), metric)


def _show(output: Output, client: RestClient, run_id: str, metric: str) -> None:
    points = _MOST_POINTS if output.is_json else columns_beside_scale()
    now = _read(client, run_id, metric, points)
    if output.is_json:
        output.show_json(_facts(now, metric))
    else:
        click.echo(drawing(now, metric, points))


def _draw_again_and_again(client: RestClient, run_id: str, metric: str, interval: float) -> None:
    is_over = False
    while not is_over:
        now = _read(client, run_id, metric, columns_beside_scale())
        click.clear()
        click.echo(drawing(now, metric, columns_beside_scale()))
        is_over = now.run.corrupted
        time.sleep(0 if is_over else interval)


def drawing(now: RunNow, metric: str, columns: int) -> str:
    """What the run does, and its curve in at most so many columns beside the scale."""
    from tinsmith.cli.training.plot import plot

    run, title = now.run, _TITLES.get(metric, metric)
    name = naming.run_name(run)
    lines = [
        f"{name} ({run.training_run_id})" if name else run.training_run_id,
        f"{run.base_model} · {now.status} · last request {time_text(run.last_request_time)}",
    ]
    if now.queue.waiting:
        lines.append(f"{now.queue.waiting} operations wait: {now.queue.reason}")
    if now.curve is None:
        return "\n".join([*lines, "", f"{title}: no point yet"])
    unit = "Operations" if now.curve.axis == "seq" else "Steps"
    now_text = f"{title}: {now.values[-1]:.4g} now, {now.values[0]:.4g} at first"
    if now.tokens_per_second is not None:
        now_text += f"; {now.tokens_per_second:,.0f} tokens/s"
    drawn = plot(now.values, height=10, columns=columns)
    return "\n".join([*lines, now_text, "", drawn, f"{unit} {now.curve.x[0]} to {now.curve.x[-1]}"])


def _facts(now: RunNow, metric: str) -> dict[str, Any]:
    return {
        "run": now.run.training_run_id,
        "status": now.status,
        "metric": metric,
        "metrics": list(now.metrics),
        "curve": now.curve.model_dump() if now.curve else None,
        "tokens_per_second": now.tokens_per_second,
        "waiting": now.queue.waiting,
        "reason": now.queue.reason,
    }


def _tell_points(output: Output, points: Iterator[dict[str, Any]], metric: str) -> None:
    for point in points:
        if output.is_json:
            click.echo(json.dumps(point))
        else:
            axis, number = next(iter(point.items()))
            value = point[metric]
            shown = "not finite" if value is None else f"{value:.6g}"
            click.echo(f"{'operation' if axis == 'seq' else axis} {number}: {metric} {shown}")


def _new_points(
    client: RestClient, run_id: str, metric: str, interval: float
) -> Iterator[dict[str, Any]]:
    """All points that a run has, and then each that comes; the end when the run has failed."""
    after, is_over = -1, False
    while not is_over:
        now = _read(client, run_id, metric, _MOST_POINTS, after)
        if curve := now.curve:
            for x, t, value in zip(curve.x, curve.t, curve.mean, strict=True):
                yield {curve.axis: x, "t": t, metric: value}
            after = curve.x[-1]
        is_over = now.run.corrupted
        time.sleep(0 if is_over else interval)


def _read(client: RestClient, run_id: str, metric: str, points: int, after: int = -1) -> RunNow:
    """A run that has just begun has no loss yet; other unknown names may be mistakes."""
    from tinsmith.cli.server import runs

    now = runs.read(client, run_id, metric=metric, points=points, after=after)
    if metric not in now.metrics and metric != runs.LOSS and after < 0:
        raise CommandError(
            f"the run has no metric called {metric!r}",
            f"Known: {', '.join(now.metrics) or 'none yet'}",
        )
    return now


def columns_beside_scale() -> int:
    """How many columns of the terminal a curve may have."""
    return min(max(shutil.get_terminal_size().columns - _MARGIN, 8), _MOST_COLUMNS)
