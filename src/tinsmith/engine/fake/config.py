"""How the fake engine is set up: its models, and how long it pretends to work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinsmith.detokenizer import Detokenize


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    name: str = "tinsmith/fake"
    vocab_size: int = 256
    max_context_length: int = 4096
    eos_token_ids: tuple[int, ...] = (0,)
    tokenizer_folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineConfig:
    models: tuple[FakeModel, ...] = (FakeModel(),)
    """The base models that are served."""

    pass_seconds: float = 0.0
    """How long each pass, step, save, restore or creation keeps the pretended device busy."""

    token_seconds: float = 0.0
    """How long a sampling job takes for each token."""

    max_lora_rank: int = 128

    detokenize: Detokenize = lambda tokens: bytes(t % 256 for t in tokens).decode("latin-1")
    """Text of tokens, for stop strings; by default token t is the character of code t."""
