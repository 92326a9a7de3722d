"""Packing: which sequences share a micro-batch, in what order, and what they see."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tinsmith.engine.local.model.batch import (
    Bounds,
    Item,
    PackedAttention,
    causal_mask,
    packed_attention,
    plan,
)
from tinsmith.engine.local.model.families import AttentionSpec, DecoderConfig

SPEC = AttentionSpec(scale=0.3, rope=None)

items_of = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from("abc"), st.booleans()), max_size=30
).map(lambda rows: [Item(n, 0, *row) for n, row in enumerate(rows)])


@given(items_of, st.integers(1, 100))
def test_every_item_is_in_one_micro_batch_and_budgets_hold(items: list[Item], budget: int) -> None:
    batches = list(plan(items, max_tokens=lambda: budget))
    flat = [item for batch in batches for item in batch]
    assert sorted(flat, key=lambda item: item.pass_index) == items
    for batch in batches:
        assert len(batch) == 1 or sum(item.length for item in batch) <= budget
        assert len({item.forward_only for item in batch}) == 1
        adapters = [item.adapter_id for item in batch]
        changes = sum(a != b for a, b in itertools.pairwise(adapters))
        assert changes == max(len(set(adapters)) - 1, 0)


@given(items_of)
def test_one_by_one_keeps_the_order(items: list[Item]) -> None:
    batches = plan(items, max_tokens=lambda: 1000, one_by_one=True)
    assert list(batches) == [(item,) for item in items]


def test_items_of_one_adapter_are_neighbours_and_keep_their_order() -> None:
    rows = [(0, "a"), (1, "b"), (2, "a"), (3, "c"), (4, "b")]
    items = [Item(number, 0, 2, adapter) for number, adapter in rows]
    (batch,) = plan(items, max_tokens=lambda: 100)
    assert [item.pass_index for item in batch] == [0, 2, 1, 4, 3]


def test_items_that_keep_apart_come_last_and_only_with_those_of_their_pass() -> None:
    rows = [(0, True), (1, False), (2, True), (0, True), (1, False)]
    items = [Item(index, n, 2, "a", keeps_apart=apart) for n, (index, apart) in enumerate(rows)]
    batches = [[item.datum for item in batch] for batch in plan(items, max_tokens=lambda: 100)]
    assert batches == [[1, 4], [0, 3], [2]]


def test_a_window_counts_the_position_itself() -> None:
    mask = causal_mask(5, 2, torch.device("cpu"))
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def attention_config(spec: AttentionSpec) -> DecoderConfig:
    return DecoderConfig(
        architecture="test",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_context_length=100,
        norm_eps=1e-6,
        layers=(spec,),
    )


def test_packed_attention_equals_softmax_written_out_for_each_sequence() -> None:
    """Tolerance 1e-5."""
    torch.manual_seed(0)
    lengths = [7, 7, 1, 12, 7]
    q = torch.randn(34, 4, 8)
    k, v = torch.randn(34, 2, 8), torch.randn(34, 2, 8)
    for softcap in (None, 2.0):
        for window in (None, 3):
            spec = AttentionSpec(scale=0.3, rope=None, softcap=softcap, window=window)
            out = PackedAttention(attention_config(spec), lengths)(0, q, k, v)
            start = 0
            for length in lengths:
                for position in range(start, start + length):
                    first = start if window is None else max(start, position - window + 1)
                    for head in range(4):
                        keys = k[first : position + 1, head // 2]
                        scores = keys @ q[position, head] * 0.3
                        if softcap is not None:
                            scores = torch.tanh(scores / softcap) * softcap
                        expected = scores.softmax(0) @ v[first : position + 1, head // 2]
                        torch.testing.assert_close(
                            out[position, head], expected, atol=1e-5, rtol=1e-5
                        )
                start += length


@pytest.mark.parametrize("value_size", [8, 6], ids=["of one size", "values are smaller"])
def test_long_sequences_have_the_output_and_gradients_of_softmax_written_out(
    value_size: int,
) -> None:
    """In float64; tolerance 1e-5. Sequences of one length, and some shorter ones, go other ways."""
    torch.manual_seed(0)
    lengths = [300, 300, 5, 161]
    num_tokens = sum(lengths)
    sizes = ((4, 8), (2, 8), (2, value_size))
    inputs = [torch.randn(num_tokens, *size, requires_grad=True) for size in sizes]
    grad = torch.randn(num_tokens, 4, value_size)
    attention = PackedAttention(attention_config(SPEC), lengths)
    out = attention(0, *inputs)
    found = torch.autograd.grad(out, inputs, grad)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    parts = zip(*(x.split(lengths) for x in exact), strict=True)
    expected = torch.cat([written_out(*part) for part in parts])
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for actual, right in zip([out, *found], [expected, *wanted], strict=True):
        torch.testing.assert_close(actual.double(), right, atol=1e-5, rtol=1e-5)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence: q (n, 4, D), k and v with two heads."""
    keys, values = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * SPEC.scale
    is_later = torch.ones(len(q), len(q)).triu(1).bool()
    return (scores.masked_fill(is_later, -torch.inf).softmax(-1) @ values).transpose(0, 1)


