"""A curve in a terminal: a few lines of characters, no library."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot(values: Sequence[float], *, height: int = 6, title: str = "") -> str:
    """Columns that rise with the values, from zero to the largest, with a scale at the left.

    >>> print(plot([2.0, 1.0], height=2))
    2.00 ┤ ███
         │ ██████
    0.00 ┼───────
    """
    top = max([value for value in values if math.isfinite(value)] or [1.0]) or 1.0
    label = f"{top:.2f}"
    margin = " " * len(label)
    lines = [title] if title else []
    width = 3 if len(values) <= 24 else 1
    for row in range(height, 0, -1):
        cells = []
        for value in values:
            # What is not a number leaves a gap.
            part = value / top * height - (row - 1) if math.isfinite(value) else 0.0
            filled = min(max(part, 0.0), 1.0)
            cells.append(_EIGHTHS[round(filled * 8)] * width)
        left = f"{label} ┤ " if row == height else f"{margin} │ "
        lines.append((left + "".join(cells)).rstrip())
    lines.append(f"{0:{len(label)}.2f} ┼{'─' * (len(values) * width + 1)}")
    return "\n".join(lines)
