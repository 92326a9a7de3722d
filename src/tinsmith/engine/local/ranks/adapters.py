"""Adapters of a model that is cut: each rank has the part that belongs to its weights.

The wide factor is cut with its matrix, B where rows are cut and A where columns are; the narrow one
is on every rank, and so is its gradient, because what it is computed from is summed. A whole
adapter is put together to be saved, and cut again when it is loaded, so that checkpoints do not
depend on the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import SavedAdapter, SavedKind
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.model.families import DecoderConfig, Projection
from tinsmith.engine.local.model.lora import Adapter, AdapterPool, Layout, LowRank
from tinsmith.engine.local.ranks.cut import Cut
from tinsmith.engine.local.ranks.group import Ranks
from tinsmith.engine.local.ranks.models import cut_config
from tinsmith.types import LoraConfig

_VECTORS = ("grad", "exp_avg", "exp_avg_sq")


def adapter_pool(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype, ranks: Ranks
) -> AdapterPool:
    """For the adapters of a whole model's configuration."""
    if ranks.count == 1:
        return AdapterPool(config, device, dtype)
    return CutAdapterPool(config, device, dtype, ranks)


def save(adapter: Adapter, folder: Path, kind: SavedKind) -> SavedAdapter:
    """`checkpoints.save`, by one rank for all."""
    layout = adapter.layout
    if not isinstance(layout, CutLayout):
        return checkpoints.save(adapter, folder, kind)
    whole = layout.joined(adapter)
    return layout.ranks.first(lambda: checkpoints.save(whole, folder, kind))


def load(adapter: Adapter, folder: Path, kind: SavedKind) -> SavedAdapter:
    """`checkpoints.load`; one rank reads, and each takes its part."""
    layout = adapter.layout
    if not isinstance(layout, CutLayout):
        return checkpoints.load(adapter, folder, kind)
    whole = layout.new_whole(adapter)
    info, state = layout.ranks.first(lambda: (checkpoints.load(whole, folder, kind), _state(whole)))
    _fill(whole, *state)
    layout.take(whole, adapter)
    return info


def measure(adapter: Adapter) -> CutLayout | None:
    """What an optimizer step needs to know of the other ranks, where there are any."""
    layout = adapter.layout
    if not isinstance(layout, CutLayout):
        return None
    if adapter.grad is not None and adapter.grad.is_cuda:
        layout.align(adapter.grad)
    return layout


