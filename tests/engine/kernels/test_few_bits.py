"""Products with weights in few bits, against those with the numbers that they stand for.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.config import BaseWeights
from tinsmith.engine.local.model import quantized
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.quantized import Quantized

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]

# The interpreter has no products of bfloat16.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
KINDS: tuple[BaseWeights, ...] = ("int8", "fp8", "nf4")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, HALF)


def rounded(weight: Tensor, kind: BaseWeights) -> Quantized:
    kept = quantized.quantize(weight, kind)
    assert not isinstance(kept, Tensor)
    return kept


def assert_product(
    x: Tensor, kept: Quantized, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Against the plain sum over the full weight, in float64."""
    assert kept.can_multiply(x)
    y = kept.product(x, bias, dtype)
    expected = x.double() @ kept.plain_dense().double().t()
    if bias is not None:
        expected += bias.double()
    assert y.dtype == dtype and y.shape == expected.shape
    # Sums in float32 are as far away as their terms are large.
    terms = x.double().abs() @ kept.plain_dense().double().abs().t()
    allowed = 2e-6 * terms + 1e-30
    if dtype != torch.float32:
        allowed += torch.finfo(dtype).eps * expected.abs()
    assert ((y.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 64, 70])
def test_a_product_is_that_of_the_full_weight(kind: BaseWeights, num_rows: int) -> None:
    """Outputs and inputs that fill no tile, nor the last share."""
    x, weight = normal(num_rows, 704), normal(200, 704, seed=1)
    assert_product(x, rounded(weight, kind), normal(200, seed=2))


@pytest.mark.parametrize(("kind", "inputs"), [("int8", 203), ("fp8", 203), ("nf4", 192)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
def test_a_product_without_a_bias_of_any_width(
    kind: BaseWeights, inputs: int, dtype: torch.dtype
) -> None:
    assert_product(normal(5, inputs), rounded(normal(7, inputs, seed=1), kind), None, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_rows_as_a_tile_has(kind: BaseWeights) -> None:
    assert_product(normal(128, 128), rounded(normal(40, 128, seed=1), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_the_largest_codes_are_read_as_they_are(kind: BaseWeights) -> None:
    """Columns of a unit matrix bring out every number, in its last bit."""
    weight = normal(24, 64, seed=1) * torch.logspace(-3, 3, 24, device=DEVICE, dtype=HALF)[:, None]
    weight[3] = 0
    weight[4], weight[5] = 0.75, -0.75
    weight[6] = torch.linspace(-1, 1, 64)
    kept = rounded(weight, kind)
    x = torch.eye(64, device=DEVICE, dtype=HALF)
    assert torch.equal(kept.product(x, None, HALF), kept.plain_dense().t())
    assert torch.equal(kept.plain_dense()[3], weight[3])


@pytest.mark.parametrize("kind", KINDS)
def test_whole_tiles_and_tiles_in_shares_meet_without_a_seam(kind: BaseWeights) -> None:
    few_bits = kernels.module("few_bits")
    x, weight, bias = normal(20, 896), normal(300, 896, seed=1), normal(300, seed=2)
    kept = rounded(weight, kind)
    # Of five tiles of outputs three are whole; two are cut into shares of three tiles of inputs.
    plan = few_bits.Plan(
        block_rows=32,
        block_outputs=64,
        whole=3,
        shares=3,
        share_inputs=384,
        num_warps=4,
        num_stages=2,
        max_registers=None,
    )
    values = quantized.nf4_values(DEVICE)
    found = [
        few_bits.run(plan, x, kind, kept.codes, kept.scales, values, bias, torch.float32)
        for _ in range(2)
    ]
    assert torch.equal(*found)
    expected = x.double() @ kept.plain_dense().double().t() + bias.double()
    torch.testing.assert_close(found[0].double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
def test_the_full_weight_is_the_same_to_the_last_bit(kind: BaseWeights, dtype: torch.dtype) -> None:
    for outputs, inputs in ((37, 320), (5, 64), (3, 96)):
        weight = normal(outputs, inputs, seed=1).to(dtype)
        weight[1] = 0
        kept = rounded(weight, kind)
        made = kept.dense()
        assert made.dtype == dtype and torch.equal(made, kept.plain_dense())


def test_every_output_is_added_up_once_and_the_device_is_full() -> None:
    few_bits = kernels.module("few_bits")
    for outputs in (8, 1024, 2560, 4096, 6144, 19_456, 151_936):
        for inputs in (64, 1024, 2560, 9728):
            for num_rows in (1, 16, 100, 128):
                plan = few_bits.plan_for(num_rows, inputs, outputs, 132)
                tiles = -(-outputs // plan.block_outputs)
                assert plan.block_rows * -(-num_rows // plan.block_rows) >= num_rows
                assert 0 <= plan.whole <= tiles
                assert (plan.shares - 1) * plan.share_inputs < inputs
                assert plan.shares * plan.share_inputs >= inputs
                assert plan.shares > 1 or plan.whole == tiles
    busy = few_bits.plan_for(64, 9728, 2560, 132)
    assert 132 < 20 * busy.shares <= 264


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_multiplies_few_rows_without_the_full_weight(
    kind: BaseWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = rounded(normal(24, 64, seed=1), kind)
    linear, full = Linear(kept, normal(24, seed=2)), kept.dense()
    x, many = normal(5, 64), normal(129, 64)
    expected = x.float() @ full.float().t() + linear.bias.float()  # type: ignore[union-attr]
    made: list[int] = []
    monkeypatch.setattr(kept, "dense", lambda: made.append(1) or full)  # type: ignore[func-returns-value]
    for dtype in (None, torch.float32):
        y = linear.product(x, dtype)
        assert y.dtype == (dtype or HALF)
        torch.testing.assert_close(y.float(), expected, atol=0.05, rtol=0.01)
    assert not made
    # Of many rows, and where the order of additions is promised, the full weight is multiplied.
    linear.product(many)
    assert len(made) == 1
    if not IS_INTERPRETED:
        linear.is_invariant = True
        linear.product(x)
        assert len(made) == 2
