"""The optimizer step against `torch.optim.AdamW` and `clip_grad_norm_` on the same gradients.

Tolerance: 1e-6 relative to the largest weight after ten steps; both are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tinsmith.cli.weights.peft_layout import to_peft
from tinsmith.engine.base import Pass
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.train.adamw import adamw_step
from tinsmith.engine.local.train.passes import run_passes
from tinsmith.errors import ValidationError
from tinsmith.types import AdamParams, Datum, ForwardBackwardOutput, ModelInput

SIZE = 1000
CPU = LocalEngineConfig(device="cpu")


class Vectors:
    """The part of an adapter that a step looks at."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.grad: Tensor | None = None
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.step = 0

    def drop_gradient(self) -> None:
        self.grad = None


def weights(seed: int = 0, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def gradients(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) * 10 ** (i % 3 - 1) for i in range(count)]


def reference_steps(start: Tensor, grads: list[Tensor], params: list[AdamParams]) -> Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    for gradient, p in zip(grads, params, strict=True):
        optimizer.param_groups[0].update(
            lr=p.learning_rate, betas=(p.beta1, p.beta2), eps=p.eps, weight_decay=p.weight_decay
        )
        parameter.grad = gradient.clone()
        if p.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_([parameter], p.grad_clip_norm)
        optimizer.step()
    return parameter.detach()


def our_steps(
    start: Tensor, grads: list[Tensor], params: list[AdamParams], **options: int
) -> Vectors:
    vectors = Vectors(start.clone())
    for gradient, p in zip(grads, params, strict=True):
        vectors.grad = gradient.clone()
        adamw_step(vectors, p, **options)
    return vectors


def assert_close(ours: Tensor, reference: Tensor) -> None:
    assert (ours - reference).abs().max() <= 1e-6 * reference.abs().max()


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"learning_rate": 1e-2, "weight_decay": 0.1},
    "clipping": {"learning_rate": 1e-2, "grad_clip_norm": 0.5},
    "everything": {
        "learning_rate": 3e-3,
        "beta1": 0.8,
        "beta2": 0.999,
        "eps": 1e-3,
        "weight_decay": 0.3,
        "grad_clip_norm": 2.0,
    },
    "no momentum": {"beta1": 0.0, "beta2": 0.0, "eps": 1e-8},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_ten_steps_equal_those_of_torch(settings: dict[str, Any]) -> None:
    start, grads = weights(), gradients(10)
    params = [AdamParams(**settings)] * 10
    ours = our_steps(start, grads, params)
    assert_close(ours.flat, reference_steps(start, grads, params))
    assert ours.step == 10


def test_every_parameter_may_change_from_step_to_step() -> None:
    start, grads = weights(), gradients(10)
    params = [
        AdamParams(
            learning_rate=1e-3 * (i + 1),
            beta1=0.9 - 0.05 * i,
            beta2=0.99 - 0.01 * i,
            eps=10.0 ** -(i + 3),
            weight_decay=0.02 * i,
            grad_clip_norm=[0.0, 1.0][i % 2],
        )
        for i in range(10)
    ]
    assert_close(our_steps(start, grads, params).flat, reference_steps(start, grads, params))


def test_the_size_of_a_chunk_changes_nothing() -> None:
    start, grads = weights(), gradients(4)
    params = [AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)] * 4
    whole = our_steps(start, grads, params)
    assert torch.equal(our_steps(start, grads, params, chunk=64).flat, whole.flat)


def test_a_step_without_pending_gradient_is_a_step_with_a_gradient_of_zero() -> None:
    start, grads = weights(), gradients(3)
    params = [AdamParams(learning_rate=1e-2, weight_decay=0.1)] * 4
    with_zero = reference_steps(start, [*grads, torch.zeros(SIZE)], params)
    vectors = our_steps(start, grads, params[:3])
    metrics = adamw_step(vectors, params[3])
    assert_close(vectors.flat, with_zero)
    assert vectors.step == 4
    assert metrics["unclipped_grad_l2:mean"] == 0.0
    assert metrics["optim/update_norm"] > 0.0


def test_the_first_step_without_gradient_leaves_the_weights_alone() -> None:
    vectors = Vectors(weights())
    adamw_step(vectors, AdamParams())
    assert torch.equal(vectors.flat, weights())


def test_a_step_consumes_the_gradient() -> None:
    assert our_steps(weights(), gradients(1), [AdamParams()]).grad is None


