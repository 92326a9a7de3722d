"""Uploaded losses: graphs traced by the official client give what the plain function gives.

Values and gradients are compared with the Python function that was traced, run by torch itself;
both execute the same operations, so the tolerance is 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from torch import Tensor

from tinsmith.engine.base import CustomLoss
from tinsmith.engine.local.train.custom_loss import compile_loss
from tinsmith.engine.local.train.losses import combine_metrics, datum_loss
from tinsmith.errors import ValidationError
from tinsmith.types import CustomLossGraph, CustomLossInput

LossFunction = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


def traced(function: LossFunction, **ranks: int) -> CustomLoss:
    """What the official client would upload for `function`, read back by our types."""
    handle = trace_loss(function, ranks, session_id="session")
    graph = encode_graph(handle).model_dump(mode="json")
    return CustomLoss(
        inputs=tuple(CustomLossInput(name=i.name, rank=i.rank) for i in handle.inputs),
        graph=CustomLossGraph.model_validate(graph),
    )


def ppo_like(logprobs, sampled, advantages):
    ratio = torch.exp(logprobs - sampled)
    clipped = torch.clamp(ratio, 1 - 0.2, max=1.2)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    fraction = (ratio != clipped).float().mean()
    return -objective.sum(), {"custom/clip_fraction:mean": fraction}


def dpo_like(logprobs, mask, rejected_logprob, reference_margin):
    chosen = (logprobs * mask).sum()
    margin = 0.1 * (chosen - rejected_logprob - reference_margin)
    return -F.logsigmoid(margin), {
        "custom/margin:mean": margin.detach(),
        "custom/accuracy:mean": (margin > 0).float(),
    }


def entropy_like(logprobs, weights):
    probabilities = torch.softmax(logprobs, dim=-1)
    entropy = -(probabilities * F.log_softmax(logprobs, dim=-1)).sum(dim=-1)
    best = torch.max(logprobs, dim=1).values
    loss = -(logprobs * weights).sum() - 0.01 * entropy.sum() + torch.logsumexp(logprobs, 1).mean()
    return loss, {"custom/entropy:mean": entropy.mean(), "custom/best:sum": best.sum()}


def masked_by_index(logprobs, mask, advantages):
    chosen = logprobs[mask > 0]
    tail = logprobs[1:] - logprobs[:-1]
    loss = -(chosen * advantages[mask > 0]).sum() / logprobs.shape[0] + tail.abs().mean()
    return loss, {}


def reshaping(logprobs, targets):
    n = logprobs.shape[0]
    first, second = logprobs.chunk(2)
    positions = torch.arange(n, device=logprobs.device, dtype=torch.float32)
    stacked = torch.stack([logprobs, positions / (n + 1)], dim=1)
    best = logprobs[logprobs.argmax()]
    picked = torch.gather(stacked, 1, (targets % 2.0).long().unsqueeze(-1)).squeeze(1)
    gap = first.mean() - second.mean()
    return (
        -stacked.cumsum(0)[..., 0].sum() * 0.01 + gap**2 + best + picked.sum() * 0.1,
        {"custom/n:sum": torch.ones_like(logprobs).sum()},
    )


def many_operators(logprobs, advantages, scale):
    both = (advantages > 0) & ~(logprobs < -3) | (advantages == 0)
    weight = torch.where(both, 1.0, torch.full_like(logprobs, 0.5))
    bounded = torch.nan_to_num(logprobs.clamp(min=-float("inf"), max=0.0), neginf=-9.0)
    surprise = F.softplus(-bounded) + torch.special.expm1(bounded) + abs(bounded) / 2 - 1
    stable = torch.nn.functional.huber_loss(logprobs, advantages, reduction="none", delta=0.5)
    pairs = (logprobs[:, None] - logprobs[None, :]).sigmoid().tril(-1)
    total = (weight * surprise * scale + stable).sum(dtype=torch.float64) + pairs.mean()
    return total.to(torch.float32), {"custom/w/x.y-z:sum": weight.norm(p=2)}


def with_stopped_gradient(logprobs, sampled):
    ratio = (logprobs.detach() - sampled).exp().clamp(0.8, 1.2)
    return -(ratio * logprobs).mean(), {"custom/shape:sum": logprobs.shape[0]}


N = 12
CASES: list[tuple[LossFunction, dict[str, int]]] = [
    (ppo_like, {"logprobs": 1, "sampled": 1, "advantages": 1}),
    (dpo_like, {"logprobs": 1, "mask": 1, "rejected_logprob": 0, "reference_margin": 0}),
    (entropy_like, {"logprobs": 2, "weights": 2}),
    (masked_by_index, {"logprobs": 1, "mask": 1, "advantages": 1}),
    (reshaping, {"logprobs": 1, "targets": 1}),
    (many_operators, {"logprobs": 1, "advantages": 1, "scale": 0}),
]


def values_for(ranks: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {0: (), 1: (N,), 2: (N, 4)}
    values = {k: torch.randn(shapes[r], generator=generator) for k, r in ranks.items()}
    values["logprobs"] = -values["logprobs"].abs()
    return values


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("function", "ranks"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_graph_traced_by_the_official_client_gives_what_the_function_gives(
    function: LossFunction, ranks: dict[str, int], seed: int
) -> None:
    compiled = compile_loss(traced(function, **ranks))
    values = values_for(ranks, seed)
    for _ in range(2):  # the second time its sizes are known
        ours = values["logprobs"].clone().requires_grad_()
        loss, metrics = compiled(ours, {k: v for k, v in values.items() if k != "logprobs"})
        loss.backward()

        theirs = values["logprobs"].clone().requires_grad_()
        expected, expected_metrics = function(theirs, *(values[k] for k in list(ranks)[1:]))
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7)
        assert metrics.keys() == expected_metrics.keys()
        for key, value in expected_metrics.items():
            assert metrics[key].item() == pytest.approx(
                float(torch.as_tensor(value).detach()), rel=1e-6
            )
            assert not metrics[key].requires_grad


def test_a_metric_may_be_a_number_and_a_gradient_may_be_stopped() -> None:
    compiled = compile_loss(traced(with_stopped_gradient, logprobs=1, sampled=1))
    policy = torch.tensor([-1.0, -2.0]).requires_grad_()
    loss, metrics = compiled(policy, {"sampled": torch.tensor([-1.0, -9.0])})
    loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-0.5, -0.6])
    assert metrics["custom/shape:sum"].item() == 2


def test_a_custom_loss_runs_through_the_same_door_as_the_built_in_ones() -> None:
    compiled = compile_loss(traced(ppo_like, logprobs=1, sampled=1, advantages=1))
    stats = []
    for n in (2, 6):
        policy = torch.full((n,), -1.0)
        inputs = {
            "target_tokens": torch.zeros(n, dtype=torch.int64),
            "sampled": policy - math.log(2) * (torch.arange(n) == 0),
            "advantages": torch.ones(n),
        }
        loss, datum_stats = datum_loss("custom", policy, inputs, {"loss_id": "l"}, compiled)
        assert loss.item() == pytest.approx(-(n - 1) - 1.2)
        stats.append(datum_stats)
    metrics = combine_metrics(stats)
    assert metrics["loss:sum"] == pytest.approx(-6 - 2.4)
    assert metrics["tokens:sum"] == 8
    assert metrics["custom/clip_fraction:mean"] == pytest.approx((1 / 2 + 1 / 6) / 2)


def test_a_custom_loss_without_its_graph_is_refused() -> None:
    with pytest.raises(ValidationError, match="without its graph"):
        datum_loss("custom", torch.zeros(1), {}, {"loss_id": "l"}, None)


@pytest.mark.gpu
def test_a_graph_gives_the_same_for_a_model_on_cuda() -> None:
    compiled = compile_loss(traced(ppo_like, logprobs=1, sampled=1, advantages=1))
    values = values_for({"logprobs": 1, "sampled": 1, "advantages": 1}, seed=0)
    gradients = []
    for device in ("cpu", "cuda"):
        policy = values["logprobs"].detach().to(device).requires_grad_()
        inputs = {k: v.to(device) for k, v in values.items() if k != "logprobs"}
        loss, metrics = compiled(policy, inputs)
        assert loss.device == policy.device == metrics["custom/clip_fraction:mean"].device
        loss.backward()
        assert policy.grad is not None
        gradients.append(policy.grad.cpu())
    assert torch.equal(*gradients)
