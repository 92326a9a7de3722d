"""What this machine can do at most: its rate of matrix products, and of memory.

The other benchmarks put these two beside each figure: a floor for the time, and the fraction of
it that was reached. Rates are measured, not read off a data sheet, and on random numbers.

    python benchmarks/machine.py [--device cuda] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import reports


def main() -> None:
    let_threads_wait_passively()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    result = {
        "matmul_tflops": round(matmul_rate(device) / 1e12, 3),
        "bandwidth_gb_s": round(bandwidth(device) / 1e9, 1),
    }
    for name, value in result.items():
        print(f"{name:16} {value}")
    write_report(arguments.out, device, result)


def let_threads_wait_passively() -> None:
    """Start this script again, so that threads without work give their core away.

    The engine's process has it so. It is read once, when torch is loaded. Without it a machine
    that has anything else to do slows every side several times.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.argv])


def matmul_rate(device: torch.device, rounds: int = 5) -> float:
    """Floating-point operations a second of a large square product, in the engine's own type.

    The best of some rounds: what the machine can do when nobody else uses it.
    """
    return max(matmul_once(device) for _ in range(rounds))


_OPERANDS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


def matmul_once(device: torch.device) -> float:
    """One measurement of the same, to be interleaved with what is compared with it."""
    is_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if is_cuda else (1536, torch.float32)
    if device.type not in _OPERANDS:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        _OPERANDS[device.type] = left, right
        seconds(lambda: left @ right, device)
    left, right = _OPERANDS[device.type]
    repeats = 10 if is_cuda else 2
    return 2 * size**3 * repeats / seconds(lambda: [left @ right for _ in range(repeats)], device)


def bandwidth(device: torch.device, rounds: int = 7) -> float:
    """Bytes a second of a large copy, those read and those written counted."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return max(2 * size / seconds(lambda: target.copy_(source), device) for _ in range(rounds))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of `work`, to the end of what it started on the device."""
    synchronize(device)
    start = _clock()
    work()
    synchronize(device)
    return _clock() - start


_clock: Callable[[], float] = time.perf_counter


def count_cpu_seconds() -> None:
    """From here on measure what one core works instead of what the clock on the wall shows.

    For a machine that is busy with other things: neither side is then charged for waiting.
    """
    global _clock
    torch.set_num_threads(1)
    _clock = time.process_time


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    works: dict[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each work, round by round, after rounds that are not counted: one, and on CUDA,
    where what comes for the second time may be captured, two."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + (2 if device.type == "cuda" else 1)):
        for name, work in works.items():
            times[name].append(seconds(work, device))
    return {name: taken[-rounds:] for name, taken in times.items()}


def median_ratio(above: list[float], below: list[float]) -> float:
    """The median of the rounds' own ratios: what both felt of the machine's load cancels."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def write_report(path: Path | None, device: torch.device, result: dict[str, Any]) -> None:
    """The report of a run on this device."""
    reports.write_report(path, result, f"{describe(device)}, torch {torch.__version__}")


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"{threads} CPU threads, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    main()
