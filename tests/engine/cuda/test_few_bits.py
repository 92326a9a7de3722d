"""Base weights in few bits on CUDA: decoding reads them as they lie, captured or launched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.sample.sampling_reference import answers, job_of, tokens_of
from tinsmith.engine.local.config import BaseWeights, LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.quantized import Quantized, quantize
from tinsmith.engine.local.sample.generation import Generator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"]),
]


def test_a_captured_product_reads_new_rows_and_has_the_bits_of_a_launched_one(
    kind: BaseWeights, cuda: torch.device
) -> None:
    """Of sizes in which all programs of the device have something to do."""
    for outputs, inputs in ((2560, 9728), (19_456, 2560)):
        weight = torch.randn(outputs, inputs, device=cuda, dtype=torch.bfloat16)
        kept = quantize(weight, kind)
        assert isinstance(kept, Quantized)
        x = torch.randn(64, inputs, device=cuda, dtype=torch.bfloat16)
        kept.product(x, None, torch.float32)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kept.product(x, None, torch.float32)
        for _ in range(2):
            x.normal_()
            graph.replay()
            assert torch.equal(y, kept.product(x, None, torch.float32))
            expected = x.double() @ kept.plain_dense().double().t()
            torch.testing.assert_close(y.double(), expected, atol=1e-2, rtol=1e-4)


def test_captured_steps_give_what_launched_ones_give_and_make_no_weight_whole(
    kind: BaseWeights,
    cuda: torch.device,
    tmp_path: Path,
    new_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    decoder = Decoder.load(tmp_path, cuda, torch.bfloat16, base_weights=kind)

    def refuse(weight: Quantized) -> torch.Tensor:
        raise AssertionError(f"{weight.kind} {tuple(weight.shape)} was made whole")

    monkeypatch.setattr(Quantized, "dense", refuse)
    adapters = {"a": new_adapter(decoder, fill_seed=21, rank=8), "b": None}
    jobs = [
        (job_of(name, tokens_of(7), num_samples=3, max_tokens=14, seed=5), adapter)
        for name, adapter in adapters.items()
    ]
    small = LocalEngineConfig(device="cuda", kv_cache_bytes=1 << 28)
    captured, launched = (
        [
            (name, sequence.tokens, sequence.logprobs)
            for name, response in answers(generator, jobs).items()
            for sequence in response.sequences
        ]
        for generator in (Generator(decoder, small), Generator(decoder, small, use_graphs=False))
    )
    assert sorted(captured) == sorted(launched)
