"""Passes on CUDA, against the reference on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.train.training_reference import (
    RAGGED,
    Reference,
    check_a_broken_tenant_fails_alone,
    check_in_bfloat16,
    differences,
    run,
    succeed,
)
from tinsmith.engine.base import Pass
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.types import (
    ForwardBackwardOutput,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_tenant_with_broken_weights_fails_alone_on_cuda(
    value: float,
    cuda: torch.device,
    tiny_llama_folder: Path,
    new_adapter: Callable[..., Adapter],
) -> None:
    decoder = Decoder.load(tiny_llama_folder, cuda, torch.bfloat16)
    check_a_broken_tenant_fails_alone(decoder, new_adapter, value)


def test_bfloat16_on_cuda_is_as_close_to_float32_as_that_of_transformers(
    variant: str,
    cuda: torch.device,
    model_folder: Callable[[str], Path],
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    check_in_bfloat16(cuda, variant, model_folder(variant), reference_model, new_adapter)


def test_float32_on_cuda_equals_the_reference_in_every_family(
    variant: str,
    cuda: torch.device,
    model_folder: Callable[[str], Path],
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    """Relative tolerance 1e-5, as on the CPU."""
    decoder = Decoder.load(model_folder(variant), cuda, torch.float32)
    adapter, on_cpu = new_adapter(decoder), new_adapter(Decoder.load(model_folder(variant)))
    _, logprobs, grad = Reference(reference_model(variant), on_cpu).run(RAGGED)
    ours, our_grad = differences(succeed(decoder, RAGGED, adapter), adapter, logprobs, grad)
    print(f"{variant}: log-probabilities {ours:.1e}, gradient {our_grad:.1e}")
    assert ours <= 1e-5
    assert our_grad <= 1e-5


def run_tenants(
    decoder: Decoder, new_adapter: Callable[..., Adapter], ranks: Sequence[int]
) -> list[tuple[ForwardBackwardOutput, Adapter]]:
    """One pass each of several adapters, in one batch."""
    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
    shared = {
        str(n): new_adapter(decoder, pool=pool, rank=rank, fill_seed=n)
        for n, rank in enumerate(ranks)
    }
    passes = [Pass(adapter_id=name, data=RAGGED, loss_fn="cross_entropy") for name in shared]
    results = run(decoder, passes, shared)
    outputs = [result for result in results if isinstance(result, ForwardBackwardOutput)]
    return list(zip(outputs, shared.values(), strict=True))


TENANTS = pytest.mark.parametrize("ranks", [(4, 8, 12), (8, 8, 8)], ids=["different", "alike"])


@TENANTS
def test_tenants_in_a_batch_on_cuda_equal_the_reference_in_float32(
    ranks: tuple[int, ...],
    cuda: torch.device,
    tiny_llama_folder: Path,
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    """Relative tolerance 1e-5."""
    decoder, on_cpu = Decoder.load(tiny_llama_folder, cuda), Decoder.load(tiny_llama_folder)
    for n, (output, adapter) in enumerate(run_tenants(decoder, new_adapter, ranks)):
        same = new_adapter(on_cpu, rank=ranks[n], fill_seed=n)
        _, logprobs, grad = Reference(reference_model("llama"), same).run(RAGGED)
        ours, our_grad = differences(output, adapter, logprobs, grad)
        print(f"tenant {n}: log-probabilities {ours:.1e}, gradient {our_grad:.1e}")
        assert ours <= 1e-5 and our_grad <= 1e-5


@TENANTS
def test_tenants_in_a_batch_on_cuda_are_as_exact_as_bfloat16_allows(
    ranks: tuple[int, ...],
    cuda: torch.device,
    tiny_llama_folder: Path,
    reference_model: Callable[[str], Any],
    new_adapter: Callable[..., Adapter],
) -> None:
    """At most half as far again from float32 as `transformers` in bfloat16 is, as when alone."""
    decoder = Decoder.load(tiny_llama_folder, cuda, torch.bfloat16)
    on_cpu = Decoder.load(tiny_llama_folder)
    for n, (output, adapter) in enumerate(run_tenants(decoder, new_adapter, ranks)):
        same = new_adapter(on_cpu, rank=ranks[n], fill_seed=n)
        _, logprobs, grad = Reference(reference_model("llama"), same).run(RAGGED)
        rounded = Reference(reference_model("llama"), same, torch.bfloat16).run(RAGGED)
        floor = (torch.cat(rounded[1]) - torch.cat(logprobs)).abs().mean().item()
        grad_floor = ((rounded[2] - grad).norm() / grad.norm()).item()
        ours, our_grad = differences(output, adapter, logprobs, grad)
        print(f"tenant {n}: {ours:.1e} ({floor:.1e}), gradient {our_grad:.1e} ({grad_floor:.1e})")
        assert ours <= 1.5 * floor and our_grad <= 1.5 * grad_floor
