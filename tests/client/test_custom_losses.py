"""Custom losses: two passes here, or traced and run by the service."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tinsmith.client.calls import custom_loss  # noqa: E402
from tinsmith.client.service import ServiceClient  # noqa: E402
from tinsmith.client.training import TrainingClient  # noqa: E402
from tinsmith.errors import ValidationError  # noqa: E402
from tinsmith.types import Datum, ForwardBackwardRequest, ForwardRequest, ModelInput, TensorData  # noqa: E402


def datum(n: int = 3, **inputs: Any) -> Datum:
    return Datum(
        ModelInput.from_ints(list(range(n))),
        {"target_tokens": list(range(n)), **inputs},
    )


@pytest.fixture
def training(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("m")


def test_the_gradient_goes_back_as_weights(stub: Any, training: TrainingClient) -> None:
    """S81, S95: forward with zero weights, then cross-entropy with minus the gradient."""

    def loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        assert [d.loss_fn_inputs["advantages"].tolist() for d in data] == [[1.0, 2.0, 3.0]]
        advantages = data[0].loss_fn_inputs["advantages"].to_torch()
        return (advantages * logprobs[0] ** 2).sum(), {"mine": 5.0}

    result = training.forward_backward_custom([datum(advantages=[1.0, 2.0, 3.0])], loss).result(10)
    first, second = stub.passes
    assert isinstance(first, ForwardRequest) and isinstance(second, ForwardBackwardRequest)
    sent = first.forward_input.data[0].loss_fn_inputs
    assert set(sent) == {"target_tokens", "weights"} and sent["weights"].tolist() == [0.0] * 3
    weights = second.forward_backward_input.data[0].loss_fn_inputs["weights"].tolist()
    assert weights == [2.0, 4.0, 6.0]  # -d(a*x^2)/dx at x = -1
    assert result.metrics == {"mine": 5.0, "loss:sum": 6.0, "surrogate_loss:sum": 12.0}


def test_custom_cross_entropy_sends_the_built_in_ones_weights(
    stub: Any, training: TrainingClient
) -> None:
    """S81"""
    data = [datum(weights=[0.0, 1.0, 0.5])]

    def cross_entropy(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        pairs = zip(data, logprobs, strict=True)
        return sum(-(d.loss_fn_inputs["weights"].to_torch() * lp).sum() for d, lp in pairs), {}

    training.forward_backward_custom(data, cross_entropy).result(10)
    training.forward_backward(data, "cross_entropy").result(10)
    custom, built_in = (p.forward_backward_input.data[0] for p in stub.passes[1:])
    assert custom == built_in


async def test_the_async_twin_does_the_same(stub: Any, training: TrainingClient) -> None:
    future = await training.forward_backward_custom_async(
        [datum()], lambda data, lps: (lps[0].sum(), {"k": 1.0})
    )
    assert (await future).metrics["loss:sum"] == -3.0
    assert [type(p) for p in stub.passes] == [ForwardRequest, ForwardBackwardRequest]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda data, lps: (lps[0].sum(), {}), "logprobs of data\\[1\\]"),
        (lambda data, lps: (torch.tensor(1.0), {}), "computed from the logprobs"),
        (lambda data, lps: (1.0, {}), "computed from the logprobs"),
        (lambda data, lps: (lps[0] + lps[1], {}), "one number"),
    ],
)
def test_a_loss_that_cannot_work_is_explained(
    training: TrainingClient, loss: Any, message: str
) -> None:
    """S82"""
    with pytest.raises(ValueError, match=message):
        training.forward_backward_custom([datum(), datum()], loss)


def test_missing_targets_are_named(training: TrainingClient) -> None:
    bare = Datum(ModelInput.from_ints([1]), {"weights": [1.0]})
    with pytest.raises(ValidationError, match=r"data\[1\].*target_tokens"):
        training.forward_backward_custom([datum(), bare], lambda data, lps: (lps[0].sum(), {}))


def test_the_old_argument_warns(training: TrainingClient) -> None:
    with pytest.warns(DeprecationWarning, match="always receives logprobs"):
        training.forward_backward_custom(
            [datum()], lambda data, lps: (lps[0].sum(), {}), loss_type_input="logprobs"
        ).result(5)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="known: logprobs"):
        training.forward_backward_custom([datum()], lambda d, lps: (0, {}), loss_type_input="x")  # type: ignore[arg-type]


def test_the_users_function_runs_in_the_users_thread(training: TrainingClient) -> None:
    """S79: a slow loss must not hold up heartbeats on the I/O thread."""
    import threading

    threads = []

    def loss(data: Any, lps: list[Any]) -> tuple[Any, dict[str, float]]:
        threads.append(threading.current_thread())
        return lps[0].sum(), {}

    training.forward_backward_custom([datum()], loss).result(5)
    assert threads == [threading.current_thread()]


def test_two_dimensional_targets(stub: Any, training: TrainingClient) -> None:
    wide = Datum(
        ModelInput.from_ints([1, 2]),
        {"target_tokens": TensorData.from_numpy(np.array([[1, 2], [3, 4]]))},
    )
    training.forward_backward_custom(
        [wide], lambda d, lps: (lps[0][0].sum() + 0 * lps[0].sum(), {})
    ).result(5)
    weights = stub.passes[1].forward_backward_input.data[0].loss_fn_inputs["weights"]
    assert weights.to_numpy().tolist() == [[-1.0, -1.0], [0.0, 0.0]]


# --- traced losses ----------------------------------------------------------------------------


def weighted(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/loss:sum": loss, "custom/size:mean": torch.abs(logprobs).mean()}


RANKS: Any = {"logprobs": 1, "weights": 1}


def test_a_traced_loss_runs_here_where_the_service_cannot(
    stub: Any, service: ServiceClient
) -> None:
    training = service.create_lora_training_client("m")
    handle = service.create_custom_loss(weighted, RANKS).result(5)
    assert (handle.name, handle.loss_id, handle.input_names) == ("weighted", None, ("weights",))
    data = [datum(weights=[1.0, 0.0, 2.0]), datum(weights=[1.0, 1.0, 1.0])]
    result = training.forward_backward_custom(data, handle).result(5)
    assert result.metrics["loss:sum"] == 6.0
    assert result.metrics["custom/loss:sum"] == 6.0 and result.metrics["custom/size:mean"] == 1.0
    with pytest.raises(ValueError, match="use its handle"):
        service.create_custom_loss(weighted, RANKS)


def test_a_traced_loss_is_uploaded_where_the_service_can_run_it(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    stub.flags = {"custom_loss_server_side": True}
    service = make_service()
    training = service.create_lora_training_client("m")
    handle = service.create_custom_loss(weighted, RANKS).result(5)
    assert handle.loss_id == "loss-1"
    training.forward_backward_custom([datum(weights=[1.0] * 3)], handle).result(5)
    assert len(stub.passes) == 1
    inputs = stub.passes[0].forward_backward_input
    assert inputs.loss_fn == "custom" and inputs.loss_fn_config == {"loss_id": "loss-1"}


def test_the_uploaded_graph_is_the_official_one() -> None:
    official = pytest.importorskip("tinker.lib.public_interfaces.custom_loss")

    def loss(logprobs: Any, advantages: Any) -> Any:
        clipped = torch.clamp(logprobs.exp()[..., 1:], min=-float("inf"), max=2.0)
        value = (clipped * advantages[1:].to(torch.float32)).sum()
        return value, {"custom/v:mean": torch.stack([value, value]).mean()}

    ranks: Any = {"logprobs": 1, "advantages": 1}
    ours = custom_loss.encode(custom_loss.trace(loss, ranks, "s"))
    theirs = official.encode_graph(official.trace_loss(loss, ranks, "s"))
    assert ours.to_wire() == theirs.model_dump(mode="json")


def branches(logprobs: Any) -> Any:
    return (logprobs.sum() if logprobs.sum() > 0 else logprobs.mean()), {}


def leaves(logprobs: Any) -> Any:
    return logprobs.sum(), {"custom/x:sum": logprobs.sum().item()}


def no_tuple(logprobs: Any) -> Any:
    return logprobs.sum()


def bad_metric(logprobs: Any) -> Any:
    return logprobs.sum(), {"x": logprobs.sum()}


def backward(logprobs: Any) -> Any:
    logprobs.sum().backward()
    return logprobs.sum(), {}


CAPTURED = torch.ones(3)


def captures(logprobs: Any) -> Any:
    return (logprobs * CAPTURED).sum(), {}


def defaults(logprobs: Any, x: Any = 1) -> Any:
    return logprobs.sum(), {}


def wrong_first(x: Any) -> Any:
    return x.sum(), {}


@pytest.mark.parametrize(
    ("fn", "ranks", "message"),
    [
        (branches, {"logprobs": 1}, "cannot be traced"),
        (leaves, {"logprobs": 1}, "leaves torch"),
        (no_tuple, {"logprobs": 1}, r"\(loss, metrics\)"),
        (bad_metric, {"logprobs": 1}, "custom/<name>"),
        (backward, {"logprobs": 1}, "backward"),
        (captures, {"logprobs": 1}, "captures a tensor"),
        (defaults, {"logprobs": 1, "x": 0}, "default"),
        (wrong_first, {"x": 1}, "logprobs first"),
        (weighted, {"logprobs": 1}, "a rank for each parameter"),
        (weighted, {"logprobs": 0, "weights": 1}, "rank 1"),
    ],
)
def test_what_cannot_be_traced_is_explained(fn: Any, ranks: Any, message: str) -> None:
    """S82"""
    with pytest.raises(ValueError, match=message):
        custom_loss.trace(fn, ranks, "s")


def test_data_must_fit_the_declared_inputs(service: ServiceClient) -> None:
    training = service.create_lora_training_client("m")
    handle = service.create_custom_loss(weighted, RANKS).result(5)
    with pytest.raises(ValidationError, match=r"data\[0\].*'weights'.*needs this tensor"):
        training.forward_backward_custom([datum()], handle)
    square = TensorData.from_numpy(np.ones((3, 1), "f4"))
    with pytest.raises(ValidationError, match="rank 2"):
        training.forward_backward_custom([datum(weights=square)], handle)


def test_a_handle_of_another_session_is_refused(
    make_service: Callable[..., ServiceClient],
) -> None:
    one, two = make_service(), make_service()
    training = one.create_lora_training_client("m")
    handle = two.create_custom_loss(weighted, RANKS).result(5)
    with pytest.raises(ValueError, match="only be used by clients of that session"):
        asyncio.run(training.forward_backward_custom_async([datum(weights=[1.0] * 3)], handle))


def test_without_torch_the_error_says_what_to_install() -> None:
    """S13, S82"""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tinsmith.client.calls import custom_loss\n"
        "try: custom_loss.trace(lambda logprobs: None, {'logprobs': 1}, 's')\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install torch" in done.stdout
