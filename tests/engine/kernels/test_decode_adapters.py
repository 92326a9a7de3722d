"""The kernels that add adapters' parts in a decoding step, against plain torch.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.families import Projection

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]

# The interpreter has no products of bfloat16.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
RANKS = pytest.mark.parametrize("rank", [1, 3, 32, 128])

NUM_ROWS = 26
RUNS = ((0, 18, 2), (18, 21, -1), (21, 22, 1), (22, 24, 0))
"""Rows and adapter: two tiles of one, rows of none, two more adapters, and padding at the end."""

HIDDEN, INNER = 600, 300
O, GATE_UP, DOWN, HEAD = (
    Projection(layer=0, name=name, part="mlp", inputs=inputs, modules=modules, outputs=outputs)
    for name, inputs, modules, outputs in (
        ("o", 96, ("o",), (HIDDEN,)),
        ("gate_up", HIDDEN, ("gate", "up"), (INNER, INNER)),
        ("down", INNER, ("down",), (HIDDEN,)),
        ("qkv", HIDDEN, ("q", "k", "v"), (130, 64, 64)),
    )
)
PROJECTIONS = (O, GATE_UP, DOWN, HEAD)


class Weights(NamedTuple):
    """One adapter's matrices of one projection; none where it leaves that alone."""

    a: Tensor
    b: list[Tensor]


