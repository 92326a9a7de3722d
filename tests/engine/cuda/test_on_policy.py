"""With `on_policy` exact, sampler and trainer agree in every bit on CUDA in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.on_policy_reference import assert_they_agree_in_every_bit, trained_logprobs
from tests.engine.sample.sampling_reference import answers, job_of
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model import invariant
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.families import AttentionSpec
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.errors import EngineError

pytestmark = pytest.mark.gpu

EXACT = LocalEngineConfig(device="cuda", dtype="bfloat16", on_policy="exact")


@pytest.fixture(autouse=True)
def _library_as_it_was() -> Iterator[None]:
    """Exact mode changes how products are made in the whole process."""
    yield
    torch.backends.cuda.preferred_blas_library("default")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


def exact(folder: Path) -> Decoder:
    decoder = Decoder.load(folder, device=torch.device("cuda"), dtype=torch.bfloat16)
    decoder.make_invariant()
    return decoder


@pytest.mark.parametrize("cached_tokens", [100_000, 400])
def test_a_sampled_tokens_logprob_is_the_trainers_in_every_bit(
    cached_tokens: int,
    cuda: torch.device,
    variant: str,
    model_folder: Callable[[str], Path],
    new_adapter: Callable[..., Adapter],
) -> None:
    decoder = exact(model_folder(variant))
    assert_they_agree_in_every_bit(decoder, EXACT, new_adapter, cached_tokens)


@pytest.mark.real_model
def test_on_the_real_model(
    cuda: torch.device, real_model_folder: Path, new_adapter: Callable[..., Adapter]
) -> None:
    """Long and short sequences of several adapters beside one another."""
    decoder = exact(real_model_folder)
    config = replace(EXACT, kv_cache_bytes=1 << 30)
    adapters = [None, *(new_adapter(decoder, fill_seed=seed, rank=32) for seed in (1, 2))]
    none = new_adapter(decoder, fill_seed=None)
    prompts = [list(range(1000, 1000 + 13 * size, 13)) for size in (2, 45, 128, 700)]
    jobs = [
        (job_of(str(number), prompt, max_tokens=90, num_samples=4, seed=number), adapter)
        for number, (prompt, adapter) in enumerate(
            (prompt, adapter) for prompt in prompts for adapter in adapters
        )
    ]
    responses = answers(Generator(decoder, config), jobs)
    sequences, sampled = [], []
    for job, adapter in jobs:
        for sequence in responses[job.job_id].sequences:
            sequences.append((job.prompt.to_ints() + sequence.tokens, adapter or none))
            sampled.append(sequence.logprobs_np)
    trained = trained_logprobs(decoder, sequences, config, forward_only=False)
    for ours, theirs in zip(sampled, trained, strict=True):
        np.testing.assert_array_equal(ours, theirs[-len(ours) :])


@pytest.mark.parametrize("lengths", [[256, 256, 256], [100, 7, 300]], ids=["even", "uneven"])
@pytest.mark.parametrize("window", [None, 40])
def test_the_gradient_of_attention_is_that_without_it(
    lengths: list[int], window: int | None, cuda: torch.device, tiny_decoder: Decoder
) -> None:
    """Whichever kernel makes it, from the normalizers that ours leaves."""
    spec = AttentionSpec(scale=0.2, rope=None, window=window, softcap=None)
    config = replace(tiny_decoder.config, layers=(spec,))
    generator = torch.Generator().manual_seed(4)
    shapes = [(sum(lengths), heads, 64) for heads in (6, 2, 2, 6)]
    *parts, grad = (
        torch.randn(shape, generator=generator).to(cuda, torch.bfloat16) for shape in shapes
    )
    found = []
    for is_invariant in (True, False):
        inputs = [part.clone().requires_grad_() for part in parts]
        out = PackedAttention(config, lengths, is_invariant=is_invariant)(0, *inputs)
        found.append(torch.autograd.grad(out, inputs, grad))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 5.0)])
def test_a_query_finds_what_plain_torch_finds_and_the_same_bits_from_pages(
    window: int | None, softcap: float | None, cuda: torch.device
) -> None:
    from tinsmith.engine.local.kernels import ordered_attention

    generator = torch.Generator().manual_seed(3)
    spec = AttentionSpec(scale=0.2, rope=None, window=window, softcap=softcap)
    length, num_heads, kv_heads, dim, page = 150, 6, 2, 64, 32
    q = torch.randn(length, num_heads, dim, generator=generator).to(cuda, torch.bfloat16)
    k, v = torch.randn(2, length, kv_heads, dim, generator=generator).to(cuda, torch.bfloat16)
    spans = [ordered_attention.Span(0, length, position=0, begin=0)]
    tiles = ordered_attention.tiles_of(spans, num_heads // kv_heads, cuda)
    whole, normalizers = ordered_attention.attend_packed(spec, q, k, v, tiles)
    expected = invariant.attend(
        spec,
        q[None].float(),
        k.transpose(0, 1).float(),
        v.transpose(0, 1).float(),
        torch.arange(length, device=cuda)[None],
    )[0]
    torch.testing.assert_close(whole.float(), expected, rtol=0.02, atol=0.02)
    assert normalizers.isfinite().all()
    # The same keys and values in the blocks of a cache, in any order, and queries by themselves.
    order = torch.randperm(8, generator=generator)[: -(-length // page)].to(cuda)
    keys, values = torch.zeros(2, 1, 8, kv_heads, page, dim, device=cuda, dtype=torch.bfloat16)
    for source, target in ((k, keys), (v, values)):
        padded = torch.nn.functional.pad(source, (0, 0, 0, 0, 0, -length % page))
        target[0, order] = padded.view(-1, page, kv_heads, dim).transpose(1, 2)
    for start, stop in [(0, 1), (63, 64), (64, 65), (5, 70), (149, 150), (0, 150)]:
        span = ordered_attention.Span(0, stop - start, position=start, begin=0)
        part = ordered_attention.tiles_of([span], num_heads // kv_heads, cuda)
        found = ordered_attention.attend_cached(
            spec, q[start:stop], keys, values, order.to(torch.int32), 0, part
        )
        assert torch.equal(found, whole[start:stop]), (start, stop)


def test_a_library_that_divides_sums_is_refused(cuda: torch.device) -> None:
    """The check must be able to fail: with the default settings some shapes are divided."""
    weight = torch.randn(1024, 12288, device=cuda, dtype=torch.bfloat16)
    with pytest.raises(EngineError, match="1024 x 12288"):
        invariant.check_cuda(weight)
    invariant.prepare_cuda()
    invariant.check_cuda(weight)
