"""Base models in 8 and 4 bits: what is rounded, what it costs, and that they learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.sample.sampling_reference import (
    answer,
    assert_trainer_agrees,
    job_of,
    tokens_of,
)
from tests.engine.train.training_reference import RAGGED, Reference, assert_close, succeed
from tests.support.tiny_families import save_tiny
from tinsmith.engine.local.config import BaseWeights, LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.quantized import (
    NF4,
    Fp8Weight,
    Int8Weight,
    Nf4Weight,
    quantize,
)
from tinsmith.engine.local.model.sources import weights_nbytes
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.errors import EngineError

KINDS: tuple[BaseWeights, ...] = ("int8", "fp8", "nf4")
NewAdapter = Callable[..., Adapter]


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(2))


def test_int8_is_half_a_step_of_its_row_away_at_most() -> None:
    weight = normal(20, 50) * torch.logspace(-20, 20, 20)[:, None]
    weight[3] = 0
    dense = Int8Weight(weight).dense()
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((dense - weight).abs() <= 0.5001 * steps).all()
    assert torch.equal(dense[3], weight[3])


def test_fp8_is_a_sixteenth_of_a_number_away_at_most() -> None:
    """Or half the smallest step, of which a row's largest magnitude has 448 · 512."""
    weight = normal(20, 50) * torch.logspace(-20, 20, 20)[:, None]
    weight[3] = 0
    dense = Fp8Weight(weight).dense()
    smallest = weight.abs().amax(dim=1, keepdim=True) / 448 / 512
    assert ((dense - weight).abs() <= 1.0001 * torch.maximum(weight.abs() / 16, smallest / 2)).all()
    assert torch.equal(dense[3], weight[3])


def test_nf4_takes_the_nearest_of_sixteen_values_in_each_block() -> None:
    """Against the plain search; the last block is not full."""
    weight = normal(7, 30)
    weight[2] = 0
    dense = Nf4Weight(weight).dense()
    flat, found = weight.flatten().tolist(), dense.flatten().tolist()
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        largest = max(map(abs, block))
        for number, rounded in zip(block, found[start : start + 64], strict=True):
            nearest = min(NF4, key=lambda value: abs(value * largest - number))
            assert rounded == pytest.approx(nearest * largest, abs=1e-6)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("fp8", 8), ("nf4", 4.5)])
def test_a_weight_takes_its_bits_and_keeps_its_dtype(kind: BaseWeights, bits: float) -> None:
    weight = normal(512, 1024).bfloat16()
    kept = quantize(weight, kind)
    assert weight.numel() * bits / 8 <= kept.nbytes <= weight.numel() * bits / 8 * 1.01
    linear = Linear(kept)
    assert linear.weight.dtype == torch.bfloat16
    assert linear.packed_bytes == 0 and linear.nbytes == kept.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_rounded_weight(kind: BaseWeights) -> None:
    kept = quantize(normal(24, 40), kind)
    assert not isinstance(kept, torch.Tensor)
    linear, plain = Linear(kept, normal(24)), Linear(kept.dense(), normal(24))
    x, grad = normal(5, 40), normal(5, 24)
    assert torch.equal(linear.product(x), plain.product(x))
    assert torch.equal(linear.product_back(grad), plain.product_back(grad))