class CutLayout(Layout):
    """Where the matrices of a rank's part of an adapter lie, and where they are in the whole."""

    def __init__(self, config: DecoderConfig, lora: LoraConfig, ranks: Ranks) -> None:
        """`config` is that of the whole model."""
        configs = [cut_config(config, index, ranks.count) for index in range(ranks.count)]
        super().__init__(configs[ranks.index], lora)
        self.ranks = ranks
        self.whole = Layout(config, lora)
        self._parts = [(Layout(each, lora), _cut_of(each)) for each in configs]

    def cut(self, vector: Tensor) -> Tensor:
        """This rank's part of a whole vector."""
        layout, cut = self._parts[self.ranks.index]
        own = vector.new_empty(self.size)
        for mine, whole in self._pairs(own, vector, layout, cut):
            mine.copy_(whole)
        return own

    def whole_of(self, vector: Tensor) -> Tensor:
        """The whole vector, on the CPU, of all ranks' parts."""
        longest = max(layout.size for layout, _ in self._parts)
        padded = vector.new_zeros(longest)
        padded[: self.size] = vector
        whole = torch.empty(self.whole.size)
        gathered = self.ranks.gather(padded)
        for (layout, cut), part in zip(self._parts, gathered, strict=True):
            for mine, place in self._pairs(part.cpu(), whole, layout, cut):
                place.copy_(mine)
        return whole

    def joined(self, adapter: Adapter) -> Adapter:
        """The whole adapter, of all ranks' parts."""
        whole = self.new_whole(adapter)
        whole.flat.copy_(self.whole_of(adapter.flat))
        for name in _VECTORS:
            part = getattr(adapter, name)
            setattr(whole, name, None if part is None else self.whole_of(part))
        whole.step = adapter.step
        return whole

    def new_whole(self, adapter: Adapter) -> Adapter:
        """An adapter of the whole shape, on the CPU, whose weights the caller fills in."""
        flat = torch.empty(self.whole.size)
        return Adapter(adapter.base_model, adapter.lora, self.whole, flat, torch.float32)

    def take(self, whole: Adapter, adapter: Adapter) -> None:
        """Overwrite an adapter with this rank's part of a whole one."""
        device = adapter.flat.device
        adapter.flat.copy_(self.cut(whole.flat))
        for name in _VECTORS:
            vector = getattr(whole, name)
            setattr(adapter, name, None if vector is None else self.cut(vector).to(device))
        adapter.step = whole.step

    def align(self, vector: Tensor) -> None:
        """Give all ranks the first one's numbers, where all are to have the same. On CUDA they may
        differ in last bits, which would add up: kernels need not add in the same order."""
        cut = self._parts[self.ranks.index][1]
        alike = [
            vector[piece]
            for piece, module, is_a in self._named_pieces()
            if (cut.inputs(module) if is_a else cut.outputs(module)) is None
        ]
        joined = torch.cat(alike)
        self.ranks.copy_(joined)
        for part, numbers in zip(alike, joined.split([len(p) for p in alike]), strict=True):
            part.copy_(numbers)

    def total(self, number: float) -> float:
        return sum(self.ranks.numbers(number))

    def largest(self, number: float) -> float:
        return max(self.ranks.numbers(number))

    @functools.cached_property
    def pieces(self) -> list[tuple[slice, bool]]:
        """The vector's matrices in order, and whether each counts here: those that several ranks
        have alike count on one of them."""
        return list(self._pieces())

    def _pieces(self) -> Iterator[tuple[slice, bool]]:
        cut = self._parts[self.ranks.index][1]
        for piece, module, is_a in self._named_pieces():
            is_cut = (cut.inputs(module) if is_a else cut.outputs(module)) is not None
            is_kv = not is_a and module.endswith(("k_proj", "v_proj"))
            yield piece, cut.index == 0 or (is_cut and (cut.has_own_kv or not is_kv))

    def _named_pieces(self) -> Iterator[tuple[slice, str, bool]]:
        """The vector's matrices in order, each with its module, or one of them, and whether it
        is an A."""
        for place in self.places.values():
            projection, start = place.projection, place.offset
            num_a, num_b = projection.experts or (1, 1)
            stop = start + self.rank * num_a * len(projection.modules) * projection.inputs
            yield slice(start, stop), projection.modules[0], True
            for module, outputs in zip(projection.modules, projection.outputs, strict=True):
                start, stop = stop, stop + self.rank * num_b * outputs
                yield slice(start, stop), module, False

    def _pairs(
        self, part: Tensor, whole: Tensor, layout: Layout, cut: Cut
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The matrices of a rank's vector, each with where it is in the whole vector."""
        mine, all_of = layout.views(part), self.whole.views(whole)
        for key, place in self.whole.places.items():
            yield from zip(
                _matrices(mine[key]), _part(all_of[key], place.projection, cut), strict=True
            )


class CutAdapterPool(AdapterPool):
    def __init__(
        self, config: DecoderConfig, device: torch.device, dtype: torch.dtype, ranks: Ranks
    ) -> None:
        super().__init__(config, device, dtype)
        self._whole = AdapterPool(config, torch.device("cpu"), torch.float32)
        self._ranks = ranks

    def create(self, base_model: str, lora: LoraConfig) -> Adapter:
        """As with one rank: the whole is drawn, and cut."""
        adapter = self.create_empty(base_model, lora)
        whole = self._whole.create(base_model, lora)
        assert isinstance(adapter.layout, CutLayout), "as `new_layout` makes it"
        adapter.flat.copy_(adapter.layout.cut(whole.flat))
        self._whole.release(whole)
        return adapter

    def new_layout(self, config: DecoderConfig, lora: LoraConfig) -> Layout:
        return CutLayout(config, lora, self._ranks)


def _cut_of(config: DecoderConfig) -> Cut:
    assert config.cut is not None, "it is one rank's"
    return config.cut


def _matrices(low_rank: LowRank) -> list[Tensor]:
    return [low_rank.a, *low_rank.b]


def _part(whole: LowRank, projection: Projection, cut: Cut) -> list[Tensor]:
    """Views of what a rank has of a projection's matrices."""
    columns = cut.inputs(projection.modules[0])
    a = whole.a if columns is None else whole.a[..., columns.start : columns.stop]
    b = []
    for module, matrix in zip(projection.modules, whole.b, strict=True):
        rows = cut.outputs(module)
        b.append(matrix if rows is None else matrix[..., rows.start : rows.stop, :])
    return [a, *b]


_State = tuple[int, list[np.ndarray | None]]


def _state(adapter: Adapter) -> _State:
    vectors = [adapter.flat, *(getattr(adapter, name) for name in _VECTORS)]
    return adapter.step, [None if vector is None else vector.numpy() for vector in vectors]


def _fill(adapter: Adapter, step: int, vectors: list[np.ndarray | None]) -> None:
    flat, *others = (None if each is None else torch.from_numpy(each) for each in vectors)
    assert flat is not None, "every adapter has weights"
    adapter.flat.copy_(flat)
    for name, vector in zip(_VECTORS, others, strict=True):
        setattr(adapter, name, vector)
    adapter.step = step
