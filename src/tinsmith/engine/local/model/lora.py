"""Low-rank adapters: their weights, and which rows of a batch they apply to.

An adapter is one flat float32 vector, so that an optimizer step, a copy or a checksum is one
operation. The vector is an allocation of its own: it goes when its adapter goes, whatever else is
in memory, and always begins at an aligned address. The order within a vector is that of the model's
projections, layer by layer, and for each projection first the A of all its modules and then the B
of all its modules: products that share an input share one matmul.

What is computed with them is in `adapted_linear`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.model.families import DecoderConfig, Projection
from tinsmith.errors import EngineError
from tinsmith.types import LoraConfig

if TYPE_CHECKING:
    from tinsmith.engine.local.kernels.low_rank import Columns
    from tinsmith.engine.local.model.grouped_linear import Group
    from tinsmith.engine.local.model.stacked_adapters import StackedRows

ALPHA = 32
"""LoRA's alpha, whatever the rank: an update is scaled by ALPHA / rank."""


class LowRank(NamedTuple):
    """The matrices of one projection with n modules, as views into a flat vector.

    Those of experts have one more dimension, in front: 1 where all experts share the factor.
    """

    a: Tensor
    """(n · rank, inputs): the modules' A, one above the other."""

    b: tuple[Tensor, ...]
    """One (outputs, rank) for each module."""


@dataclass(frozen=True, slots=True)
class _Place:
    projection: Projection
    offset: int


class Layout:
    """Where each trained matrix lies in an adapter's flat vector."""

    def __init__(self, config: DecoderConfig, lora: LoraConfig) -> None:
        wanted = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        self.rank = lora.rank
        self.places: dict[tuple[int | None, str], _Place] = {}
        offset = 0
        for projection in config.projections:
            if wanted[projection.part]:
                self.places[projection.layer, projection.name] = _Place(projection, offset)
                num_a, num_b = projection.experts or (1, 1)
                offset += self.rank * num_a * len(projection.modules) * projection.inputs
                offset += self.rank * num_b * sum(projection.outputs)
        if not offset:
            raise EngineError("an adapter must train at least one of attn, mlp and unembed")
        self.size = offset
        self.tables: dict[tuple[int | None, str], Columns] = {}
        """What `grouped_linear` worked out about each projection."""

    def views(self, flat: Tensor) -> dict[tuple[int | None, str], LowRank]:
        """Every projection's matrices as views into `flat`, by layer and name."""
        return {key: self._view(flat, place) for key, place in self.places.items()}

    def _view(self, flat: Tensor, place: _Place) -> LowRank:
        projection, start = place.projection, place.offset
        num_a, num_b = projection.experts or (1, 1)
        rows = len(projection.modules) * self.rank
        stop = start + num_a * rows * projection.inputs
        a = flat[start:stop].view(num_a, rows, projection.inputs)
        b = []
        for outputs in projection.outputs:
            start, stop = stop, stop + num_b * outputs * self.rank
            b.append(flat[start:stop].view(num_b, outputs, self.rank))
        if projection.experts is None:
            return LowRank(a[0], tuple(b_of[0] for b_of in b))
        return LowRank(a, tuple(b))


