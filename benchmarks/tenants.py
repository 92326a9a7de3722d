"""Many adapters on one base model: passes together, one after another, and as PEFT runs them.

    python benchmarks/tenants.py [--device cuda --shape qwen3-0.6b] [--rounds N] [--out FILE]

Each tenant brings a small batch. PEFT has no batch of several adapters for training, so it
switches from one to the next; `one_adapter` has all the batches itself. Beside that: what a
resident adapter costs in memory, and how far an optimizer step is from the time in which memory can
be read and written once.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
from pathlib import Path
from typing import Any

import torch

import machine
from trainers import RANK, SHAPES, Ours, Peft, make_data

COUNTS = (1, 4, 8, 16, 64)
BATCH = {"cpu": (1, 32), "cuda": (2, 256)}


def main() -> None:
    machine.let_threads_wait_passively()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(BATCH), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--cpu-seconds", action="store_true", help="one core, its own time")
    parser.add_argument("--peft-up-to", type=int, default=4, help="most tenants for PEFT")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.cpu_seconds:
        machine.count_cpu_seconds()
    ours = Ours(device, arguments.shape)
    peft = Peft(device, arguments.shape) if arguments.peft_up_to else None
    result: dict[str, Any] = {
        "shape": arguments.shape or "SmolLM2-135M",
        "batch": "{}x{} tokens each".format(*BATCH[device.type]),
        "optim_step": optim_step(ours, device, arguments.rounds),
        "tenants": {},
    }
    for count in arguments.counts:
        own = peft if count <= arguments.peft_up_to else None
        result["tenants"][str(count)] = compare(ours, own, device, count, arguments.rounds)
    result["resident"] = resident(ours, device, max(arguments.counts))
    print_table(result)
    machine.write_report(arguments.out, device, result)


def compare(
    ours: Ours, peft: Peft | None, device: torch.device, count: int, rounds: int
) -> dict[str, Any]:
    sequences, length = BATCH[device.type]
    data = {
        name: make_data([length] * sequences, ours.vocab_size, seed=int(name))
        for name in ours.add_adapters(count)
    }

    def one_by_one() -> None:
        for name, own in data.items():
            ours.forward_backward({name: own})

    works: dict[str, Any] = {"together": lambda: ours.forward_backward(data)}
    works["one_by_one"] = one_by_one
    joined = {next(iter(data)): [datum for own in data.values() for datum in own]}
    works["one_adapter"] = lambda: ours.forward_backward(joined)
    if peft is not None:
        peft.add_adapters(count)
        works["peft"] = lambda: peft.forward_backward(data)
    times = machine.interleaved(works, device, rounds)
    num_tokens = count * sequences * length
    found: dict[str, Any] = {}
    for name, taken in times.items():
        found[f"{name}_ms"] = round(statistics.median(taken) * 1e3, 1)
        found[f"{name}_tokens_s"] = round(num_tokens / statistics.median(taken))
    for name in ("one_by_one", "peft"):
        if name in times:
            ratio = machine.median_ratio(times[name], times["together"])
            found[f"times_faster_than_{name}"] = round(ratio, 2)
    ratio = machine.median_ratio(times["together"], times["one_adapter"])
    found["over_one_adapter"] = round(ratio, 3)
    return found


def optim_step(ours: Ours, device: torch.device, rounds: int) -> dict[str, Any]:
    """A step reads weights, gradient and two moments, and writes all but the gradient."""
    (name,) = ours.add_adapters(1)
    adapter = ours.adapters[name]
    num_bytes = 7 * adapter.flat.nbytes
    taken, ratios = [], []
    for number in range(rounds + 3):
        bandwidth = machine.bandwidth(device, rounds=2)
        adapter.grad = torch.full_like(adapter.flat, 1e-3)
        seconds = machine.seconds(lambda: ours.optim_step(name), device)
        if number >= 3:
            taken.append(seconds)
            ratios.append(seconds * bandwidth / num_bytes)
    return {
        "rank": RANK,
        "parameters": adapter.layout.size,
        "ms": round(statistics.median(taken) * 1e3, 2),
        "times_the_bandwidth_floor": round(statistics.median(ratios), 2),
    }


def resident(ours: Ours, device: torch.device, count: int) -> dict[str, Any]:
    """What `count` adapters add to memory, after a step and with a gradient pending."""
    for adapter in ours.adapters.values():
        ours.pool.release(adapter)
    ours.adapters.clear()
    gc.collect()
    ours.add_adapters(1)
    before = _memory(device)
    for name in ours.add_adapters(count):
        ours.optim_step(name)
        ours.adapters[name].grad = torch.full_like(ours.adapters[name].flat, 1e-3)
    grown = _memory(device) - before
    own = sum(adapter.nbytes for adapter in ours.adapters.values())
    return {
        "adapters": count,
        "memory_grown_mb": round(grown / 1e6),
        "weights_moments_gradients_mb": round(own / 1e6),
        "ratio": round(grown / own, 3),
    }


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "/proc/self/status has no VmRSS"
    return int(found[1]) * 1024


def print_table(result: dict[str, Any]) -> None:
    print(f"{result['shape']}, rank {RANK}, {result['batch']}")
    rows = result["tenants"]
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    width = max(len(column) for column in columns)
    print(f"{'tenants':{width}}", *(f"{count:>9}" for count in rows))
    for column in columns:
        print(f"{column:{width}}", *(f"{row.get(column, ''):>9}" for row in rows.values()))
    for name in ("optim_step", "resident"):
        print(name, result[name])


if __name__ == "__main__":
    main()
