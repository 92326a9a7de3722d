"""Latent attention in our own decoder: two ways to attend that agree, and a cache of small vectors.

That its logits and gradients are those of transformers is in `families.test_families`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.engine.model.test_models import models_of
from tests.engine.sample.sampling_reference import (
    CPU,
    answer,
    answers,
    assert_trainer_agrees,
    job_of,
    tokens_in,
    tokens_of,
    trainer_logprobs,
)
from tests.support.tiny_families import save_tiny
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts.grouped_router import GroupedRouter
from tinsmith.engine.local.model.families import ExpertGroups, LatentSpec
from tinsmith.engine.local.model.foreign.config import is_foreign
from tinsmith.engine.local.model.latent.heads import LatentHeads
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample import cached_latents
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.engine.local.sample.kvcache import CacheShape, KVCache
from tinsmith.errors import EngineError

NewAdapter = Callable[..., Adapter]
SPEC = LatentSpec(
    query_rank=None, rank=12, plain_dim=8, rotated_dim=4, value_dim=6, is_interleaved=True
)


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v3, whole queries"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("latent")
    save_tiny(request.param, folder)
    return models_of({"tiny": folder}).get("tiny")


def test_queries_that_come_to_latent_vectors_find_what_they_find_among_keys_and_values() -> None:
    torch.manual_seed(0)
    heads = LatentHeads(SPEC, torch.randn(3, 14, 12))
    q, latents = torch.randn(1, 3, 12), torch.randn(9, 16)
    k, v = heads.expanded(latents)
    among_keys = torch.einsum("nhd,mhd->hm", q, k).softmax(dim=-1)
    expected = torch.einsum("hm,mhv->hv", among_keys, v)
    among_vectors = torch.einsum("nhd,md->hm", heads.absorbed(q), latents).softmax(dim=-1)
    found = heads.values_of(torch.einsum("hm,mr->hr", among_vectors, latents[:, :12])[None])
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("value_dim", [6, 20])
def test_heads_of_two_sizes_attend_as_if_they_had_one(value_dim: int) -> None:
    torch.manual_seed(0)
    heads = LatentHeads(replace(SPEC, value_dim=value_dim), torch.randn(3, 8 + value_dim, 12))
    q, latents = torch.randn(5, 3, 12), torch.randn(5, 16)

    def attend(*parts: torch.Tensor) -> torch.Tensor:
        by_head = (part.transpose(0, 1) for part in parts)
        return F.scaled_dot_product_attention(*by_head, scale=0.2).transpose(0, 1)

    assert torch.allclose(
        heads.attend_expanded(attend, q, latents), attend(q, *heads.expanded(latents)), atol=1e-6
    )


def test_a_token_takes_a_latent_vector_and_a_rotated_key_in_each_layer(decoder: Decoder) -> None:
    shape = CacheShape.of(decoder.config, decoder.device, decoder.dtype)
    assert shape.bytes_per_token == 2 * (12 + 8) * 4
    cache = KVCache(shape, 3 * shape.block_bytes)
    taken = cache.keys[:, :3].nbytes + cache.values.nbytes
    assert taken == 3 * shape.block_tokens * shape.bytes_per_token


def test_a_prompt_read_in_parts_has_the_scores_of_training(
    decoder: Decoder, new_adapter: NewAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside running sequences, beginning in the middle of a block, and of so much that keys and
    values are made of a few heads at a time."""
    monkeypatch.setattr(
        cached_latents, "heads_at_once", lambda spec, num_tokens: 1 + num_tokens % 2
    )
    adapter, prompt = new_adapter(decoder), tokens_of(75)
    generator = Generator(decoder, CPU, prefill_tokens=11)
    beside = job_of("beside", tokens_of(20, 1), max_tokens=30, seed=1)
    job = job_of("job", prompt, num_samples=2, seed=2, prompt_logprobs=True)
    found = answers(generator, [(beside, None), (job, adapter)])
    scores = found["job"].prompt_logprobs
    assert scores is not None and scores[0] is None
    expected = torch.from_numpy(trainer_logprobs(decoder, prompt, adapter))
    torch.testing.assert_close(torch.tensor(scores[1:]), expected, rtol=0, atol=2e-5)
    assert_trainer_agrees(decoder, prompt, found["job"], adapter)
    assert_trainer_agrees(decoder, tokens_of(20, 1), found["beside"])


