"""The kernels for experts against the plain torch that runs where there are none.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.experts.products import Batch, Down, Up
from tinsmith.engine.local.model.experts.routing import Routing
from tinsmith.engine.local.model.experts.weights import ExpertWeights
from tinsmith.engine.local.model.lora import AdapterPool, AdapterSegments, GradientBuffer
from tinsmith.engine.local.model.quantized import QuantizedStack
from tinsmith.engine.local.model.settings import decoder_config
from tinsmith.types import LoraConfig

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
    # What an adapter's rows leave of a tensor holds anything, and the interpreter computes with it.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

# The interpreter has no products of bfloat16.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
HIDDEN, INNER, NUM_EXPERTS, NUM_TOKENS = 40, 24, 6, 14
CONFIG = decoder_config(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 8,
        "hidden_size": HIDDEN,
        "intermediate_size": 8,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
    }
)
LORAS = (
    LoraConfig(rank=8),
    LoraConfig(rank=3),
    LoraConfig(rank=8),
    LoraConfig(rank=8, train_mlp=False),
)
"""Two of one layout, one that no wide load fits, and one that leaves experts alone."""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


def random(*shape: int, seed: int) -> Tensor:
    """Numbers that half precision has too."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(HALF).float()


def results(dtype: torch.dtype, device: torch.device, *, is_interleaved: bool) -> dict[str, Tensor]:
    """Both products and all their gradients, under several adapters, some rows under none."""
    pool = AdapterPool(CONFIG, device, dtype)
    adapters = []
    for seed, lora in enumerate(LORAS):
        adapter = pool.create_empty("tiny", lora)
        adapter.flat.copy_(random(adapter.layout.size, seed=seed) / 4)
        adapters.append(adapter)
    buffers = [GradientBuffer(each.layout, torch.ones_like(each.flat)) for each in adapters]
    a, b, c, d = adapters
    runs = [(0, 5, a), (5, 6, None), (6, 8, b), (8, 12, c), (12, 14, d)]
    segments = AdapterSegments(runs, [buffers[0], None, buffers[1], None, buffers[3]])

    def given(*shape: int, seed: int) -> Tensor:
        return random(*shape, seed=seed).to(device, dtype)

    # The last expert has no row.
    scores = random(NUM_TOKENS, NUM_EXPERTS - 1, seed=9)
    routing = Routing(scores.topk(2).indices.to(device), NUM_EXPERTS)
    batch = Batch(routing, segments)
    halves = (slice(INNER), slice(INNER, None))
    columns = (slice(0, None, 2), slice(1, None, 2)) if is_interleaved else halves
    weight, bias = given(NUM_EXPERTS, HIDDEN, 2 * INNER, seed=10), given(6, 2 * INNER, seed=11)
    x = given(NUM_TOKENS, HIDDEN, seed=12)
    up = Up(x, ExpertWeights(weight, bias, columns), batch, (0, "experts_up"))
    y, inners = up.forward(x)
    found = {"up": y, "up x": up.backward(given(*y.shape, seed=13), x, inners)}
    # As files have them: outputs before inputs.
    weight = given(NUM_EXPERTS, HIDDEN, INNER, seed=14).transpose(1, 2)
    bias = given(NUM_EXPERTS, HIDDEN, seed=18)
    x, shares = given(routing.num_rows, INNER, seed=15), random(NUM_TOKENS, 2, seed=16).to(device)
    down = Down(x, ExpertWeights(weight, bias, (slice(None),)), batch, (0, "experts_down"))
    y, inners = down.forward(x, shares)
    grad = given(*y.shape, seed=17)
    found |= {"down": y}
    found["down x"], found["shares"] = down.backward(grad, x, shares, inners)
    return found | {f"adapter {n}": buffer.flat for n, buffer in enumerate(buffers)}


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
def test_products_of_experts_and_their_gradients(
    dtype: torch.dtype, is_interleaved: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results(dtype, device, is_interleaved=is_interleaved)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "are_usable", lambda x: False)
        expected = results(torch.float32, device, is_interleaved=is_interleaved)
    relative = 1e-5 if dtype == torch.float32 else 2e-2
    for name, wanted in expected.items():
        difference = (found[name].float() - wanted).abs().max()
        assert difference <= relative * wanted.abs().max(), name
    # An adapter without gradients, and one that leaves experts alone.
    for untouched in ("adapter 2", "adapter 3"):
        assert torch.equal(found[untouched], torch.ones_like(found[untouched]))


class Sizes(TorchDispatchMode):  # type: ignore[misc]  # torch is unannotated here
    """Takes down how many numbers each tensor has that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point():
            self.found.add(made.numel())
        return made


def test_nothing_is_made_that_holds_several_adapters_or_their_gradients(
    device: torch.device,
) -> None:
    """With experts those are large: eight of rank 32 have a quarter of the base's memory."""
    size = AdapterPool(CONFIG, device, HALF).create_empty("tiny", LORAS[0]).layout.size
    with Sizes() as sizes:
        results(torch.float32, device, is_interleaved=False)
    assert {made // size for made in sizes.found if made % size == 0} <= {0, 1}


@pytest.mark.parametrize("num_tokens", [1, 60])
def test_a_product_of_rounded_experts_is_that_of_the_full_ones(
    num_tokens: int, device: torch.device
) -> None:
    """Some experts at a time; with rows gathered, biased where asked, and backward."""
    matrices = random(NUM_EXPERTS, INNER, HIDDEN, seed=1).to(device)
    bias = random(NUM_EXPERTS, INNER, seed=4).to(device)
    weights = ExpertWeights(QuantizedStack(matrices, "int8"), bias, (slice(None),))
    scores = random(num_tokens, NUM_EXPERTS, seed=2)
    routing = Routing(scores.topk(3).indices.to(device), NUM_EXPERTS)
    x, grad = (random(num_tokens, n, seed=3).to(device) for n in (HIDDEN, INNER))
    step = matrices.abs().amax(dim=2, keepdim=True) / 127
    dense = (matrices / step).round() * step
    chosen = dense[routing.experts]
    forward = weights.gathered_product(x, routing, routing.tokens)
    expected = torch.einsum("soi,si->so", chosen, routing.expanded(x))
    torch.testing.assert_close(forward, expected, atol=1e-4, rtol=1e-4)
    biased = weights.gathered_product(x, routing, routing.tokens, is_biased=True)
    expected = expected + bias[routing.experts]
    torch.testing.assert_close(biased, expected, atol=1e-4, rtol=1e-4)
    back = weights.product(routing.expanded(grad), routing, back=True)
    expected = torch.einsum("soi,so->si", chosen, routing.expanded(grad))
    torch.testing.assert_close(back, expected, atol=1e-4, rtol=1e-4)
