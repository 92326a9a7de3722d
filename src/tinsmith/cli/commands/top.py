"""`tinsmith top`: what a server is doing, again and again."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.output import Output, Table, size_text, with_output

if TYPE_CHECKING:
    from tinsmith.cli.server.metrics import Reading


@click.command("top")
@click.option("--interval", type=click.FloatRange(0.1), default=2.0, show_default=True)
@click.option("--once", is_flag=True, help="One reading over one interval, and end.")
@with_output
def command(output: Output, interval: float, once: bool) -> None:
    """Show what a server is doing: models, queues, tokens per second, engine.

    On a terminal the view is renewed until Ctrl-C; elsewhere it is shown once.
    """
    from tinsmith.cli.server.metrics import read
    from tinsmith.transport.config import ClientConfig

    url = ClientConfig.from_env().base_url
    before = read(url)
    is_live = sys.stdout.isatty() and not once and not output.is_json
    while True:
        time.sleep(interval)
        now = read(url)
        if is_live:
            click.clear()
        facts = describe(now, before)
        rows = [[name, text] for name, (_, text) in facts.items()]
        data = {name.lower().replace(" ", "_"): value for name, (value, _) in facts.items()}
        output.show({"url": url, **data}, Table(["What", "Now"], rows, url))
        if not is_live:
            return
        before = now


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
