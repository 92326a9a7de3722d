"""Attention with sinks, against a softmax with one more key: outputs, gradients and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.model.test_batch import attention_config
from tinsmith.engine.local.model.attention.sinks import attend, take_share
from tinsmith.engine.local.model.batch import (
    Bounds,
    PackedAttention,
    causal_mask,
    packed_attention,
)
from tinsmith.engine.local.model.families import AttentionSpec

HEADS, KV_HEADS, DIM = 4, 2, 16
SINKS = torch.tensor([0.5, -1.0, 2.0, 8.0])
"""The last takes nearly all of a head."""

WINDOWS = pytest.mark.parametrize("window", [None, 5], ids=["whole", "window"])


def by_hand(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor = SINKS) -> Tensor:
    """(n, H, D) of one sequence's last n queries, with the sink as a column of the scores."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    hidden = ~causal_mask(len(k), window, q.device)[len(k) - len(q) :]
    scores = scores.masked_fill(hidden, -torch.inf)
    column = sinks.to(q)[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat([scores, column], dim=2).softmax(dim=2)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v)


def spec_of(window: int | None) -> AttentionSpec:
    return AttentionSpec(scale=0.3, rope=None, window=window)


def random(num_tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_tokens, heads, DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return list(torch.autograd.grad(out, leaves, upstream.to(out)))


@WINDOWS
def test_packed_sequences_have_the_outputs_and_gradients_of_one_more_key(
    window: int | None,
) -> None:
    """Sequences of several blocks of queries and of less than one; within 1e-5."""
    lengths = [300, 300, 1, 128, 3]
    leaves = [part.requires_grad_() for part in random(sum(lengths))]
    out = PackedAttention(attention_config(spec_of(window)), lengths)(0, *leaves, SINKS)
    parts = zip(*(part.split(lengths) for part in leaves), strict=True)
    expected = torch.cat([by_hand(*part, window) for part in parts])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    found, wanted = gradients(out, leaves), gradients(expected, leaves)
    for actual, of_reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, of_reference, atol=3e-5, rtol=1e-5)


@WINDOWS
def test_the_last_queries_of_a_sequence_may_attend_alone(window: int | None) -> None:
    q, k, v = random(230)
    batch = [x.transpose(0, 1)[None] for x in (q[-150:], k, v)]
    out = attend(spec_of(window), batch[0], batch[1], batch[2], SINKS)[0].transpose(0, 1)
    expected = by_hand(q[-150:], k, v, window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_kernel_without_sinks_gives_both_directions_once_it_knows_what_they_leave() -> None:
    """That is how CUDA's kernels are used; here with the one that torch has for the CPU."""
    leaves = [part.requires_grad_() for part in random(20)]
    q, k, v = (
        x.detach().repeat_interleave(HEADS // x.shape[1], dim=1).transpose(0, 1)[None]
        for x in leaves
    )
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, normalizers = flash(q, k, v, 0.0, True, scale=0.3)
    out = out.contiguous()
    take_share(out, normalizers, SINKS)
    expected = by_hand(*leaves, None)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = backward(upstream, q, k, v, out, normalizers, 0.0, True, scale=0.3)
    wanted = torch.autograd.grad(expected, leaves, upstream[0].transpose(0, 1))
    for actual, of_reference in zip(found, wanted, strict=True):
        # Of heads that share keys, the gradients add up.
        heads = actual[0].transpose(0, 1)
        summed = heads.unflatten(1, (of_reference.shape[1], -1)).sum(dim=2)
        torch.testing.assert_close(summed, of_reference, atol=1e-5, rtol=1e-5)


class Largest(TorchDispatchMode):  # type: ignore[misc]  # torch is unannotated here
    """Takes down how many numbers the largest tensor has that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.found = max(self.found, tensor.numel())
        return made


def test_nothing_grows_with_the_square_of_a_sequences_length() -> None:
    largest = []
    for length in (512, 1024):
        leaves = [part.requires_grad_() for part in random(length)]
        with Largest() as made:
            out = PackedAttention(attention_config(spec_of(None)), [length])(0, *leaves, SINKS)
            gradients(out, leaves)
        largest.append(made.found)
    assert largest[1] <= 2 * largest[0] < 512 * 512 * HEADS


@pytest.mark.gpu
@WINDOWS
@pytest.mark.parametrize("lengths", [[128] * 3, [100, 1, 61]], ids=["even", "ragged"])
def test_on_cuda_outputs_and_gradients_are_those_of_one_more_key(
    lengths: list[int], window: int | None, cuda: torch.device
) -> None:
    """bfloat16 against float32: within 2e-2 of the norm. Those of one length may go through another
    kernel."""
    rounded = [part.bfloat16() for part in random(sum(lengths))]
    leaves = [part.to(cuda).requires_grad_() for part in rounded]
    attention = PackedAttention(attention_config(spec_of(window)), lengths)
    out = attention(0, *leaves, SINKS.to(cuda))
    exact = [part.float().requires_grad_() for part in rounded]
    parts = zip(*(part.split(lengths) for part in exact), strict=True)
    expected = torch.cat([by_hand(*part, window) for part in parts])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    found = [out, *torch.autograd.grad(out, leaves, upstream.to(cuda))]
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream.float())]
    for actual, of_reference in zip(found, wanted, strict=True):
        difference = actual.detach().float().cpu() - of_reference
        assert difference.norm() <= 2e-2 * of_reference.norm()


@pytest.mark.gpu
@WINDOWS
def test_on_cuda_the_last_queries_of_packed_sequences_may_attend_alone(
    window: int | None, cuda: torch.device
) -> None:
    lengths, num_last = [100, 1, 61, 40], [1, 1, 60, 40]
    rounded = [part.bfloat16() for part in random(sum(lengths))]
    q, k, v = (part.split(lengths) for part in rounded)
    last = [x[-n:] for x, n in zip(q, num_last, strict=True)]
    expected = torch.cat(
        [by_hand(*(x.float() for x in part), window) for part in zip(last, k, v, strict=True)]
    )
    out = packed_attention(
        spec_of(window),
        torch.cat(last).to(cuda),
        *(part.to(cuda) for part in rounded[1:]),
        Bounds.of(num_last, cuda),
        Bounds.of(lengths, cuda),
        SINKS.to(cuda),
    )
    assert (out.float().cpu() - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.gpu
@WINDOWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_on_cuda_a_long_sequence_takes_memory_for_its_tokens_alone(
    dtype: torch.dtype, window: int | None, cuda: torch.device
) -> None:
    """Scores of all pairs would take 17 GB in float32."""
    length = 32_768
    leaves = [part.to(cuda, dtype).requires_grad_() for part in random(length)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = PackedAttention(attention_config(spec_of(window)), [length])(0, *leaves, SINKS.to(cuda))
    assert all(part.isfinite().all() for part in torch.autograd.grad(out.float().sum(), leaves))
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
