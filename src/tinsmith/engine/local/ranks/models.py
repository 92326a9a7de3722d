"""From a whole model to a rank's part of it: its configuration and its weights, read cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from tinsmith.engine.local.model.families import DecoderConfig, Projection
from tinsmith.engine.local.ranks.cut import Cut, share_of
from tinsmith.errors import EngineError


def cut_config(config: DecoderConfig, index: int, count: int) -> DecoderConfig:
    """The shape of one rank's part; a model that cannot be cut so is an `EngineError`."""
    if problem := why_not(config, count):
        raise EngineError(f"it cannot be served with {count} ranks: {problem}")
    cut = Cut(
        index=index,
        count=count,
        head_dim=config.head_dim,
        heads=share_of(index, count, config.num_heads),
        num_kv_heads=config.num_kv_heads,
        kv_heads=_kv_heads(index, count, config.num_kv_heads),
        inner=share_of(index, count, config.intermediate_size),
        vocab=share_of(index, count, config.vocab_size),
        is_head_cut=config.vocab_size % count == 0,
    )
    return replace(
        config,
        num_heads=len(cut.heads),
        num_kv_heads=len(cut.kv_heads),
        intermediate_size=len(cut.inner),
        projections=tuple(_cut_projection(each, cut) for each in config.projections),
        cut=cut,
    )


def why_not(config: DecoderConfig, count: int) -> str | None:
    """Why a model of our own decoder cannot be cut into so many parts; None where it can."""
    if config.num_heads % count:
        return f"its {config.num_heads} attention heads cannot be divided evenly"
    if config.num_kv_heads % count and count % config.num_kv_heads:
        return f"its {config.num_kv_heads} key/value heads cannot be divided evenly"
    if config.intermediate_size % count:
        return f"the {config.intermediate_size} columns of its MLP cannot be divided evenly"
    return None


def foreign_refusal(count: int, problem: Exception) -> str:
    """Why a model that our own decoder does not run is not served with several ranks."""
    return (
        f"{problem}; the modules of transformers, which may run it, are not divided among "
        f"{count} ranks, so serve it with ranks = 1"
    )


def _kv_heads(index: int, count: int, total: int) -> range:
    if total >= count:
        return share_of(index, count, total)
    own = index // (count // total)
    return range(own, own + 1)


def _cut_projection(projection: Projection, cut: Cut) -> Projection:
    inputs = cut.inputs(projection.modules[0])
    outputs = [
        size if (rows := cut.outputs(module)) is None else len(rows)
        for module, size in zip(projection.modules, projection.outputs, strict=True)
    ]
    return replace(
        projection,
        inputs=projection.inputs if inputs is None else len(inputs),
        outputs=tuple(outputs),
    )


class SlicedWeights(Protocol):
    """Where a model's tensors can be read in part."""

    def __contains__(self, name: str) -> bool: ...

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        part: tuple[slice, ...] = (),
    ) -> Tensor: ...


class CutWeights:
    """A model's tensors by name, each as far as this rank has it."""

    def __init__(self, weights: SlicedWeights, cut: Cut) -> None:
        self._weights = weights
        self._cut = cut

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        module, _, kind = name.rpartition(".")
        rows, columns = self._cut.outputs(module), self._cut.inputs(module)
        if kind == "bias":
            bias = self._weights.get(name, shape, dtype, _slices(rows))
            # The bias of a product that is summed over ranks is added by one of them.
            return bias if columns is None or self._cut.index == 0 else torch.zeros_like(bias)
        is_cut = rows is not None or columns is not None
        return self._weights.get(name, shape, dtype, _slices(rows, columns) if is_cut else ())


def _slices(*ranges: range | None) -> tuple[slice, ...]:
    return tuple(slice(None) if r is None else slice(r.start, r.stop) for r in ranges)
