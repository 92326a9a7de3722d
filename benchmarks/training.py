"""A training pass of our engine against PEFT + transformers, in one process, interleaved.

    python benchmarks/training.py [--device cuda --shape qwen3-0.6b] [--rounds N] [--out FILE]

Every case is timed in rounds of ours, theirs and one matrix product, so that a loaded machine
slows all; the ratios are medians over rounds. The fraction of the matmul rate counts four
operations for each base weight and token (forward and backward with a frozen base): those of
adapters and attention are not counted, though they are done. Beside it stands the time of all
products of a pass in their own shapes, adapters' included, and nothing else. Peak memory is that
of a process of its own for each side on the CPU, and of the allocator on CUDA, above what the
weights take.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from tinsmith.types import Datum
from trainers import SHAPES, Ours, Peft, make_data

SIDES = ("ours", "peft")
CASES = {"cpu": ("4x128", "8x256", "ragged"), "cuda": ("16x1024", "ragged")}


def main() -> None:
    machine.let_threads_wait_passively()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(CASES), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", help="as 4x128, or ragged")
    parser.add_argument("--cpu-seconds", action="store_true", help="one core, its own time")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--peak-of", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.cpu_seconds:
        machine.count_cpu_seconds()
    names = arguments.cases or CASES[arguments.device]
    if arguments.peak_of:
        (name,) = names
        print(json.dumps({"peak_bytes": peak_on_cpu(arguments.peak_of, name)}))
        return
    result = compare(device, arguments.shape, names, arguments.rounds, arguments.sides)
    print_table(result)
    machine.write_report(arguments.out, device, result)


def compare(
    device: torch.device, shape: str | None, names: list[str], rounds: int, sides: list[str]
) -> dict[str, Any]:
    memory = {name: peaks_on_cpu(name, sides) for name in names} if device.type == "cpu" else {}
    trainers: dict[str, Any] = {
        name: build(device, shape)
        for name, build in (("ours", Ours), ("peft", Peft))
        if name in sides
    }
    for trainer in trainers.values():
        trainer.add_adapters(1)
    flops, vocab_size = trainers[sides[0]].base_flops_a_token(), trainers[sides[0]].vocab_size
    result: dict[str, Any] = {"shape": shape or "SmolLM2-135M", "cases": {}}
    for name in names:
        data = {"0": make_case(name, vocab_size)}
        works = {side: _pass(trainer, data) for side, trainer in trainers.items()}
        lacking = [side for side, work in works.items() if not fits(work)]
        for side in lacking:
            del works[side]
        rates: list[float] = []
        num_tokens = sum(datum.model_input.length for datum in data["0"])
        limits = {"matmul": _matmul(device, rates)}
        if "ours" in trainers:
            limits["products"] = trainers["ours"].products("0", num_tokens)
        times = machine.interleaved({**works, **limits}, device, rounds)
        floors = [num_tokens * flops / rate for rate in rates[-rounds:]]
        case: dict[str, Any] = {
            "tokens": num_tokens,
            "matmul_tflops": round(statistics.median(rates[-rounds:]) / 1e12, 3),
            "floor_ms": _milliseconds(floors),
        }
        if "products" in times:
            case["products_ms"] = _milliseconds(times["products"])
            case["ours_of_products"] = round(
                machine.median_ratio(times["products"], times["ours"]), 3
            )
        for side in works:
            case[f"{side}_ms"] = _milliseconds(times[side])
            case[f"{side}_tokens_s"] = round(num_tokens / statistics.median(times[side]))
            case[f"{side}_of_matmul_rate"] = round(machine.median_ratio(floors, times[side]), 3)
        if len(works) > 1:
            case["times_faster"] = round(machine.median_ratio(times["peft"], times["ours"]), 2)
        for side in lacking:
            case[f"{side}_ms"] = "out of memory"
        case |= memory[name] if name in memory else peaks_on_cuda(works)
        result["cases"][name] = case
    return result


def fits(work: Callable[[], object]) -> bool:
    """Whether the device has the memory for it."""
    try:
        work()
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return False
    return True


def _pass(trainer: Any, data: dict[str, list[Datum]]) -> Callable[[], object]:
    return lambda: trainer.forward_backward(data)


def _matmul(device: torch.device, rates: list[float]) -> Callable[[], object]:
    return lambda: rates.append(machine.matmul_once(device))


def make_case(name: str, vocab_size: int) -> list[Datum]:
    """ "BxT" is B sequences of T tokens; "ragged" is 32 of 16 to 512, a half of each a prompt."""
    if name == "ragged":
        lengths = np.random.default_rng(7).integers(16, 513, 32).tolist()
        return make_data(lengths, vocab_size, prompt_share=0.5)
    count, _, length = name.partition("x")
    return make_data([int(length)] * int(count), vocab_size)


def peaks_on_cuda(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Peak memory of one pass beyond what is resident, in GB."""
    found: dict[str, float] = {}
    for side, work in works.items():
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        found[f"{side}_peak_gb"] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 2)
    return found


def peaks_on_cpu(name: str, sides: list[str]) -> dict[str, float]:
    """The same, each side in a process of its own; before this one needs its memory itself."""
    found: dict[str, float] = {}
    for side in sides:
        command = [sys.executable, __file__, "--peak-of", side, "--cases", name]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[f"{side}_peak_gb"] = round(json.loads(answer)["peak_bytes"] / 1e9, 2)
    return found


def peak_on_cpu(side: str, name: str) -> int:
    """Bytes that passes add to the resident memory of this process at most."""
    device = torch.device("cpu")
    trainer: Any = Ours(device, None) if side == "ours" else Peft(device, None)
    trainer.add_adapters(1)
    data = {"0": make_case(name, 49_152)}
    gc.collect()
    before = _resident("VmRSS")
    for _ in range(2):
        trainer.forward_backward(data)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def _milliseconds(times: list[float]) -> float:
    return round(statistics.median(times) * 1e3, 1)


def print_table(result: dict[str, Any]) -> None:
    print(f"{result['shape']}, rank 32")
    rows = list(result["cases"].items())
    columns = list(rows[0][1])
    width = max(len(column) for column in columns)
    print(" " * width, *(f"{name:>10}" for name, _ in rows))
    for column in columns:
        print(f"{column:{width}}", *(f"{case.get(column, ''):>10}" for _, case in rows))


if __name__ == "__main__":
    main()
