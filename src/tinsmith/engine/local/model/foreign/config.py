"""The shape of a model that runs through `transformers`' modules."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.engine.local.model.families import DecoderConfig, RoutedLayers
from tinsmith.engine.local.model.foreign.routers import ForeignRouters


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig(DecoderConfig):
    """The shape of a model that runs through `transformers`' modules."""

    attending: tuple[int, ...]
    """The model's own numbers of the layers that attend; `layers` describes these."""

    routers: ForeignRouters | None = None
    """None where the model has none, or routes by itself."""

    hidden_divisor: float = 1.0
    """Of hidden states, before the unembedding."""

    num_logits: int | None = None
    """Where tokens from that one on are never next: their rows are there to round the number."""

    @property
    def routed(self) -> RoutedLayers | None:
        return None if self.routers is None else self.routers.layers


def is_foreign(config: DecoderConfig) -> bool:
    return isinstance(config, ForeignConfig)