def test_a_long_sequence_finds_the_same_bits_with_others_beside_it() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(700, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    alone, beside = (
        PackedAttention(attention_config(SPEC), lengths) for lengths in ([300], [200, 300, 200])
    )
    own = [x[200:500].detach().requires_grad_() for x in (q, k, v)]
    found, out = alone(0, *own), beside(0, q, k, v)
    assert torch.equal(found, out[200:500])
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for grad, with_others in zip(torch.autograd.grad(found.sum(), own), grads, strict=True):
        assert torch.equal(grad, with_others[200:500])


def test_long_sequences_find_the_same_bits_on_one_core_and_on_several() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(700, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    num_threads, found = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            out = PackedAttention(attention_config(SPEC), [700])(0, *inputs)
            found.append([out, *torch.autograd.grad(out.sum(), inputs)])
        finally:
            torch.set_num_threads(num_threads)
    for one, several in zip(*found, strict=True):
        assert torch.equal(one, several)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ([128] * 3, None),
        ([128] * 3, 30),
        ([100, 1, 61], None),
        ([100, 1, 61], 30),
        ([16_500], None),
    ],
    ids=["even", "even, windowed", "ragged", "ragged, windowed", "long"],
)
def test_packed_attention_on_cuda_has_the_output_and_gradients_of_the_cpu(
    lengths: list[int], window: int | None, cuda: torch.device
) -> None:
    """bfloat16 against float32: within 2e-2 of the norm."""
    torch.manual_seed(0)
    spec = AttentionSpec(scale=0.3, rope=None, window=window)
    num_tokens = sum(lengths)
    parts = [torch.randn(num_tokens, heads, 16).bfloat16() for heads in (4, 2, 2)]
    upstream = torch.randn(num_tokens, 4, 16).bfloat16()
    found = []
    for device, dtype in ((torch.device("cpu"), torch.float32), (cuda, torch.bfloat16)):
        leaves = [part.to(device, dtype).requires_grad_() for part in parts]
        out = PackedAttention(attention_config(spec), lengths)(0, *leaves)
        grads = torch.autograd.grad(out, leaves, upstream.to(device, dtype))
        found.append([tensor.detach().float().cpu() for tensor in (out, *grads)])
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 30])
def test_on_cuda_the_last_tokens_of_a_sequence_may_attend_alone(
    window: int | None, cuda: torch.device
) -> None:
    """bfloat16 against all tokens in float32: within 2e-2 of the norm."""
    torch.manual_seed(0)
    spec = AttentionSpec(scale=0.3, rope=None, window=window)
    lengths, num_last = [100, 1, 61, 40], [1, 1, 60, 40]
    parts = [torch.randn(sum(lengths), heads, 16).bfloat16() for heads in (4, 2, 2)]
    whole = PackedAttention(attention_config(spec), lengths)(0, *(part.float() for part in parts))
    is_last = torch.cat(
        [torch.arange(n) >= n - last for n, last in zip(lengths, num_last, strict=True)]
    )
    q, k, v = (part.to(cuda) for part in parts)
    out = packed_attention(
        spec, q[is_last.to(cuda)], k, v, Bounds.of(num_last, cuda), Bounds.of(lengths, cuda)
    )
    assert (out.float().cpu() - whole[is_last]).norm() <= 2e-2 * whole[is_last].norm()
