"""Types and codecs against the official package, in one run, interleaved (`make bench`).

    python benchmarks/foundation.py [--output FILE]

Prints a table, and the same as JSON, or writes that to a file. Every figure is a ratio: the
official cost divided by ours for speed, ours divided by the official's for import cost, so noise
of the machine cancels.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker.proto import response_conv
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

import recording
import tinsmith
from tinsmith.wire import proto

DATUMS, TOKENS, ROUNDS = 64, 1024, 31


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path)
    output = options.parse_args().output
    load = recording.load_now()
    rows = make_rows()
    theirs, ours = build(tinker, rows), build(tinsmith, rows)
    their_request = tinker.types.ForwardBackwardRequest(
        tinker.types.ForwardBackwardInput(theirs, "cross_entropy"), "model", 1
    )
    our_request = tinsmith.types.ForwardBackwardRequest(
        tinsmith.types.ForwardBackwardInput(ours, "cross_entropy"), "model", 1
    )
    body = proto.encode_pass(our_request)
    outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in ours]
    result = proto.encode_output(
        tinsmith.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": 1.0})
    )
    report: dict[str, Any] = {"payload_bytes": len(body)}
    for name, official, own in (
        ("build_from_lists", lambda: build(tinker, rows), lambda: build(tinsmith, rows)),
        (
            "encode_request",
            lambda: forward_backward_request_to_proto(their_request).SerializeToString(),
            lambda: proto.encode_pass(our_request),
        ),
        ("decode_request", lambda: official_decode(body), lambda: proto.decode_pass(body)),
        (
            "decode_output",
            lambda: response_conv.deserialize_forward_backward_output(result),
            lambda: proto.decode_output(result),
        ),
    ):
        report[name] = speed(official, own)
    report["encode_peak_over_payload"] = peak(lambda: proto.encode_pass(our_request)) / len(body)
    report["decode_peak_over_payload"] = peak(lambda: proto.decode_pass(body)) / len(body)
    report["import"] = import_cost()
    print_table(report)
    recording.write(report, command="python benchmarks/foundation.py", load=load, output=output)


def make_rows() -> list[tuple[list[int], list[int], list[float], list[float]]]:
    random = np.random.default_rng(0)
    return [
        (
            random.integers(0, 50_000, TOKENS).tolist(),
            random.integers(0, 50_000, TOKENS).tolist(),
            random.random(TOKENS).tolist(),
            (-random.random(TOKENS)).tolist(),
        )
        for _ in range(DATUMS)
    ]


def build(package: Any, rows: list[Any]) -> list[Any]:
    return [
        package.Datum(
            model_input=package.ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": targets, "weights": weights, "logprobs": logprobs},
        )
        for tokens, targets, weights, logprobs in rows
    ]


def official_decode(body: bytes) -> list[Any]:
    """What a server built on the official package does: its message, its tensors, its datums."""
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(body)
    return [
        tinker.Datum(
            model_input=tinker.ModelInput(
                chunks=[
                    tinker.EncodedTextChunk(
                        tokens=np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
                    )
                    for chunk in datum.model_input
                ]
            ),
            loss_fn_inputs={
                name: response_conv._tensor_data_from_proto(tensor)
                for name, tensor in datum.loss_fn_inputs.items()
            },
        )
        for datum in message.data
    ]


def speed(official: Callable[[], object], own: Callable[[], object]) -> dict[str, float]:
    """Median milliseconds of each, taken in turns, and how many times faster ours is."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for function, kept in zip((official, own), times, strict=True):
            start = time.perf_counter()
            function()
            kept.append(time.perf_counter() - start)
    theirs, ours = (statistics.median(kept) * 1000 for kept in times)
    return {
        "official_ms": round(theirs, 3),
        "ours_ms": round(ours, 3),
        "times_faster": round(theirs / ours, 2),
    }


def peak(function: Callable[[], object]) -> float:
    """Bytes at the highest point while `function` runs, beyond what was there before."""
    tracemalloc.start()
    keep = function()
    _, highest = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del keep
    return float(highest)


def import_cost() -> dict[str, float]:
    """Seconds and resident megabytes that importing adds to a fresh process (Linux)."""
    statements = {
        "nothing": "",
        "official": "import tinker",
        "ours": "import tinsmith",
        # Names are loaded on use; this is what a program that uses them all waits for.
        "ours_all_names": "from tinsmith import *",
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in statements}
    for _ in range(5):
        for name, kept in samples.items():
            kept.append(one_import(statements[name]))
    cost: dict[str, tuple[float, float]] = {}
    for name, kept in samples.items():
        cost[name] = (statistics.median(s for s, _ in kept), statistics.median(m for _, m in kept))
    idle_seconds, idle_memory = cost["nothing"]
    seconds = {name: s - idle_seconds for name, (s, _) in cost.items()}
    memory = {name: m - idle_memory for name, (_, m) in cost.items()}
    report = {"official_seconds": round(seconds["official"], 3)}
    for name in ("ours", "ours_all_names"):
        report[f"{name}_time_share"] = round(seconds[name] / seconds["official"], 3)
        report[f"{name}_memory_share"] = round(memory[name] / memory["official"], 3)
    return report


def one_import(statement: str) -> tuple[float, float]:
    code = (
        "import os, time\n"
        "start = time.perf_counter()\n"
        f"{statement}\n"
        "seconds = time.perf_counter() - start\n"
        "pages = int(open('/proc/self/statm').read().split()[1])\n"
        "print(seconds, pages * os.sysconf('SC_PAGE_SIZE') / 2**20)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    seconds, megabytes = output.split()
    return float(seconds), float(megabytes)


def print_table(report: dict[str, Any]) -> None:
    print(f"{DATUMS} datums x {TOKENS} tokens, {report['payload_bytes']} bytes")
    for name, value in report.items():
        if isinstance(value, dict):
            print(f"{name:26}", "  ".join(f"{key} {number}" for key, number in value.items()))
        elif name != "payload_bytes":
            print(f"{name:26} {value:.2f}")


if __name__ == "__main__":
    main()
