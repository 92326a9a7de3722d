"""When passes are captured, and when their memory is given back; what they compute is tested on
CUDA (`tests/engine/cuda/test_pass_graphs.py`)."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments
from tinsmith.engine.local.train.graph_memory import GraphMemory

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="what it captures is made with Triton"
)


class Captures:
    """What capturing does here: nothing, or run out of memory."""

    def __init__(self) -> None:
        self.count = 0
        self.has_memory = True
        self.tables = SimpleNamespace(fill=lambda *arguments: None)

    def __call__(self, *arguments: object) -> Captures:
        return self

    def capture(self, *arguments: object) -> None:
        self.count += 1
        if not self.has_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def discard(self) -> None:
        pass


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    from tinsmith.engine.local.train import pass_graphs

    found = Captures()
    monkeypatch.setattr(pass_graphs, "CapturedPass", found)
    monkeypatch.setattr(pass_graphs, "most_tokens", lambda *arguments: 4096)
    monkeypatch.setattr(GraphMemory, "stream", lambda *arguments: None)
    monkeypatch.setattr(GraphMemory, "pool", lambda *arguments: (0, 1))
    return found


class Model:
    """A base model's captured passes, and a batch of one shape that comes to them."""

    def __init__(self, decoder: Decoder, adapter: Adapter, memory: GraphMemory) -> None:
        from tinsmith.engine.local.train.pass_graphs import PassGraphs

        self.graphs = PassGraphs(decoder, memory=memory)
        self._decoder = decoder
        self._batch = AdapterSegments([(0, 9, adapter)])

    def come(self, times: int) -> list[bool]:
        """Whether it is left to a captured pass, each time."""
        numbers = np.arange(9)
        return [
            self.graphs.begin(self._decoder, numbers, numbers, [9], self._batch) is not None
            for _ in range(times)
        ]


@pytest.fixture
def new_model(
    captures: Captures, tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> Callable[[GraphMemory], Model]:
    adapter = new_adapter(tiny_decoder, rank=4)
    return partial(Model, tiny_decoder, adapter)


def test_what_is_given_back_is_that_of_all_base_models(
    new_model: Callable[[GraphMemory], Model],
) -> None:
    """One whose batch needs the memory knows nothing of the others."""
    memory = GraphMemory()
    models = [new_model(memory), new_model(memory)]
    assert [each.come(2) for each in models] == [[False, True]] * 2
    models[0].graphs.drop()
    assert [len(each.graphs) for each in models] == [0, 0]


def test_after_that_a_shape_has_to_come_twice_again(
    new_model: Callable[[GraphMemory], Model], captures: Captures
) -> None:
    """Where large batches and small ones take turns, none is captured for one use."""
    model = new_model(GraphMemory())
    for _ in range(5):
        model.come(1)
        model.graphs.drop()
    assert captures.count == 0
    assert model.come(3) == [False, True, True]


def test_what_torch_keeps_of_other_work_is_there_to_capture_into(
    new_model: Callable[[GraphMemory], Model],
    captures: Captures,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot use that while it captures, and has to give it back before."""

    def give_back() -> None:
        captures.has_memory = True

    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    captures.has_memory = False
    assert new_model(GraphMemory()).come(3) == [False, True, True]
    assert captures.count == 2


def test_where_capturing_finds_no_memory_even_so_a_batch_is_computed_as_before(
    new_model: Callable[[GraphMemory], Model], captures: Captures
) -> None:
    model = new_model(GraphMemory())
    captures.has_memory = False
    assert model.come(3) == [False, False, False]
    assert captures.count == 2
    captures.has_memory = True
    assert model.come(1) == [True]


class _Graphs:
    """Captured passes of a base model."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def forget(self) -> None:
        self.count = 0


def test_memory_is_one_place_as_long_as_a_graph_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    memory = GraphMemory()
    one, other = _Graphs(0), _Graphs(0)
    memory.share(one)
    memory.share(other)
    first = memory.pool()
    one.count = 1
    assert memory.pool() == first
    # Its base model leaves memory, and torch drops the place.
    del one
    second = memory.pool()
    assert second != first
    other.count = 3
    assert memory.pool() == second
    memory.give_back()
    assert len(other) == 0 and memory.pool() != second
