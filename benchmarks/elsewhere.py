"""What a database and a storage elsewhere add to a small `forward_backward`.

    python benchmarks/elsewhere.py [--calls 200] [--rounds 5]

Three servers with an engine that answers at once run side by side: one as it is started without
options (SQLite, a folder), one on Postgres and object storage (rclone's S3, on loopback), and a
second one of the latter, which passes requests on. Calls go to each in turns, from the request to
the result; given are medians, and how much more they are than the first one's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import runpy
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyqwest import Client, HTTPTransport

from reports import write_report
from server_overhead import new_model, poster
from serving import Server, serve

MACHINERY = Path(__file__).parents[1] / "tools" / "chaos" / "machinery.py"
TOKENS = list(range(1, 33))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--calls", type=int, default=200, help="in each round, to each server")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--out", type=Path, help="write the result to this file")
    arguments = options.parse_args()
    machinery = runpy.run_path(str(MACHINERY))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinsmith-bench-")))
        database: Any = machinery["Postgres"]()
        stack.callback(database.close)
        database.start()
        storage: Any = machinery["ObjectStorage"](folder / "s3")
        stack.callback(storage.close)
        storage.start()
        os.environ.update(storage.environment(storage.port))
        (folder / "data").mkdir()
        shared = ["--engine", "fake", "--database-url", database.url]
        shared += ["--storage", "s3://bucket/bench"]
        local = stack.enter_context(serve("--engine", "fake"))
        leader = stack.enter_context(serve(*shared, data_dir=str(folder / "data")))
        follower = stack.enter_context(serve(*shared, data_dir=str(folder / "data")))
        servers = {
            "sqlite_folder": local,
            "postgres_s3": leader,
            "postgres_s3_passed_on": replace(follower, key=leader.key),
        }
        result = asyncio.run(measure(servers, arguments.rounds, arguments.calls))
    print(result)
    write_report(arguments.out, result)


async def measure(servers: dict[str, Server], rounds: int, calls: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    async with HTTPTransport() as transport:
        posts = {name: poster(Client(transport), server) for name, server in servers.items()}
        models = {name: await new_model(post) for name, post in posts.items()}
        seq_id = 0
        for number in range(rounds + 1):
            for _ in range(calls):
                seq_id += 1
                for name, post in posts.items():
                    took = await round_trip(post, models[name], seq_id)
                    if number > 0:  # the first round warms up
                        seconds[name].append(took)
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    first = medians["sqlite_folder"]
    return {
        **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
        "added_ms": round(medians["postgres_s3"] - first, 3),
        "added_when_passed_on_ms": round(medians["postgres_s3_passed_on"] - first, 3),
    }


async def round_trip(post: Any, model_id: str, seq_id: int) -> float:
    """Seconds from the request to its result."""
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": TOKENS[1:], "dtype": "int64"},
            "weights": {"data": [1.0] * (len(TOKENS) - 1), "dtype": "float32"},
        },
    }
    inputs = {"loss_fn": "cross_entropy", "data": [datum] * 4}
    body = {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": inputs}
    began = time.perf_counter()
    promise = await post("/api/v1/forward_backward", body)
    await post("/api/v1/retrieve_future", {"request_id": promise["request_id"]})
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
