"""What a chaos run has counted, and what was amiss."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass(slots=True)
class Findings:
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
