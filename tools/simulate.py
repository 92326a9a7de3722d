"""Simulated lives of servers and their clients, until so many operations were carried out.

    python tools/simulate.py [--operations 10000000] [--seed 1000] [--jobs 2]

A life is that of `tests/simulation`: two or three servers of one database, clients, and a simulated
network, clock and disk; each result is compared with the one that it has to be, and the history
goes through the checker. Of as many lives as are done at once, the last is that of
`tests/server/test_model_simulation.py`: one server, and all that can happen to checkpoints.

Each line of progress is the sum so far: of a run that is broken off, the last one counts. An
operation is a training operation or a sample whose result was compared; a call is one submission,
or one question for a result, with its answer, in a history that was checked: an operation takes two
or more. A life that went wrong is named by its seed; ends with 1 then.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

LIVES_AT_ONCE = 16


@dataclass(slots=True)
class Total:
    """What lives came to, all together."""

    num_lives: int = 0
    num_operations: int = 0
    """Training operations and samples whose results were compared, each counted once."""
    num_calls: int = 0
    """Calls of clients, with their answers, that went through the checker of histories."""
    num_steps: int = 0
    num_faults: int = 0
    """Troubles and losses of the network and the database; those of a server alone are not
    counted."""
    cpu_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def add(self, other: Total) -> None:
        self.num_lives += other.num_lives
        self.num_operations += other.num_operations
        self.num_calls += other.num_calls
        self.num_steps += other.num_steps
        self.num_faults += other.num_faults
        self.cpu_seconds += other.cpu_seconds
        self.problems += other.problems

    def __str__(self) -> str:
        return (
            f"{self.num_lives} lives: {self.num_operations} operations, {self.num_calls} calls "
            f"checked, {self.num_steps} steps, {self.num_faults} faults, "
            f"{self.cpu_seconds:.0f} s of a core, {len(self.problems)} problems"
        )


def lives(seeds: range) -> Total:
    from tests.simulation.life import Lived, live

    logging.disable(logging.CRITICAL)
    gc.freeze()  # what is loaded now is not looked through again after each life
    began, total = time.process_time(), Total(num_lives=len(seeds))
    for seed in seeds[:-1]:
        lived = live(seed)
        if isinstance(lived, Lived):
            total.num_steps += lived.num_steps
            total.num_operations += lived.num_operations
            total.num_calls += lived.num_calls
            total.num_faults += lived.num_faults
        else:
            total.problems.append(lived)
    total.add(alone(seeds[-1]))
    total.cpu_seconds = time.process_time() - began
    return total


def alone(seed: int) -> Total:
    """One server's life; it keeps no history."""
    from tests.server.test_model_simulation import run

    with tempfile.TemporaryDirectory(prefix="tinsmith-simulation-") as folder:
        try:
            lived = run(seed, Path(folder))
        except Exception as error:
            return Total(problems=["".join(traceback.format_exception(error))])
    return Total(num_steps=lived.num_steps, num_operations=lived.num_operations)


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulate")
    parser.add_argument("--operations", type=float, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1000, help="the first life's")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    arguments = parser.parse_args()
    began, total = time.monotonic(), Total()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        starts = itertools.count(arguments.seed, LIVES_AT_ONCE)
        while total.num_operations < arguments.operations:
            parts = [range(s, s + LIVES_AT_ONCE) for s in itertools.islice(starts, arguments.jobs)]
            for part in pool.map(lives, parts):
                total.add(part)
                for problem in part.problems:
                    print("PROBLEM", problem, flush=True)
            # Of a run that is broken off, the last line counts.
            print(
                f"from seed {arguments.seed}, after {time.monotonic() - began:.0f} s: {total}",
                flush=True,
            )
    return 1 if total.problems else 0


if __name__ == "__main__":
    sys.exit(main())
