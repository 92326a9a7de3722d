"""Numbers about the server's work, in the text form that Prometheus reads.

Everything that can be counted is in the tables below; a name that is not there is a mistake. A
registry of our own keeps servers in one process apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

# They would be a second line for each number, with the time of its first use.
disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations

PREFIX = "tinsmith_"

COUNTERS: dict[str, str] = {
    "forwarded_requests": "Requests passed on to the server that runs the engines, and answered.",
    "operations": "Training operations that ended, by kind and by status (done or failed).",
    "prefilled_tokens": "Prompt tokens computed for samples; those found in a cache do not count.",
    "refusals": "Requests answered with an error, by HTTP status.",
    "sampled_tokens": "Tokens of samples that ended.",
    "samples": "Sampling requests that ended, by status (done or failed).",
    "telemetry_events": "Events that clients reported about themselves.",
    "telemetry_unreadable": "Reports of clients that could not be read.",
    "trained_tokens": "Tokens in forward and backward passes.",
}
HISTOGRAMS = {
    "batch_passes": "Passes in one batch for the engine.",
    "batch_tokens": "Tokens in one batch for the engine.",
    "operation_seconds": "From recording a training operation to its end.",
    "sample_seconds": "From accepting a sampling request to its end.",
    "step_seconds": "Optimizer steps in the engine; models that step together count once.",
    "store_commit_seconds": "One commit of the store.",
    "store_commit_writes": "Writes that shared one commit.",
    "wait_seconds": "From recording a training operation to its start.",
}
GAUGES: dict[str, str] = {
    "active_body_bytes": "Bytes of bodies of requests under way.",
    "active_requests": "Requests under way, those that wait for results not counted.",
    "connections": "Open connections.",
    "engine_adapter_bytes": "Adapters in the engine, their gradients and moments, and samplers.",
    "engine_adapter_limit_bytes": "What the engine's plan has for them.",
    "engine_busy_seconds": "How long the present engine has worked since it started.",
    "engine_cache_bytes": "Keys and values of samples and remembered prompts.",
    "engine_cache_limit_bytes": "What the engine's plan has for them.",
    "engine_decoded_tokens": "Tokens that the present engine has sampled since it started, those "
    "of samples under way among them.",
    "engine_memory_bytes": "The engine's memory: the process's, or the device's.",
    "engine_restarts": "How often an engine was started again after it died.",
    "engine_weights_bytes": "Base models in the engine.",
    "engine_up": "1 while an engine serves, 0 while none does.",
    "event_loop_lag_seconds": "How late the event loop lately was.",
    "event_streams": "Streams of events that are open.",
    "kept_experts_bytes": "Experts of sampled tokens in memory, for passes with `router_replay`.",
    "leads": "1 while this server runs the engines, 0 while it passes requests on to the one that "
    "does; of servers on Postgres.",
    "lease_epoch": "How often the lease to run the engines was taken; of servers on Postgres.",
    "live_models": "Models that the server keeps track of, in the engine or on disk.",
    "loaded_models": "Models in the engine's memory.",
    "queued_operations": "Training operations that wait for their turn.",
    "running_samples": "Sampling requests under way.",
    "sample_result_bytes": "Sampling results in memory that have not been fetched.",
    "slot_busy_seconds": "How long a slot's present engine has worked, by slot.",
    "slot_memory_bytes": "The memory of a slot's engine, by slot: the process's, or the device's.",
    "slot_models": "Models that train in a slot, by slot.",
    "slot_restarts": "How often a slot's engine was started again after it died, by slot.",
    "slot_running_samples": "Sampling requests under way, by slot.",
    "slot_up": "1 while a slot has an engine, 0 while it has none, by slot.",
    "uptime_seconds": "Since the server started.",
}
"""What each number means; shown as HELP, and in docs/reference/metrics.md."""


LABELS = {
    "operations": ("kind", "status"),
    "refusals": ("status",),
    "samples": ("status",),
    **{name: ("slot",) for name in GAUGES if name.startswith("slot_")},
}
"""The labels of counters and gauges that have any."""

SECONDS_BUCKETS = tuple(0.001 * step * 10**power for power in range(6) for step in (1, 2, 5))
"""Upper ends from 1 ms to 500 s: a quantile read from them is at most 2.5 times too large."""

SIZE_BUCKETS = tuple(2.0**power for power in range(18))
"""Upper ends for passes, tokens and writes, from 1 to 131,072."""


class Metrics:
    """Counters, histograms, and gauges that are read at each scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(PREFIX + name, text, LABELS.get(name, ()), registry=self._registry)
            for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(
                PREFIX + name,
                text,
                buckets=SECONDS_BUCKETS if name.endswith("_seconds") else SIZE_BUCKETS,
                registry=self._registry,
            )
            for name, text in HISTOGRAMS.items()
        }
        self._labelled: dict[tuple[str, ...], Counter] = {}
        """Parts of counters by name and values: to find one costs more than to count."""
        self._gauges: dict[str, Gauge] = {}
        started = time.monotonic()
        self.gauge("uptime_seconds", lambda: time.monotonic() - started)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        key = (name, *labels.values())
        counter = self._labelled.get(key)
        if counter is None:
            whole = self._counters[name]
            counter = self._labelled[key] = whole.labels(**labels) if labels else whole
        counter.inc(amount)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def gauge(self, name: str, read: Callable[[], float], **labels: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(
                PREFIX + name, GAUGES[name], LABELS.get(name, ()), registry=self._registry
            )
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(read)

    def render(self) -> bytes:
        return generate_latest(self._registry)
