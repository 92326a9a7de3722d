"""Passes give the losses, log-probabilities and gradients of a slow, obvious reference.

The reference runs the `transformers` model one sequence at a time with weights W + scale · B A,
takes log-softmax of whole logits, and leaves the gradients to autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.train.training_reference import (
    CPU,
    RAGGED,
    RELATIVE,
    Reference,
    assert_close,
    check_a_broken_tenant_fails_alone,
    make_datum,
    policy_datum,
    run,
    succeed,
)
from tinsmith.engine.base import CustomLoss, Failure, Pass
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.train import pass_progress
from tinsmith.engine.local.train.passes import run_passes
from tinsmith.types import (
    CustomLossGraph,
    CustomLossInput,
    CustomLossNode,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    TensorData,
)


def test_a_pass_has_the_losses_and_gradients_of_the_reference_in_every_family(
    variant: str,
    model_folder: Callable[[str], Path],
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    decoder = Decoder.load(model_folder(variant))
    adapter = new_adapter(decoder)
    loss, logprobs, grad = Reference(reference_model(variant), adapter).run(RAGGED)
    output = succeed(decoder, RAGGED, adapter)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
    assert output.metrics["tokens:sum"] == sum(datum.model_input.length for datum in RAGGED)
    for tensors, expected in zip(output.loss_fn_outputs, logprobs, strict=True):
        torch.testing.assert_close(tensors["logprobs"].to_torch(), expected, atol=1e-5, rtol=1e-5)
    assert adapter.grad is not None
    assert_close(adapter.grad, grad)


@pytest.mark.parametrize("rank", [1, 3, 32])
@pytest.mark.parametrize("variant_name", ["llama", "llama_tied"])
@pytest.mark.parametrize(
    "trained",
    ["attn", "mlp", "unembed", "attn mlp", "attn unembed", "mlp unembed", "attn mlp unembed"],
)
def test_gradients_equal_the_reference_for_each_rank_and_trained_part(
    rank: int,
    variant_name: str,
    trained: str,
    model_folder: Callable[[str], Path],
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    decoder = Decoder.load(model_folder(variant_name))
    flags = {f"train_{part}": part in trained.split() for part in ("attn", "mlp", "unembed")}
    adapter = new_adapter(decoder, rank=rank, **flags)
    _, _, grad = Reference(reference_model(variant_name), adapter).run(RAGGED)
    succeed(decoder, RAGGED, adapter)
    assert adapter.grad is not None
    assert_close(adapter.grad, grad)


@pytest.mark.parametrize(
    "loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo", "cross_entropy"]
)
def test_every_loss_has_the_reference_gradient_end_to_end(
    loss_fn: str,
    tiny_decoder: Decoder,
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    data = [policy_datum(length, seed, loss_fn) for seed, length in enumerate((12, 5, 20))]
    if loss_fn == "cross_entropy":
        data = RAGGED
    adapter = new_adapter(tiny_decoder)
    loss, _, grad = Reference(reference_model("llama"), adapter).run(data, loss_fn)
    output = succeed(tiny_decoder, data, adapter, loss_fn=loss_fn)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
    assert all(name.count(":") == 1 for name in output.metrics)
    assert adapter.grad is not None
    assert_close(adapter.grad, grad)


def test_several_targets_a_position_equal_the_reference(
    tiny_decoder: Decoder,
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    data = [make_datum(7, 1, targets_a_position=3), make_datum(12, 2), make_datum(5, 3)]
    adapter = new_adapter(tiny_decoder)
    loss, logprobs, grad = Reference(reference_model("llama"), adapter).run(data)
    output = succeed(tiny_decoder, data, adapter)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
    for tensors, expected in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert tensors["logprobs"].shape == list(expected.shape)
        torch.testing.assert_close(tensors["logprobs"].to_torch(), expected, atol=1e-5, rtol=1e-5)
    assert adapter.grad is not None
    assert_close(adapter.grad, grad)


def test_sparse_targets_mean_what_dense_ones_mean(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    dense_targets, dense_weights = torch.zeros(6, 40, dtype=torch.int64), torch.zeros(6, 40)
    dense_targets[2, 3], dense_weights[2, 3] = 17, 1.5
    dense_targets[5, 0], dense_weights[5, 0] = 40, -0.5
    tokens = ModelInput.from_ints([3, 1, 4, 1, 5, 9])
    sparse = {
        "target_tokens": TensorData.from_torch_sparse(dense_targets),
        "weights": TensorData.from_torch_sparse(dense_weights),
    }
    assert sparse["target_tokens"].is_sparse
    dense = {
        "target_tokens": TensorData.from_torch(dense_targets),
        "weights": TensorData.from_torch(dense_weights),
    }
    outputs, grads = [], []
    for inputs in (sparse, dense):
        adapter = new_adapter(tiny_decoder)
        outputs.append(succeed(tiny_decoder, [Datum(tokens, inputs)], adapter))
        grads.append(adapter.grad)
    assert outputs[0].metrics == outputs[1].metrics
    assert outputs[0].loss_fn_outputs == outputs[1].loss_fn_outputs
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    "config",
    [
        LocalEngineConfig(device="cpu", micro_batch_tokens=1),
        LocalEngineConfig(device="cpu", micro_batch_tokens=32),
        LocalEngineConfig(device="cpu", logits_bytes=97 * 4 * 5),
        LocalEngineConfig(device="cpu", checkpoint_layers=True),
        LocalEngineConfig(device="cpu", deterministic=True),
    ],
    ids=["one_by_one", "small_batches", "few_logits", "checkpointed", "deterministic"],
)
@pytest.mark.parametrize("variant_name", ["llama", "gemma2"])
def test_budgets_change_nothing_beyond_rounding(
    config: LocalEngineConfig,
    variant_name: str,
    model_folder: Callable[[str], Path],
    new_adapter: Callable[..., Adapter],
) -> None:
    decoder = Decoder.load(model_folder(variant_name))
    usual, changed = new_adapter(decoder), new_adapter(decoder)
    expected = succeed(decoder, RAGGED, usual)
    output = succeed(decoder, RAGGED, changed, config)
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    assert changed.grad is not None and usual.grad is not None
    assert_close(changed.grad, usual.grad, 1e-6)


def test_rows_without_weight_still_get_their_log_probability(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    zeros = np.zeros(17, dtype=np.float32)
    adapter = new_adapter(tiny_decoder)
    (weighted,) = succeed(tiny_decoder, RAGGED[:1], adapter, forward_only=True).loss_fn_outputs
    silent = Datum(
        RAGGED[0].model_input,
        {"target_tokens": RAGGED[0].loss_fn_inputs["target_tokens"], "weights": zeros},
    )
    (unweighted,) = succeed(tiny_decoder, [silent], adapter).loss_fn_outputs
    assert np.array_equal(weighted["logprobs"].numpy, unweighted["logprobs"].numpy)
    assert adapter.grad is not None and not adapter.grad.any()


def test_a_forward_pass_leaves_no_trace(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    adapter = new_adapter(tiny_decoder)
    before = adapter.flat.clone()
    succeed(tiny_decoder, RAGGED, adapter, forward_only=True)
    assert adapter.grad is None and adapter.exp_avg is None and adapter.step == 0
    assert torch.equal(adapter.flat, before)


def test_gradients_add_up_over_passes(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    once, twice = new_adapter(tiny_decoder), new_adapter(tiny_decoder)
    succeed(tiny_decoder, RAGGED, once)
    for _ in range(2):
        succeed(tiny_decoder, RAGGED, twice)
    assert once.grad is not None and twice.grad is not None
    assert torch.equal(twice.grad, 2 * once.grad)


DETERMINISTIC = LocalEngineConfig(device="cpu", deterministic=True)


@pytest.mark.parametrize(
    "cuts", [[], [1], [3], [1, 2, 4]], ids=["whole", "after_1", "after_3", "in_four"]
)
def test_splitting_a_batch_changes_no_bit_in_deterministic_mode(
    cuts: list[int], tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    whole, split = new_adapter(tiny_decoder), new_adapter(tiny_decoder)
    expected = succeed(tiny_decoder, RAGGED, whole, DETERMINISTIC)
    bounds = [0, *cuts, len(RAGGED)]
    passes = [
        Pass(adapter_id="a", data=RAGGED[start:stop], loss_fn="cross_entropy")
        for start, stop in itertools.pairwise(bounds)
    ]
    outputs = [
        tensors
        for result in run(tiny_decoder, passes, {"a": split}, DETERMINISTIC)
        if isinstance(result, ForwardBackwardOutput)
        for tensors in result.loss_fn_outputs
    ]
    assert outputs == expected.loss_fn_outputs
    assert whole.grad is not None and split.grad is not None
    assert torch.equal(split.grad, whole.grad)


@pytest.mark.parametrize("config", [CPU, DETERMINISTIC], ids=["packed", "deterministic"])
def test_other_tenants_in_the_batch_change_nothing(
    config: LocalEngineConfig, tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    """Bit-equal in deterministic mode; within 1e-6 when packed."""
    shapes = [{"rank": 4}, {"rank": 7, "train_mlp": False}, {"rank": 2, "train_attn": False}]
    shared = {
        str(n): new_adapter(tiny_decoder, fill_seed=n, **shape) for n, shape in enumerate(shapes)
    }
    passes = [
        Pass(adapter_id="0", data=RAGGED[:3], loss_fn="cross_entropy"),
        Pass(adapter_id="1", data=RAGGED[1:], loss_fn="cross_entropy"),
        Pass(adapter_id="2", data=RAGGED[2:4], loss_fn="cross_entropy"),
        Pass(adapter_id="0", data=RAGGED[3:], loss_fn="cross_entropy"),
        Pass(adapter_id="1", data=RAGGED[:2], loss_fn="cross_entropy", forward_only=True),
    ]
    together = run(tiny_decoder, passes, shared, config)
    for n, shape in enumerate(shapes):
        alone = new_adapter(tiny_decoder, fill_seed=n, **shape)
        own = [(p, r) for p, r in zip(passes, together, strict=True) if p.adapter_id == str(n)]
        for request, result in own:
            assert isinstance(result, ForwardBackwardOutput)
            (expected,) = run(tiny_decoder, [request], {str(n): alone}, config)
            assert isinstance(expected, ForwardBackwardOutput)
            for ours, theirs in zip(result.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
                if config.deterministic:
                    assert ours == theirs
                else:
                    np.testing.assert_allclose(
                        ours["logprobs"].numpy, theirs["logprobs"].numpy, atol=1e-6, rtol=1e-6
                    )
        grad = shared[str(n)].grad
        assert grad is not None and alone.grad is not None
        if config.deterministic:
            assert torch.equal(grad, alone.grad)
        else:
            assert_close(grad, alone.grad, 1e-6)


@pytest.mark.parametrize("config", [CPU, DETERMINISTIC], ids=["packed", "deterministic"])
@pytest.mark.parametrize("has_pending", [False, True])
def test_a_pass_whose_loss_is_not_finite_leaves_nothing_behind(
    config: LocalEngineConfig,
    has_pending: bool,
    tiny_decoder: Decoder,
    new_adapter: Callable[..., Adapter],
) -> None:
    bad = policy_datum(6, 5, "importance_sampling")
    inputs = dict(bad.loss_fn_inputs)
    inputs["logprobs"] = TensorData.from_numpy(np.full(6, -300.0, dtype=np.float32))
    good = [policy_datum(9, seed, "importance_sampling") for seed in (1, 2)]
    data = [*good, Datum(bad.model_input, inputs)]
    failing, other = new_adapter(tiny_decoder), new_adapter(tiny_decoder, fill_seed=12)
    undisturbed = new_adapter(tiny_decoder, fill_seed=12)
    if has_pending:
        succeed(tiny_decoder, RAGGED, failing, config)
    before = failing.grad.clone() if failing.grad is not None else None
    passes = [
        Pass(adapter_id="failing", data=data, loss_fn="importance_sampling"),
        Pass(adapter_id="other", data=good, loss_fn="importance_sampling"),
    ]
    failure, result = run(tiny_decoder, passes, {"failing": failing, "other": other}, config)
    assert isinstance(failure, Failure) and failure.category == "user"
    assert "data[2]" in failure.message
    assert isinstance(result, ForwardBackwardOutput)
    if before is None:
        assert failing.grad is None
    else:
        assert failing.grad is not None and torch.equal(failing.grad, before)
    succeed(tiny_decoder, good, undisturbed, config, "importance_sampling")
    assert other.grad is not None and undisturbed.grad is not None
    assert_close(other.grad, undisturbed.grad, 1e-6)


class _Unreadable(TensorData):
    """A loss input that cannot be turned into a tensor."""

    def to_torch(self) -> Tensor:
        raise RuntimeError("no such tensor")


def test_an_exception_in_a_shared_micro_batch_fails_the_pass_that_raises_it_and_no_other(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    raising, healthy, alone = (new_adapter(tiny_decoder, fill_seed=3) for _ in range(3))
    good = RAGGED[0]
    weights = _Unreadable(data=np.ones(17, np.float32), dtype="float32", shape=[17])
    bad = Datum(
        model_input=good.model_input, loss_fn_inputs={**good.loss_fn_inputs, "weights": weights}
    )
    passes = [
        Pass(adapter_id="raising", data=[bad], loss_fn="cross_entropy"),
        Pass(adapter_id="healthy", data=[good], loss_fn="cross_entropy"),
    ]
    failure, result = run(tiny_decoder, passes, {"raising": raising, "healthy": healthy})
    assert isinstance(failure, Failure) and failure.category == "server"
    assert result == succeed(tiny_decoder, [good], alone)
    assert healthy.grad is not None and alone.grad is not None
    assert torch.equal(healthy.grad, alone.grad)


def test_what_breaks_at_the_end_of_a_pass_fails_it_without_effect_and_no_other(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result is put together for each pass by itself, in one call for all of them."""
    adapters = {name: new_adapter(tiny_decoder, fill_seed=3) for name in ("broken", "healthy")}
    alone = succeed(tiny_decoder, RAGGED, new_adapter(tiny_decoder, fill_seed=3))
    combine = pass_progress.combine_metrics
    left = iter([True])

    def break_once(stats: Any) -> dict[str, float]:
        if next(left, False):
            raise RuntimeError("it broke")
        return combine(stats)

    monkeypatch.setattr(pass_progress, "combine_metrics", break_once)
    passes = [Pass(adapter_id=name, data=RAGGED, loss_fn="cross_entropy") for name in adapters]
    failure, result = run(tiny_decoder, passes, adapters)
    assert isinstance(failure, Failure)
    assert failure.category == "server" and "it broke" in failure.message
    assert isinstance(result, ForwardBackwardOutput)
    assert result.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=1e-5)
    assert adapters["broken"].grad is None and adapters["healthy"].grad is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_tenant_with_broken_weights_fails_alone(
    value: float, tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    check_a_broken_tenant_fails_alone(tiny_decoder, new_adapter, value)


def test_a_pass_is_reported_before_later_ones_have_run(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    adapters = {"a": new_adapter(tiny_decoder), "b": new_adapter(tiny_decoder)}
    passes = [Pass(adapter_id=name, data=RAGGED, loss_fn="cross_entropy") for name in "ab"]
    config = LocalEngineConfig(device="cpu", micro_batch_tokens=87)
    results = run_passes(passes, adapters, tiny_decoder, config)
    first = next(results)
    assert first is not None and first.index == 0
    assert adapters["a"].grad is not None and adapters["b"].grad is None
    assert [result and result.index for result in results] == [None, 1, None]


def test_a_pass_that_is_given_up_between_micro_batches_leaves_nothing_behind(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    adapter = new_adapter(tiny_decoder)
    config = LocalEngineConfig(device="cpu", micro_batch_tokens=32)
    request = Pass(adapter_id="a", data=RAGGED, loss_fn="cross_entropy")
    results = run_passes([request], {"a": adapter}, tiny_decoder, config)
    assert next(results) is None
    results.close()
    assert adapter.grad is None


@pytest.mark.parametrize("class_name", ["GPTNeoXConfig", "Olmo2Config"])
def test_a_model_outside_our_families_has_the_reference_gradients_too(
    class_name: str, tmp_path: Path, new_adapter: Callable[..., Adapter]
) -> None:
    import transformers

    config = getattr(transformers, class_name)(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval().save_pretrained(tmp_path)
    table = LocalEngineConfig(device="cpu", models={"foreign": str(tmp_path)})
    decoder = BaseModels(table).get("foreign")
    adapter = new_adapter(decoder)
    loss, _, grad = Reference(model, adapter).run(RAGGED)
    output = succeed(decoder, RAGGED, adapter)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
    assert adapter.grad is not None
    assert_close(adapter.grad, grad)


def test_an_uploaded_loss_trains_like_the_built_in_loss_it_spells_out(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    """−Σ p·A as a graph has the loss and gradient of cross_entropy with weights A, to 1e-6."""

    def node(op: str, name: str, target: str, *args: Any) -> CustomLossNode:
        return CustomLossNode(op=op, name=name, target=target, args=list(args), kwargs={})

    def ref(name: str) -> dict[str, str]:
        return {"ref": name}

    custom = CustomLoss(
        inputs=(
            CustomLossInput(name="logprobs", rank=1),
            CustomLossInput(name="advantages", rank=1),
        ),
        graph=CustomLossGraph(
            nodes=[
                node("placeholder", "logprobs", "logprobs"),
                node("placeholder", "advantages", "advantages"),
                node("call_function", "each", "operator.mul", ref("logprobs"), ref("advantages")),
                node("call_method", "total", "sum", ref("each")),
                node("call_function", "loss", "operator.neg", ref("total")),
                node(
                    "output",
                    "output",
                    "output",
                    {"tuple": [ref("loss"), {"dict": {"custom/total:sum": ref("total")}}]},
                ),
            ]
        ),
    )
    data = [policy_datum(length, seed, "custom") for seed, length in enumerate((12, 5, 20))]
    weighted = [
        Datum(
            datum.model_input,
            {
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "weights": datum.loss_fn_inputs["advantages"],
            },
        )
        for datum in data
    ]
    ours, theirs = new_adapter(tiny_decoder), new_adapter(tiny_decoder)
    output = succeed(
        tiny_decoder,
        data,
        ours,
        loss_fn="custom",
        custom_loss=custom,
        loss_fn_config={"loss_id": "x"},
    )
    expected = succeed(tiny_decoder, weighted, theirs)
    loss = expected.metrics["loss:sum"]
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-6)
    assert output.metrics["custom/total:sum"] == pytest.approx(-loss, rel=1e-6)
    assert ours.grad is not None and theirs.grad is not None
    assert_close(ours.grad, theirs.grad, 1e-6)
