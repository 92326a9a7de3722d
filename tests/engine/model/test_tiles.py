"""Products in tiles: a row's bits are those it has alone, on any number of cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.cpu import cores, tiles
from tinsmith.engine.local.model.linear import Linear

SIZES = (1, 15, 16, 17, 100, 128, 250, 512, 513, 1050)


@pytest.fixture(params=[1, 2, 3, 8], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_the_smallest(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Sixteen rows after sixteen rows, on one core."""
    padded = F.pad(x, (0, 0, 0, -len(x) % 16))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return torch.cat([multiply(tile) for tile in padded.split(16)])[: len(x)]
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("shape", [(24, 24), (96, 24), (1000, 200), (960, 576), (576, 1536)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_row_has_the_bits_of_the_smallest_tile(shape: tuple[int, int], is_packed: bool) -> None:
    linear = Linear(random(*shape), random(shape[0]))
    if is_packed:
        linear.allow_packing()
    linear.is_invariant = True
    x = random(max(SIZES), shape[1])
    expected = by_the_smallest(linear.product, x)
    for size in SIZES:
        assert torch.equal(linear.product(x[-size:]), expected[-size:])


def test_of_an_adapter_too() -> None:
    weight, x = random(96, 5), random(max(SIZES), 5)
    expected = by_the_smallest(lambda tile: tile @ weight.t(), x)
    for size in SIZES:
        assert torch.equal(tiles.product(x[-size:], weight), expected[-size:])


@pytest.mark.parametrize(
    "multiply",
    [
        lambda x: x * len(x),
        lambda x: x * (1 + len(x) // 200),
        lambda x: x * torch.get_num_threads(),
        lambda x: x * torch.get_num_threads() * len(x),
    ],
    ids=["many rows", "very many rows", "several cores", "both"],
)
def test_where_it_would_change_with_the_way_it_goes_another(
    multiply: Callable[[Tensor], Tensor],
) -> None:
    x = random(max(SIZES), 3)
    expected = by_the_smallest(multiply, x)
    for size in SIZES:
        assert torch.equal(tiles.in_tiles(multiply, x[:size], multiply), expected[:size])


def test_undivided_operations_have_one_core_and_others_all(num_threads: int) -> None:
    with cores.undivided():
        assert torch.get_num_threads() == 1
        with cores.undivided(), cores.divided():
            assert torch.get_num_threads() == num_threads
        assert torch.get_num_threads() == 1
        busy = set(cores.on_all_cores(lambda parts: [len(parts)] * len(parts), range(8)))
        assert busy <= {8 // num_threads, 8 // num_threads + 1}
    assert torch.get_num_threads() == num_threads