class Adapter:
    """One LoRA model's weights, and while it trains its gradient and optimizer state.

    Made by `AdapterPool`. A sampler is an adapter that nobody steps.
    """

    def __init__(
        self, base_model: str, lora: LoraConfig, layout: Layout, flat: Tensor, dtype: torch.dtype
    ) -> None:
        self.base_model = base_model
        self.lora = lora
        self.rank = lora.rank
        self.scale = ALPHA / lora.rank
        self.layout = layout
        self.grad: Tensor | None = None
        """(P,) float32, the sum of what passes left since the last step; None: nothing pending."""
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.step = 0
        self._spare: Tensor | None = None
        """Memory of the last gradient, for the next."""
        self._flat: Tensor | None = flat
        self._dtype = dtype
        self._views: dict[tuple[int | None, str], LowRank] = {}
        self._rounded: Tensor | None = None
        self._rounded_version = -1

    @property
    def flat(self) -> Tensor:
        """(P,) float32: every A and B. Write to it in place."""
        if self._flat is None:
            raise EngineError("the adapter has been released")
        return self._flat

    @property
    def nbytes(self) -> int:
        parts = (self.flat, self.grad, self.exp_avg, self.exp_avg_sq, self._rounded, self._spare)
        return sum(part.nbytes for part in parts if part is not None)

    def new_gradient(self) -> Tensor:
        """(P,) zeros, of which nothing is pending yet."""
        flat, self._spare = self._spare, None
        return torch.zeros_like(self.flat) if flat is None else flat.zero_()

    def drop_gradient(self) -> None:
        """Forget the pending gradient.

        On the CPU its memory is kept for the next one: there new memory costs ten times as much to
        touch as old memory to clear (eight of rank 32 on SmolLM2-135M, 110 ms and 9).
        """
        if self.grad is not None and self.grad.device.type == "cpu":
            self._spare = self.grad
        self.grad = None

    def drop_spare(self) -> None:
        """Give back the memory that is kept for the next gradient."""
        self._spare = None

    @property
    def modules(self) -> list[str]:
        """The model's own names of what is trained."""
        projections = [place.projection for place in self.layout.places.values()]
        return [module for projection in projections for module in projection.modules]

    @property
    def unembedding_modules(self) -> list[str]:
        """That of them which is the unembedding, if it is trained."""
        projections = [place.projection for place in self.layout.places.values()]
        return [each.modules[0] for each in projections if each.part == "unembed"]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """PEFT's names and views into the weights, in the vector's order."""
        for place in self.layout.places.values():
            low_rank = self.layout._view(self.flat, place)
            for index, module in enumerate(place.projection.modules):
                yield f"base_model.model.{module}.lora_A.weight", self._split_a(low_rank, index)
                yield f"base_model.model.{module}.lora_B.weight", low_rank.b[index]

    def _split_a(self, low_rank: LowRank, index: int) -> Tensor:
        return low_rank.a[..., index * self.rank : (index + 1) * self.rank, :]

    def weights(self) -> dict[tuple[int | None, str], LowRank]:
        """The matrices as the forward pass reads them, in the base model's dtype.

        In float32 these are views of `flat`. Otherwise they are a rounded copy, made again
        when the weights have changed since.
        """
        rounded = self.rounded()
        if not self._views:
            self._views = self.layout.views(rounded)
        return self._views

    def rounded(self) -> Tensor:
        """`flat` in the base model's dtype: itself, or a copy of its present state."""
        flat = self.flat
        if self._dtype == torch.float32:
            return flat
        if self._rounded is None or flat._version != self._rounded_version:
            self._rounded = flat.to(self._dtype)
            self._rounded_version = flat._version
            self._views = {}
        return self._rounded


class AdapterPool:
    """Makes the adapters of one base model, and knows those in use."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._layouts: dict[tuple[int, bool, bool, bool], Layout] = {}
        self._in_use: set[Adapter] = set()

    def create(self, base_model: str, lora: LoraConfig) -> Adapter:
        """A fresh adapter: A uniform as PEFT draws it, from `lora.seed`; B zero.

        The numbers are a function of the seed and the shapes, and of nothing else: replaying the
        creation gives the same weights. The caller draws a seed where the user gave none; here none
        means 0.
        """
        adapter = self.create_empty(base_model, lora)
        generator = torch.Generator().manual_seed(lora.seed if lora.seed is not None else 0)
        flat = torch.zeros(adapter.layout.size)
        for low_rank in adapter.layout.views(flat).values():
            bound = 1 / math.sqrt(low_rank.a.shape[-1])
            low_rank.a.uniform_(-bound, bound, generator=generator)
        adapter.flat.copy_(flat)
        return adapter

    def create_empty(self, base_model: str, lora: LoraConfig) -> Adapter:
        """An adapter whose weights the caller fills in at once."""
        layout = self._layout(lora)
        # A tensor of its own begins at a multiple of 64 bytes. Views of a larger one need not, and
        # kernels compute other last bits where the first number is not aligned.
        flat = torch.empty(layout.size, dtype=torch.float32, device=self._device)
        adapter = Adapter(base_model, lora, layout, flat, self._dtype)
        self._in_use.add(adapter)
        return adapter

    def copy(self, adapter: Adapter) -> Adapter:
        """A new adapter with the present weights of `adapter`, and nothing else of it."""
        copy = self.create_empty(adapter.base_model, adapter.lora)
        copy.flat.copy_(adapter.flat)
        return copy

    def release(self, adapter: Adapter) -> None:
        """Free an adapter's memory. It cannot be used afterwards."""
        self._in_use.discard(adapter)
        adapter._flat = adapter._rounded = None
        adapter._views = {}
        adapter.grad = adapter.exp_avg = adapter.exp_avg_sq = None
        adapter.drop_spare()

    def drop_spares(self) -> None:
        """Give back what is kept for the next gradients."""
        for adapter in self._in_use:
            adapter.drop_spare()

    def training_bytes(self, lora: LoraConfig) -> int:
        """What an adapter takes while it trains: a gradient and two moments beside its weights."""
        return 3 * 4 * self._layout(lora).size + self.sampling_bytes(lora)

    def sampling_bytes(self, lora: LoraConfig) -> int:
        """What an adapter takes that only samples: weights, and a copy in the model's dtype."""
        rounded = 0 if self._dtype == torch.float32 else self._dtype.itemsize
        return (4 + rounded) * self._layout(lora).size

    @property
    def nbytes(self) -> int:
        """Memory of all adapters in use, with what they need to train."""
        return sum(adapter.nbytes for adapter in self._in_use)

    def _layout(self, lora: LoraConfig) -> Layout:
        key = (lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)
        if key not in self._layouts:
            self._layouts[key] = self.new_layout(self._config, lora)
        return self._layouts[key]

    def new_layout(self, config: DecoderConfig, lora: LoraConfig) -> Layout:
        return Layout(config, lora)


