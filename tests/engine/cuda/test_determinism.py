"""Deterministic mode on CUDA: the same bits, whoever shares a call and however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tinsmith.engine.base import Pass
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.engine.local.train.passes import run_passes
from tinsmith.types import Datum, ForwardBackwardOutput, ModelInput

pytestmark = pytest.mark.gpu

CONFIG = LocalEngineConfig(device="cuda", deterministic=True)


@pytest.fixture(autouse=True)
def deterministic_torch(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the engine's core sets up in this mode."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def decoder(
    request: pytest.FixtureRequest,
    cuda: torch.device,
    model_folder: Callable[[str], Path],
) -> Decoder:
    return Decoder.load(model_folder("qwen3"), cuda, request.param)


def make_data(lengths: list[int], seed: int) -> list[Datum]:
    random = np.random.default_rng(seed)
    return [
        Datum(
            ModelInput.from_ints(random.integers(0, 97, length)),
            {
                "target_tokens": random.integers(0, 97, length),
                "weights": random.normal(size=length).astype(np.float32),
            },
        )
        for length in lengths
    ]


def run(
    decoder: Decoder, passes: list[Pass], adapters: dict[str, Adapter]
) -> list[ForwardBackwardOutput]:
    results = {p.index: p.result for p in run_passes(passes, adapters, decoder, CONFIG) if p}
    found = [results[index] for index in range(len(passes))]
    assert all(isinstance(result, ForwardBackwardOutput) for result in found), found
    return [result for result in found if isinstance(result, ForwardBackwardOutput)]


def passes_of(*parts: list[Datum]) -> list[Pass]:
    return [Pass(adapter_id="a", data=part, loss_fn="cross_entropy") for part in parts]


# Longer than the chunks in which gradients are summed up otherwise, and two of one round length.
LENGTHS = [17, 1, 128, 128, 2100, 90]


def test_two_tenants_together_have_the_bits_they_have_alone(
    decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
    shared = {str(n): new_adapter(decoder, pool=pool, fill_seed=n) for n in range(2)}
    passes = [
        Pass(adapter_id=name, data=make_data(LENGTHS, int(name)), loss_fn="cross_entropy")
        for name in shared
    ]
    together = run(decoder, passes, shared)
    for n, request in enumerate(passes):
        alone = new_adapter(decoder, fill_seed=n)
        (result,) = run(decoder, [request], {str(n): alone})
        assert result.loss_fn_outputs == together[n].loss_fn_outputs
        grad = shared[str(n)].grad
        assert grad is not None and alone.grad is not None
        assert torch.equal(grad, alone.grad)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_cutting_a_pass_in_two_changes_no_bit(
    cut: int, decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    data = make_data(LENGTHS, 0)
    whole, split = new_adapter(decoder), new_adapter(decoder)
    (expected,) = run(decoder, passes_of(data), {"a": whole})
    parts = passes_of(data[:cut], data[cut:])
    outputs = [o for result in run(decoder, parts, {"a": split}) for o in result.loss_fn_outputs]
    assert outputs == expected.loss_fn_outputs
    assert whole.grad is not None and split.grad is not None
    assert torch.equal(whole.grad, split.grad)
