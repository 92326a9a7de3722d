"""What it costs that sampler and trainer agree to the bit, and how far they are apart without.

    python benchmarks/on_policy.py [--device cuda --shape qwen3-4b] [--rounds N] [--out FILE]

The engine alone, as in `service.py`, with `on_policy` close and exact by turns, each in a process
of its own: on CUDA the setting is the whole process's. `difference` is that of log-probabilities
of sampled tokens, and the part that is equal in every bit. Costs are times, exact over close.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import reports
from service import SIZES, engine_errand, model_source, run_engine, say
from trainers import SHAPES

CASES = ["sample", "train", "difference"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    with model_source(arguments.device, arguments.shape) as (model, source):
        samples = list(SIZES[arguments.device].samples[:2])
        errand = engine_errand(arguments.device, model, source, CASES, samples, arguments.rounds)
        close = run_engine(errand)
        say("close", close["found"])
        exact = run_engine(replace(errand, on_policy="exact"))
        say("exact", exact["found"])
    result: dict[str, Any] = {
        "shape": arguments.shape or "SmolLM2-135M",
        "close": close["found"],
        "exact": exact["found"],
        "sampling_cost": {
            count: _cost(rate, exact["found"]["sample"][count])
            for count, rate in close["found"]["sample"].items()
        },
        "training_cost": _cost(close["found"]["train"], exact["found"]["train"]),
    }
    say("cost", {key: result[key] for key in ("sampling_cost", "training_cost")})
    reports.write_report(arguments.out, result, close["machine"])


def _cost(close: dict[str, float], exact: dict[str, float]) -> float:
    return round(close["tokens_per_s"] / exact["tokens_per_s"], 3)


if __name__ == "__main__":
    main()
