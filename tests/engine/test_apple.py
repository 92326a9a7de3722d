"""The engine on a GPU of Apple's, as far as that can be seen without one.

Nobody has run it on a Mac. Here the device is pretended (`tests/support/apple_device.py`): what
MPS has no type or kernel for fails, and the results are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import apple_device
from tests.support.tiny_families import TINY_FAMILIES, save_tiny
from tinsmith.engine.base import Pass, SampleJob, Shaping, Step
from tinsmith.engine.local.boundary.core import Later
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.model.recurrent.recurrence import decays
from tinsmith.engine.local.sample import choosing
from tinsmith.errors import EngineError
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

TOKENS = [10, 40, 20, 60, 30, 50, 12, 44]

PARAMS = {
    "plain": SamplingParams(max_tokens=4, seed=3),
    "cut": SamplingParams(max_tokens=4, seed=3, temperature=0.7, top_k=20, top_p=0.9),
}

SHAPINGS = {"cut": Shaping(min_p=0.05, presence_penalty=0.5, logit_bias={5: 1.0, 9: -2.0})}


def datum(**inputs: Any) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], **inputs},
    )


def lived(folder: Path, device: str, saves: Path) -> list[np.ndarray]:
    """Numbers of every kind that a run makes: passes, steps, samples, a checkpoint and back."""
    # Comparing with transformers at the first load is the CPU's work in any case.
    config = LocalEngineConfig(models={"m": str(folder)}, device=device, verify_models=False)  # type: ignore[arg-type]
    core = EngineCore(config)
    found: list[np.ndarray] = []
    assert core.create_adapter("a", "m", LoraConfig(rank=4, seed=1)) is None
    length = len(TOKENS) - 1
    scored = {"logprobs": [-1.0] * length, "advantages": [0.5, -1.0] * 3 + [1.0]}
    for loss_fn, data in (
        ("cross_entropy", [datum(), datum(weights=[1.0] * length)]),
        ("ppo", [datum(**scored)]),
    ):
        found += passed(core, Pass(adapter_id="a", data=data, loss_fn=loss_fn))  # type: ignore[arg-type]
        (metrics,) = core.step([Step(adapter_id="a", params=AdamParams(learning_rate=0.01))])
        assert isinstance(metrics, dict), metrics
        found.append(np.array([metrics[name] for name in sorted(metrics)]))
    begun = core.save("a", saves / f"{device}-state", "training")
    assert isinstance(begun, Later), begun
    info = begun.finish()
    assert not hasattr(info, "category"), info
    assert core.create_adapter("b", "m", LoraConfig(rank=4, seed=2)) is None
    info = core.restore("b", saves / f"{device}-state", "training")
    assert not hasattr(info, "category"), info
    forward = Pass(adapter_id="b", data=[datum()], loss_fn="cross_entropy", forward_only=True)
    found += passed(core, forward)
    assert core.freeze("b", "s") is None
    return found + sampled(core)


def passed(core: EngineCore, request: Pass) -> list[np.ndarray]:
    (finished,) = [each for each in core.run_passes([request]) if each]
    assert isinstance(finished.result, ForwardBackwardOutput), finished.result
    return [each["logprobs"].numpy for each in finished.result.loss_fn_outputs]


def sampled(core: EngineCore) -> list[np.ndarray]:
    for name, params in PARAMS.items():
        job = SampleJob(
            job_id=name,
            base_model="m",
            weights_id="s",
            prompt=ModelInput.from_ints(TOKENS[:4]),
            params=params,
            num_samples=2,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            shaping=SHAPINGS.get(name),
        )
        assert core.submit_sample(job) is None
    last: dict[str, Any] = {}
    while core.is_sampling:
        last.update(core.sampling_turn())
    found = []
    for name in PARAMS:
        answer = last[name]
        assert isinstance(answer, SampleResponse), answer
        for sequence in answer.sequences:
            found.append(np.array(sequence.tokens))
            found.append(np.array(sequence.logprobs))
        found.append(np.array(answer.prompt_logprobs[1:], dtype=np.float64))
    return found


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "qwen3_5_text"))],
)
def test_training_and_sampling_need_nothing_that_the_device_lacks(
    family: str,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One family of our own decoder, one with soft caps and windows, a recurrent one."""
    if family in TINY_FAMILIES:
        folder = tmp_path / "model"
        save_tiny(family, folder)
    else:
        folder = model_folder(family)
    expected = lived(folder, "cpu", tmp_path)
    with apple_device.pretended(monkeypatch):
        found = lived(folder, "mps", tmp_path)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_the_decays_of_recurrent_layers_have_the_cpu_s_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = -torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0))
    ours, theirs = g.clone().requires_grad_(), g.clone()
    expected = decays(ours)
    torch.cat([x.flatten() for x in expected]).square().sum().backward()
    with apple_device.pretended(monkeypatch):
        there = theirs.to("mps").requires_grad_()
        found = decays(there)
        torch.cat([x.flatten() for x in found]).square().sum().backward()
        assert there.grad is not None
        assert [x.tolist() for x in found] == [x.tolist() for x in expected]
        np.testing.assert_allclose(there.grad.tolist(), ours.grad, rtol=1e-5)


def test_what_the_device_lacks_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with apple_device.pretended(monkeypatch):
        x = torch.ones(3).to("mps")
        assert (x.device.type, (x * 2).tolist()) == ("mps", [2.0, 2.0, 2.0])
        with pytest.raises(TypeError, match="float64"):
            x.double()
        with pytest.raises(RuntimeError, match="some operands are on the CPU"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        with pytest.raises(NotImplementedError, match="geqrf"):
            torch.geqrf(torch.ones(2, 2).to("mps"))


def test_tokens_are_chosen_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    rows, temperatures = np.arange(4), np.array([1.0, 0.5, 0.0, 2.0])
    numbers = choosing.uniforms(np.full(4, 7), rows, np.zeros(4, dtype=int))
    cut = choosing.Cut(np.array([0, 50, 0, 0]), np.array([1.0, 0.9, 1.0, 0.7]))
    expected = choosing.Distributions(logits, temperatures).choose(rows, numbers, cut)
    with apple_device.pretended(monkeypatch):
        there = choosing.Distributions(logits.to("mps"), temperatures)
        assert there.choose(rows, numbers, cut).tolist() == expected.tolist()


def test_a_machine_without_one_says_what_is_missing(tiny_llama_folder: Path) -> None:
    if torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    config = LocalEngineConfig(models={"m": str(tiny_llama_folder)}, device="mps")
    with pytest.raises(EngineError, match="no GPU of Apple's; it needs a Mac"):
        EngineCore(config)
