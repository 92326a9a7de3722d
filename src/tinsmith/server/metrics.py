"""Numbers about the server's work, in the text form that Prometheus reads."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

PREFIX = "tinsmith_"

Labels = tuple[tuple[str, str], ...]


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
            lines.append(f"# TYPE {PREFIX}{name}_total counter")
            for (other, labels), value in sorted(self._counts.items()):
                if other == name:
                    lines.append(f"{PREFIX}{name}_total{_label_text(labels)} {value:g}")
        for name, (total, count) in sorted(self._sums.items()):
            lines.append(f"# TYPE {PREFIX}{name} summary")
            lines.append(f"{PREFIX}{name}_sum {total:g}")
            lines.append(f"{PREFIX}{name}_count {count:g}")
        for name, read in sorted(self._gauges.items()):
            lines.append(f"# TYPE {PREFIX}{name} gauge")
            lines.append(f"{PREFIX}{name} {read():g}")
        return "\n".join(lines) + "\n"


def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}"
