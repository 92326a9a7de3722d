"""Whole decoding steps on kernels, against the trainer's forward pass.

Needs CUDA with Triton, or Triton alone and TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.sample.sampling_reference import (
    answers,
    assert_trainer_agrees,
    job_of,
    tokens_of,
)
from tests.support.tiny_families import TINY_FAMILIES, save_tiny
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if IS_INTERPRETED else [pytest.mark.gpu]),
]

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
# The interpreter takes a quarter of a minute for each.
VARIANTS = ["qwen3", "gemma2", "gpt_oss", *([] if IS_INTERPRETED else ["llama_biased", "mistral"])]
MAX_TOKENS = 2 if IS_INTERPRETED else 4
SMALL = LocalEngineConfig(device=DEVICE, kv_cache_bytes=1 << 24)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows, in the interpreter's numpy
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_many_tenants_and_of_none_have_the_logprobs_of_the_trainer(
    variant: str,
    model_folder: Callable[[str], Path],
    new_adapter: Callable[..., Adapter],
    tmp_path: Path,
) -> None:
    """Adapters of many ranks and of parts of the model; more rows of one than a tile has."""
    if variant in TINY_FAMILIES:
        save_tiny(variant, tmp_path)
    folder = tmp_path if variant in TINY_FAMILIES else model_folder(variant)
    decoder = Decoder.load(folder, device=torch.device(DEVICE))
    adapters: dict[str, Adapter | None] = {
        "none": None,
        "one": new_adapter(decoder, fill_seed=1, rank=1),
        "three": new_adapter(decoder, fill_seed=2, rank=3),
        "many": new_adapter(decoder, fill_seed=3, rank=32),
        "large": new_adapter(decoder, fill_seed=4, rank=128),
        "attention": new_adapter(decoder, fill_seed=5, rank=8, train_mlp=False),
        "mlp": new_adapter(decoder, fill_seed=6, rank=8, train_attn=False, train_unembed=False),
    }
    counts = {"many": 17, "none": 2}
    prompts = {name: tokens_of(5 + number, number) for number, name in enumerate(adapters)}
    jobs = [
        (
            job_of(
                name, prompts[name], num_samples=counts.get(name, 1), max_tokens=MAX_TOKENS, seed=5
            ),
            adapter,
        )
        for name, adapter in adapters.items()
    ]
    for name, response in answers(Generator(decoder, SMALL), jobs).items():
        assert_trainer_agrees(decoder, prompts[name], response, adapters[name])