class Tenants:
    """Three adapters of two ranks, the last of which leaves gate, up and down alone."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu" if IS_INTERPRETED else "cuda")
        self.dtype = dtype
        self.ranks, self.scales = (8, rank, rank), (4.0, 0.5, 0.25)
        self.weights = [
            {
                projection.name: Weights(
                    self.noise(of * len(projection.modules), projection.inputs, by=0.05),
                    [self.noise(size, of, by=0.3) for size in projection.outputs],
                )
                for projection in PROJECTIONS
                if number or projection.name in ("o", "qkv")
            }
            for number, of in enumerate(self.ranks)
        ]
        self.addresses = torch.zeros(4, len(PROJECTIONS), 4, dtype=torch.int64)
        for number, weights in enumerate(self.weights):
            for index, projection in enumerate(PROJECTIONS):
                if projection.name in weights:
                    a, b = weights[projection.name]
                    pointers = [a.data_ptr(), *(b_of.data_ptr() for b_of in b)]
                    self.addresses[number, index, : len(pointers)] = torch.tensor(pointers)

    def noise(self, *shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * by).to(self.dtype)

    def tiled(self) -> Any:
        from tinsmith.engine.local.kernels.decode_lora import TiledAdapters

        tiles = [
            (first, min(16, stop - first), number)
            for start, stop, number in RUNS
            for first in range(start, stop, 16)
        ]
        tiles.append((0, 0, 0))
        row_adapters = torch.full((NUM_ROWS,), -1)
        for start, stop, number in RUNS:
            row_adapters[start:stop] = number
        facts = torch.tensor([*zip(self.ranks, self.scales, strict=True), (0, 0)])
        return TiledAdapters(
            torch.tensor(tiles, device=self.device).T.contiguous(),
            row_adapters.to(self.device),
            self.addresses.to(self.device),
            facts.float().to(self.device),
            self.dtype,
            max(16, 1 << (max(self.ranks) - 1).bit_length()),
            all(rank % 8 == 0 for rank in self.ranks),
        )

    def begun(self, x: Tensor, projection: Projection) -> Any:
        """The part of a product of x."""
        from tinsmith.engine.local.kernels.decode_lora import Part

        adapters, index = self.tiled(), PROJECTIONS.index(projection)
        inner = adapters.new_inner(x, projection)
        adapters.shrink(inner, x, index, projection)
        return Part(adapters, inner, index, projection)

    def whole(self, y: Tensor, x: Tensor, projection: Projection) -> Tensor:
        """y + scale · (x Aᵀ) Bᵀ row by row, rounded where the kernels round it."""
        y = y.float().clone()
        for start, stop, number in RUNS:
            weights = self.weights[number].get(projection.name) if number >= 0 else None
            if weights is None:
                continue
            inner = self.scales[number] * (x[start:stop].float() @ weights.a.float().t())
            inner = inner.to(self.dtype).float()
            parts = inner.split(self.ranks[number], dim=1)
            y[start:stop] += torch.cat(
                [part @ b.float().t() for part, b in zip(parts, weights.b, strict=True)], dim=1
            )
        return y.to(self.dtype)

    def assert_close(self, found: Tensor, wanted: Tensor) -> None:
        """On all rows but padding: 1e-5 of the largest number in float32, 1e-2 in half."""
        rows = RUNS[-1][1]
        relative = 1e-5 if self.dtype == torch.float32 else 1e-2
        difference = (found[:rows].float() - wanted[:rows].float()).abs().max()
        assert difference <= relative * wanted[:rows].float().abs().max()


@RANKS
@DTYPES
def test_each_row_gets_its_own_adapters_part(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tenants = Tenants(rank, dtype)
    x, y = tenants.noise(NUM_ROWS, HIDDEN), tenants.noise(NUM_ROWS, 258)
    wanted = tenants.whole(y, x, HEAD)
    before = y.clone()
    found = tenants.begun(x, HEAD).add_to(y)
    tenants.assert_close(found, wanted)
    assert torch.equal(found[18:21], before[18:21])
    assert torch.equal(found[24:], before[24:])
    # A product in float32 beside adapters in half precision stays in float32.
    wide = before.float()
    tenants.assert_close(tenants.begun(x, HEAD).add_to(wide), wanted)
    assert wide.dtype == torch.float32


@pytest.mark.parametrize("rank", [1, 3, 32, 128, 256])
@DTYPES
def test_the_norm_adds_the_part_of_the_product_before_it(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tenants = Tenants(rank, dtype)
    joins, pointwise = kernels.module("decode_joins"), kernels.module("pointwise")
    x, z = tenants.noise(NUM_ROWS, HIDDEN), tenants.noise(NUM_ROWS, O.inputs)
    y, weight = tenants.noise(NUM_ROWS, HIDDEN), tenants.noise(HIDDEN)
    wanted_x = x.clone()
    wanted = pointwise.add_rms_norm(wanted_x, tenants.whole(y, z, O), weight, 1e-5)
    plain_x = x.clone()
    plain = pointwise.add_rms_norm(plain_x, y, weight, 1e-5)
    found = joins.add_rms_norm(x, y, tenants.begun(z, O), weight, 1e-5)
    tenants.assert_close(x, wanted_x)
    tenants.assert_close(found, wanted)
    assert torch.equal(x[18:21], plain_x[18:21])
    tenants.assert_close(found[18:21], plain[18:21])


@RANKS
@DTYPES
@pytest.mark.parametrize("is_silu", [True, False])
def test_swiglu_adds_the_part_before_it_and_begins_that_of_the_next_product(
    rank: int, dtype: torch.dtype, is_silu: bool
) -> None:
    torch.manual_seed(0)
    tenants = Tenants(rank, dtype)
    joins, pointwise = kernels.module("decode_joins"), kernels.module("pointwise")
    x, gate_up = tenants.noise(NUM_ROWS, HIDDEN), tenants.noise(NUM_ROWS, 2 * INNER)
    wanted = pointwise.swiglu(tenants.whole(gate_up, x, GATE_UP), is_silu)
    part = tenants.begun(x, GATE_UP)
    found, down = joins.swiglu(gate_up, part, is_silu, PROJECTIONS.index(DOWN), DOWN)
    tenants.assert_close(found, wanted)
    assert torch.equal(found[18:21], pointwise.swiglu(gate_up, is_silu)[18:21])
    # The adapters' part of the next product comes from the shares that it left.
    y = tenants.noise(NUM_ROWS, HIDDEN)
    after = tenants.whole(y, found, DOWN)
    tenants.assert_close(down.add_to(y), after)


@pytest.mark.skipif(not IS_INTERPRETED, reason="compiles for minutes, for a rank that few allow")
def test_swiglu_leaves_the_next_product_to_others_where_ranks_are_large() -> None:
    torch.manual_seed(0)
    tenants = Tenants(2048, torch.float32)
    joins, pointwise = kernels.module("decode_joins"), kernels.module("pointwise")
    x, gate_up = tenants.noise(NUM_ROWS, HIDDEN), tenants.noise(NUM_ROWS, 2 * INNER)
    wanted = pointwise.swiglu(tenants.whole(gate_up, x, GATE_UP), True)
    part = tenants.begun(x, GATE_UP)
    found, down = joins.swiglu(gate_up, part, True, PROJECTIONS.index(DOWN), DOWN)
    tenants.assert_close(found, wanted)
    assert down is None
