"""Launches with as many stages as there is shared memory for, on kernels that only pretend."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

import triton

from tinsmith.engine.local.kernels.launching import Direct, Launcher, Staged


class Kernel:
    """Fits with `most` stages, and with one more of float16; keeps the stages that were tried."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []
        self.direct: list[tuple[object, ...]] = []
        self.registers: list[object] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(x: torch.Tensor, *rest: object, num_stages: int, **options: object) -> Variant:
            self.tried.append(num_stages)
            self.registers.append(options.get("maxnreg"))
            if num_stages > self.most + (x.dtype == torch.float16):
                raise triton.OutOfResources(num_stages * 100_000, 101_376, "shared memory")
            return Variant(self)

        return launch


class Variant:
    """What Triton returns from a launch."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel


class Recorded(Direct):
    """A direct launch that only notes what it is asked for."""

    def __init__(self, variant: Variant) -> None:
        self.kernel = variant.kernel

    def __call__(self, grid: Any, device: int, arguments: Any, constants: Any) -> None:
        self.kernel.direct.append((device, *arguments[1:], *constants))


FULL, HALF = torch.zeros(4), torch.zeros(4, dtype=torch.float16)


@pytest.mark.parametrize("direct", [Recorded, None])
def test_a_launch_takes_the_stages_that_fit_and_the_next_one_begins_with_them(
    direct: Any,
) -> None:
    kernel = Kernel(most=1)
    launcher = Launcher(kernel, direct)
    for x in (FULL, FULL, HALF, HALF):
        launcher((1, 1, 1), (x, 3), (64, True), num_warps=4)
    # Each variant has a memory of its own.
    assert kernel.tried == ([3, 2, 1, 3, 2] if direct else [3, 2, 1, 1, 3, 2, 2])
    assert kernel.direct == ([(-1, 3, 64, True)] * 2 if direct else [])


def test_a_variant_serves_numbers_of_its_kind_and_no_others() -> None:
    """Triton compiles another one for 1, multiples of 16, and memory that is not aligned."""
    kernel = Kernel(most=3)
    launcher = Launcher(kernel, Recorded)
    for number in (3, 5, 5, 16, 32, 1):
        launcher((1, 1, 1), (FULL, number), (), num_warps=4)
    launcher((1, 1, 1), (FULL[1:], 3), (), num_warps=4)
    launcher((1, 1, 1), (FULL[1:], 7), (), num_warps=4)
    launcher((1, 1, 1), (FULL, 3), (), num_warps=8)
    assert len(kernel.tried) == 5
    assert [number for _, number in kernel.direct] == [5, 5, 32, 7]


def test_a_bound_on_registers_makes_a_variant_of_its_own() -> None:
    kernel = Kernel(most=3)
    launcher = Launcher(kernel, Recorded)
    for bound in (None, 128, 64, 128, None):
        launcher((1, 1, 1), (FULL, 3), (), num_warps=4, max_registers=bound)
    assert kernel.registers == [None, 128, 64]
    assert len(kernel.direct) == 2


def test_what_changes_with_every_batch_is_not_kept_for_ever() -> None:
    kernel = Kernel(most=3)
    launcher = Launcher(kernel, Recorded)
    for number in range(3, 20_000, 2):
        launcher((1, 1, 1), (FULL, number), (), num_warps=4)
    assert len(kernel.tried) == 1
    assert max(map(sys.getsizeof, vars(launcher).values())) < 2**19


def test_a_direct_launch_hands_on_what_tritons_own_would(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    variant = object.__new__(triton.compiler.CompiledKernel)
    variant.module = object()  # it has been loaded
    variant.name, variant.src = "kernel", None
    variant.function, variant.packed_metadata = 77, ("packed",)
    variant._run = lambda *given: asked.append(given)
    driver = SimpleNamespace(get_current_stream=lambda device: 1000 + device)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    Direct(variant)((4, 2, 1), 3, (FULL, 5), (64, True))
    variant[4, 2, 1](FULL, 5, 64, True, stream=1003)
    ours, tritons = asked
    assert ours[:6] == tritons[:6] == (4, 2, 1, 1003, 77, ("packed",))
    assert ours[9:] == tritons[9:] == (FULL, 5, 64, True)
    # What Triton would tell somebody before and after; nobody is there to hear.
    assert ours[6:9] == (None, None, None)
    assert not any(getattr(hook, "calls", None) for hook in tritons[7:9])


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
