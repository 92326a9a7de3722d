"""Adapters: where their weights lie, how they start, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tinsmith.engine.local.model.adapted_linear import lora_linear
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import (
    Adapter,
    AdapterPool,
    AdapterSegments,
    GradientBuffer,
)
from tinsmith.errors import EngineError
from tinsmith.types import LoraConfig


@pytest.fixture
def pool(tiny_decoder: Decoder) -> AdapterPool:
    return AdapterPool(tiny_decoder.config, torch.device("cpu"), torch.float32)


def test_a_new_adapter_has_a_as_peft_draws_it_and_b_zero(pool: AdapterPool) -> None:
    adapter = pool.create("tiny", LoraConfig(rank=8, seed=3))
    for name, tensor in adapter.named_tensors():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            bound = 1 / math.sqrt(tensor.shape[1])
            assert tensor.abs().max() <= bound
            assert tensor.abs().max() > 0.9 * bound
            assert abs(tensor.mean()) < 0.2 * bound


def test_equal_seeds_give_equal_weights_and_others_do_not(pool: AdapterPool) -> None:
    first, again, other = (pool.create("tiny", LoraConfig(rank=4, seed=s)) for s in (5, 5, 6))
    assert torch.equal(first.flat, again.flat)
    assert not torch.equal(first.flat, other.flat)


def test_names_and_shapes_are_those_of_peft(pool: AdapterPool) -> None:
    adapter = pool.create("tiny", LoraConfig(rank=4, seed=0))
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.named_tensors()}
    layer = "base_model.model.model.layers.1."
    assert shapes[layer + "self_attn.q_proj.lora_A.weight"] == (4, 32)
    assert shapes[layer + "self_attn.k_proj.lora_B.weight"] == (32, 4)
    assert shapes[layer + "mlp.down_proj.lora_A.weight"] == (4, 48)
    assert shapes["base_model.model.lm_head.lora_B.weight"] == (97, 4)
    assert len(shapes) == 2 * (2 * 7 + 1)
    assert sum(math.prod(shape) for shape in shapes.values()) == adapter.flat.numel()


def test_named_tensors_are_views_that_together_are_the_flat_vector(pool: AdapterPool) -> None:
    adapter = pool.create("tiny", LoraConfig(rank=4, seed=0))
    for _, tensor in adapter.named_tensors():
        tensor.fill_(1.0)
    assert torch.equal(adapter.flat, torch.ones_like(adapter.flat))


def test_a_part_that_is_switched_off_has_no_tensors(pool: AdapterPool) -> None:
    adapter = pool.create("tiny", LoraConfig(rank=4, seed=0, train_mlp=False))
    modules = {name.split(".lora_")[0] for name, _ in adapter.named_tensors()}
    assert "base_model.model.model.layers.1.self_attn.v_proj" in modules
    assert "base_model.model.lm_head" in modules
    assert not [module for module in modules if ".mlp." in module]


def test_the_scale_is_32_over_the_rank(pool: AdapterPool) -> None:
    assert pool.create("tiny", LoraConfig(rank=4)).scale == 8
    assert pool.create("tiny", LoraConfig(rank=64)).scale == 0.5


def test_an_adapter_that_trains_nothing_is_refused(pool: AdapterPool) -> None:
    nothing = LoraConfig(rank=4, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(EngineError, match="at least one"):
        pool.create("tiny", nothing)


def test_the_memory_of_a_gradient_is_used_for_the_next_and_counts_until_it_is_given_back(
    pool: AdapterPool,
) -> None:
    adapter = pool.create("tiny", LoraConfig(rank=4, seed=0))
    row = adapter.flat.nbytes
    adapter.grad = adapter.new_gradient().fill_(torch.nan)
    place = adapter.grad.data_ptr()
    adapter.drop_gradient()
    assert adapter.grad is None
    assert pool.nbytes == 2 * row
    again = adapter.new_gradient()
    assert again.data_ptr() == place
    assert not again.any(), "nothing of the last one is left"
    assert adapter.new_gradient().data_ptr() != place, "it is used once"
    adapter.grad = again
    adapter.drop_gradient()
    pool.drop_spares()
    assert pool.nbytes == row


def test_memory_follows_the_adapters_in_use(pool: AdapterPool) -> None:
    lora = LoraConfig(rank=4, seed=0)
    adapters = [pool.create("tiny", lora) for _ in range(4)]
    row = adapters[0].flat.nbytes
    assert pool.nbytes <= 5 * row
    assert all(adapter.nbytes == row for adapter in adapters)
    for adapter in adapters[1:]:
        pool.release(adapter)
    reused = pool.create("tiny", lora)
    assert pool.nbytes <= 5 * row
    pool.release(reused)
    pool.release(adapters[0])
    assert pool.nbytes == 0


def test_adapters_keep_their_weights_while_others_are_made(pool: AdapterPool) -> None:
    adapters = [pool.create("tiny", LoraConfig(rank=2, seed=seed)) for seed in range(9)]
    for seed, adapter in enumerate(adapters):
        fresh = pool.create("tiny", LoraConfig(rank=2, seed=seed))
        assert torch.equal(adapter.flat, fresh.flat)
        a, _ = adapter.weights()[0, "qkv"]
        assert a.data_ptr() == adapter.flat.data_ptr()


def test_a_copy_does_not_follow_its_original(pool: AdapterPool) -> None:
    original = pool.create("tiny", LoraConfig(rank=2, seed=1))
    copy = pool.copy(original)
    before = copy.flat.clone()
    original.flat.add_(1.0)
    assert torch.equal(copy.flat, before)


def test_a_released_adapter_cannot_be_used(pool: AdapterPool) -> None:
    adapter = pool.create("tiny", LoraConfig(rank=2))
    pool.release(adapter)
    with pytest.raises(EngineError, match="released"):
        _ = adapter.flat


def test_segments_of_a_subset_keep_each_row_with_its_adapter(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    first, second = new_adapter(tiny_decoder), new_adapter(tiny_decoder)
    segments = AdapterSegments([(0, 3, first), (3, 5, None), (5, 9, second)])
    subset = segments.gather(torch.tensor([1, 2, 4, 5, 8, 0]))
    assert subset.runs == ((0, 2, first), (2, 3, None), (3, 5, second), (5, 6, first))
    assert segments.gather(torch.tensor([], dtype=torch.int64)).runs == ()


@pytest.mark.parametrize("needs_input", [False, True])
def test_the_product_and_its_gradients_equal_autograd_on_explicit_weights(
    needs_input: bool, tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    """Relative tolerance 1e-5, for the fused projection with three modules and a bias."""
    torch.manual_seed(0)
    weight, bias = torch.randn(128, 32), torch.randn(128)
    x = torch.randn(10, 32, requires_grad=needs_input)
    adapters = [new_adapter(tiny_decoder, rank=rank, fill_seed=rank) for rank in (3, 5)]
    buffers = [GradientBuffer(a.layout, torch.zeros_like(a.flat)) for a in adapters]
    runs = [(0, 4, adapters[0]), (4, 6, None), (6, 10, adapters[1])]
    segments = AdapterSegments(runs, [buffers[0], None, buffers[1]])
    y = lora_linear(x, Linear(weight, bias), segments, 0, "qkv")
    upstream = torch.randn_like(y)
    y.backward(upstream)

    plain = x.detach().clone().requires_grad_()
    expected = []
    leaves = []
    for start, stop, adapter in runs:
        part = plain[start:stop]
        total = part @ weight.t() + bias
        if adapter is not None:
            for target, columns in (("q", (0, 64)), ("k", (64, 96)), ("v", (96, 128))):
                named = dict(adapter.named_tensors())
                module = f"base_model.model.model.layers.0.self_attn.{target}_proj"
                a, b = (
                    named[f"{module}.lora_{part}.weight"].clone().requires_grad_() for part in "AB"
                )
                update = torch.zeros(128, 32)
                update[slice(*columns)] = adapter.scale * b @ a
                total = total + part @ update.t()
                leaves.append((adapter, target, a, b))
        expected.append(total)
    reference = torch.cat(expected)
    reference.backward(upstream)
    torch.testing.assert_close(y, reference, atol=1e-5, rtol=1e-5)
    if needs_input:
        torch.testing.assert_close(x.grad, plain.grad, atol=1e-4, rtol=1e-5)
    for adapter, target, a, b in leaves:
        into = buffers[adapters.index(adapter)].views[0, "qkv"]
        index = "qkv".index(target)
        rows = slice(index * adapter.rank, (index + 1) * adapter.rank)
        torch.testing.assert_close(into.a[rows], a.grad, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(into.b[index], b.grad, atol=1e-4, rtol=1e-5)
