"""From a whole model to a rank's part of it: its configuration and its weights, read cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tinsmith.engine.local.model.families import DecoderConfig, Projection
from tinsmith.engine.local.ranks.cut import Cut, share_of
from tinsmith.errors import EngineError

Config = TypeVar("Config", bound=DecoderConfig)


def cut_config(config: Config, index: int, count: int) -> Config:
    """The shape of one rank's part; a model that cannot be cut so is an `EngineError`."""
    if problem := why_not(config, count):
        raise EngineError(f"it cannot be served with {count} ranks: {problem}")
    assert config.experts is None, "divided experts run on the modules of `transformers`"
    if _is_foreign(config):
        (inner,) = _expert_sizes(config)
        cut = Cut.of_experts(index, count, inner)
        projections = tuple(_cut_projection(each, cut) for each in config.projections)
        return replace(config, projections=projections, cut=cut)
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
    """Why a model cannot be cut into so many parts; None where it can."""
    has_more = config.experts is not None or config.recurring or config.latent is not None
    if _is_foreign(config) or has_more:
        return _why_not_foreign(config, count)
    if config.num_heads % count:
        return f"its {config.num_heads} attention heads cannot be divided evenly"
    if config.num_kv_heads % count and count % config.num_kv_heads:
        return f"its {config.num_kv_heads} key/value heads cannot be divided evenly"
    if config.intermediate_size % count:
        return f"the {config.intermediate_size} columns of its MLP cannot be divided evenly"
    return None


def _is_foreign(config: DecoderConfig) -> bool:
    """Whether it runs on the modules of `transformers`, where projections have no layer."""
    return config.projections[0].layer is None


def _why_not_foreign(config: DecoderConfig, count: int) -> str | None:
    """For what runs on those modules, with several ranks at least."""
    if config.state is not None:
        return "recurrent layers are not divided"
    if config.images is not None:
        return "models that read images are not divided"
    sizes = _expert_sizes(config)
    if not sizes:
        return "of the models that run on transformers' own modules, those with experts are divided"
    if len(sizes) > 1:
        return "its experts differ in size"
    (inner,) = sizes
    if inner % count:
        return f"the {inner} inner columns of its experts cannot be divided evenly"
    return None


def _expert_sizes(config: DecoderConfig) -> set[int]:
    """How many inner columns experts have."""
    experts = [each for each in config.projections if each.experts is not None]
    return {each.inputs for each in experts if each.modules[0].endswith(".w2")}


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
