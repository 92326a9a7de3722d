"""Each Triton kernel against the plain torch that runs where there is none.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model import pointwise
from tinsmith.engine.local.model.adapted_linear import forward, lora_linear
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts.clamped_swiglu import ClampedSwiglu
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import AdapterPool, AdapterSegments, GradientBuffer
from tinsmith.engine.local.model.rope import Rope, Rotation
from tinsmith.engine.local.sample.choosing import Distributions, uniforms
from tinsmith.types import LoraConfig

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]

# The interpreter has no products of bfloat16.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call a function as if there were no kernels, in float32."""

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "are_usable", lambda x: False)
            return function(*(_widen(argument) for argument in arguments))

    return call


def _widen(argument: Any) -> Any:
    if isinstance(argument, Rotation):
        return Rotation(argument.cos.float(), argument.sin.float(), argument.distance)
    if isinstance(argument, tuple):
        return tuple(_widen(part) for part in argument)
    return argument.float() if isinstance(argument, Tensor) else argument


def assert_close(actual: Any, expected: Any) -> None:
    """Within 1e-5 of the largest number in float32, 1e-2 in half precision."""
    if isinstance(actual, tuple):
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other)
        return
    relative = 1e-5 if actual.dtype == torch.float32 else 1e-2
    assert actual.shape == expected.shape
    assert (actual.float() - expected).abs().max() <= relative * expected.abs().max()


