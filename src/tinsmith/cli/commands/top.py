"""`tinsmith top`: what a server is doing, again and again."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.naming import run_name
from tinsmith.cli.output import Output, Table, size_text, with_output

if TYPE_CHECKING:
    from tinsmith.cli.server.metrics import Reading
    from tinsmith.cli.server.runs import RunNow


_CURVE_POINTS, _FEW_POINTS = 24, 12
_WIDE_COLUMNS = 100
_COLUMNS = ["Run", "Status", "Loss per token", "Now", "Tokens/s", "Waiting"]


@click.command("top")
@click.option("--interval", type=click.FloatRange(0.1), default=2.0, show_default=True)
@click.option("--once", is_flag=True, help="One reading over one interval, and end.")
@click.option(
    "--runs",
    "num_runs",
    type=click.IntRange(0, 50),
    default=10,
    show_default=True,
    help="Most runs to show: those of your key with the last requests.",
)
@with_output
def command(output: Output, interval: float, once: bool, num_runs: int) -> None:
    """Show what a server is doing: models, queues, tokens per second, engine, and your runs.

    A run has its loss per token as a curve, tokens for each second of computing, and how many of
    its operations wait. On a terminal the view is renewed until you press q: the arrows (or j and
    k) choose a run, Enter draws its curve, Escape closes it. Elsewhere it is shown once.
    """
    from tinsmith.cli.server.metrics import read
    from tinsmith.transport.config import ClientConfig

    url = ClientConfig.from_env().base_url
    before = read(url)
    if sys.stdout.isatty() and not once and not output.is_json:
        _watch(url, before, interval, num_runs)
        return
    time.sleep(interval)
    facts = describe(read(url), before)
    runs, reason = _runs(num_runs)
    if output.is_json:
        data = {name.lower().replace(" ", "_"): value for name, (value, _) in facts.items()}
        listed = None if runs is None else [_run_facts(run) for run in runs]
        output.show_json({"url": url, **data, "runs": listed, "no_runs_because": reason})
    else:
        _show(output, url, facts, runs, reason)


def _watch(url: str, before: Reading, interval: float, num_runs: int) -> None:
    """Show it again and again, and at once when a key is pressed; ends with q."""
    from tinsmith.cli.keyboard import Keyboard
    from tinsmith.cli.server.metrics import read

    chosen, is_open, key = 0, False, None
    with Keyboard() as keyboard, suppress(KeyboardInterrupt):
        keyboard.wait(interval)
        while key != "q":
            if key is None:
                now = read(url)
                facts, (runs, reason) = describe(now, before), _runs(num_runs)
                before, looked = now, time.monotonic()
            last = max(0, len(runs or ()) - 1)
            chosen = min(max(0, chosen + {"up": -1, "down": 1}.get(key or "", 0)), last)
            is_open = {"enter": not is_open, "escape": False}.get(key or "", is_open)
            _redraw(url, facts, runs, reason, chosen, is_open)
            key = keyboard.wait(max(0.0, looked + interval - time.monotonic()))


def _show(
    output: Output,
    url: str,
    facts: dict[str, tuple[Any, str]],
    runs: list[RunNow] | None,
    reason: str | None,
) -> None:
    rows = [[name, text] for name, (_, text) in facts.items()]
    output.show(None, Table(["What", "Now"], rows, url))
    if reason is not None:
        output.note(f"Your runs are not shown: {reason}")
    elif runs:
        output.show(None, Table(_COLUMNS, _run_rows(runs), "Runs with the last requests"))


def _redraw(
    url: str,
    facts: dict[str, tuple[Any, str]],
    runs: list[RunNow] | None,
    reason: str | None,
    chosen: int,
    is_open: bool,
) -> None:
    from tinsmith.cli.server.screen import screen

    size = shutil.get_terminal_size()
    points = _CURVE_POINTS if size.columns >= _WIDE_COLUMNS else _FEW_POINTS
    shown = screen(
        url,
        {name: text for name, (_, text) in facts.items()},
        [_COLUMNS, *_run_rows(runs, points)] if runs else [],
        chosen=chosen,
        note=None if reason is None else f"Your runs are not shown: {reason}",
        curve=_curve(runs[chosen]) if runs and is_open else None,
        columns=size.columns,
        lines=size.lines,
    )
    click.clear()
    click.echo("\n".join(shown))


def _curve(now: RunNow) -> str:
    from tinsmith.cli.commands.run_show import columns_beside_scale, drawing
    from tinsmith.cli.server import runs
    from tinsmith.client.rest import RestClient

    columns = columns_beside_scale()
    again = runs.read(RestClient(), now.run.training_run_id, points=columns)
    return drawing(again, runs.LOSS, columns)


def _runs(limit: int) -> tuple[list[RunNow] | None, str | None]:
    """The caller's runs, or why there are none: unlike the server's numbers they need a key."""
    from tinsmith.cli.server.runs import latest
    from tinsmith.client.rest import RestClient
    from tinsmith.errors import AuthenticationError, TinkerError

    if limit == 0:
        return [], None
    try:
        return latest(RestClient(), limit, points=_CURVE_POINTS), None
    except AuthenticationError as error:
        return None, error.message
    except TinkerError as error:
        return None, str(error)


def _run_facts(now: RunNow) -> dict[str, Any]:
    return {
        "run": now.run.training_run_id,
        "name": run_name(now.run),
        "status": now.status,
        "losses": now.curve.mean if now.curve else [],
        "tokens_per_second": now.tokens_per_second,
        "waiting": now.queue.waiting,
        "reason": now.queue.reason,
    }


def _run_rows(runs: Sequence[RunNow], points: int = _CURVE_POINTS) -> list[list[str]]:
    """The cells of `_COLUMNS`; curves have at most so many points."""
    from tinsmith.cli.training.plot import sparkline

    return [
        [
            # The beginning of an id is enough for every command.
            run_name(now.run) or now.run.training_run_id[:8],
            now.status,
            sparkline(now.values[:: -max(1, -(-len(now.values) // points))][::-1]),
            f"{now.values[-1]:.4g}" if now.values else "–",
            "–" if now.tokens_per_second is None else f"{now.tokens_per_second:,.0f}",
            str(now.queue.waiting),
        ]
        for now in runs
    ]


def describe(now: Reading, before: Reading) -> dict[str, tuple[Any, str]]:
    """What to show: for each line the value, and the value as text."""

    def number(name: str) -> tuple[float, str]:
        return now.get(name), f"{now.get(name):g}"

    def rate(name: str) -> tuple[float, str]:
        value = round(now.rate(name, before), 1)
        return value, f"{value:g}"

    def milliseconds(name: str) -> tuple[float | None, str]:
        mean = now.mean(name, before)
        if mean is None:
            return None, "N/A"
        return round(1000 * mean, 2), f"{1000 * mean:.1f} ms"

    def slowest(name: str) -> tuple[float | None, str]:
        bound = now.quantile(name, 0.99, before)
        if bound is None:
            return None, "N/A"
        if math.isinf(bound):
            return None, "more than 500 s"
        return round(1000 * bound, 2), f"at most {1000 * bound:g} ms"

    is_up = now.get("engine_up") > 0
    restarts = int(now.get("engine_restarts"))
    engine = ("up" if is_up else "DOWN") + (f", restarted {restarts} times" if restarts else "")
    seconds = int(now.get("uptime_seconds"))
    result_bytes = int(now.get("sample_result_bytes"))
    return {
        "Engine": (is_up, engine),
        "Uptime": (seconds, f"{seconds // 3600} h {seconds // 60 % 60} min {seconds % 60} s"),
        "Live models": number("live_models"),
        "Loaded models": number("loaded_models"),
        "Queued operations": number("queued_operations"),
        "Running samples": number("running_samples"),
        "Trained tokens per second": rate("trained_tokens_total"),
        "Sampled tokens per second": rate("engine_decoded_tokens"),
        "Prefilled tokens per second": rate("prefilled_tokens_total"),
        "Operations per second": rate("operations_total"),
        "Refusals": number("refusals_total"),
        "Operation time": milliseconds("operation_seconds"),
        "Operation time p99": slowest("operation_seconds"),
        "Sample time": milliseconds("sample_seconds"),
        "Sample time p99": slowest("sample_seconds"),
        "Commit time": milliseconds("store_commit_seconds"),
        "Kept samples": (result_bytes, size_text(result_bytes)),
    }
