"""Copies for a save are of the moment in which it began."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tinsmith.engine.local.adapter_files.copies import Room, begin_copies

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("most", [1 << 30, 0], ids=["on the device", "at once"])
def test_what_changes_later_is_not_in_a_copy(cuda: torch.device, most: int) -> None:
    room = Room(most)
    vectors = {name: torch.randn(1 << 24, device=cuda) for name in ("flat", "exp_avg")}
    expected = {name: vector.cpu() for name, vector in vectors.items()}
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device=cuda)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(3):
            for name in vectors:
                vectors[name].copy_(expected[name])
            fetched = thread.submit(begin_copies(vectors, room))
            for vector in vectors.values():
                vector.mul_(2)
            for _ in range(50):
                busy = torch.tanh(busy @ busy)
            found = fetched.result()
            assert all(torch.equal(found[name], expected[name]) for name in vectors)


def test_copies_on_the_device_are_bounded_together(cuda: torch.device) -> None:
    room = Room(10_000)
    vectors = {"flat": torch.randn(1000, device=cuda)}
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        under_way = [begin_copies(vectors, room) for _ in range(5)]
        assert torch.cuda.memory_allocated() - before <= 10_000
        assert all(torch.equal(fetch()["flat"], vectors["flat"].cpu()) for fetch in under_way)
        del under_way