@DTYPES
@pytest.mark.parametrize("size", [24, 96])
def test_norm(
    size: int, dtype: torch.dtype, device: torch.device, plainly: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    x, grad, residual = torch.randn(3, 7, size, device=device, dtype=dtype)
    weight = torch.randn(size, device=device, dtype=dtype)
    assert_close(
        pointwise.rms_norm(x, weight, 1e-5),
        plainly(pointwise.rms_norm, x, weight, 1e-5),
    )
    for given in (residual, None):
        arguments = (grad, x, weight, 1e-5, given)
        assert_close(
            pointwise.rms_norm_backward(*arguments),
            plainly(pointwise.rms_norm_backward, *arguments),
        )


def test_norm_of_a_stream_in_float32(
    device: torch.device, plainly: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What products read, and gradients for them, are in half precision; also without kernels."""
    torch.manual_seed(0)
    x = torch.randn(7, 96, device=device)
    grad, residual = torch.randn(2, 7, 96, device=device, dtype=HALF)
    weight = torch.randn(96, device=device, dtype=HALF)
    expected = plainly(pointwise.rms_norm, x, weight, 1e-5)
    expected_grad, _ = plainly(pointwise.rms_norm_backward, grad, x, weight, 1e-5, residual)
    for has_kernels in (True, False):
        if not has_kernels:
            monkeypatch.setattr(kernels, "are_usable", lambda x: False)
        y = pointwise.rms_norm(x, weight, 1e-5, HALF)
        grad_x, again = pointwise.rms_norm_backward(grad, x, weight, 1e-5, residual)
        assert y.dtype == grad_x.dtype == again.dtype == HALF
        assert_close((y, grad_x, again), (expected, expected_grad, expected))
        grad_x, _ = pointwise.rms_norm_backward(grad, x, weight, 1e-5, residual, torch.float32)
        assert_close(grad_x, expected_grad)  # to the precision of float32
        leaf = x.clone().requires_grad_()
        pointwise.differentiable_rms_norm(leaf, weight, 1e-5, HALF).backward(grad)
        assert leaf.grad is not None
        assert_close(leaf.grad + residual, expected_grad)


@DTYPES
@pytest.mark.parametrize("size", [8, 24, 5000])
def test_gated_norm(
    size: int, dtype: torch.dtype, device: torch.device, plainly: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    y, gate, grad = torch.randn(3, 7, 3 * size, device=device, dtype=dtype)
    weight = torch.randn(size, device=device, dtype=dtype)
    assert_close(
        pointwise.gated_norm(y, gate, weight, 1e-5),
        plainly(pointwise.gated_norm, y, gate, weight, 1e-5),
    )
    arguments = (grad, y, gate, weight, 1e-5)
    assert_close(
        pointwise.gated_norm_backward(*arguments),
        plainly(pointwise.gated_norm_backward, *arguments),
    )


@DTYPES
@pytest.mark.parametrize("distance", [8, 3])
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads(
    has_norms: bool,
    distance: int,
    dtype: torch.dtype,
    device: torch.device,
    plainly: Callable[..., Any],
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(7, (3 + 2) * 16, device=device, dtype=dtype)
    angles = torch.randn(7, 1, 8, device=device)
    angles[..., distance:] = 0
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), distance)
    weights = torch.randn(2, 16, device=device, dtype=dtype)
    norms = (weights[0], weights[1]) if has_norms else None
    arguments = (qkv, norms, rotation, 1, 1e-5)
    assert_close(pointwise.apply_rope(*arguments), plainly(pointwise.apply_rope, *arguments))
    # Strided, as attention's own gradients may be.
    grads = torch.randn(7, 5, 16, device=device, dtype=dtype).split((3, 1, 1), dim=1)
    backward = (grads, qkv, norms, rotation, 1e-5)
    assert_close(
        pointwise.apply_rope_backward(*backward),
        plainly(pointwise.apply_rope_backward, *backward),
    )


def test_heads_of_positions_on_three_axes(
    device: torch.device, plainly: Callable[..., Any]
) -> None:
    """Also where all dimensions of a head are rotated, and nothing is put behind the angles."""
    torch.manual_seed(0)
    qkv = torch.randn(7, (3 + 2) * 16, device=device)
    rope = Rope(theta=100.0, head_dim=16, sections=(3, 3, 2))
    positions = torch.randint(50, (3, 7), device=device)
    rotation = rope.rotation(rope.inverse_frequencies().to(device), positions, torch.float32)
    arguments = (qkv, None, rotation, 1, 1e-5)
    assert_close(pointwise.apply_rope(*arguments), plainly(pointwise.apply_rope, *arguments))


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedSwiglu(1.702, 0.7)])
def test_gate(
    activation: pointwise.Activation,
    dtype: torch.dtype,
    device: torch.device,
    plainly: Callable[..., Any],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2 * 1030, device=device, dtype=dtype)
    grad = torch.randn(5, 1030, device=device, dtype=dtype)
    assert_close(pointwise.swiglu(x, activation), plainly(pointwise.swiglu, x, activation))
    arguments = (grad, x, activation)
    assert_close(
        pointwise.swiglu_backward(*arguments), plainly(pointwise.swiglu_backward, *arguments)
    )


@DTYPES
def test_scores(dtype: torch.dtype, device: torch.device) -> None:
    """Two blocks of the vocabulary, the second not full; and a row that is not finite."""
    scores = kernels.module("scores")
    torch.manual_seed(0)
    logits = (torch.randn(4, 9001, device=device) * 3).to(dtype)
    targets = torch.tensor([0, 9000, 8191, 8192], device=device)
    upstream = torch.randn(4, device=device)
    leaf = logits.float().clone().requires_grad_()
    expected = leaf.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
    expected.backward(upstream)
    values, normalizers = scores.target_logprobs(logits, targets)
    assert_close(values, expected.detach())
    if dtype == torch.float32:  # as products read it, the logits are left as they are
        assert_close(scores.gradient(logits, targets, normalizers, upstream, HALF), leaf.grad)
    found = scores.gradient(logits, targets, normalizers, upstream, dtype)
    assert found is logits
    assert_close(logits, leaf.grad)
    logits[1, 5] = float("nan")
    values, _ = scores.target_logprobs(logits, targets)
    assert values.isfinite().tolist() == [True, False, True, True]


@DTYPES
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("ranks", [(16, 16, 16), (4, 2, 7), (3, 3, 140)])
def test_linear_layers_under_adapters(
    ranks: tuple[int, ...],
    is_split: bool,
    dtype: torch.dtype,
    device: torch.device,
    tiny_decoder: Decoder,
    plainly: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward, backward and the adapters' gradients, on a projection of three modules."""
    low_rank = kernels.module("low_rank")
    divide_rows = functools.partial(low_rank.divide_rows, chunk_rows=2 if is_split else 1 << 20)
    monkeypatch.setattr(low_rank, "divide_rows", divide_rows)
    torch.manual_seed(0)
    weight = torch.randn(128, 32, device=device, dtype=dtype)
    x = torch.randn(12, 32, device=device, dtype=dtype)
    upstream = torch.randn(12, 128, device=device, dtype=dtype)
    filling = torch.Generator().manual_seed(1)
    noise: dict[int, list[Tensor]] = {}

    def run(wide: bool) -> list[Tensor]:
        inner_dtype = torch.float32 if wide else dtype
        pool = AdapterPool(tiny_decoder.config, device, inner_dtype)
        adapters = [pool.create("tiny", LoraConfig(rank=rank)) for rank in ranks]
        for n, adapter in enumerate(adapters):
            if n not in noise:
                values = torch.randn(adapter.layout.size, generator=filling) * 0.1
                noise[n] = [values.to(dtype).float()]
            adapter.flat.copy_(noise[n][0])
        buffers = [GradientBuffer(a.layout, torch.ones_like(a.flat)) for a in adapters]
        runs = [(0, 3, adapters[0]), (3, 5, None), (5, 9, adapters[1]), (9, 12, adapters[2])]
        segments = AdapterSegments(runs, [buffers[0], None, None, buffers[2]])
        leaf = x.to(inner_dtype).requires_grad_()
        y = lora_linear(leaf, Linear(weight.to(inner_dtype)), segments, 0, "qkv")
        y.backward(upstream.to(inner_dtype))
        assert leaf.grad is not None
        assert torch.equal(buffers[1].flat, torch.ones_like(buffers[1].flat))
        return [y.detach(), leaf.grad, buffers[0].flat, buffers[2].flat]

    expected = plainly(run, True)
    for ours, wanted in zip(run(False), expected, strict=True):
        relative = 1e-5 if dtype == torch.float32 else 1e-2
        assert (ours.float() - wanted).abs().max() <= relative * wanted.abs().max()


@pytest.mark.parametrize("kind", ["one", "two", "none"])
def test_a_product_joins_a_float32_stream_without_being_rounded(
    kind: str, device: torch.device, tiny_decoder: Decoder
) -> None:
    """Under one adapter, under two of other ranks, under none."""
    torch.manual_seed(0)
    pool = AdapterPool(tiny_decoder.config, device, HALF)
    adapters = [pool.create("tiny", LoraConfig(rank=rank)) for rank in (16, 4)]
    for adapter in adapters:
        adapter.flat.copy_(torch.randn(adapter.layout.size) * 0.1)
    one, two = adapters
    cuts = {"one": [(0, 12, one)], "two": [(0, 5, one), (5, 12, two)], "none": [(0, 12, None)]}
    segments = AdapterSegments(cuts[kind])
    key = (0, "o")
    outputs, inputs = tiny_decoder.layers[0].o.shape
    weight, x = (torch.randn(n, inputs, device=device).to(HALF) for n in (outputs, 12))
    bias = torch.randn(outputs, device=device).to(HALF)
    stream = torch.randn(12, outputs, device=device) * 30
    linear = Linear(weight, bias)
    y, inners = forward(x, linear, segments, key, stream)
    # What A leaves is rounded, as ever.
    expected = stream + x.float() @ weight.float().t() + bias.float()
    of_groups = iter(inners)
    for start, stop, adapter in cuts[kind]:
        if adapter is not None:
            (b,) = adapter.weights()[key].b
            expected[start:stop] += next(of_groups)[start:stop].float() @ b.float().t()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, atol=2e-5, rtol=2e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, in the interpreter's numpy
@pytest.mark.parametrize("vocabulary", [300, 5000])
@DTYPES
def test_draws_are_the_choices_from_whole_rows(
    vocabulary: int, dtype: torch.dtype, device: torch.device
) -> None:
    """One chunk of the vocabulary, and several; greedy rows, rows without a number, with masks."""
    count = 24
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(5)) * 3
    logits[3, vocabulary // 3 :] = -torch.inf
    logits[7, vocabulary - 1] = torch.nan
    logits[11] = -torch.inf
    logits[12, 5] = torch.inf
    temperature = np.resize([1.0, 0.0, 0.7, 2.5], count)
    numbers = uniforms(np.arange(count), np.arange(count), np.arange(count))
    rounded = logits.to(dtype)
    drawn = kernels.module("decode_choice").draw(
        rounded.to(device),
        torch.from_numpy(temperature).to(device),
        torch.from_numpy(numbers).to(device),
    )
    spread = Distributions(rounded.float(), temperature)
    wanted = spread.choose(np.arange(count), numbers)
    tokens, logprobs, is_finite = drawn.facts.cpu()
    usable = [row for row in range(count) if row not in (7, 11, 12)]
    assert np.flatnonzero(is_finite).tolist() == usable
    assert tokens[usable].tolist() == wanted[usable].tolist()
    assert torch.equal(drawn.tokens.cpu()[usable], wanted[usable])
    expected = spread.logprobs(np.arange(count), wanted)[usable]
    torch.testing.assert_close(logprobs.float()[usable], expected, atol=1e-5, rtol=0)
