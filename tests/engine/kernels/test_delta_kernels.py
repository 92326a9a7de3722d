"""The kernels of the gated delta rule against the plain torch that runs where there are none.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.recurrent import delta_rule
from tinsmith.engine.local.model.recurrent.delta_rule import DeltaWeights, mix
from tinsmith.engine.local.model.recurrent.recurrence import Walk

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]

# The interpreter has no products of bfloat16.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
KEY_HEADS, HEADS, TAPS = (1, 2, 4) if IS_INTERPRETED else (2, 6, 4)
LENGTHS = [5, 1, 64, 70] if IS_INTERPRETED else [5, 1, 64, 300, 128, 65]
# The interpreter is too slow for those that there are kernels for.
KERNEL_SIZES = ((16, 16), (32, 16)) if IS_INTERPRETED else delta_rule.KERNEL_SIZES
SIZES = pytest.mark.parametrize("sizes", KERNEL_SIZES)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


class States:
    """Of a batch: what is found before it, and what it leaves."""

    def __init__(self, lengths: list[int], before: Tensor | None) -> None:
        self.walk = Walk(lengths)
        self.before = before
        self.after: tuple[Tensor, Tensor] | None = None

    def read(self, layer: int) -> Tensor | None:
        return self.before

    def write(self, layer: int, inputs: Tensor, memory: Tensor) -> None:
        self.after = inputs.detach(), memory.detach()


@dataclass(frozen=True)
class Case:
    """What `mix` is given: mixed (N, C), a and b (N, H), and states (S, size) if not fresh."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    before: Tensor | None
    lengths: list[int]
    weights: DeltaWeights
    upstream: Tensor
    """The gradient of the outputs (N, H, V)."""

    def given(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return self.mixed.to(dtype), self.a.to(dtype), self.b.to(dtype)


class Found(NamedTuple):
    y: Tensor
    past: Tensor
    memory: Tensor
    grad_mixed: Tensor
    grad_a: Tensor
    grad_b: Tensor


NAMES = ("y", "past", "memory", "grad_mixed", "grad_a", "grad_b")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Found]:
    """`mix` with all gradients, by kernels or by plain torch; inputs in `dtype`."""

    def call(case: Case, dtype: torch.dtype, *, by_kernels: bool) -> Found:
        leaves = [x.detach().requires_grad_() for x in case.given(dtype)]
        states = States(case.lengths, case.before)
        with monkeypatch.context() as patch:
            if not by_kernels:
                patch.setattr(kernels, "are_usable", lambda x: False)
            y = mix(*leaves, case.weights, states, layer=0)
            y.backward(case.upstream.to(y))
        assert states.after is not None
        return Found(y.detach(), *states.after, *(leaf.grad for leaf in leaves))

    return call


def make_case(
    sizes: tuple[int, int],
    device: torch.device,
    *,
    is_fresh: bool,
    lengths: list[int] = LENGTHS,
    heads: tuple[int, int] = (KEY_HEADS, HEADS),
) -> Case:
    """Heads from such as remember everything to such as forget with the next token."""
    generator = torch.Generator().manual_seed(7)
    (keys, values), (key_heads, num_heads) = sizes, heads
    channels = 2 * key_heads * keys + num_heads * values
    num_rows = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    weights = DeltaWeights(
        conv=normal(channels, TAPS) / 2,
        a_log=torch.linspace(-5, 3, num_heads).to(device),
        dt_bias=normal(num_heads),
        num_key_heads=key_heads,
        key_dim=keys,
        value_dim=values,
        kernel_sizes=KERNEL_SIZES,
    )
    # Rows of a fused projection, further apart than they are long; in half of them similar keys.
    mixed = normal(num_rows, channels + 8)[:, :channels]
    mixed[: num_rows // 2] = 0.3 * mixed[: num_rows // 2] + mixed[0]
    before = None if is_fresh else normal(len(lengths), weights.state_shape.size)
    gates = normal(num_rows, num_heads), normal(num_rows, num_heads)
    return Case(mixed, *gates, before, lengths, weights, normal(num_rows, num_heads, values))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "continued"])
@SIZES
def test_the_rule_in_float32(
    sizes: tuple[int, int], is_fresh: bool, device: torch.device, run: Callable[..., Found]
) -> None:
    case = make_case(sizes, device, is_fresh=is_fresh)
    found = run(case, torch.float32, by_kernels=True)
    expected = run(case, torch.float32, by_kernels=False)
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert one.shape == other.shape, name
        assert error(one, other.double()) <= 1e-5, name


@SIZES
def test_the_rule_in_half_precision(
    sizes: tuple[int, int], device: torch.device, run: Callable[..., Found]
) -> None:
    """Twice what a single rounding changes."""
    case = make_case(sizes, device, is_fresh=False)
    found = run(case, HALF, by_kernels=True)
    mixed, a, b = (x.float() for x in case.given(HALF))
    rounded = replace(case, mixed=mixed, a=a, b=b)
    expected = run(rounded, torch.float32, by_kernels=False)
    unit = torch.finfo(HALF).eps
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert one.shape == other.shape and one.isfinite().all(), name
        assert error(one, other.double()) <= 2 * unit, name


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
def test_a_sequence_does_not_depend_on_the_others(
    dtype: torch.dtype, device: torch.device, run: Callable[..., Found]
) -> None:
    """To the bit, gradients too."""
    case = make_case(KERNEL_SIZES[0], device, is_fresh=False)
    together = run(case, dtype, by_kernels=True)
    start = 0
    for i, length in enumerate(LENGTHS):
        rows, own = slice(start, start + length), slice(i, i + 1)
        alone = replace(
            case,
            mixed=case.mixed[rows],
            a=case.a[rows],
            b=case.b[rows],
            before=case.before[own],
            lengths=[length],
            upstream=case.upstream[rows],
        )
        found = run(alone, dtype, by_kernels=True)
        for name, one, all_of_them in zip(NAMES, found, together, strict=True):
            part = all_of_them[own if name in ("memory", "past") else rows]
            assert torch.equal(one, part), name
        start += length


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
@SIZES
def test_a_step_changes_the_states_where_they_lie(
    sizes: tuple[int, int], dtype: torch.dtype, device: torch.device, run: Callable[..., Found]
) -> None:
    """Those of the numbers alone; a row without a number changes nothing."""
    chosen, offset = [4, 0, -1, 2], 8
    case = make_case(sizes, device, is_fresh=True, lengths=[1] * len(chosen))
    shape = case.weights.state_shape
    generator = torch.Generator().manual_seed(8)
    states = torch.randn(5, offset + shape.size + 4, generator=generator).to(device)
    kept = states.clone()
    numbers = torch.tensor(chosen, device=device)
    step = kernels.module("delta_step")
    given = case.given(dtype)
    y = step.step_in_place(*given, case.weights, states, numbers, offset)

    used = numbers >= 0
    before = kept[numbers[used], offset : offset + shape.size]
    rounded = (x.float()[used] for x in case.given(dtype))
    there = Case(*rounded, before, [1] * 3, case.weights, case.upstream[used])
    expected = run(there, torch.float32, by_kernels=False)
    assert y.dtype == dtype and y.isfinite().all()
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert error(y[used], expected.y.double()) <= tolerance
    after = states[numbers[used], offset : offset + shape.size]
    for one, other in zip(shape.split(after), (expected.past, expected.memory), strict=True):
        assert error(one, other.double()) <= 1e-5
    # Nothing else has changed.
    states[numbers[used], offset : offset + shape.size] = before
    assert torch.equal(states, kept)
