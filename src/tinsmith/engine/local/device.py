"""The device and the number type that the configuration asks for, and torch made ready for them."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import torch

from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.errors import EngineError
from tinsmith.memory import process_bytes


def set_up_torch(config: LocalEngineConfig, device: torch.device) -> None:
    if config.deterministic:
        torch.set_num_threads(config.num_threads or 1)
    elif config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if device.type == "cuda":
        # Compiled kernels are kept for the next start, beside converted models.
        os.environ.setdefault("TRITON_CACHE_DIR", str(config.cache_folder / "triton"))
    if config.deterministic and device.type == "cuda":
        # Without it cuBLAS may choose another algorithm each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def device_of(config: LocalEngineConfig) -> torch.device:
    """The device the configuration asks for; one that is not there is an error."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EngineError("device 'cuda' was asked for, but torch finds no CUDA device")
    if config.device == "mps" and not torch.backends.mps.is_available():
        raise EngineError(
            "device 'mps' was asked for, but torch finds no GPU of Apple's; it needs a Mac with "
            "Apple silicon and a torch that was built for it"
        )
    return torch.device(config.device)


def dtype_of(config: LocalEngineConfig) -> torch.dtype:
    """The type of base weights the configuration asks for."""
    if config.dtype == "auto":
        is_cuda = device_of(config).type == "cuda"
        return torch.bfloat16 if is_cuda else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def arithmetic_of(device: torch.device) -> str:
    """The kind of device and torch's release: with others results have other last bits."""
    if device.type == "cuda":
        kind = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        if processor := _processor():
            kind += f" ({processor})"
        if device.type != "cpu":
            kind += f", {device.type}"
    return f"{kind}, torch {torch.__version__}"


def _processor() -> str:
    """The processor's name, where the system tells one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def describe(device: torch.device, dtype: torch.dtype, num_ranks: int) -> str:
    words = [str(device), str(dtype).removeprefix("torch.")]
    return ", ".join(words if num_ranks == 1 else [*words, f"{num_ranks} ranks"])


def used_bytes(device: torch.device) -> int:
    """Memory in use on the device; on the CPU, this process's."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return process_bytes()
