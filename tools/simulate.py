"""Simulated lives of servers and their clients, until so many operations were carried out.

    python tools/simulate.py [--operations 10000000] [--seed 1000] [--jobs 2]

A life is that of `tests/simulation`: two or three servers of one database, clients, and a simulated
network, clock and disk; each result is compared with the one that it has to be, and the history
goes through the checker. Of as many lives as are done at once, the last is that of
`tests/server/test_model_simulation.py`: one server, and all that can happen to checkpoints.

A life that went wrong is named by its seed; ends with 1 then.
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
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

LIVES_AT_ONCE = 16


def lives(seeds: range) -> tuple[int, int, list[str]]:
    """How many steps they took and operations they carried out, and what went wrong."""
    from tests.simulation.life import Lived, live

    logging.disable(logging.CRITICAL)
    gc.freeze()  # what is loaded now is not looked through again after each life
    num_steps, num_operations, problems = 0, 0, []
    for seed in seeds[:-1]:
        lived = live(seed)
        if isinstance(lived, Lived):
            num_steps += lived.num_steps
            num_operations += lived.num_operations
        else:
            problems.append(lived)
    steps, operations, found = alone(seeds[-1])
    return num_steps + steps, num_operations + operations, problems + found


def alone(seed: int) -> tuple[int, int, list[str]]:
    """The same of one server's life."""
    from tests.server.test_model_simulation import run

    with tempfile.TemporaryDirectory(prefix="tinsmith-simulation-") as folder:
        try:
            lived = run(seed, Path(folder))
        except Exception as error:
            return 0, 0, ["".join(traceback.format_exception(error))]
    return lived.num_steps, lived.num_operations, []


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulate")
    parser.add_argument("--operations", type=float, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1000, help="the first life's")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    arguments = parser.parse_args()
    began, num_lives, num_steps, num_operations = time.monotonic(), 0, 0, 0
    problems: list[str] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        starts = itertools.count(arguments.seed, LIVES_AT_ONCE)
        while num_operations < arguments.operations:
            parts = [range(s, s + LIVES_AT_ONCE) for s in itertools.islice(starts, arguments.jobs)]
            for steps, operations, found in pool.map(lives, parts):
                num_lives += LIVES_AT_ONCE
                num_steps += steps
                num_operations += operations
                problems += found
                for problem in found:
                    print("PROBLEM", problem, flush=True)
            print(
                f"{num_lives} lives from seed {arguments.seed}: {num_operations} operations, "
                f"{num_steps} steps, {time.monotonic() - began:.0f} s, {len(problems)} problems",
                flush=True,
            )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
