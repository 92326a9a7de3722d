"""Families with experts, latent vectors or recurrent layers on CUDA: against the CPU, in bfloat16,
and of our own decoder captured steps against launched ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.families.test_families import FAMILIES
from tests.engine.sample.sampling_reference import (
    answers,
    assert_trainer_agrees,
    job_of,
    tokens_of,
)
from tests.engine.train.training_reference import RAGGED, assert_close, make_datum, run, succeed
from tests.engine.vision import test_models as vision
from tests.support.tiny_families import VARIANTS, save_tiny
from tests.support.tiny_vision import save_tiny_vision
from tinsmith.engine.base import Pass
from tinsmith.engine.local.config import BaseWeights, LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.family_settings import FAMILIES as OWN
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import ForwardBackwardOutput, SampleResponse

pytestmark = pytest.mark.gpu

SMALL = LocalEngineConfig(device="cuda", kv_cache_bytes=1 << 28)

NewAdapter = Callable[..., Adapter]


WITH_KERNELS = [name for name in VARIANTS if "kernel" in name]


@pytest.fixture(scope="module", params=[*FAMILIES, *WITH_KERNELS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, made)
    return made


def load(folder: Path, device: str, dtype: str = "float32", kind: BaseWeights = "full") -> Decoder:
    config = LocalEngineConfig(
        device=device, dtype=dtype, models={"tiny": str(folder)}, base_weights=kind
    )
    return BaseModels(config).get("tiny")


def test_a_pass_on_cuda_has_the_gradient_of_the_cpu(
    cuda: torch.device, folder: Path, new_adapter: NewAdapter
) -> None:
    found = []
    for device in ("cpu", "cuda"):
        decoder = load(folder, device)
        adapter = new_adapter(decoder)
        loss = succeed(decoder, RAGGED, adapter).metrics["loss:sum"]
        assert adapter.grad is not None
        found.append((loss, adapter.grad.cpu()))
    (cpu_loss, expected), (loss, gradient) = found
    assert loss == pytest.approx(cpu_loss, rel=1e-4)
    assert_close(gradient, expected, 1e-3)


def test_a_pass_of_several_adapters_takes_their_gradients_and_no_copy_of_them(
    cuda: torch.device, tmp_path: Path, new_adapter: NewAdapter
) -> None:
    """With experts adapters are large, and few tokens take little else."""
    save_tiny("qwen3_moe", tmp_path)
    decoder = load(tmp_path, "cuda", "bfloat16")
    config = LocalEngineConfig(device="cuda")
    adapters = {str(n): new_adapter(decoder, fill_seed=n, rank=1024) for n in range(8)}
    passes = [
        Pass(adapter_id=n, data=[make_datum(4, 1)], loss_fn="cross_entropy") for n in adapters
    ]
    # The second time all is there that is made once.
    for _ in range(2):
        for adapter in adapters.values():
            adapter.drop_gradient()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run(decoder, passes, adapters, config)
        assert all(isinstance(result, ForwardBackwardOutput) for result in results), results
    taken = torch.cuda.max_memory_allocated() - before
    gradients = sum(adapter.flat.nbytes for adapter in adapters.values())
    assert gradients <= taken < 1.25 * gradients
    alone = new_adapter(decoder, fill_seed=3, rank=1024)
    run(decoder, [passes[0]], {"0": alone}, config)
    together = adapters["3"].grad
    assert alone.grad is not None and together is not None
    assert_close(together, alone.grad, 1e-2)


def test_samples_on_cuda_have_the_logprobs_of_the_trainer(
    cuda: torch.device, folder: Path, new_adapter: NewAdapter
) -> None:
    decoder = load(folder, "cuda")
    adapter, prompt = new_adapter(decoder), tokens_of(11)
    jobs = [(job_of("j", prompt, num_samples=3, max_tokens=14, seed=5), adapter)]
    for response in answers(Generator(decoder, SMALL), jobs).values():
        assert_trainer_agrees(decoder, prompt, response, adapter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", [*(name for name in FAMILIES if name in OWN), *WITH_KERNELS])
def test_captured_steps_give_what_launched_ones_give(
    cuda: torch.device, model_type: str, dtype: str, tmp_path: Path, new_adapter: NewAdapter
) -> None:
    """Under several adapters, and under none: whatever the router chooses, nothing waits for it,
    and a state is changed once by a step, captured there or replayed."""
    save_tiny(model_type, tmp_path)
    decoder = load(tmp_path, "cuda", dtype)
    adapters = {
        "a": new_adapter(decoder, fill_seed=21, rank=8),
        "b": new_adapter(decoder, fill_seed=22, rank=3),
        "c": new_adapter(decoder, fill_seed=23, train_mlp=False),
        "d": None,
    }
    jobs = [
        (job_of(name, tokens_of(7), num_samples=3, max_tokens=14, seed=5), adapter)
        for name, adapter in adapters.items()
    ]
    captured, launched = (
        [
            (name, sequence.tokens, sequence.logprobs)
            for name, response in answers(generator, jobs).items()
            for sequence in response.sequences
        ]
        for generator in (Generator(decoder, SMALL), Generator(decoder, SMALL, use_graphs=False))
    )
    assert sorted(captured) == sorted(launched)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_captured_steps_behind_an_image_have_the_logprobs_of_the_trainer(
    cuda: torch.device, model_type: str, tmp_path: Path, new_adapter: NewAdapter
) -> None:
    """There a token's position is not its place among the tokens."""
    save_tiny_vision(model_type, tmp_path)
    decoder = load(tmp_path, "cuda")
    assert decoder.vision is not None
    adapter = new_adapter(decoder)
    for prompt in vision.INPUTS[:2]:
        jobs = [(vision.job_of("j", prompt, num_samples=3), adapter)]
        for response in answers(Generator(decoder, SMALL), jobs).values():
            vision.assert_trainer_agrees(decoder, prompt, response, adapter)


