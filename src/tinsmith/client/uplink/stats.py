"""Local counters: how many requests, how they ended and how long they took, per connection class.

Nothing here leaves the process. `ServiceClient.stats()` gives a copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from tinsmith.wire.endpoints import ConnectionClass

_KEPT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStats:
    """Counters of one connection class; latencies of its last requests, in seconds."""

    requests: int
    failures: int
    retries: int
    in_flight: int
    latency_p50: float | None
    latency_p90: float | None
    latency_p99: float | None


class Stats:
    """Counts on the I/O thread; `current` may be called from any."""

    def __init__(self) -> None:
        self._classes = {kind: _Counters() for kind in ConnectionClass}

    @contextmanager
    def watch(self, kind: ConnectionClass) -> Iterator[None]:
        """One call with all its attempts."""
        counters = self._classes[kind]
        counters.requests += 1
        counters.in_flight += 1
        started = time.perf_counter()
        try:
            yield
        except BaseException:
            counters.failures += 1
            raise
        finally:
            counters.in_flight -= 1
            counters.latencies.append(time.perf_counter() - started)

    def count_retry(self, kind: ConnectionClass) -> None:
        self._classes[kind].retries += 1

    def current(self) -> Mapping[str, ClassStats]:
        return MappingProxyType(
            {kind.value: counters.current() for kind, counters in self._classes.items()}
        )


class _Counters:
    def __init__(self) -> None:
        self.requests = self.failures = self.retries = self.in_flight = 0
        self.latencies: deque[float] = deque(maxlen=_KEPT)

    def current(self) -> ClassStats:
        ordered = sorted(self.latencies.copy())

        def percentile(share: float) -> float | None:
            return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None

        return ClassStats(
            requests=self.requests,
            failures=self.failures,
            retries=self.retries,
            in_flight=self.in_flight,
            latency_p50=percentile(0.5),
            latency_p90=percentile(0.9),
            latency_p99=percentile(0.99),
        )
