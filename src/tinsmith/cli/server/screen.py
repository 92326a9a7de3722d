"""What `tinsmith top` shows, laid out for a terminal of a given size: no line is wrapped, and none
is scrolled away. Where there is little room, numbers make way for runs, and runs for a curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

KEYS = "↑ ↓ choose a run · Enter draws its curve · Escape closes it · q quits"
_FACT_COLUMNS = 39
_FEWEST_RUNS = 3
_SHORTEST_NAME = 12


def screen(
    title: str,
    facts: Mapping[str, str],
    runs: Sequence[Sequence[str]],
    *,
    chosen: int = 0,
    note: str | None = None,
    curve: str | None = None,
    columns: int,
    lines: int,
) -> list[str]:
    """`runs` are a heading and a row for each run, whose first cell is its name; `note` says why
    there are none. One line less than there are, for the cursor."""
    head = [*_grid(facts, columns), ""]
    drawn = ["", *curve.splitlines()] if curve else []
    room = lines - 1 - len([title, "", KEYS]) - len(drawn)
    wanted = len(runs) if note is None else 1
    least = min(wanted, _FEWEST_RUNS + 1)
    head = head[: max(0, room - least)]
    below = _table(runs, columns, chosen, room - len(head)) if note is None else [note]
    shown = [title, *head, *below[: max(0, room - len(head))], *drawn, "", KEYS]
    return [_cut(line, columns) for line in shown]


def _grid(facts: Mapping[str, str], columns: int) -> list[str]:
    """Names and values in as many columns as there is room for, read downwards."""
    cells = [f"{name.replace(' per second', '/s'):<20}{value}" for name, value in facts.items()]
    height = -(-len(cells) // max(1, columns // _FACT_COLUMNS))
    return [
        " ".join(
            f"{_cut(cell, _FACT_COLUMNS):<{_FACT_COLUMNS}}" for cell in cells[row::height]
        ).rstrip()
        for row in range(height)
    ]


def _table(runs: Sequence[Sequence[str]], columns: int, chosen: int, height: int) -> list[str]:
    """The heading, and the rows around the chosen one for which there is room."""
    if not runs:
        return []
    first = max(0, min(chosen - (height - 1) // 2, len(runs) - height))
    shown = [runs[0], *runs[1 + first : height + first]]
    widths = [max(map(len, cells)) for cells in zip(*runs, strict=True)]
    taken = sum(widths[1:]) + 2 * len(widths)
    name = max(_SHORTEST_NAME, min(widths[0], columns - taken))
    return [
        ("▸ " if number == chosen - first + 1 else "  ")
        + "  ".join(
            f"{_cut(cell, width):<{width}}"
            for cell, width in zip(row, [name, *widths[1:]], strict=True)
        ).rstrip()
        for number, row in enumerate(shown)
    ]


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 1] + "…"