def test_a_prompt_that_begins_alike_finds_the_vectors_of_the_first(decoder: Decoder) -> None:
    generator, prompt = Generator(decoder, CPU), tokens_of(60)
    longer = prompt + tokens_of(7, 3)
    answer(generator, job_of("first", prompt, seed=1))
    again = answer(generator, job_of("again", longer, num_samples=3, seed=2))
    assert again.prompt_cache_hit_tokens == 48
    assert_trainer_agrees(decoder, longer, again)


def test_sequences_that_give_way_continue_where_they_were(decoder: Decoder) -> None:
    shape = CacheShape.of(decoder.config, decoder.device, decoder.dtype)
    jobs = [
        (job_of(str(seed), tokens_of(30, seed), num_samples=2, max_tokens=40, seed=seed), None)
        for seed in range(3)
    ]
    small = replace(CPU, kv_cache_bytes=8 * shape.block_bytes)
    found, expected = (
        answers(Generator(decoder, small), jobs),
        answers(Generator(decoder, CPU), jobs),
    )
    assert {name: tokens_in(each) for name, each in found.items()} == {
        name: tokens_in(each) for name, each in expected.items()
    }


def test_a_router_with_groups_chooses_and_weighs_as_written_out() -> None:
    """The two best of each group of three, by their biased scores; shares are without the bias."""
    torch.manual_seed(1)
    router = GroupedRouter(
        weight=torch.randn(12, 5),
        bias=torch.randn(12),
        per_token=3,
        is_normalized=True,
        groups=ExpertGroups(count=4, per_token=2, scale=2.5),
    )
    x = torch.randn(40, 5, requires_grad=True)
    routed = router.forward(x.detach())
    for row, choices, shares in zip(x.detach(), routed.choices, routed.shares, strict=True):
        scores = [1 / (1 + float(torch.exp(-row @ weight))) for weight in router.weight]
        judged = [score + float(bias) for score, bias in zip(scores, router.bias, strict=True)]
        groups = [range(first, first + 3) for first in range(0, 12, 3)]
        groups.sort(key=lambda group: -sum(sorted(judged[expert] for expert in group)[-2:]))
        allowed = [expert for group in groups[:2] for expert in group]
        best = sorted(allowed, key=lambda expert: -judged[expert])[:3]
        assert choices.tolist() == best
        total = sum(scores[expert] for expert in best)
        expected = [2.5 * scores[expert] / total for expert in best]
        torch.testing.assert_close(shares, torch.tensor(expected))
    # The gradient by autograd, of the same shares.
    grad = torch.randn(40, 3)
    chosen = (x @ router.weight.t()).sigmoid().gather(1, routed.choices)
    (2.5 * chosen / chosen.sum(dim=-1, keepdim=True)).backward(grad)
    torch.testing.assert_close(router.backward(grad, routed), x.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_it_is_divided_through_transformers_and_refused_where_bits_must_not_change(
    model_type: str, tmp_path: Path
) -> None:
    save_tiny(model_type, tmp_path)
    config = LocalEngineConfig(device="cpu", models={"tiny": str(tmp_path)}, verify_models=False)
    assert not is_foreign(BaseModels(config).config("tiny"))
    assert is_foreign(BaseModels(replace(config, ranks=2)).config("tiny"))
    with pytest.raises(EngineError, match=r"exact.*experts"):
        BaseModels(replace(config, on_policy="exact")).config("tiny")
    save_tiny("deepseek_v3, dense", tmp_path)
    with pytest.raises(EngineError, match=r"exact.*latent attention"):
        BaseModels(replace(config, on_policy="exact")).config("tiny")
    with pytest.raises(EngineError, match="those with experts are divided"):
        BaseModels(replace(config, ranks=2)).config("tiny")