def test_metrics_tell_the_norms_the_learning_rate_and_the_step() -> None:
    vectors = Vectors(weights())
    gradient = gradients(1)[0]
    vectors.grad = gradient.clone()
    metrics = adamw_step(vectors, AdamParams(learning_rate=0.25, grad_clip_norm=1e-3))
    assert metrics == {
        "unclipped_grad_l2:mean": pytest.approx(gradient.norm().item(), rel=1e-6),
        "optim/update_norm": pytest.approx((vectors.flat - weights()).norm().item(), rel=1e-5),
        "optim/learning_rate": 0.25,
        "optim/step": 1.0,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_gradient_that_is_not_finite_changes_nothing_and_says_so(bad: float) -> None:
    vectors = our_steps(weights(), gradients(2), [AdamParams(learning_rate=1e-2)] * 2)
    assert vectors.exp_avg is not None and vectors.exp_avg_sq is not None
    before = [t.clone() for t in (vectors.flat, vectors.exp_avg, vectors.exp_avg_sq)]
    vectors.grad = torch.ones(SIZE)
    vectors.grad[7] = bad
    with pytest.raises(ValidationError, match=r"No step was taken.*unchanged.*dropped"):
        adamw_step(vectors, AdamParams(learning_rate=1e-2))
    after = (vectors.flat, vectors.exp_avg, vectors.exp_avg_sq)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert vectors.step == 2
    assert vectors.grad is None


def test_a_step_whose_update_overflows_changes_nothing_and_says_so() -> None:
    vectors = our_steps(weights(), [torch.full((SIZE,), 1e17)], [AdamParams(beta2=0.0)])
    assert vectors.exp_avg is not None and vectors.exp_avg_sq is not None
    vectors.grad = torch.zeros(SIZE)
    before = [t.clone() for t in (vectors.flat, vectors.exp_avg, vectors.exp_avg_sq, vectors.grad)]
    with pytest.raises(ValidationError, match=r"the update's norm.*unchanged.*learning_rate"):
        adamw_step(vectors, AdamParams(beta2=0.0))
    after = (vectors.flat, vectors.exp_avg, vectors.exp_avg_sq, vectors.grad)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert vectors.step == 1
    assert "optim/step" in adamw_step(vectors, AdamParams())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("beta2", math.nan),
        ("eps", 0.0),
        ("eps", -1e-8),
        ("eps", math.inf),
        ("weight_decay", -0.1),
        ("weight_decay", math.inf),
        ("grad_clip_norm", -1.0),
        ("grad_clip_norm", math.nan),
    ],
)
def test_meaningless_parameters_are_refused_before_anything_happens(
    field: str, value: float
) -> None:
    vectors = Vectors(weights())
    vectors.grad = gradients(1)[0]
    with pytest.raises(ValidationError) as caught:
        adamw_step(vectors, AdamParams(**{field: value}))
    assert caught.value.path == field
    assert torch.equal(vectors.flat, weights())
    assert vectors.grad is not None
    assert vectors.step == 0


def test_whoever_keeps_a_copy_of_the_weights_can_see_that_they_changed() -> None:
    rows = torch.randn(3, SIZE)
    vectors = Vectors(rows[1])
    version = rows[1]._version
    others = rows[[0, 2]].clone()
    vectors.grad = torch.ones(SIZE)
    adamw_step(vectors, AdamParams())
    assert rows[1]._version > version
    assert torch.equal(rows[[0, 2]], others)


@pytest.mark.parametrize("grad_clip_norm", [0.0, 1.0])
def test_ten_training_steps_equal_those_of_torch_on_a_peft_model(
    tiny_decoder: Decoder,
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
    tmp_path: Path,
    grad_clip_norm: float,
) -> None:
    """Whole steps, from tokens to weights: within 1e-5 of how far the weights have moved.

    Adam divides by the gradient's size, so where that is near zero it magnifies rounding.
    """
    from peft import PeftModel

    params = AdamParams(
        learning_rate=1e-3, eps=1e-8, weight_decay=0.01, grad_clip_norm=grad_clip_norm
    )
    adapter = new_adapter(tiny_decoder, fill_seed=None)
    start = adapter.flat.clone()
    checkpoints.save(adapter, tmp_path / "start", "sampler")
    to_peft(tmp_path / "start")
    model = PeftModel.from_pretrained(
        reference_model("llama"), tmp_path / "start", is_trainable=True
    ).eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=1e-3, betas=(params.beta1, params.beta2), eps=1e-8, weight_decay=0.01
    )
    for step in range(10):
        data = [example(length, seed=10 * step + length) for length in (12, 5, 20)]
        request = Pass(adapter_id="a", data=data, loss_fn="cross_entropy")
        passes = run_passes([request], {"a": adapter}, tiny_decoder, CPU)
        results = [result for result in passes if result is not None]
        assert isinstance(results[0].result, ForwardBackwardOutput)
        adamw_step(adapter, params)

        optimizer.zero_grad()
        for datum in data:
            tokens = torch.tensor(datum.model_input.to_ints())
            targets = datum.loss_fn_inputs["target_tokens"].to_torch()
            scores = model(tokens[None]).logits[0].log_softmax(-1)
            (-scores.gather(1, targets[:, None])).sum().backward()
        if grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(trained, grad_clip_norm)
        optimizer.step()

    theirs = dict(model.named_parameters())
    expected = torch.cat(
        [
            theirs[name.replace(".weight", ".default.weight")].flatten()
            for name, _ in adapter.named_tensors()
        ]
    )
    ours = torch.cat([tensor.flatten() for _, tensor in adapter.named_tensors()])
    moved = (adapter.flat - start).norm()
    assert moved > 0.1
    assert (ours - expected).norm() <= 1e-5 * moved


def example(length: int, seed: int) -> Datum:
    numbers = np.random.default_rng(seed).integers(0, 97, length + 1)
    return Datum(
        model_input=ModelInput.from_ints(numbers[:-1]),
        loss_fn_inputs={"target_tokens": numbers[1:]},
    )


@pytest.mark.gpu
def test_ten_steps_equal_those_of_torch_on_cuda() -> None:
    start, grads = weights().cuda(), [g.cuda() for g in gradients(10)]
    params = [AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=0.5)] * 10
    assert_close(our_steps(start, grads, params).flat, reference_steps(start, grads, params))
