"""Each loss against the formula written out token by token, and the laws that connect them.

The references are plain Python floats (double precision) in a loop; gradients are compared
with central differences of the reference. Tolerance: 1e-6 relative to the largest value.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from tinsmith.engine.local.train.losses import combine_metrics, datum_loss
from tinsmith.engine.loss_table import LOSSES
from tinsmith.errors import ValidationError

Inputs = Mapping[str, list[float]]
Reference = Callable[[list[float], Inputs, Mapping[str, float], list[float]], float]


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    return {name: torch.tensor(values) for name, values in inputs.items()}


def loss_and_gradient(
    loss_fn: str,
    logprobs: list[float] | Tensor,
    inputs: Inputs,
    config: Mapping[str, float] | None = None,
) -> tuple[float, Tensor]:
    policy = torch.as_tensor(logprobs, dtype=torch.float32).clone().requires_grad_()
    loss, _ = datum_loss(loss_fn, policy, tensors(inputs), config or {})
    loss.backward()
    assert policy.grad is not None
    return loss.item(), policy.grad


# The formulas of losses.md. `frozen` is the policy where the formula stops gradients.


def reference_cross_entropy(
    p: list[float], i: Inputs, c: Mapping[str, float], frozen: list[float]
) -> float:
    return sum(-p[t] * i["weights"][t] for t in range(len(p)))


def reference_importance_sampling(
    p: list[float], i: Inputs, c: Mapping[str, float], frozen: list[float]
) -> float:
    return sum(-math.exp(p[t] - i["logprobs"][t]) * i["advantages"][t] for t in range(len(p)))


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def reference_ppo(p: list[float], i: Inputs, c: Mapping[str, float], frozen: list[float]) -> float:
    total = 0.0
    for t in range(len(p)):
        ratio, a = math.exp(p[t] - i["logprobs"][t]), i["advantages"][t]
        total -= min(ratio * a, clip(ratio, *bounds(i, c, t)) * a)
    return total


def reference_cispo(
    p: list[float], i: Inputs, c: Mapping[str, float], frozen: list[float]
) -> float:
    total = 0.0
    for t in range(len(p)):
        ratio = math.exp(frozen[t] - i["logprobs"][t])
        total -= clip(ratio, *bounds(i, c, t, (0.0, 4.0))) * p[t] * i["advantages"][t]
    return total


def reference_dro(p: list[float], i: Inputs, c: Mapping[str, float], frozen: list[float]) -> float:
    beta = c.get("beta", 0.05)
    return sum(
        -(p[t] * i["advantages"][t] - 0.5 * beta * (p[t] - i["logprobs"][t]) ** 2)
        for t in range(len(p))
    )


def reference_gspo(p: list[float], i: Inputs, c: Mapping[str, float], frozen: list[float]) -> float:
    masked = [t for t in range(len(p)) if i["sequence_ratio_mask"][t]]
    s = math.exp(sum(frozen[t] - i["logprobs"][t] for t in masked) / len(masked))
    total = 0.0
    for t in range(len(p)):
        ratio, a = s * math.exp(p[t] - frozen[t]), i["advantages"][t]
        total -= min(ratio * a, clip(ratio, *bounds(i, c, t)) * a)
    return total


def bounds(
    i: Inputs, c: Mapping[str, float], t: int, default: tuple[float, float] = (0.8, 1.2)
) -> tuple[float, float]:
    low = c.get("clip_low_threshold", default[0])
    high = c.get("clip_high_threshold", default[1])
    if "clip_low_threshold" in i:
        low = i["clip_low_threshold"][t]
    if "clip_high_threshold" in i:
        high = i["clip_high_threshold"][t]
    return low, high


REFERENCES: dict[str, Reference] = {
    "cross_entropy": reference_cross_entropy,
    "importance_sampling": reference_importance_sampling,
    "ppo": reference_ppo,
    "cispo": reference_cispo,
    "dro": reference_dro,
    "gspo": reference_gspo,
}


def make_inputs(
    loss_fn: str, seed: int, *, per_token_clip: bool = False
) -> tuple[list[float], Inputs]:
    draw = random.Random(seed)
    n = draw.randint(1, 40)
    policy = [float(torch.tensor(-draw.expovariate(0.5))) for _ in range(n)]
    if loss_fn == "cross_entropy":
        return policy, {"weights": [draw.choice([0.0, 1.0, 0.37, -2.0]) for _ in policy]}
    inputs = {
        "logprobs": [p + draw.gauss(0, 0.4) for p in policy],
        "advantages": [draw.choice([0.0, 1.0, -1.0, 0.3, -2.5]) for _ in policy],
    }
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = [draw.choice([0.0, 1.0]) for _ in policy]
        inputs["sequence_ratio_mask"][0] = 1.0
    if per_token_clip:
        inputs["clip_low_threshold"] = [draw.uniform(0.5, 0.95) for _ in policy]
        inputs["clip_high_threshold"] = [draw.uniform(1.05, 2.0) for _ in policy]
    rounded = {k: torch.tensor(v, dtype=torch.float32).tolist() for k, v in inputs.items()}
    return policy, rounded


def assert_equals_reference(
    loss_fn: str, policy: list[float], inputs: Inputs, config: Mapping[str, float] | None = None
) -> None:
    config = config or {}
    reference = REFERENCES[loss_fn]
    loss, gradient = loss_and_gradient(loss_fn, policy, inputs, config)
    expected = reference(policy, inputs, config, policy)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
    step = 1e-6
    for t in range(len(policy)):
        up, down = list(policy), list(policy)
        up[t] += step
        down[t] -= step
        slope = (
            reference(up, inputs, config, policy) - reference(down, inputs, config, policy)
        ) / (2 * step)
        assert gradient[t].item() == pytest.approx(slope, rel=1e-5, abs=1e-6), (loss_fn, t)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("loss_fn", REFERENCES)
def test_a_loss_and_its_gradient_equal_the_formula_written_as_a_loop(
    loss_fn: str, seed: int
) -> None:
    assert_equals_reference(loss_fn, *make_inputs(loss_fn, seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_clip_thresholds_given_per_token_win_over_the_config(loss_fn: str, seed: int) -> None:
    policy, inputs = make_inputs(loss_fn, seed, per_token_clip=True)
    config = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    assert_equals_reference(loss_fn, policy, inputs, config)


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_clip_thresholds_come_from_the_config(loss_fn: str) -> None:
    policy, inputs = make_inputs(loss_fn, 3)
    config = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}
    assert_equals_reference(loss_fn, policy, inputs, config)


def test_dro_takes_beta_from_the_config() -> None:
    policy, inputs = make_inputs("dro", 5)
    assert_equals_reference("dro", policy, inputs, {"beta": 0.7})


def test_every_loss_has_a_reference() -> None:
    assert REFERENCES.keys() == LOSSES.keys()


def test_importance_sampling_has_the_gradient_of_cross_entropy_when_policies_agree() -> None:
    policy, inputs = make_inputs("importance_sampling", 1)
    _, one = loss_and_gradient("importance_sampling", policy, {**inputs, "logprobs": policy})
    _, other = loss_and_gradient("cross_entropy", policy, {"weights": inputs["advantages"]})
    assert torch.equal(one, other)


def test_ppo_equals_importance_sampling_inside_the_bounds() -> None:
    policy, inputs = make_inputs("ppo", 2)
    inputs = {**inputs, "logprobs": [p + 0.05 for p in policy]}
    one = loss_and_gradient("ppo", policy, inputs)
    other = loss_and_gradient("importance_sampling", policy, inputs)
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(("log_ratio", "advantage"), [(1.0, 2.0), (-1.0, -2.0)])
def test_ppo_has_no_gradient_outside_the_bounds_on_the_clipped_side(
    log_ratio: float, advantage: float
) -> None:
    inputs = {"logprobs": [-1.0 - log_ratio], "advantages": [advantage]}
    _, gradient = loss_and_gradient("ppo", [-1.0], inputs)
    assert gradient.item() == 0.0


@pytest.mark.parametrize(("log_ratio", "advantage"), [(1.0, -2.0), (-1.0, 2.0)])
def test_ppo_keeps_its_gradient_outside_the_bounds_on_the_other_side(
    log_ratio: float, advantage: float
) -> None:
    inputs = {"logprobs": [-1.0 - log_ratio], "advantages": [advantage]}
    _, gradient = loss_and_gradient("ppo", [-1.0], inputs)
    assert gradient.item() == pytest.approx(-advantage * math.exp(log_ratio), rel=1e-6)


@pytest.mark.parametrize("log_ratio", [-80.0, -1.0, 0.0, 1.0, 80.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_the_gradient_of_cispo_never_vanishes(log_ratio: float, advantage: float) -> None:
    inputs = {"logprobs": [-1.0 - log_ratio], "advantages": [advantage]}
    _, gradient = loss_and_gradient("cispo", [-1.0], inputs)
    assert abs(gradient.item()) == pytest.approx(min(math.exp(log_ratio), 4.0), rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_gspo_with_a_mask_of_one_token_equals_ppo_on_that_token(seed: int) -> None:
    policy, inputs = make_inputs("ppo", seed)
    chosen = seed % len(policy)
    alone = [float(t == chosen) for t in range(len(policy))]
    advantages = [1.5 * m for m in alone]
    one = loss_and_gradient(
        "gspo", policy, {**inputs, "advantages": advantages, "sequence_ratio_mask": alone}
    )
    other = loss_and_gradient("ppo", policy, {**inputs, "advantages": advantages})
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert torch.allclose(one[1], other[1], rtol=1e-6, atol=0)


def test_cross_entropy_with_one_hot_weights_over_k_targets_equals_cross_entropy_with_one() -> None:
    policy = -torch.rand(5, 3)
    one_hot = torch.zeros(5, 3)
    one_hot[:, 1] = 1.0
    one = loss_and_gradient("cross_entropy", policy, {"weights": one_hot.tolist()})
    other = loss_and_gradient("cross_entropy", policy[:, 1], {"weights": [1.0] * 5})
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert torch.equal(one[1][:, 1], other[1])
    assert not one[1][:, [0, 2]].any()


def test_missing_weights_mean_ones() -> None:
    policy = [-1.0, -2.5, -0.25]
    assert loss_and_gradient("cross_entropy", policy, {})[0] == 3.75


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_token_without_advantage_adds_nothing_even_where_its_ratio_overflows(
    loss_fn: str,
) -> None:
    inputs = {"logprobs": [-500.0, -1.0], "advantages": [0.0, 1.0]}
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = [0.0, 1.0]
    loss, gradient = loss_and_gradient(loss_fn, [-1.0, -1.0], inputs)
    assert loss == pytest.approx(1.0 if loss_fn == "cispo" else -1.0)
    assert gradient.tolist() == [0.0, -1.0]


def test_a_clipped_token_has_no_gradient_even_where_its_ratio_overflows() -> None:
    loss, gradient = loss_and_gradient("ppo", [-1.0], {"logprobs": [-500.0], "advantages": [1.0]})
    assert loss == pytest.approx(-1.2)
    assert gradient.tolist() == [0.0]


def test_the_target_tokens_among_the_inputs_do_not_disturb_a_loss() -> None:
    policy = torch.tensor([-1.0, -2.0])
    inputs = {"target_tokens": torch.tensor([3, 4]), "weights": torch.tensor([1.0, 0.5])}
    assert datum_loss("cross_entropy", policy, inputs, {})[0].item() == 2.0


@pytest.mark.parametrize("loss_fn", REFERENCES)
def test_metrics_have_one_colon_and_a_suffix_the_client_can_combine(loss_fn: str) -> None:
    policy, inputs = make_inputs(loss_fn, 4)
    stats = [datum_loss(loss_fn, torch.tensor(policy), tensors(inputs), {})[1] for _ in range(3)]
    metrics = combine_metrics(stats)
    assert {"loss:sum", "tokens:sum"} <= metrics.keys()
    for name, value in metrics.items():
        assert name.count(":") == 1
        assert name.split(":")[1] in ("sum", "mean")
        assert math.isfinite(value)


def test_sums_add_up_and_means_are_over_datums() -> None:
    stats = []
    for ratio, n in ((1.0, 2), (3.0, 4)):
        policy = torch.full((n,), -1.0)
        inputs = {
            "logprobs": policy - math.log(ratio),
            "advantages": torch.tensor([0.0] + [1.0] * (n - 1)),
        }
        stats.append(datum_loss("ppo", policy, inputs, {})[1])
    metrics = combine_metrics(stats)
    assert metrics["tokens:sum"] == 6
    assert metrics["loss:sum"] == pytest.approx(-1.0 - 3 * 1.2, rel=1e-6)
    assert metrics["ratio:mean"] == pytest.approx(2.0, rel=1e-6)
    assert metrics["kl_q_p:mean"] == pytest.approx(-math.log(3) / 2, rel=1e-6)
    assert metrics["clip_fraction:mean"] == 0.5


def test_a_datum_without_advantage_does_not_count_in_means_over_tokens() -> None:
    policy = torch.tensor([-1.0, -1.0])
    stats = [
        datum_loss("ppo", policy, {"logprobs": policy - 1.0, "advantages": advantages}, {})[1]
        for advantages in (torch.tensor([0.0, 1.0]), torch.zeros(2), torch.zeros(2))
    ]
    metrics = combine_metrics(stats)
    assert metrics["ratio:mean"] == pytest.approx(math.e)
    assert metrics["kl_q_p:mean"] == pytest.approx(-1.0)
    assert metrics["clip_fraction:mean"] == 1.0
    assert metrics["advantage_tokens:sum"] == 1
    assert metrics["ratio:sum"] == pytest.approx(math.e)
    assert not any(name.endswith(":mean") for name in combine_metrics(stats[1:]))


def test_sums_and_the_number_of_tokens_are_the_same_however_the_data_is_cut() -> None:
    stats = []
    for seed in range(9):
        policy, inputs = make_inputs("ppo", seed)
        stats.append(datum_loss("ppo", torch.tensor(policy), tensors(inputs), {})[1])
    whole = combine_metrics(stats)
    cut = [combine_metrics(stats[:2]), combine_metrics(stats[2:])]
    for name in whole:
        if name.endswith(":sum"):
            assert sum(part[name] for part in cut) == pytest.approx(whole[name]), name


EXTREMES = [0.0, 1e-45, -1e-30, 1.0, -1.0, 80.0, -80.0, 800.0, -800.0, 1e30, -1e30, 3e38, -3e38]


@pytest.mark.parametrize("loss_fn", REFERENCES)
def test_a_loss_of_extreme_finite_inputs_is_its_formula_or_an_error_that_names_the_token(
    loss_fn: str,
) -> None:
    draw = random.Random(1)
    spec = LOSSES[loss_fn]
    counts = {"value": 0, "refusal": 0}
    for _ in range(2000):
        n = draw.randint(1, 3)
        policy = [float(torch.tensor(-abs(draw.choice([1e-30, 0.5, 3.0, 90.0])))) for _ in range(n)]
        inputs: dict[str, list[float]] = {
            name: [draw.choice(EXTREMES) for _ in range(n)]
            for name in (*spec.required, *(spec.optional if draw.random() < 0.5 else ()))
        }
        if "sequence_ratio_mask" in inputs:
            inputs["sequence_ratio_mask"] = [1.0] * n
            # All alike: a mean of extremes depends on the order of adding.
            inputs["logprobs"] = inputs["logprobs"][:1] * n
        if "clip_low_threshold" in inputs:
            pairs = zip(inputs["clip_low_threshold"], inputs["clip_high_threshold"], strict=True)
            inputs["clip_low_threshold"], inputs["clip_high_threshold"] = map(
                list, zip(*(sorted(pair) for pair in pairs), strict=True)
            )
        if loss_fn == "cross_entropy":
            inputs.setdefault("weights", [1.0] * n)
        config = {name: draw.choice([0.5, 1e300, -1e300]) for name in spec.config}
        if "clip_low_threshold" in config:
            config = {"clip_low_threshold": -1e300, "clip_high_threshold": 1e300}
        inputs = {k: torch.tensor(v, dtype=torch.float32).tolist() for k, v in inputs.items()}
        try:
            loss, gradient = loss_and_gradient(loss_fn, policy, inputs, config)
        except ValidationError as error:
            assert "must be within" in str(error)
            counts["refusal"] += 1
            continue
        assert not math.isnan(loss) and not gradient.isnan().any()
        with contextlib.suppress(OverflowError):  # the plain formula's own exp
            expected = REFERENCES[loss_fn](policy, inputs, config, policy)
            if math.isfinite(expected):
                assert loss == pytest.approx(expected, rel=1e-5, abs=1e-30)
        counts["value"] += 1
    assert min(counts.values()) > 50, counts


def test_no_datums_have_no_metrics() -> None:
    assert combine_metrics([]) == {}


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"no loss called 'grpo'.*cross_entropy.*custom"):
        datum_loss("grpo", torch.zeros(1), {}, {})


def test_stable_reinforce_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match="formula is not public"):
        datum_loss("stable_reinforce", torch.zeros(1), {}, {})


@pytest.mark.gpu
@pytest.mark.parametrize("loss_fn", REFERENCES)
def test_a_loss_on_cuda_equals_the_loss_on_the_cpu(loss_fn: str) -> None:
    policy, inputs = make_inputs(loss_fn, 6)
    loss, gradient = loss_and_gradient(loss_fn, policy, inputs)
    on_cuda = torch.tensor(policy, device="cuda", requires_grad=True)
    given = {name: tensor.cuda() for name, tensor in tensors(inputs).items()}
    cuda_loss, stats = datum_loss(loss_fn, on_cuda, given, {})
    cuda_loss.backward()
    assert cuda_loss.item() == pytest.approx(loss, rel=1e-5)
    assert on_cuda.grad is not None
    torch.testing.assert_close(on_cuda.grad.cpu(), gradient, rtol=1e-5, atol=1e-6)
    assert combine_metrics([stats])["loss:sum"] == pytest.approx(loss, rel=1e-5)
