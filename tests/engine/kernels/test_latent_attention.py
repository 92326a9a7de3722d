"""Latent attention of decoding steps on kernels, against plain torch and the trainer.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.kernels.test_decode_attention import config_of, filled_cache, row_blocks
from tests.engine.sample.sampling_reference import (
    answers,
    assert_trainer_agrees,
    job_of,
    tokens_of,
)
from tests.support.tiny_families import save_tiny
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.families import AttentionSpec, LatentSpec
from tinsmith.engine.local.model.latent.heads import LatentHeads
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.cached_attention import CachedAttention
from tinsmith.engine.local.sample.cached_rows import Rows
from tinsmith.engine.local.sample.generation import Generator

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.mark.parametrize("num_rows", [1, 5 if IS_INTERPRETED else 300])
@pytest.mark.parametrize(
    ("num_heads", "rank", "rotated"), [(3, 12, 6), (20, 64, 16)], ids=["odd sizes", "two tiles"]
)
def test_heads_find_what_plain_attention_finds(
    num_rows: int, num_heads: int, rank: int, rotated: int
) -> None:
    """One row splits its scan; many do not. The new vectors go behind the last token and nowhere
    else, and what is behind it is not read."""
    from tinsmith.engine.local.kernels import decode_attention, latent_attention

    enough = 16 if IS_INTERPRETED else decode_attention.ENOUGH_PROGRAMS
    torch.manual_seed(0)
    latent = LatentSpec(
        query_rank=None,
        rank=rank,
        plain_dim=10,
        rotated_dim=rotated,
        value_dim=8,
        is_interleaved=True,
    )
    spec = AttentionSpec(scale=0.2, rope=None)
    config = replace(config_of(spec), latent=latent, num_heads=num_heads, num_kv_heads=num_heads)
    cache, tables = filled_cache(config, DEVICE, num_rows)
    heads = LatentHeads(latent, torch.randn(num_heads, 18, rank, device=DEVICE))
    q = torch.randn(num_rows + 2, num_heads, latent.key_dim, device=DEVICE)
    latents = torch.randn(num_rows + 2, latent.kept_dim, device=DEVICE)
    before = cache.keys.clone()
    running = [Rows(row, row + 1, table) for row, table in enumerate(tables)]
    # The plain form also writes the new vectors.
    attention = CachedAttention(config, [], running)
    wanted = attention.of_latents(1, q[:num_rows], latents[:num_rows], heads)
    after = cache.keys.clone()
    cache.keys.copy_(before)
    size = cache.shape.block_tokens
    for table in tables:
        cache.keys[1, table.blocks[-1], 0, table.num_tokens % size :] = torch.nan
    rows = row_blocks(cache, tables, num_padding=2)
    sums = latent_attention.attend(heads.absorbed(q), latents, rows, spec.scale, 1, rank, enough)
    found = heads.values_of(sums)[:num_rows]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    is_new = (after != before).any(dim=-1)
    assert is_new.sum() == num_rows
    assert torch.equal(cache.keys[is_new], after[is_new])
    is_kept = ~(is_new | cache.keys.isnan().any(dim=-1))
    assert torch.equal(cache.keys[is_kept], before[is_kept])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows, in the interpreter's numpy
@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek_v3, whole queries"])
def test_steps_of_many_tenants_and_of_none_have_the_logprobs_of_the_trainer(
    variant: str, tmp_path: Path, new_adapter: Callable[..., Adapter]
) -> None:
    """Through dense layers and experts in groups, with a shared one."""
    save_tiny(variant, tmp_path)
    decoder = Decoder.load(tmp_path, device=DEVICE)
    adapters: dict[str, Adapter | None] = {
        "none": None,
        "three": new_adapter(decoder, fill_seed=2, rank=3),
        "many": new_adapter(decoder, fill_seed=3, rank=32),
        "attention": new_adapter(decoder, fill_seed=5, rank=8, train_mlp=False),
    }
    prompts = {name: tokens_of(5 + number, number) for number, name in enumerate(adapters)}
    max_tokens = 2 if IS_INTERPRETED else 40
    jobs = [
        (job_of(name, prompts[name], num_samples=2, max_tokens=max_tokens, seed=5), adapter)
        for name, adapter in adapters.items()
    ]
    config = LocalEngineConfig(device=DEVICE.type, kv_cache_bytes=1 << 24)
    for name, response in answers(Generator(decoder, config), jobs).items():
        assert_trainer_agrees(decoder, prompts[name], response, adapters[name])
