"""Launching a kernel at little cost to the CPU.

Triton looks at every argument of every launch to find the variant it has compiled, which takes
longer than a small kernel runs. Here the few facts that a variant depends on make a key, and
the variant found once is launched directly.

Stages say how far a kernel reads ahead, and so how much shared memory it needs; no sum depends on
them. Where a device has less, a kernel is launched with as many as it has memory for.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
from torch import Tensor

_STAGES = 3
"""As Triton has it where nothing else is said."""

CAN_LAUNCH_DIRECTLY = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
"""Older releases expect other arguments when a compiled variant is launched."""


class Launcher:
    """A kernel whose compile-time constants are its last parameters."""

    def __init__(self, function: Any, is_direct: bool = CAN_LAUNCH_DIRECTLY) -> None:
        self._function = function
        self._is_direct = is_direct
        self._variants: dict[tuple[object, ...], Any] = {}  # Triton names no type for them
        self._stages: dict[tuple[object, ...], int] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int = _STAGES,
    ) -> None:
        key = (constants, num_warps, tuple([_facts(argument) for argument in arguments]))
        variant = self._variants.get(key)
        if variant is not None:
            variant[grid](*arguments, *constants)
            return
        variant, self._stages[key] = _launch_what_fits(
            self._function,
            grid,
            (*arguments, *constants),
            {"num_warps": num_warps},
            self._stages.get(key, num_stages),
        )
        if self._is_direct:
            self._variants[key] = variant


class Staged:
    """A kernel that Triton launches, as always, but with as many stages as there is memory for."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._stages: dict[tuple[object, ...], int] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:  # a kernel's parameters are its own
        return functools.partial(self._launch, grid)

    def _launch(
        self, grid: tuple[int, ...], *arguments: Any, num_stages: int = _STAGES, **options: Any
    ) -> None:
        facts = tuple([_facts(argument) for argument in arguments])
        key = (num_stages, tuple(options.values()), facts)
        _, self._stages[key] = _launch_what_fits(
            self._function, grid, arguments, options, self._stages.get(key, num_stages)
        )


def _launch_what_fits(
    function: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    num_stages: int,
) -> tuple[Any, int]:
    """What a launch returns, and the stages that it had: fewer where so many do not fit."""
    while True:
        try:
            return function[grid](*arguments, num_stages=num_stages, **options), num_stages
        except triton.OutOfResources:
            if num_stages == 1:
                raise
            num_stages -= 1


def _facts(argument: Any) -> object:  # a tensor or a number
    """What Triton compiles a variant of its own for: types, alignment, and the number one."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.device.index, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return 1 if argument == 1 else (argument % 16 == 0, argument >= 2**31)
    return float
