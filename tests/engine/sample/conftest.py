"""What tests of the sampler share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.sample.sampling_reference import (
    CPU,
)
from tinsmith.detokenizer import read_detokenize
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.sample.generation import Generator


@pytest.fixture
def generator(tiny_decoder: Decoder, tiny_llama_folder: Path) -> Generator:
    return Generator(tiny_decoder, CPU, read_detokenize(tiny_llama_folder), prefill_tokens=16)
