"""Every family with experts, latent vectors or recurrent layers: exact, packed, shared, sampled.

Tiny random models of each type in float32. The reference is `transformers` itself, with the
adapter's product added to the weights, and autograd through that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.sample.sampling_reference import (
    CPU,
    DETERMINISTIC,
    answer,
    answers,
    assert_trainer_agrees,
    job_of,
    tokens_of,
)
from tests.engine.train.training_reference import (
    RAGGED,
    RELATIVE,
    Reference,
    assert_close,
    assert_saved_adapter_continues,
    make_datum,
    run,
    succeed,
)
from tests.support.tiny_families import VARIANTS, save_tiny
from tinsmith.engine.base import Pass
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import Datum, ModelInput

FAMILIES = (
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "kimi_k2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "nemotron_h",
    "inkling_text",
    "inkling_mm_model",
)

NewAdapter = Callable[..., Adapter]


@pytest.fixture(scope="module", params=[*FAMILIES, *VARIANTS])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Decoder]:
    """The `transformers` model, and ours loaded from what it saved."""
    folder = tmp_path_factory.mktemp("family")
    reference = save_tiny(request.param, folder)
    return reference, load(folder)


def load(folder: Path) -> Decoder:
    return BaseModels(LocalEngineConfig(device="cpu", models={"tiny": str(folder)})).get("tiny")


def packed_logits(decoder: Decoder, sequences: list[Tensor]) -> list[Tensor]:
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = AdapterSegments.whole(sum(lengths))
    with torch.no_grad():
        attention = PackedAttention(decoder.config, lengths)
        hidden = decoder.hidden(torch.cat(sequences), positions, attention, segments)
        return list(decoder.unembed(hidden, segments).split(lengths))


def test_packed_logits_are_those_of_transformers(family: tuple[Any, Decoder]) -> None:
    """Sequences longer than a window too; within 1e-5 of the largest logit."""
    reference, decoder = family
    sequences = [torch.tensor(tokens_of(length, length)) for length in (9, 1, 20, 33)]
    for sequence, found in zip(sequences, packed_logits(decoder, sequences), strict=True):
        with torch.no_grad():
            expected = reference(sequence[None]).logits[0]
        assert (found - expected).abs().max() <= RELATIVE * expected.abs().max()


def test_every_factor_has_the_gradient_of_autograd_through_merged_weights(
    family: tuple[Any, Decoder], new_adapter: NewAdapter
) -> None:
    reference, decoder = family
    adapter = new_adapter(decoder)
    loss, _, expected = Reference(reference, adapter).run(RAGGED)
    output = succeed(decoder, RAGGED, adapter)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
    assert adapter.grad is not None
    wanted, found = adapter.layout.views(expected), adapter.layout.views(adapter.grad)
    for key, factors in wanted.items():
        assert_close(found[key].a, factors.a, 3 * RELATIVE)
        for found_b, b in zip(found[key].b, factors.b, strict=True):
            assert_close(found_b, b, 3 * RELATIVE)


def tenants(decoder: Decoder, new_adapter: NewAdapter) -> dict[str, Adapter]:
    """Adapters of several ranks, one of which leaves the experts alone."""
    return {
        "a": new_adapter(decoder, fill_seed=21),
        "b": new_adapter(decoder, fill_seed=22, rank=3),
        "c": new_adapter(decoder, fill_seed=23, train_mlp=False),
    }


def gradients(
    decoder: Decoder, adapters: dict[str, Adapter], config: LocalEngineConfig
) -> dict[str, Tensor]:
    """Of one call with a pass of each."""
    passes = [
        Pass(
            adapter_id=name, data=[make_datum(12 + n, n), make_datum(5, 9)], loss_fn="cross_entropy"
        )
        for n, name in enumerate(adapters)
    ]
    run(decoder, passes, adapters, config)
    found = {}
    for name, adapter in adapters.items():
        assert adapter.grad is not None
        found[name], adapter.grad = adapter.grad, None
    return found


@pytest.mark.parametrize("config", [CPU, DETERMINISTIC], ids=["packed", "deterministic"])
def test_tenants_of_one_batch_have_the_gradients_that_each_has_alone(
    family: tuple[Any, Decoder], new_adapter: NewAdapter, config: LocalEngineConfig
) -> None:
    """Bit for bit in deterministic mode."""
    _, decoder = family
    adapters = tenants(decoder, new_adapter)
    together = gradients(decoder, adapters, config)
    for number, (name, adapter) in enumerate(adapters.items()):
        data = [make_datum(12 + number, number), make_datum(5, 9)]
        succeed(decoder, data, adapter, config)
        assert adapter.grad is not None
        if config.deterministic:
            assert torch.equal(adapter.grad, together[name])
        else:
            assert_close(adapter.grad, together[name])


def test_sampled_tokens_have_the_logprobs_of_the_trainer(
    family: tuple[Any, Decoder], new_adapter: NewAdapter
) -> None:
    """Alone, and as several samples of one prompt among other tenants; beyond a window."""
    _, decoder = family
    adapters = tenants(decoder, new_adapter)
    prompt = tokens_of(11)
    jobs = [
        (job_of(name, prompt, num_samples=count, max_tokens=14, seed=5), adapters[name])
        for name, count in (("a", 3), ("b", 1), ("c", 2))
    ]
    for name, response in answers(Generator(decoder, CPU), jobs).items():
        assert_trainer_agrees(decoder, prompt, response, adapters[name])


def test_tenants_sample_what_each_samples_alone(
    family: tuple[Any, Decoder], new_adapter: NewAdapter
) -> None:
    """In deterministic mode: the same tokens, and log-probabilities to the last bit."""
    _, decoder = family
    adapters = tenants(decoder, new_adapter)
    jobs = [(job_of(name, tokens_of(7), seed=5), adapter) for name, adapter in adapters.items()]
    together = answers(Generator(decoder, DETERMINISTIC), jobs)
    for job, adapter in jobs:
        (alone,) = answer(Generator(decoder, DETERMINISTIC), job, adapter).sequences
        (beside,) = together[job.job_id].sequences
        assert alone.tokens == beside.tokens
        assert (alone.logprobs_np == beside.logprobs_np).all()


def test_tokens_that_only_fill_up_the_vocabulary_are_never_next(
    new_adapter: NewAdapter, tmp_path: Path
) -> None:
    """Inkling's last rows: adapters have them, as the hosted service's do, and nothing else."""
    reference = save_tiny("inkling_text", tmp_path, unpadded_vocab_size=90)
    decoder = load(tmp_path)
    adapter = new_adapter(decoder)
    tokens = [token % 90 for token in tokens_of(20)]
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    loss, _, expected = Reference(reference, adapter).run([datum])
    output = succeed(decoder, [datum], adapter)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
    assert adapter.grad is not None
    assert_close(adapter.grad, expected)
    job = job_of("a", tokens, num_samples=16, max_tokens=16)
    response = answer(Generator(decoder, CPU), job, adapter)
    assert max(token for each in response.sequences for token in each.tokens) < 90


@pytest.mark.parametrize("shorten", ["self_attn", "attn"])
def test_an_adapter_that_the_hosted_service_wrote_is_loaded(
    family: tuple[Any, Decoder], new_adapter: NewAdapter, tmp_path: Path, shorten: str
) -> None:
    """Its files are weights and their description; in some models `self_attn` is `attn`."""
    _, decoder = family
    adapter, loaded = new_adapter(decoder), new_adapter(decoder, fill_seed=None)
    checkpoints.save(adapter, tmp_path / "one", "sampler")
    (tmp_path / "one" / "tinsmith.json").unlink()
    path = tmp_path / "one" / "adapter_model.safetensors"
    tensors = {k.replace("self_attn", shorten): v for k, v in load_file(path).items()}
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in tensors
    save_file(tensors, path)
    assert checkpoints.read_lora(tmp_path / "one", decoder.config).rank == adapter.rank
    checkpoints.load(loaded, tmp_path / "one", "sampler")
    assert torch.equal(adapter.flat, loaded.flat)


def test_in_bfloat16_gradients_are_near_those_in_float32(
    family: tuple[Any, Decoder], new_adapter: NewAdapter, tmp_path: Path
) -> None:
    """Rounding sends a few tokens to other experts, so that they only point the same way."""
    reference, decoder = family
    reference.save_pretrained(tmp_path)
    models = {"tiny": str(tmp_path)}
    half = BaseModels(LocalEngineConfig(device="cpu", dtype="bfloat16", models=models)).get("tiny")
    assert half.dtype == torch.bfloat16
    exact, rounded = new_adapter(decoder), new_adapter(half)
    succeed(decoder, RAGGED, exact)
    succeed(half, RAGGED, rounded)
    assert exact.grad is not None and rounded.grad is not None
    assert torch.cosine_similarity(exact.grad, rounded.grad, dim=0) > 0.95


def test_a_saved_adapter_continues_bit_for_bit(
    family: tuple[Any, Decoder], new_adapter: NewAdapter, tmp_path: Path
) -> None:
    _, decoder = family
    adapter, restored = new_adapter(decoder), new_adapter(decoder, fill_seed=None)
    assert_saved_adapter_continues(decoder, RAGGED, adapter, restored, tmp_path / "one")
