"""Numbers about the server's work, in the text form that Prometheus reads."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

PREFIX = "tinsmith_"

Labels = tuple[tuple[str, str], ...]

COUNTERS = {
    "operations": "Training operations that ended, by kind and by status (done or failed).",
    "prefilled_tokens": "Prompt tokens computed for samples; those found in a cache do not count.",
    "refusals": "Requests answered with an error, by HTTP status.",
    "sampled_tokens": "Tokens sampled.",
    "samples": "Sampling requests that ended, by status (done or failed).",
    "telemetry_events": "Events that clients reported about themselves.",
    "telemetry_unreadable": "Reports of clients that could not be read.",
    "trained_tokens": "Tokens in forward and backward passes.",
}
SUMMARIES = {
    "batch_passes": "Passes in one batch for the engine.",
    "batch_tokens": "Tokens in one batch for the engine.",
    "operation_seconds": "From recording a training operation to its end.",
    "sample_seconds": "From accepting a sampling request to its end.",
    "step_seconds": "Optimizer steps in the engine; models that step together count once.",
    "store_commit_seconds": "One commit of the store.",
    "store_commit_writes": "Writes that shared one commit.",
    "wait_seconds": "From recording a training operation to its start.",
}
GAUGES = {
    "active_body_bytes": "Memory given to large bodies of requests under way.",
    "active_requests": "Requests under way, those that wait for results not counted.",
    "engine_busy_seconds": "How long the present engine has worked since it started.",
    "engine_memory_bytes": "The engine's memory: the process's, or the device's.",
    "engine_restarts": "How often an engine was started again after it died.",
    "engine_up": "1 while an engine serves, 0 while none does.",
    "event_loop_lag_seconds": "How late the server lately came to do what was due.",
    "live_models": "Models that the server keeps track of, in the engine or on disk.",
    "loaded_models": "Models in the engine's memory.",
    "queued_operations": "Training operations that wait for their turn.",
    "running_samples": "Sampling requests under way.",
    "sample_result_bytes": "Sampling results in memory that have not been fetched.",
    "uptime_seconds": "Since the server started.",
}
"""What each number means; shown as HELP, and in docs/reference/metrics.md."""


class Metrics:
    """Counters, sums with counts, and gauges that are asked for when somebody looks."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, Labels], float] = defaultdict(float)
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._gauges: dict[str, Callable[[], float]] = {}
        self._started = time.time()
        self.gauge("uptime_seconds", lambda: time.time() - self._started)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._counts[name, tuple(sorted(labels.items()))] += amount

    def observe(self, name: str, value: float) -> None:
        entry = self._sums[name]
        entry[0] += value
        entry[1] += 1

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        self._gauges[name] = read

    def render(self) -> str:
        lines = []
        for name in sorted({name for name, _ in self._counts}):
            lines += _head(f"{name}_total", "counter", COUNTERS.get(name))
            for (other, labels), value in sorted(self._counts.items()):
                if other == name:
                    lines.append(f"{PREFIX}{name}_total{_label_text(labels)} {value:g}")
        for name, (total, count) in sorted(self._sums.items()):
            lines += _head(name, "summary", SUMMARIES.get(name))
            lines.append(f"{PREFIX}{name}_sum {total:g}")
            lines.append(f"{PREFIX}{name}_count {count:g}")
        for name, read in sorted(self._gauges.items()):
            lines += _head(name, "gauge", GAUGES.get(name))
            lines.append(f"{PREFIX}{name} {read():g}")
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, description: str | None) -> list[str]:
    told = [] if description is None else [f"# HELP {PREFIX}{name} {description}"]
    return [*told, f"# TYPE {PREFIX}{name} {kind}"]


def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}"
