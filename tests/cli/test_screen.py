"""The view of `tinsmith top` in terminals of all sizes: it fits, and shows what is chosen."""

from __future__ import annotations

import itertools

import pytest

from tinsmith.cli.server.screen import KEYS, screen

FACTS = {f"Fact {number} per second": f"at most {number} ms" for number in range(17)}
HEADING = ["Run", "Status", "Loss per token", "Now", "Tokens/s", "Waiting"]
CURVE = "\n".join(f"line {number} of a curve " + "█" * 60 for number in range(17))
SIZES = ((80, 24), (120, 40), (40, 12), (200, 60))


def rows(count: int) -> list[list[str]]:
    return [
        [f"run {number} with a long name", "Training", "█▅▃▁▁▁▁▁▁▁▁▁", "0.0003055", "1,234", "0"]
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("size", "count", "curve"), [*itertools.product(SIZES, (1, 5, 50), (None, CURVE))]
)
def test_it_fits_and_the_chosen_run_is_seen(
    size: tuple[int, int], count: int, curve: str | None
) -> None:
    columns, lines = size
    for chosen in {0, count // 2, count - 1}:
        shown = screen(
            "http://server",
            FACTS,
            [HEADING, *rows(count)],
            chosen=chosen,
            curve=curve if lines >= 24 else None,
            columns=columns,
            lines=lines,
        )
        assert len(shown) < lines
        assert max(map(len, shown)) <= columns
        marked = [line for line in shown if line.startswith("▸ ")]
        assert len(marked) == 1 and marked[0].startswith(f"▸ run {chosen} ")
        assert shown[0] == "http://server" and KEYS.startswith(shown[-1].rstrip("…"))


def test_at_80_columns_a_name_is_cut_before_numbers_are() -> None:
    shown = screen("url", FACTS, [HEADING, *rows(2)], columns=80, lines=24)
    assert "Fact 16/s           at most 16 ms" in "\n".join(shown), "all numbers are there"
    (row,) = (line for line in shown if line.startswith("▸ "))
    assert row.split()[-4:] == ["█▅▃▁▁▁▁▁▁▁▁▁", "0.0003055", "1,234", "0"]


def test_without_runs_it_says_why() -> None:
    shown = screen("url", FACTS, [], note="Your runs are not shown: no key", columns=80, lines=24)
    assert "Your runs are not shown: no key" in shown
