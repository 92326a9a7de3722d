"""Drawing steps together: means with least and greatest values, in blocks of rising sizes.

A run may have a million steps, and a picture a few hundred points. So complete blocks of 32 steps,
of 128, of 512 and so on are kept beside the steps, and a picture is made of the largest blocks that
are fine enough. Least and greatest values survive: a spike of one step shows in any picture. Pure
functions; `curves` keeps the blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

FIRST_SIZE, FANOUT, NUM_SIZES = 32, 4, 9
SIZES = [FIRST_SIZE * FANOUT**level for level in range(NUM_SIZES)]
STEPS_PER_PART = 8
"""Steps of which a picture needs no more than every eighth are drawn together as they are read;
blocks that small would cost more to keep than to make again."""

Range = list[Any]
"""How many finite values, their mean, the least and the greatest; None where there are none."""


@dataclass(slots=True)
class Summary:
    """Some steps in a row."""

    x: int
    """The number of the last one."""
    t: float
    """When it ended."""
    ranges: dict[str, Range] = field(default_factory=dict)

    def to_json(self) -> str:
        return orjson.dumps([self.x, self.t, self.ranges]).decode()

    @classmethod
    def from_json(cls, text: str) -> Summary:
        return cls(*orjson.loads(text))


def of_step(x: int, t: float, metrics: str) -> Summary:
    """One step. Numbers that are not finite stand there as words, and count for nothing."""
    values: dict[str, float | str] = orjson.loads(metrics)
    return Summary(
        x,
        t,
        {
            name: [0, None, None, None] if type(value) is str else [1, value, value, value]
            for name, value in values.items()
        },
    )


def merged(summaries: Sequence[Summary]) -> Summary:
    """Several in a row as one."""
    if len(summaries) == 1:
        return summaries[0]
    together: dict[str, Range] = {}
    for summary in summaries:
        for name, (count, mean, least, greatest) in summary.ranges.items():
            known = together.get(name)
            if known is None:
                together[name] = [count, mean, least, greatest]
            elif count:
                if not known[0]:
                    known[:] = count, mean, least, greatest
                    continue
                known[0] += count
                # This form does not overflow where the values themselves do not.
                known[1] += (mean - known[1]) * (count / known[0])
                if least < known[2]:
                    known[2] = least
                if greatest > known[3]:
                    known[3] = greatest
    last = summaries[-1]
    return Summary(last.x, last.t, together)


def drawn_together(rows: Iterable[Sequence[Any]], size: int) -> list[tuple[int, Summary]]:
    """Steps (number, moment, metrics) in blocks of `size` numbers; those without any metrics are
    left out. What `of_step`, `merged` and `in_blocks` give, in half of the time."""
    blocks: list[tuple[int, Summary]] = []
    for block, inside in itertools.groupby(rows, lambda row: row[0] // size):
        ranges: dict[str, Range] = {}
        x, t = 0, 0.0
        for number, moment, metrics in inside:
            if metrics == "{}":
                continue
            x, t = number, moment
            for name, value in orjson.loads(metrics).items():
                known = ranges.get(name)
                if known is None:
                    known = ranges[name] = [0, None, None, None]
                if type(value) is str:
                    continue
                if not known[0]:
                    known[:] = 1, value, value, value
                    continue
                known[0] += 1
                known[1] += (value - known[1]) / known[0]
                if value < known[2]:
                    known[2] = value
                elif value > known[3]:
                    known[3] = value
        if ranges:
            blocks.append((block, Summary(x, t, ranges)))
    return blocks


def in_blocks(summaries: Iterable[Summary], size: int) -> list[tuple[int, Summary]]:
    """What falls into each block of `size` numbers, drawn together; empty ones are left out."""
    return [
        (block, merged(list(inside)))
        for block, inside in itertools.groupby(summaries, lambda summary: summary.x // size)
    ]


def size_for(span: int, points: int) -> int:
    """The largest blocks of which a picture of `points` can be made; 1 for the steps themselves."""
    fine_enough = [size for size in (STEPS_PER_PART, *SIZES) if size * points <= span]
    return fine_enough[-1] if fine_enough else 1


def thinned(summaries: Sequence[Summary], points: int) -> list[Summary]:
    """At most so many, evenly over the numbers that they have."""
    if len(summaries) <= points:
        return list(summaries)
    first = summaries[0].x
    width = -(-(summaries[-1].x - first + 1) // points)
    groups = itertools.groupby(summaries, lambda summary: (summary.x - first) // width)
    return [merged(list(inside)) for _, inside in groups]