def test_bfloat16_on_cuda_trains_and_samples(
    cuda: torch.device, folder: Path, new_adapter: NewAdapter
) -> None:
    decoder = load(folder, "cuda", "bfloat16")
    adapter = new_adapter(decoder)
    succeed(decoder, RAGGED, adapter)
    assert adapter.grad is not None and adapter.grad.isfinite().all()
    jobs = [(job_of("j", tokens_of(11), num_samples=3, max_tokens=14, seed=5), adapter)]
    config = LocalEngineConfig(device="cuda", dtype="bfloat16", kv_cache_bytes=1 << 28)
    (response,) = answers(Generator(decoder, config), jobs).values()
    assert isinstance(response, SampleResponse)
    assert all(len(sequence.tokens) > 0 for sequence in response.sequences)


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_a_base_in_few_bits_on_cuda_has_the_gradient_of_the_cpu(
    kind: BaseWeights, cuda: torch.device, folder: Path, new_adapter: NewAdapter
) -> None:
    """Of linear layers and experts; nothing of it is left behind on the CPU."""
    found = []
    for device in ("cpu", "cuda"):
        decoder = load(folder, device, kind=kind)
        adapter = new_adapter(decoder)
        assert decoder.device.type == adapter.flat.device.type == device
        loss = succeed(decoder, RAGGED, adapter).metrics["loss:sum"]
        assert adapter.grad is not None
        found.append((loss, adapter.grad.cpu(), decoder.nbytes))
    (cpu_loss, expected, cpu_bytes), (loss, gradient, num_bytes) = found
    assert loss == pytest.approx(cpu_loss, rel=1e-3)
    assert_close(gradient, expected, 1e-2)
    assert num_bytes <= 1.1 * cpu_bytes
    prompt = tokens_of(11)
    jobs = [(job_of("j", prompt, num_samples=3, max_tokens=14, seed=5), adapter)]
    for response in answers(Generator(decoder, SMALL), jobs).values():
        assert_trainer_agrees(decoder, prompt, response, adapter)