Run = tuple[int, int, Adapter | None]
"""Rows start to stop of a packed batch, and the adapter that applies; None is the bare model."""


class GradientBuffer:
    """A flat float32 gradient of one adapter, with a view for each projection."""

    def __init__(self, layout: Layout, flat: Tensor) -> None:
        self.flat = flat
        self._layout = layout

    @functools.cached_property
    def views(self) -> dict[tuple[int | None, str], LowRank]:
        return self._layout.views(self.flat)


ActiveRun = tuple[int, int, Adapter, GradientBuffer | None]
"""A run whose adapter changes the projection at hand, and where its gradient goes."""


class AdapterSegments:
    """Which rows of a packed batch belong to which adapter, as contiguous runs.

    `gradients`, where given, holds a flat float32 buffer for each run that the backward pass
    adds to; a None leaves the run's adapter without gradients.
    """

    def __init__(
        self, runs: Iterable[Run], gradients: Sequence[GradientBuffer | None] | None = None
    ) -> None:
        self.runs: tuple[Run, ...] = tuple(runs)
        self.gradients = tuple(gradients) if gradients is not None else (None,) * len(self.runs)
        if len(self.gradients) != len(self.runs):
            raise ValueError("one gradient buffer or None is needed for each run")
        self._root: AdapterSegments | None = None
        self.origins: tuple[int, ...] = tuple(range(len(self.runs)))
        """For each run the one of `root` that it comes from."""

        self._active: dict[tuple[int | None, str], list[ActiveRun]] = {}

        self.groups: list[Group] | None = None
        """What `grouped_linear` worked out."""

        self.stacked: StackedRows | None = None
        """The rows whose adapters are computed together, where that was asked for."""

    @property
    def root(self) -> AdapterSegments:
        """The segments of the whole batch, where these are of some of its rows.

        It is not kept where it is `self`: such a cycle keeps gradients until the collector runs.
        """
        return self._root or self

    @classmethod
    def whole(cls, num_rows: int, adapter: Adapter | None = None) -> AdapterSegments:
        """Every row under one adapter, or under the bare model."""
        return cls([(0, num_rows, adapter)])

    @property
    def num_rows(self) -> int:
        return self.runs[-1][1] if self.runs else 0

    def active(self, layer: int | None, name: str) -> list[ActiveRun]:
        """The runs whose adapter changes the projection."""
        key = (layer, name)
        if key not in self._active:
            self._active[key] = [
                (start, stop, adapter, gradient)
                for (start, stop, adapter), gradient in zip(self.runs, self.gradients, strict=True)
                if adapter is not None and key in adapter.layout.places
            ]
        return self._active[key]

    def gather(self, rows: Tensor | np.ndarray) -> AdapterSegments:
        """The segments of a smaller batch made of `rows` of this one, in that order."""
        index = rows.cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
        stops = np.array([stop for _, stop, _ in self.runs])
        origins = np.searchsorted(stops, index, side="right")
        edges = np.flatnonzero(np.diff(origins)) + 1
        bounds = [0, *edges.tolist(), len(index)]
        runs: list[Run] = []
        sources: list[int] = []
        for start, stop in itertools.pairwise(bounds):
            if stop > start:
                sources.append(int(origins[start]))
                runs.append((start, stop, self.runs[sources[-1]][2]))
        gathered = AdapterSegments(runs, [self.gradients[source] for source in sources])
        gathered._root = self.root
        gathered.origins = tuple(self.origins[source] for source in sources)
        if self.stacked is not None:
            gathered.stacked = self.stacked.on(runs)
        return gathered
