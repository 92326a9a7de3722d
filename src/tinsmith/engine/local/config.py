"""How the local engine is set up: plain values, which the caller sends to its process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from tinsmith.errors import ValidationError

EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The name under which the small model that we ship with is served."""

EMBEDDED_SOURCE = "embedded"
"""The source, in a model table, that means the small model that we ship with."""


BaseWeights = Literal["full", "int8", "fp8", "nf4"]
"""How the linear layers of base models are kept in memory."""

BITS: Mapping[BaseWeights, float] = {"int8": 8.0, "fp8": 8.0, "nf4": 4.5}
"""Bits for each number where weights are not kept in full; with 8 bits each row also has a
scale."""


def default_cache_folder() -> Path:
    """Where converted models go unless the configuration says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tinsmith"


def default_hub_folder() -> Path:
    """Where the Hugging Face tools on this machine keep what they downloaded."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngineConfig:
    models: Mapping[str, str] = field(default_factory=lambda: {EMBEDDED_MODEL: EMBEDDED_SOURCE})
    """The base models that are served: the name clients use, and where its files are, which is
    a folder, a GGUF file, a name in the Hugging Face cache, or "embedded"."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the mathematics runs; "auto" is CUDA where there is a device."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base weights; "auto" is float32 on the CPU and bfloat16 on CUDA. Adapters,
    their gradients and the optimizer's state are float32 always."""

    base_weights: BaseWeights = "full"
    """How the linear layers and experts of base models are kept: "full" in `dtype`, or rounded to 8
    bits ("int8", "fp8") or 4.5 ("nf4") for each number, which saves memory and costs time.
    Adapters, gradients and the optimizer's state keep full precision; embeddings and the
    unembedding stay in full."""

    deterministic: bool = False
    """Every sequence runs by itself, on a fixed number of threads: results are then equal to the
    last bit whatever else runs, and slower."""

    on_policy: Literal["close", "exact"] = "close"
    """With "exact" a sampled token's log-probability equals in every bit what `forward` gives for
    the same weights and tokens, at temperature 1, whatever else runs; slower, on the CPU in float32
    or on CUDA in bfloat16, for models of our own decoder."""

    router_replay: bool = False
    """Whether samples report the experts that each token went to, which are kept beside keys and
    values, and passes count the tokens whose experts they were given. A model whose
    routers cannot be told where to send tokens is named in the log, and routes by itself."""

    num_threads: int | None = None
    """Threads for the mathematics on the CPU; None leaves torch's choice, and is one thread in
    deterministic mode."""

    micro_batch_tokens: int | None = None
    """Most tokens in one micro-batch; a longer sequence runs alone. None is 16384 on CUDA and, on
    the CPU, 1024 for models below 8 MiB to 512 for those above 16 MiB, or to 256 above 32 MiB
    while others wait."""

    logits_bytes: int | None = None
    """Most memory for logits at a time while training. None is 256 MiB on the CPU, 2 GiB
    on CUDA."""

    checkpoint_layers: bool = False
    """Whether the backward pass computes activations again, layer by layer, to save memory."""

    memory_fraction: float = 0.9
    """Part of the device's memory, or on the CPU of the machine's, that is divided among base
    models, keys and values, adapters and passes when the engine starts. Engines that share a device
    share it evenly."""

    memory_budget_bytes: int | None = None
    """Most memory for base models together; beyond it the least recently used idle one is dropped.
    A request whose model has no room beside those in use waits for it, and later requests for other
    models wait behind it. None keeps them all."""

    pack_weights: bool | None = None
    """Whether base weights are also kept in the layouts in which the CPU multiplies fastest, which
    takes about three times their memory, in float32. None does so where the copies take at most a
    quarter of the machine's memory and of `memory_budget_bytes`; not in deterministic mode,
    where asking for it is an error."""

    ranks: int = 1
    """Processes, in lockstep, among which each base model is divided: by heads, inner columns and
    vocabulary. On CUDA each has a device of its own, or all share one where there are too few."""

    custom_loss_seconds: float = 10.0
    """Most processor time that the uploaded loss of one pass may take; the pass then fails."""

    max_lora_rank: int = 128
    """Largest rank that a model may ask for."""

    kv_cache_bytes: int | None = None
    """Memory for the keys and values of running samples, for each base model; it is allocated as
    a whole. None is a third of what the base models leave, divided by their number, and on the
    CPU at most 1 GiB."""

    image_cache_bytes: int | None = None
    """Memory, for each base model, for what its vision tower made of images; where it is full,
    images of the owner who takes most are dropped first. None is 256 MiB on the CPU and 2 GiB on
    CUDA."""

    max_running_samples: int = 256
    """Most sequences that are decoded at the same time; on the CPU 64 while several owners share
    a model."""

    verify_models: bool = True
    """Whether a model's logits are compared with those of transformers, on a few of its layers,
    before it is first served; a model that differs is refused."""

    cache_folder: Path = field(default_factory=default_cache_folder)
    """Where converted models and compiled kernels are kept, and which models were verified."""

    hub_folder: Path = field(default_factory=default_hub_folder)
    """The Hugging Face cache in which models are looked up by name; nothing is added to it."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not value > 0:
                raise ValidationError(f"must be above zero, got {value}", f"engine.{each.name}")
        if self.memory_fraction > 1:
            raise ValidationError(
                f"must be at most 1, got {self.memory_fraction}", "engine.memory_fraction"
            )
