"""Curves without a library: a few lines of characters for a terminal, an SVG for a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Curve = Sequence[tuple[float, float]]
"""Points, from left to right."""

_COLOURS = ("#1f6feb", "#d29922", "#3fb950")
_WIDTH, _HEIGHT, _MARGIN = 640, 320, 48

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot(values: Sequence[float], *, height: int = 6, title: str = "", columns: int = 72) -> str:
    """Columns that rise with the values, from zero or the least, with a scale at the left.

    Few values are drawn broadly, where that many columns of the terminal are enough.

    >>> print(plot([2.0, 1.0], height=2))
    2.00 ┤ ███
         │ ██████
    0.00 ┼───────
    """
    low, top = _range(values)
    form = ".2f" if top - low >= 0.1 else ".1e"
    labels = f"{top:{form}}", f"{low:{form}}"
    margin = max(map(len, labels))
    lines = [title] if title else []
    width = 3 if 3 * len(values) <= columns else 1
    for row in range(height, 0, -1):
        cells = []
        for value in values:
            # What is not a number leaves a gap.
            part = (value - low) / (top - low) * height if math.isfinite(value) else 0.0
            filled = min(max(part - (row - 1), 0.0), 1.0)
            cells.append(_EIGHTHS[round(filled * 8)] * width)
        left = f"{labels[0]:>{margin}} ┤ " if row == height else f"{'':{margin}} │ "
        lines.append((left + "".join(cells)).rstrip())
    lines.append(f"{labels[1]:>{margin}} ┼{'─' * (len(values) * width + 1)}")
    return "\n".join(lines)


def sparkline(values: Sequence[float]) -> str:
    """A character for each value, from the smallest to the largest; a gap for what is no number.

    >>> sparkline([3.0, 2.0, 1.0])
    '█▅▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low or 1.0
    return "".join(
        _EIGHTHS[1 + round((value - low) / span * 7)] if math.isfinite(value) else " "
        for value in values
    )


def thinned(values: Sequence[float], most: int = 72) -> list[float]:
    """Averages of neighbours, so that a long curve fits a line of the terminal."""
    size = max(1, -(-len(values) // most))
    pieces = [values[i : i + size] for i in range(0, len(values), size)]
    return [sum(piece) / len(piece) for piece in pieces]


def svg(curves: Mapping[str, Curve], title: str) -> str:
    """A picture of some curves over one pair of axes, from zero or the least, with a legend."""
    points = [point for curve in curves.values() for point in curve if math.isfinite(point[1])]
    right = max([x for x, _ in points] or [1.0]) or 1.0
    low, top = _range([y for _, y in points])

    def place(x: float, y: float) -> str:
        across = _MARGIN + x / right * (_WIDTH - 2 * _MARGIN)
        down = _HEIGHT - _MARGIN - (y - low) / (top - low) * (_HEIGHT - 2 * _MARGIN)
        return f"{across:.1f},{down:.1f}"

    def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#333") -> str:
        return (
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
        )

    bottom = _HEIGHT - _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        text(_WIDTH / 2, 24, title, "middle"),
        f'<polyline points="{place(0, top)} {place(0, low)} {place(right, low)}" fill="none" '
        'stroke="#999"/>',
        text(_MARGIN - 6, _MARGIN + 4, f"{top:.3g}", "end"),
        text(_MARGIN - 6, bottom + 4, f"{low:.3g}", "end"),
        text(_WIDTH - _MARGIN, bottom + 18, f"{right:g}", "end"),
    ]
    for number, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in curve if math.isfinite(y))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(text(_WIDTH - _MARGIN, _MARGIN + 16 * number, name, "end", colour))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """What the axis shows: the values that are numbers, and zero."""
    numbers = [value for value in values if math.isfinite(value)]
    low, top = min([0.0, *numbers]), max([0.0, *numbers])
    return low, top if top > low else low + 1.0
