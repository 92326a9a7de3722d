"""What can be said of a model before it is served: whether, how, and in how much memory it runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tinsmith.engine.local.config import BITS, LocalEngineConfig
from tinsmith.engine.local.device import device_of, dtype_of
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.foreign.config import ForeignConfig, is_foreign
from tinsmith.engine.local.model.foreign.trial import try_settings
from tinsmith.engine.local.model.lora import Layout
from tinsmith.engine.local.model.model_types import Path as RunsOn
from tinsmith.engine.local.model.packed_files.conversion import PackedFiles
from tinsmith.engine.local.model.settings import IN_PARTS, read_settings
from tinsmith.engine.local.model.sources import full_tensors, weights_nbytes
from tinsmith.engine.local.ranks.models import why_not
from tinsmith.engine.local.sample.kvcache import CacheShape
from tinsmith.engine.stored_tensors import num_elements
from tinsmith.memory import machine_bytes
from tinsmith.types import LoraConfig

_TRAINING_VECTORS = 4
"""Of an adapter in float32: weights, gradient and two moments."""

_RANKS = (2, 3, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """A model that can be served, and what it takes on this machine."""

    model_type: str
    architecture: str
    runs_on: RunsOn
    adapted: tuple[str, ...]
    """Last parts of the names of the modules that adapters extend."""

    stored_as: str | None
    """The layout of its files, where these hold weights in few bits."""

    converted_bytes: int
    """What these then take in full, in the cache folder."""

    max_context_length: int
    ranks: tuple[int, ...]
    """Of a few usual numbers of ranks, those among which it can be divided."""

    image_tokens: int
    """Most tokens of one image; 0 where it reads none."""

    num_parameters: int
    device: str
    dtype: str
    weights_bytes: int
    few_bits_bytes: Mapping[str, int]
    """What weights take by `base_weights`, where they are not kept in full."""

    rank: int
    adapter_bytes: int
    """Of one adapter of that rank while it trains."""

    token_bytes: int
    """What sampling keeps of a token."""

    sequence_bytes: int
    """What it keeps of a sequence beside its tokens."""

    memory_bytes: int
    """What the device has."""

    @property
    def fits(self) -> bool:
        """Whether weights and one adapter leave a fifth of the memory to activations."""
        return self._fit(self.weights_bytes)

    @property
    def fits_in(self) -> tuple[str, ...]:
        """The ways to keep weights, in full or in few bits, in which they do."""
        sizes = {"full": self.weights_bytes, **self.few_bits_bytes}
        return tuple(kind for kind, size in sizes.items() if self._fit(size))

    def _fit(self, weights_bytes: int) -> bool:
        return weights_bytes + self.adapter_bytes <= 0.8 * self.memory_bytes


def check_model(folder: Path, rank: int) -> ModelCheck:
    """The facts about a model folder; one that cannot be served is an `EngineError`."""
    packed = PackedFiles.of(folder)
    settings = LocalEngineConfig(models={"model": str(folder)})
    config = BaseModels(settings).config("model") if packed is None else _config_of(packed)
    device, dtype = device_of(settings), dtype_of(settings)
    model_type = str(read_settings(folder / "config.json").get("model_type"))
    modules = [module for each in config.projections for module in each.modules]
    cache = CacheShape.of(config, device, dtype)
    size = num_elements(full_tensors(folder))
    return ModelCheck(
        model_type=model_type,
        architecture=config.architecture,
        runs_on="transformers" if is_foreign(config) else "decoder",
        adapted=tuple(dict.fromkeys(module.rpartition(".")[2] for module in modules)),
        stored_as=None if packed is None else packed.layout,
        converted_bytes=0 if packed is None else packed.nbytes(),
        max_context_length=config.max_context_length,
        ranks=tuple(n for n in _RANKS if model_type not in IN_PARTS and not why_not(config, n)),
        image_tokens=0 if config.images is None else config.images.max_tokens,
        num_parameters=size,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=size * dtype.itemsize,
        few_bits_bytes={kind: weights_nbytes(folder, dtype.itemsize, kind) for kind in BITS},
        rank=rank,
        adapter_bytes=4 * _TRAINING_VECTORS * Layout(config, LoraConfig(rank=rank)).size,
        token_bytes=cache.bytes_per_token,
        sequence_bytes=cache.state_bytes,
        memory_bytes=_memory_bytes(device),
    )


def _config_of(packed: PackedFiles) -> DecoderConfig:
    """Without converting weights, which is what comparing our own decoder with `transformers` would
    take."""
    with tempfile.TemporaryDirectory() as name:
        packed.write_settings(Path(name))
        settings = LocalEngineConfig(models={"model": name}, verify_models=False)
        config = BaseModels(settings).config("model")
        if isinstance(config, ForeignConfig):
            try_settings(Path(name), config)
        return config


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_bytes()
