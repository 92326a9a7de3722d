"""Launching a kernel at little cost to the CPU.

Triton looks at every argument of every launch to find the variant it has compiled, which takes
longer than a small kernel runs: a training pass over a few hundred tokens is a thousand launches
and waits for each. Here dtypes, alignments and the very numbers of a launch make a key, and the
variant found once is launched directly.

Stages say how far a kernel reads ahead, and so how much shared memory it needs; no sum depends on
them. Where a device has less, a kernel is launched with as many as it has memory for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

_STAGES = 3
"""As Triton has it where nothing else is said."""

_RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
CAN_LAUNCH_DIRECTLY = (3, 6) <= _RELEASE <= (3, 7)
"""Other releases may expect other arguments when a compiled variant is launched."""

_ALIGNMENT = 16
"""Bytes; and numbers that are multiples of it have variants of their own, too."""

_MOST_KEYS = 4096
"""Some kernels are given numbers that change with every batch."""


class Direct:
    """A compiled variant, launched on the current stream as Triton does in the end."""

    def __init__(self, variant: Any) -> None:
        self._run = variant.run
        self._function = variant.function
        self._metadata = variant.packed_metadata
        self._stream_of = triton.runtime.driver.active.get_current_stream

    def __call__(
        self,
        grid: tuple[int, int, int],
        device: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
    ) -> None:
        stream = self._stream_of(device)
        # Nobody is told of the launch, before or after: those are the three that are None.
        self._run(
            *grid, stream, self._function, self._metadata, None, None, None, *arguments, *constants
        )


class Launcher:
    """A kernel whose compile-time constants are its last parameters.

    Where it is given a tensor once, it always is; the first is on the device of all.
    """

    def __init__(
        self,
        function: Any,
        direct: Callable[[Any], Direct] | None = Direct if CAN_LAUNCH_DIRECTLY else None,
    ) -> None:
        self._function = function
        self._make_direct = direct
        self._tensors: tuple[int, ...] = ()
        self._numbers: tuple[int, ...] = ()
        # By all that a launch is given, and by the few facts that a variant depends on.
        self._by_key: dict[tuple[object, ...], Direct] = {}
        self._by_facts: dict[tuple[object, ...], Direct] = {}
        self._stages: dict[tuple[object, ...], int] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int = _STAGES,
        max_registers: int | None = None,
    ) -> None:
        """With `max_registers` a thread has so many at most, so that more programs run at the same
        time."""
        if not self._tensors:
            places = range(len(arguments))
            self._tensors = tuple(i for i in places if isinstance(arguments[i], Tensor))
            self._numbers = tuple(i for i in places if i not in self._tensors)
        tensors = [arguments[i] for i in self._tensors]
        device = tensors[0].get_device()
        key = (
            device,
            constants,
            num_warps,
            max_registers,
            *[arguments[i] for i in self._numbers],
            *[tensor.dtype for tensor in tensors],
            *[tensor.data_ptr() % _ALIGNMENT for tensor in tensors],
        )
        direct = self._by_key.get(key)
        if direct is None:
            options = {"num_warps": num_warps}
            if max_registers is not None:
                options["maxnreg"] = max_registers
            facts = (constants, *options.values(), *[_facts(argument) for argument in arguments])
            direct = self._by_facts.get(facts)
            if direct is None:
                self._launch_first(facts, grid, arguments, constants, options, num_stages)
                return
            if len(self._by_key) >= _MOST_KEYS:
                self._by_key.clear()
            self._by_key[key] = direct
        direct(grid, device, arguments, constants)

    def _launch_first(
        self,
        facts: tuple[object, ...],
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, int],
        num_stages: int,
    ) -> None:
        """Have Triton compile a variant, and launch it."""
        variant, self._stages[facts] = _launch_what_fits(
            self._function,
            grid,
            (*arguments, *constants),
            options,
            self._stages.get(facts, num_stages),
        )
        # Triton's interpreter compiles none.
        if self._make_direct is not None and variant is not None:
            self._by_facts[facts] = self._make_direct(variant)


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
        return argument.dtype, argument.device.index, argument.data_ptr() % _ALIGNMENT == 0
    if isinstance(argument, int):
        return 1 if argument == 1 else (argument % 16 == 0, argument >= 2**31)
    return float
