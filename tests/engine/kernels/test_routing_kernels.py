"""The kernels that route tokens to experts against the plain torch that runs where there are none.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.experts.clamped_swiglu import ClampedSwiglu
from tinsmith.engine.local.model.experts.mlp import ExpertMlp, ExpertPass
from tinsmith.engine.local.model.experts.router import Routed, Router
from tinsmith.engine.local.model.experts.routing import Routing, TokenAdapters
from tinsmith.engine.local.model.experts.steering import Steer
from tinsmith.engine.local.model.experts.weights import ExpertWeights
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.pointwise import Activation

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]

# The interpreter rounds to bfloat16 in a way of its own.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
SIZES = [(1, 8, 128), (7, 2, 6), (33, 8, 60), (64, 10, 512)]
"""Tokens, experts of each, and experts in all."""
if not IS_INTERPRETED:
    SIZES.append((256, 8, 128))

Found = TypeVar("Found")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Found]], Found]:
    def run(work: Callable[[], Found]) -> Found:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "are_usable", lambda x: False)
            return work()

    return run


def choices_of(num_tokens: int, per_token: int, num_experts: int) -> Tensor:
    """Some experts are chosen by many; the last one by none."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores[: num_tokens // 2, 0] = 2
    scores[:, -1] = -1
    return scores.topk(per_token).indices


@pytest.mark.parametrize("is_steered", [False, True])
@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(("num_tokens", "per_token", "num_experts"), SIZES)
def test_a_router_chooses_what_it_chooses_in_torch(
    num_tokens: int,
    per_token: int,
    num_experts: int,
    is_normalized: bool,
    is_steered: bool,
    device: torch.device,
    plainly: Callable[[Callable[[], Routed]], Routed],
) -> None:
    torch.manual_seed(0)
    router = Router(torch.randn(num_experts, 32, device=device), per_token, is_normalized)
    x = torch.randn(num_tokens, 32, device=device)
    given = choices_of(num_tokens, per_token, num_experts).to(device)
    steer: Steer | None = (lambda choices: given) if is_steered else None
    expected = plainly(lambda: router.forward(x, steer))
    for ours, wanted in zip(router.forward(x, steer), expected, strict=True):
        assert ours.dtype == wanted.dtype
        torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen(device: torch.device) -> None:
    """By whoever asks, of however many tokens: so a trainer chooses what its sampler chose."""
    choose = kernels.module("routing").choose
    logits = torch.zeros(5, 60, device=device)
    logits[1, 7:50] = 1
    _, choices, shares = choose(logits, 4, True)
    assert choices[:2].tolist() == [[0, 1, 2, 3], [7, 8, 9, 10]]
    assert torch.equal(shares, torch.full_like(shares, 0.25))
    assert torch.equal(choose(logits[1:2], 4, True)[1], choices[1:2])


def test_noting_the_choices_changes_no_share(device: torch.device) -> None:
    torch.manual_seed(0)
    router = Router(torch.randn(60, 32, device=device), 7, is_normalized=True)
    x = torch.randn(9, 32, device=device)
    for noted, plain in zip(router.forward(x, lambda c: c), router.forward(x), strict=True):
        assert torch.equal(noted, plain)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, in the interpreter's numpy
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_tokens_that_are_not_finite_go_to_experts_that_there_are(
    broken: float, device: torch.device
) -> None:
    logits = torch.randn(3, 60, device=device)
    logits[1] = broken
    _, choices, shares = kernels.module("routing").choose(logits, 8, True)
    assert int(choices.min()) >= 0 and int(choices.max()) < 60
    assert all(len(set(row)) == 8 for row in choices.tolist())
    assert shares[0].isfinite().all() and shares[1].isnan().all()


@pytest.mark.parametrize(("num_tokens", "per_token", "num_experts"), SIZES)
def test_choices_are_sorted_and_cut_into_tiles_as_in_torch(
    num_tokens: int,
    per_token: int,
    num_experts: int,
    device: torch.device,
    plainly: Callable[[Callable[[], list[Tensor]]], list[Tensor]],
) -> None:
    choices = choices_of(num_tokens, per_token, num_experts).to(device)
    adapters = (torch.arange(num_tokens, device=device) // 5) % 3 - 1
    rows = torch.randn(num_tokens * per_token, 40, device=device)

    def run() -> list[Tensor]:
        routing = Routing(choices, num_experts)
        runs = TokenAdapters(adapters, num_tokens)
        tables = [routing.tiles(16), routing.tiles(4, runs), routing.tiles(32, runs)]
        moved = (routing.of_choices(choices), routing.restored(rows), routing.offsets)
        return [routing.experts, routing.tokens, *moved, *(each.table for each in tables)]

    for ours, wanted in zip(run(), plainly(run), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
@pytest.mark.parametrize("size", [3, 1030])
def test_rows_of_a_token_are_summed_up_where_they_lie(
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    routing = Routing(choices_of(9, 3, 6).to(device), 6)
    rows = torch.randn(27, size + 5, device=device).to(dtype)[:, :size]
    shares = torch.rand(9, 3, device=device)
    restored = routing.restored(rows).float()
    torch.testing.assert_close(routing.sums(rows), restored.sum(dim=1).to(dtype))
    weighed = (restored * shares.to(dtype)[:, :, None]).sum(dim=1)
    torch.testing.assert_close(routing.weighed_sums(rows, shares), weighed.to(dtype))


@pytest.mark.parametrize("activation", ["silu", ClampedSwiglu(1.702, 7.0)])
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_a_decoding_step_computes_what_a_pass_computes(
    num_tokens: int,
    activation: Activation,
    device: torch.device,
    plainly: Callable[[Callable[[], Tensor]], Tensor],
) -> None:
    from tinsmith.engine.local.sample.decode_experts import run_experts  # imports Triton

    torch.manual_seed(0)
    shapes = ((12, 32, 32), (12, 16, 32), (12, 32), (12, 32), (12,))
    up, down, *biases = (torch.randn(shape, device=device) for shape in shapes)
    # Those whose gate has bounds have biases as well.
    of_up, of_down, of_router = biases if activation != "silu" else (None, None, None)
    mlp = ExpertMlp(
        Router(torch.randn(12, 32, device=device), 3, is_normalized=True, bias=of_router),
        ExpertWeights(up, of_up, (slice(16), slice(16, None))),
        ExpertWeights(down, of_down, (slice(None),)),
        None,
    )
    x = torch.randn(num_tokens, 32, device=device)

    def of_a_pass() -> Tensor:
        return ExpertPass(mlp, 0, activation, AdapterSegments.whole(num_tokens)).forward(x)[0]

    found = run_experts(x, mlp, activation, None)
    assert torch.equal(found, run_experts(x, mlp, activation, None, lambda choices: choices))
    for expected in (of_a_pass(), plainly(of_a_pass)):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