def load(folder: Path, kind: BaseWeights, **options: int) -> Decoder:
    config = LocalEngineConfig(
        device="cpu", models={"tiny": str(folder)}, base_weights=kind, **options
    )
    return BaseModels(config).get("tiny")


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_learn_on_a_rounded_base_with_exact_gradients(
    kind: BaseWeights,
    model_folder: Callable[[str], Path],
    reference_model: Callable[[str], object],
    new_adapter: NewAdapter,
) -> None:
    """Those of autograd through `transformers` with the same rounded weights."""
    decoder = load(model_folder("qwen2"), kind)
    reference = reference_model("qwen2")
    with torch.no_grad():
        for layer, block in zip(reference.model.layers, decoder.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            linears = (
                (attention.q_proj, attention.k_proj, attention.v_proj),
                (attention.o_proj,),
                (mlp.gate_proj, mlp.up_proj),
                (mlp.down_proj,),
            )
            for fused, modules in zip(block.linears, linears, strict=True):
                parts = fused.weight.split([module.out_features for module in modules])
                for module, part in zip(modules, parts, strict=True):
                    assert not torch.equal(module.weight, part)
                    module.weight.copy_(part)
    adapter = new_adapter(decoder)
    _, _, expected = Reference(reference, adapter).run(RAGGED)
    succeed(decoder, RAGGED, adapter)
    assert adapter.grad is not None
    assert_close(adapter.grad, expected)
    prompt = tokens_of(9)
    config = LocalEngineConfig(device="cpu")
    response = answer(Generator(decoder, config), job_of("a", prompt, num_samples=2), adapter)
    assert_trainer_agrees(decoder, prompt, response, adapter)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h, no mlp"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_recurrent_layers_is_rounded_in_its_linear_layers(
    kind: BaseWeights, model_type: str, tmp_path: Path, new_adapter: NewAdapter
) -> None:
    """In our decoder, and through `transformers`' modules: sampler and trainer agree, and loading
    again gives the same bits."""
    save_tiny(model_type, tmp_path, initializer_range=0.05)
    full, first, again = (load(tmp_path, each) for each in ("full", kind, kind))
    assert first.nbytes < full.nbytes
    prompt = tokens_of(20)
    responses = []
    for decoder in (full, first, again):
        adapter = new_adapter(decoder)
        generator = Generator(decoder, LocalEngineConfig(device="cpu"))
        responses.append(answer(generator, job_of("a", prompt, prompt_logprobs=True), adapter))
        assert_trainer_agrees(decoder, prompt, responses[-1], adapter)
        succeed(decoder, RAGGED, adapter)
    plain, rounded, same = (np.array(r.prompt_logprobs_np)[1:] for r in responses)
    assert np.array_equal(rounded, same)
    assert 0 < np.abs(plain - rounded).mean() < 0.2


def test_the_budget_counts_what_a_rounded_model_with_towers_takes(tmp_path: Path) -> None:
    """These stay in full; the files are in the layout in which such models are published."""
    save_tiny("inkling_mm_model", tmp_path)
    decoder, needed = load(tmp_path, "nf4"), weights_nbytes(tmp_path, 4, "nf4")
    assert decoder.nbytes <= needed <= 1.05 * decoder.nbytes


def rounded(weight: torch.Tensor, kind: BaseWeights) -> torch.Tensor:
    kept = quantize(weight, kind)
    assert not isinstance(kept, torch.Tensor)
    return kept.dense()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3", "inkling_text"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_learn_on_rounded_experts_with_exact_gradients(
    kind: BaseWeights, model_type: str, tmp_path: Path, new_adapter: NewAdapter
) -> None:
    """Those of autograd through `transformers` with the same rounded weights. What makes queries,
    keys and values of latent vectors stays in full."""
    reference = save_tiny(model_type, tmp_path)
    decoder = load(tmp_path, kind)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "experts." in name and weight.ndim == 3:
                for matrix in weight:
                    if model_type != "gpt_oss":
                        matrix.copy_(rounded(matrix, kind))
                        continue
                    # Inputs before outputs, and gates and ups by turns: blocks are of gates alone.
                    turns = 2 if "gate_up" in name else 1
                    by_turns = matrix.t().unflatten(0, (-1, turns)).transpose(0, 1)
                    whole = rounded(by_turns.flatten(0, 1).contiguous(), kind)
                    by_turns.copy_(whole.view_as(by_turns))
            elif name.endswith(("_proj.weight", "_mqa.weight")) and "_b_proj" not in name:
                weight.copy_(rounded(weight, kind))
    needed = weights_nbytes(tmp_path, 4, kind)
    assert decoder.nbytes <= needed <= 1.05 * decoder.nbytes
    adapter = new_adapter(decoder)
    loss, _, expected = Reference(reference, adapter).run(RAGGED)
    output = succeed(decoder, RAGGED, adapter)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert adapter.grad is not None
    assert_close(adapter.grad, expected)
    prompt = tokens_of(9)
    generator = Generator(decoder, LocalEngineConfig(device="cpu"))
    response = answer(generator, job_of("a", prompt, num_samples=2), adapter)
    assert_trainer_agrees(decoder, prompt, response, adapter)


@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_counts_what_a_rounded_model_takes(
    kind: BaseWeights, tiny_llama_folder: Path
) -> None:
    decoder = load(tiny_llama_folder, kind)
    needed = weights_nbytes(tiny_llama_folder, 4, kind)
    assert decoder.nbytes <= needed <= 1.05 * decoder.nbytes
    assert load(tiny_llama_folder, kind, memory_budget_bytes=needed).nbytes == decoder.nbytes
    with pytest.raises(EngineError, match="memory_budget_bytes"):
        load(tiny_llama_folder, "full", memory_budget_bytes=needed)


def test_packed_copies_of_rounded_weights_are_refused(tiny_llama_folder: Path) -> None:
    with pytest.raises(EngineError, match="leave out one of them"):
        load(tiny_llama_folder, "nf4", pack_weights=True)
