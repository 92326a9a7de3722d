"""Launches with as many stages as there is shared memory for, on kernels that only pretend."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

import triton

from tinsmith.engine.local.kernels.launching import Launcher, Staged


class Kernel:
    """Fits with `most` stages, and with one more of float16; keeps the stages that were tried."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []
        self.direct = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(x: torch.Tensor, *rest: object, num_stages: int, **options: object) -> Variant:
            self.tried.append(num_stages)
            if num_stages > self.most + (x.dtype == torch.float16):
                raise triton.OutOfResources(num_stages * 100_000, 101_376, "shared memory")
            return Variant(self)

        return launch


class Variant:
    """What Triton returns from a launch: it can be launched again, as it is."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: object) -> None:
            self.kernel.direct += 1

        return launch


FULL, HALF = torch.zeros(4), torch.zeros(4, dtype=torch.float16)


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_launch_takes_the_stages_that_fit_and_the_next_one_begins_with_them(
    is_direct: bool,
) -> None:
    kernel = Kernel(most=1)
    launcher = Launcher(kernel, is_direct)
    for x in (FULL, FULL, HALF, HALF):
        launcher((1, 1, 1), (x, 3), (64, True), num_warps=4)
    # Each variant has a memory of its own.
    assert kernel.tried == ([3, 2, 1, 3, 2] if is_direct else [3, 2, 1, 1, 3, 2, 2])
    assert kernel.direct == (2 if is_direct else 0)


def test_kernels_with_named_constants_are_launched_with_the_stages_that_fit() -> None:
    kernel = Kernel(most=2)
    staged = Staged(kernel)
    for x in (FULL, FULL, HALF):
        staged[(1, 1)](x, 3, BLOCK=64, num_warps=4, num_stages=4)
    staged[(1, 1)](FULL, 3, BLOCK=128, num_warps=4)
    assert kernel.tried == [4, 3, 2, 2, 4, 3, 3, 2]


def test_what_does_not_fit_with_one_stage_is_an_error_each_time() -> None:
    kernel = Kernel(most=0)
    for _ in range(2):
        with pytest.raises(triton.OutOfResources, match="Required: 100000, Hardware limit: 101376"):
            Launcher(kernel)((1, 1, 1), (FULL,), (), num_warps=4)
        with pytest.raises(triton.OutOfResources):
            Staged(kernel)[(1,)](FULL, num_warps=4)
    assert kernel.tried == [3, 2, 1] * 4
