"""Beside weights in half precision the residual stream, what joins it and logits are in float32.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.sample.sampling_reference import (
    answer,
    assert_trainer_agrees,
    job_of,
    tokens_of,
)
from tests.engine.train.training_reference import RAGGED, succeed
from tests.support.tiny_families import save_tiny
from tinsmith.engine.local import kernels
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments
from tinsmith.engine.local.sample.generation import Generator

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]

# The interpreter has no products of bfloat16.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture
def decoder(device: torch.device, model_folder: Callable[[str], Path]) -> Decoder:
    return Decoder.load(model_folder("llama"), device, HALF)


def is_rounded(x: Tensor) -> bool:
    return torch.equal(x, x.to(HALF).to(x.dtype))


def test_logits_are_the_products_of_hidden_states_unrounded(decoder: Decoder) -> None:
    tokens = torch.tensor(tokens_of(9), device=decoder.device)
    positions = torch.arange(9, device=decoder.device)
    segments, attention = AdapterSegments.whole(9, None), PackedAttention(decoder.config, [9])
    with torch.no_grad():
        hidden = decoder.hidden(tokens, positions, attention, segments)
        logits = decoder.raw_logits(hidden, segments)
    assert hidden.dtype == HALF
    expected = hidden.float() @ decoder.head.weight.float().t()
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert not is_rounded(logits)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_the_sampler_draws_from_unrounded_logits_and_adds_to_an_unrounded_stream(
    has_adapter: bool,
    decoder: Decoder,
    new_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside an adapter the kernel that adds is another, which adds its part, too."""
    from tinsmith.engine.local.sample import decode_step

    seen: list[Tensor] = []
    draw = decode_step.draw

    def keep(logits: Tensor, *others: Tensor) -> object:
        seen.append(logits)
        return draw(logits, *others)

    monkeypatch.setattr(decode_step, "draw", keep)
    module = kernels.module("decode_joins") if has_adapter else decode_step
    add = module.add_rms_norm

    def keep_sum(x: Tensor, y: Tensor, *others: object) -> Tensor:
        seen.append(y)
        out = add(x, y, *others)
        seen.append(x.clone())
        assert out.dtype == HALF
        return out

    monkeypatch.setattr(module, "add_rms_norm", keep_sum)
    small = LocalEngineConfig(device=decoder.device.type, kv_cache_bytes=1 << 24)
    generator = Generator(decoder, small, use_graphs=False)
    adapter = new_adapter(decoder) if has_adapter else None
    answer(generator, job_of("j", tokens_of(5), max_tokens=2), adapter)
    assert len(seen) == 2 * 2 * decoder.config.num_layers + 1
    for each in seen:
        assert each.dtype == torch.float32
        assert not is_rounded(each)


@pytest.mark.parametrize("model_type", ["qwen2_moe", *([] if IS_INTERPRETED else ["qwen3_moe"])])
def test_with_experts_sampler_and_trainer_agree(
    model_type: str,
    device: torch.device,
    tmp_path: Path,
    new_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What experts leave joins the stream unrounded, too; also that of a shared one."""
    from tinsmith.engine.local.sample import decode_step

    dtypes = set()
    for module in (decode_step, kernels.module("decode_joins")):
        add = module.add_rms_norm

        def keep(x: Tensor, y: Tensor, *others: object, add: Callable[..., Tensor] = add) -> Tensor:
            dtypes.add(y.dtype)
            return add(x, y, *others)

        monkeypatch.setattr(module, "add_rms_norm", keep)
    save_tiny(model_type, tmp_path)
    decoder = Decoder.load(tmp_path, device, HALF)
    adapter, prompt = new_adapter(decoder), tokens_of(5)
    small = LocalEngineConfig(device=device.type, kv_cache_bytes=1 << 24)
    generator = Generator(decoder, small, use_graphs=False)
    max_tokens = 3 if IS_INTERPRETED else 6
    response = answer(generator, job_of("j", prompt, max_tokens=max_tokens, seed=3), adapter)
    assert dtypes == {torch.float32}
    # A rounding may send a token of such a model to other experts.
    tolerance = 0.01 if IS_INTERPRETED else 0.2
    assert_trainer_agrees(decoder, prompt, response, adapter, tolerance=tolerance)
    succeed(decoder, RAGGED, adapter, LocalEngineConfig(device=device.type))
    assert adapter.grad is not None and adapter.grad.isfinite().all() and adapter.grad.any()


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_a_pass_has_the_gradient_of_one_in_float32(
    checkpoint_layers: bool,
    device: torch.device,
    decoder: Decoder,
    model_folder: Callable[[str], Path],
    new_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To what half precision of products allows."""
    config = LocalEngineConfig(device=device.type, checkpoint_layers=checkpoint_layers)
    adapter = new_adapter(decoder)
    succeed(decoder, RAGGED, adapter, config=config)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "are_usable", lambda x: False)
        plain = Decoder.load(model_folder("llama"))
        exact = new_adapter(plain)
        succeed(plain, RAGGED, exact)
    assert adapter.grad is not None and exact.grad is not None
    difference = (adapter.grad.cpu() - exact.grad).norm() / exact.grad.norm()
    assert difference <= (0.02 if IS_INTERPRETED else 0.12)


def test_where_all_sums_are_in_one_order_nothing_changes(decoder: Decoder) -> None:
    assert decoder.stream_dtype == torch.float32
    decoder.head.is_invariant = True
    assert decoder.stream_dtype == HALF
