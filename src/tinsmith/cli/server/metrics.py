"""A server's `/metrics`, read and compared over time. The numbers need no key."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field

from tinsmith.cli.failures import CommandError

_LINE = re.compile(r"tinsmith_(\w+)(?:\{([^}]*)\})? (\S+)")
_TIMEOUT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Reading:
    """All numbers at a moment; those that differ by label are added up under their name."""

    at: float
    totals: dict[str, float]
    by_label: dict[str, dict[str, float]] = field(default_factory=dict)

    def get(self, name: str) -> float:
        return self.totals.get(name, 0.0)

    def rate(self, name: str, before: Reading) -> float:
        """Change of a counter per second; 0 after a restart of the server."""
        seconds = self.at - before.at
        return max(0.0, self.get(name) - before.get(name)) / seconds if seconds > 0 else 0.0

    def mean(self, name: str, before: Reading) -> float | None:
        """Mean of what was observed since `before`, or since the start if nothing was."""
        count = self.get(f"{name}_count") - before.get(f"{name}_count")
        total = self.get(f"{name}_sum") - before.get(f"{name}_sum")
        if count <= 0:
            count, total = self.get(f"{name}_count"), self.get(f"{name}_sum")
        return total / count if count > 0 else None

    def quantile(self, name: str, share: float, before: Reading) -> float | None:
        """A bound below which that share of what was observed since `before` lies.

        It is the upper end of a histogram's bucket: infinite beyond the last one.
        """
        buckets = self._buckets(name)
        earlier = before._buckets(name)
        counts = {end: count - earlier.get(end, 0.0) for end, count in buckets.items()}
        total = max(counts.values(), default=0.0)
        if total <= 0:
            counts, total = buckets, max(buckets.values(), default=0.0)
        if total <= 0:
            return None
        return min(end for end, count in counts.items() if count >= share * total)

    def _buckets(self, name: str) -> dict[float, float]:
        """How many were observed up to each end."""
        found = self.by_label.get(f"{name}_bucket", {})
        return {float(label.split('"')[1]): count for label, count in found.items()}


def read(url: str) -> Reading:
    """The server's numbers now."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT_SECONDS) as response:
            return parse(response.read().decode(), time.monotonic())
    except OSError as error:
        raise CommandError(
            f"no metrics from {url}: {error}",
            "Is it a Tinsmith server, and does it run? `tinsmith doctor` looks for the cause.",
        ) from error


def parse(text: str, at: float) -> Reading:
    totals: dict[str, float] = defaultdict(float)
    by_label: dict[str, dict[str, float]] = defaultdict(dict)
    for line in text.splitlines():
        if found := _LINE.fullmatch(line):
            name, label, value = found[1], found[2], float(found[3])
            totals[name] += value
            if label:
                by_label[name][label] = value
    return Reading(at, dict(totals), dict(by_label))
