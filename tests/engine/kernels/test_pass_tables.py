"""What captured passes read from tables, with the padding behind it, is what batches bring.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.tiny_families import save_tiny
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import (
    Adapter,
    AdapterPool,
    AdapterSegments,
    GradientBuffer,
    Run,
)
from tinsmith.engine.local.model.recurrent.recurrence import ChunkTables

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
    # Rows of padding hold whatever was in memory.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning"),
]


HEADS_WITH_KERNELS = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe, dense": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "qwen3_5_text": {
        **HEADS_WITH_KERNELS,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
PLAIN = pytest.mark.parametrize("decoder", ["qwen3_moe, dense"], indirect=True)


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(request.param, folder, **FAMILIES[request.param])
    return Decoder.load(folder, "cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture(scope="module")
def adapters(decoder: Decoder, new_adapter: Callable[..., Adapter]) -> list[Adapter]:
    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
    return [new_adapter(decoder, pool=pool, rank=16, fill_seed=n) for n in range(3)]


class Batch:
    """Sequences of some adapters, with gradients of zero."""

    def __init__(self, adapters: Sequence[Adapter], lengths: Sequence[Sequence[int]]) -> None:
        self.lengths = [length for own in lengths for length in own]
        random = np.random.default_rng(sum(self.lengths))
        self.tokens = random.integers(0, 97, sum(self.lengths))
        self.positions = np.concatenate([np.arange(length) for length in self.lengths])
        runs: list[Run] = []
        for adapter, own in zip(adapters, lengths, strict=False):
            start = runs[-1][1] if runs else 0
            runs.append((start, start + sum(own), adapter))
        self.grads = [torch.zeros_like(adapter.flat) for _, _, adapter in runs if adapter]
        buffers = [
            GradientBuffer(adapter.layout, grad)
            for (_, _, adapter), grad in zip(runs, self.grads, strict=True)
            if adapter is not None
        ]
        self.segments = AdapterSegments(runs, buffers)


def run(
    decoder: Decoder,
    tokens: Tensor,
    positions: Tensor,
    lengths: Sequence[int],
    segments: AdapterSegments,
    num_tokens: int,
    tables: ChunkTables | None = None,
) -> Tensor:
    """Hidden states; the gradients of their sum, over rows of the batch, go to the buffers."""
    attention = PackedAttention(decoder.config, lengths, tables=tables)
    hidden = decoder.hidden(tokens, positions, attention, segments)
    grad = torch.zeros_like(hidden)
    grad[:num_tokens] = 1.0
    hidden.backward(grad)
    return hidden.detach()[:num_tokens]


def test_tables_give_the_states_and_gradients_of_the_batch_itself(
    decoder: Decoder, adapters: list[Adapter]
) -> None:
    check_tables(decoder, adapters, [[5, 7], [3]])


@PLAIN
@pytest.mark.parametrize("lengths", [[[1]], [[40, 2], [20], [2]]], ids=["one token", "full"])
def test_so_they_do_with_one_token_and_without_padding(
    lengths: list[list[int]], decoder: Decoder, adapters: list[Adapter]
) -> None:
    check_tables(decoder, adapters, lengths)


def check_tables(decoder: Decoder, adapters: list[Adapter], lengths: list[list[int]]) -> None:
    from tinsmith.engine.local.train.pass_tables import PassTables, shape_of

    batch, same = Batch(adapters, lengths), Batch(adapters, lengths)
    num_tokens = len(batch.tokens)
    device = decoder.device
    expected = run(
        decoder,
        torch.from_numpy(batch.tokens).to(device),
        torch.from_numpy(batch.positions).to(device),
        batch.lengths,
        batch.segments,
        num_tokens,
    )
    shape = shape_of(same.lengths, same.segments)
    assert shape is not None and shape.num_tokens == 64
    tables = PassTables(shape, device)
    # What an earlier batch has left there is to have no effect.
    earlier = Batch(adapters[::-1], [[9, 5]] * len(lengths))
    tables.fill(earlier.tokens, earlier.positions, earlier.lengths, earlier.segments)
    tables.fill(same.tokens, same.positions, same.lengths, same.segments)
    starts = tables.bounds.starts.tolist()
    assert starts[-1] == shape.num_tokens and len(starts) == shape.num_sequences + 1
    sizes = [stop - start for start, stop in itertools.pairwise(starts)]
    found = run(
        decoder,
        tables.tokens,
        tables.positions,
        [size for size in sizes if size],
        tables.segments(same.segments.gradients[0]),
        num_tokens,
        tables.chunks,
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for grad, other in zip(same.grads, batch.grads, strict=True):
        assert other.norm() > 0
        torch.testing.assert_close(grad, other, atol=1e-4, rtol=1e-4)
    assert all(not grad.any() for grad in earlier.grads)


@PLAIN
def test_without_gradients_buffers_stay_as_they_are(
    decoder: Decoder, adapters: list[Adapter]
) -> None:
    from tinsmith.engine.local.train.pass_tables import PassTables, shape_of

    batch = Batch(adapters, [[4], [2, 2]])
    shape = shape_of(batch.lengths, batch.segments)
    assert shape is not None
    tables = PassTables(shape, decoder.device)
    tables.fill(batch.tokens, batch.positions, batch.lengths, batch.segments)
    lengths = [*batch.lengths, shape.num_tokens - len(batch.tokens)]

    def run_once() -> None:
        segments = tables.segments(batch.segments.gradients[0])
        inputs = (tables.tokens, tables.positions, lengths, segments, len(batch.tokens))
        run(decoder, *inputs, tables.chunks)

    with tables.without_gradients():
        run_once()
        assert all(not grad.any() for grad in batch.grads)
    # A run that breaks off, for want of memory say, is tried again: its gradients are not lost.
    with pytest.raises(MemoryError), tables.without_gradients():
        raise MemoryError
    run_once()
    assert all(grad.any() for grad in batch.grads)


@PLAIN
def test_shapes_are_few_and_never_too_small(adapters: list[Adapter]) -> None:
    from tinsmith.engine.local.train.pass_tables import shape_of

    shapes = {shape_of([n], AdapterSegments([(0, n, adapters[0])])) for n in range(1, 4097)}
    assert None not in shapes and len(shapes) < 50
    for n in range(1, 4097):
        shape = shape_of([n], AdapterSegments([(0, n, adapters[0])]))
        assert shape is not None
        assert n <= shape.num_tokens <= n + max(63, n // 4)
        assert shape.num_tokens - n < shape.longest and shape.longest >= n


@PLAIN
def test_there_is_no_shape_for_what_tables_have_no_room_for(
    decoder: Decoder, adapters: list[Adapter], new_adapter: Callable[..., Adapter]
) -> None:
    from tinsmith.engine.local.train.pass_tables import shape_of

    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
    other = new_adapter(decoder, pool=pool, rank=8)
    assert shape_of([4], AdapterSegments([(0, 4, None)])) is None
    assert shape_of([4, 4], AdapterSegments([(0, 4, adapters[0]), (4, 8, other)])) is None
    assert shape_of([1] * 600, AdapterSegments([(0, 600, adapters[0])])) is None
    runs: list[Run] = [(n, n + 1, adapters[0]) for n in range(33)]
    assert shape_of([1] * 33, AdapterSegments(runs)) is None
