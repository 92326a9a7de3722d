"""The decoding kernels over blocks of the cache, against plain attention over the same blocks.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.engine.local.model import pointwise
from tinsmith.engine.local.model.families import AttentionSpec, DecoderConfig
from tinsmith.engine.local.model.rope import Rotation
from tinsmith.engine.local.sample.cached_attention import CachedAttention
from tinsmith.engine.local.sample.cached_rows import Rows
from tinsmith.engine.local.sample.kvcache import BlockTable, CacheShape, KVCache
from tinsmith.engine.local.sample.prefixes import NOTHING

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]

HEAD_DIM = 32
HEADS, KV_HEADS = 6, 2


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


def config_of(spec: AttentionSpec) -> DecoderConfig:
    config: Any = DecoderConfig(
        architecture="",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_context_length=256,
        norm_eps=1e-6,
        layers=(spec, spec),
    )
    return config  # type: ignore[no-any-return]  # some fields are not needed here


def filled_cache(
    config: DecoderConfig, device: torch.device, num_rows: int
) -> tuple[KVCache, list[BlockTable]]:
    """Rows of many lengths in scattered blocks; every third goes on from the same prompt."""
    shape = CacheShape.of(config, device, torch.float32)
    cache = KVCache(shape, 20 * max(num_rows, 4) * shape.block_bytes)
    prompt = cache.new_table(45, NOTHING, num_samples=1)
    assert prompt is not None
    prompt.num_tokens = 45
    tables = []
    for row in range(num_rows):
        length = 45 + 2 * row % 70 if row % 3 == 0 else (37 * row) % 120
        table = cache.fork(prompt) if row % 3 == 0 else cache.new_table(0, NOTHING, num_samples=1)
        assert table is not None
        assert cache.extend(table, length + 1)
        table.num_tokens = length
        tables.append(table)
    cache.keys.normal_()
    cache.values.normal_()
    return cache, tables


def row_blocks(cache: KVCache, tables: list[BlockTable], num_padding: int) -> Any:
    """What kernels are told, with some rows of padding at the end."""
    from tinsmith.engine.local.kernels.decode_attention import RowBlocks

    device = cache.shape.device
    padding = [0] * num_padding
    counts = [len(table.blocks) for table in tables]
    return RowBlocks(
        cache.keys,
        cache.values,
        torch.tensor([table.num_tokens + 1 for table in tables] + padding, device=device),
        torch.tensor([0, *np.cumsum(counts)[:-1].tolist(), *padding], device=device),
        torch.tensor([b for t in tables for b in t.blocks], device=device, dtype=torch.int32),
    )


@pytest.mark.parametrize("num_rows", [1, 7 if IS_INTERPRETED else 300])
@pytest.mark.parametrize(
    ("window", "softcap", "has_norms", "distance", "has_sinks"),
    [
        (None, None, False, HEAD_DIM // 2, False),
        (20, None, True, HEAD_DIM // 2, True),
        (1, None, False, HEAD_DIM // 8, True),
        (None, 5.0, True, HEAD_DIM // 8, False),
        (None, None, False, HEAD_DIM // 2, True),
    ],
    ids=["plain", "window", "itself", "cap", "sinks"],
)
def test_attention_finds_what_plain_attention_finds(
    device: torch.device,
    num_rows: int,
    window: int | None,
    softcap: float | None,
    has_norms: bool,
    distance: int,
    has_sinks: bool,
) -> None:
    """One row splits its scan; many do not. New keys and values go behind the last token and
    nowhere else."""
    from tinsmith.engine.local.kernels import decode_attention

    enough = 32 if IS_INTERPRETED else decode_attention.ENOUGH_PROGRAMS
    torch.manual_seed(0)
    heads = decode_attention.Heads(HEADS, KV_HEADS, HEAD_DIM)
    spec = AttentionSpec(scale=0.2, rope=None, window=window, softcap=softcap)
    config = config_of(spec)
    cache, tables = filled_cache(config, device, num_rows)
    before = cache.keys.clone(), cache.values.clone()
    qkv = torch.randn(num_rows + 3, 10 * HEAD_DIM, device=device)
    angles = torch.randn(num_rows + 3, 1, HEAD_DIM // 2, device=device)
    angles[..., distance:] = 0
    rotation = Rotation(angles.cos(), angles.sin(), distance)
    weights = torch.randn(2, HEAD_DIM, device=device)
    norms = (weights[0], weights[1]) if has_norms else None
    of_rows = Rotation(rotation.cos[:num_rows], rotation.sin[:num_rows], distance)
    q, k, v = pointwise.apply_rope(qkv[:num_rows], norms, of_rows, KV_HEADS, 1e-5)
    running = [Rows(row, row + 1, table) for row, table in enumerate(tables)]
    # The plain form also writes the new keys and values.
    # One sink takes nearly all of a head, and one nothing.
    numbers = torch.tensor([0.5, -1.0, 3.0, 40.0, -40.0, 0.0], device=device)
    sinks = numbers if has_sinks else None
    wanted = CachedAttention(config, [], running)(1, q, k, v, sinks)
    after = cache.keys.clone(), cache.values.clone()
    cache.keys.copy_(before[0])
    cache.values.copy_(before[1])

    rows = row_blocks(cache, tables, 3)
    assert (decode_attention.num_splits(num_rows + 3, KV_HEADS, enough) > 1) == (num_rows == 1)
    found = decode_attention.attend(qkv, rows, rotation, norms, 1e-5, spec, 1, heads, sinks, enough)
    found = found[:num_rows]
    torch.testing.assert_close(found.view_as(wanted), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.keys, after[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.values, after[1], atol=1e-5, rtol=1e-5)


def test_looking_ahead_for_the_next_block_changes_nothing(device: torch.device) -> None:
    """Of ten programs: in splits, without, and so many that each has enough to do."""
    from tinsmith.engine.local.kernels import decode_attention

    torch.manual_seed(0)
    spec = AttentionSpec(scale=HEAD_DIM**-0.5, rope=None)
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device)
    found = []
    for enough in (40, 10, 1):
        torch.manual_seed(1)
        cache, tables = filled_cache(config_of(spec), device, num_rows=4)
        rows = row_blocks(cache, tables, num_padding=1)
        angles = torch.randn(5, 1, HEAD_DIM // 2, device=device)
        rotation = Rotation(angles.cos(), angles.sin(), HEAD_DIM // 2)
        heads = decode_attention.Heads(HEADS, KV_HEADS, HEAD_DIM)
        out = decode_attention.attend(
            qkv, rows, rotation, None, 1e-6, spec, 1, heads, enough_programs=enough
        )
        found.append((out[:4], cache.keys, cache.values))
    for each in found[1:]:
        for got, wanted in zip(each, found[0], strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
