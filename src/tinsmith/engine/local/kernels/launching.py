"""Launching a kernel at little cost to the CPU.

Triton looks at every argument of every launch to find the variant it has compiled, which takes
longer than a small kernel runs. Here the few facts that a variant depends on make a key, and
the variant found once is launched directly.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

_CAN_LAUNCH_DIRECTLY = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
"""Older releases expect other arguments when a compiled variant is launched."""


class Launcher:
    """A kernel whose compile-time constants are its last parameters."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._variants: dict[tuple[object, ...], Any] = {}  # Triton names no type for them

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int = 3,
    ) -> None:
        key = (constants, num_warps, tuple([_facts(argument) for argument in arguments]))
        variant = self._variants.get(key)
        if variant is not None:
            variant[grid](*arguments, *constants)
            return
        variant = self._function[grid](
            *arguments, *constants, num_warps=num_warps, num_stages=num_stages
        )
        if _CAN_LAUNCH_DIRECTLY:
            self._variants[key] = variant


def _facts(argument: Any) -> object:  # a tensor or a number
    """What Triton compiles a variant of its own for: types, alignment, and the number one."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.device.index, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return 1 if argument == 1 else (argument % 16 == 0, argument >= 2**31)
    return float
