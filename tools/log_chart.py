"""Line charts on log-log paper, as SVG; just enough for the benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 36, 48
COLOURS = ("#2f6f8f", "#c0603a", "#5b8c3e", "#8a5fa8", "#7a7a7a")

Points = Sequence[tuple[float, float]]


def chart(title: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> str:
    """Every series as a line with its points; axes run over whole powers of ten or two."""
    points = [point for line in series.values() for point in line]
    x_scale = _Scale([x for x, _ in points], LEFT, WIDTH - RIGHT)
    y_scale = _Scale([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{title}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
    ]
    for x in x_scale.ticks:
        at = x_scale.place(x)
        parts.append(_line(at, TOP, at, HEIGHT - BOTTOM, "#e2e2e2"))
        parts.append(_text(at, HEIGHT - BOTTOM + 16, _number(x), "middle"))
    for y in y_scale.ticks:
        at = y_scale.place(y)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, "#e2e2e2"))
        parts.append(_text(LEFT - 6, at + 4, _number(y), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, "middle"))
    parts.append(_text(LEFT, TOP - 4, y_label, "start"))
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [(x_scale.place(x), y_scale.place(y)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        at = TOP + 14 + 18 * number
        parts.append(_line(WIDTH - RIGHT + 10, at - 4, WIDTH - RIGHT + 26, at - 4, colour, 2))
        parts.append(_text(WIDTH - RIGHT + 32, at, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    """Where a value is on an axis that runs from `start` to `end` on the page."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        base = 10.0 if max(values) / min(values) > 100 else 2.0
        first = math.floor(math.log(min(values), base) + 1e-9)
        last = max(first + 1, math.ceil(math.log(max(values), base) - 1e-9))
        self.ticks = [base**power for power in range(first, last + 1)]
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        low, high = math.log(self.ticks[0]), math.log(self.ticks[-1])
        return self._start + (self._end - self._start) * (math.log(value) - low) / (high - low)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}" stroke-width="{width}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333333">{text}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
