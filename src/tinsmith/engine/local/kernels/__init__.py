"""Triton kernels on CUDA, for training and sampling: few launches, each touching memory once.

Each has a counterpart in plain torch, in the module that calls it, which runs everywhere else and
which tests compare it with. Nothing here is imported until `are_usable` says that it may be.

A kernel is read from top to bottom, so what two of them begin with stands in both: a helper cannot
return in a kernel's place. A launch and a call name every argument, as Triton wants them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

from torch import Tensor


def are_usable(x: Tensor) -> bool:
    """Whether the kernels can work on `x`: on CUDA, where Triton is installed.

    Triton's interpreter runs them on the CPU, slowly, for debugging.
    """
    return _has_triton() and (x.is_cuda or _is_interpreted())


@functools.cache
def module(name: str) -> Any:
    """A module of this package, imported when first asked for."""
    return importlib.import_module(f"{__name__}.{name}")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
