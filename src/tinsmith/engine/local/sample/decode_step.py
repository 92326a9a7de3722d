"""One new token for every running sequence on a GPU: a forward pass captured as CUDA graphs.

At the sizes of decoding a GPU finishes its kernels faster than a program can ask for them. Here
the whole step, from token ids to chosen tokens, is a fixed list of kernels over buffers that never
move (`decode_tables`), captured once for each number of rows, rounded up, and then replayed. It
reads the same weights as `Decoder` and rounds where that does. Prompts, other devices,
deterministic mode and foreign models take the plain path in `mixed_step`. The states of recurrent
layers are changed where they lie in the cache.

Nor does the GPU wait for the program between steps. A step is launched without being read, and the
next one may be launched before it is: a row whose last token the program does not know yet finds
it on the device, in the row's seat.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.kernels import decode_joins
from tinsmith.engine.local.kernels.decode_attention import Heads, RowBlocks, attend
from tinsmith.engine.local.kernels.decode_choice import Drawn, draw
from tinsmith.engine.local.kernels.decode_lora import TILE_ROWS, Part, TiledAdapters
from tinsmith.engine.local.kernels.latent_attention import attend as attend_latents
from tinsmith.engine.local.kernels.ordered_attention import append, attend_cached, tiles_of_rows
from tinsmith.engine.local.kernels.pointwise import add_rms_norm
from tinsmith.engine.local.kernels.scores import target_logprobs
from tinsmith.engine.local.model import pointwise
from tinsmith.engine.local.model.blocks import DenseMlp, Layer
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts.mlp import ExpertMlp, SharedExpert
from tinsmith.engine.local.model.experts.routing import TokenAdapters
from tinsmith.engine.local.model.experts.steering import Steer
from tinsmith.engine.local.model.latent.mixer import LatentMixer
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.recurrent.delta_mixer import DeltaMixer
from tinsmith.engine.local.model.recurrent.delta_rule import step_in_place
from tinsmith.engine.local.model.rope import Rope, Rotation
from tinsmith.engine.local.sample.decode_experts import ExpertAdapters, run_experts
from tinsmith.engine.local.sample.decode_tables import AdapterTable, StepTable
from tinsmith.engine.local.sample.kvcache import KVCache
from tinsmith.engine.local.sample.launched import Launched
from tinsmith.engine.local.sample.next_tokens import next_tokens
from tinsmith.engine.local.sample.sequences import Sequence

_MAX_ROWS = 256
"""More sequences than this take several steps."""

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
"""Numbers of rows for which a step is captured, besides the largest."""

_SPARE_TILES = 8
"""Tiles beyond those of full rows, for adapters whose rows do not fill one."""


class StepShape(NamedTuple):
    """What a captured graph depends on."""

    num_rows: int
    num_tiles: int
    max_rank: int
    is_aligned: bool


class StepOutput(NamedTuple):
    logits: Tensor
    """(B, V)"""

    drawn: Drawn


class DecodeStep:
    """Steps of one base model. The caller's sequences have room in their blocks."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, max_rows: int, *, use_graphs: bool = True
    ) -> None:
        self._decoder = decoder
        self._max_rows = min(max_rows, _MAX_ROWS)
        self._use_graphs = use_graphs
        config, device = decoder.config, decoder.device
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._group = config.num_heads // config.num_kv_heads
        self._table = StepTable(self._max_rows, cache)
        self._last = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """The token drawn last for the sequence in each seat."""
        self._seats: dict[Sequence, int] = {}
        self._adapters = AdapterTable(config, self._max_rows, device)
        self._projections = {
            (projection.layer, projection.name): (index, projection)
            for index, projection in enumerate(config.projections)
        }
        self._frequencies = {
            spec.rope: spec.rope.inverse_frequencies().to(device)
            for spec in config.layers
            if spec.rope is not None
        }
        scale = torch.tensor(config.embedding_scale, dtype=decoder.dtype)
        self._embedding_scale = float(scale)
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, StepOutput]] = {}
        self._pool = torch.cuda.graph_pool_handle() if use_graphs else None
        self._side = torch.cuda.Stream(device) if use_graphs else None
        """For kernels beside others; in a graph such a branch costs nothing to start."""

    def launch(self, running: list[Sequence]) -> Launched:
        """Ask for the next token of each sequence. The cache then holds the one it had."""
        launched = Launched(running)
        self._take_seats(running)
        for start in range(0, len(running), self._max_rows):
            self._launch(_by_adapter(running[start : start + self._max_rows]), launched)
        return launched

    def forget(self, adapter: Adapter) -> None:
        """Let go of an adapter's weights."""
        self._adapters.forget(adapter)

    def _take_seats(self, running: list[Sequence]) -> None:
        """Who was in the last step keeps its seat; others take seats of those not in this one."""
        kept = {sequence: self._seats.get(sequence) for sequence in running}
        free = iter(set(range(len(self._last))) - set(kept.values()))
        self._seats = {
            sequence: next(free) if seat is None else seat for sequence, seat in kept.items()
        }

    def _launch(self, rows: list[Sequence], launched: Launched) -> None:
        # 1. Describe the step: rows, their blocks and adapters go to the GPU in one copy.
        tiles = self._adapters.tiles(rows)
        self._table.fill(rows, tiles.tiles, [self._seats[sequence] for sequence in rows])
        shape = self._shape(len(rows), len(tiles.tiles), tiles.max_rank, tiles.is_aligned)
        # 2. Forward pass and drawing. Rows beyond len(rows) are padding.
        logits, drawn = self._replay(shape) if self._use_graphs else self._forward(shape)
        self._last.index_copy_(0, self._table.seats[: len(rows)], drawn.tokens[: len(rows)])
        for sequence in rows:
            assert sequence.table is not None
            sequence.table.num_tokens += 1
            sequence.num_ahead += 1
        # 3. Rows with top-k, top-p or top log-probabilities choose again from their logits.
        others = [row for row, sequence in enumerate(rows) if not sequence.request.draws_whole]
        found = []
        if others:
            chosen = logits[torch.tensor(others, device=logits.device)].float()
            found = next_tokens(chosen, [[rows[row]] for row in others])
        launched.add(rows, drawn.facts[:, : len(rows)], found)

    def _shape(self, num_rows: int, num_tiles: int, max_rank: int, is_aligned: bool) -> StepShape:
        """The graph that serves: few sizes, so that few are captured."""
        size = next(size for size in (*_SIZES, self._max_rows) if size >= num_rows)
        size = min(size, self._max_rows)
        if not num_tiles:
            return StepShape(size, 0, 0, True)
        capacity = min(size, -(-size // TILE_ROWS) + _SPARE_TILES)
        return StepShape(size, capacity if num_tiles <= capacity else size, max_rank, is_aligned)

    def _replay(self, shape: StepShape) -> StepOutput:
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape)
        graph, output = self._graphs[shape]
        graph.replay()
        return output

    def _capture(self, shape: StepShape) -> tuple[torch.cuda.CUDAGraph, StepOutput]:
        """Run the step once by itself, which compiles kernels, and once into a graph.

        A step may run again: it writes the same keys and values to the same places. States would
        be a token further, so that the first time there are none.
        """
        stream = torch.cuda.Stream(self._decoder.device)
        states = self._table.states.clone()
        self._table.states.fill_(-1)
        stream.wait_stream(torch.cuda.current_stream(self._decoder.device))
        with torch.cuda.stream(stream):
            self._forward(shape)
        torch.cuda.current_stream(self._decoder.device).wait_stream(stream)
        self._table.states.copy_(states)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._forward(shape)
        return graph, output

    def _forward(self, shape: StepShape) -> StepOutput:
        decoder, config, count = self._decoder, self._decoder.config, shape.num_rows
        rows = self._table.rows(count)
        positions = self._table.positions[:count]
        rotations = {
            rope: rope.rotation(frequencies, positions, decoder.dtype)
            for rope, frequencies in self._frequencies.items()
        }
        # Embedding: tokens (B,), from the table or else the row's seat, to the residual stream x
        # (B, hidden).
        tokens = self._table.tokens[:count]
        tokens = torch.where(tokens < 0, self._last[self._table.seats[:count]], tokens)
        x = F.embedding(tokens, decoder.embedding)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        stream = decoder.stream_dtype
        x = x.to(stream)
        tiles = tiles_of_rows(rows, self._group) if decoder.is_invariant else None
        token_adapters = (
            TokenAdapters(self._table.adapters[:count], count) if shape.num_tiles else None
        )
        choices = self._table.choices(count)
        y: Tensor | None = None
        part: Part | None = None
        for index, layer in enumerate(decoder.layers):
            place = config.place(index)
            # Attention: add the last block's y to x, normalize, project to (B, (H + 2K) · D).
            z = self._add_and_norm(x, y, part, layer.input_norm)
            if layer.delta is not None:
                z = self._recur(z, layer, layer.delta, index, shape)
            elif layer.latent is not None:
                z = self._product(z, layer.qkv, index, "qkv", shape)
                z = self._look(z, layer.latent, place, rows, rotations)
            else:
                spec, gate = config.layers[place], None
                assert spec.rope is not None, "our own decoder rotates"
                z, norms = self._product(z, layer.qkv, index, "qkv", shape), layer.qk_norms
                if config.has_output_gate:
                    z, gate = pointwise.split_gate(z, config.num_heads, config.head_dim)
                if norms is not None and config.has_wide_qk_norm:
                    z, norms = pointwise.wide_norm(z, norms, config.norm_eps), None
                # Rotate queries and keys, append keys and values to the cache, attend: (B, H · D).
                rotation = rotations[spec.rope]
                if tiles is None:
                    eps = config.norm_eps
                    heads, sinks = self._heads, layer.sinks
                    z = attend(z, rows, rotation, norms, eps, spec, place, heads, sinks)
                else:
                    q, k, v = pointwise.apply_rope(
                        z, norms, rotation, config.num_kv_heads, config.norm_eps
                    )
                    append(k, v, rows, place)
                    z = attend_cached(spec, q, rows.keys, rows.values, rows.blocks, place, tiles)
                    z = z.flatten(1)
                if gate is not None:
                    z = z * gate.sigmoid().flatten(1)
            # Output projection: back to (B, hidden).
            y, part = self._open_product(z, layer.o, index, "o", shape, stream)
            if layer.post_attention_norm is not None:
                y, part = _whole(y, part), None
                y = pointwise.rms_norm(y, layer.post_attention_norm, config.norm_eps)
            # MLP, or experts: (B, hidden) to (B, hidden).
            z = self._add_and_norm(x, y, part, layer.mlp_norm)
            if isinstance(layer.mlp, ExpertMlp):
                steer = None if choices is None else functools.partial(choices, index)
                y = self._experts(z, layer.mlp, index, shape, token_adapters, steer)
                part = None
            else:
                y, part = self._mlp(z, layer.mlp, index, shape)
            if layer.post_mlp_norm is not None:
                y, part = _whole(y, part), None
                y = pointwise.rms_norm(y, layer.post_mlp_norm, config.norm_eps)
        # Unembedding: (B, hidden) to logits (B, V).
        z = self._add_and_norm(x, y, part, decoder.final_norm)
        logits = self._product(z, decoder.head, None, "lm_head", shape, stream)
        if config.final_softcap is not None:
            logits = torch.tanh(logits.float() / config.final_softcap) * config.final_softcap
        # Draw a token per row.
        temperatures, numbers = self._table.temperatures[:count], self._table.uniforms[:count]
        drawn = draw(logits, temperatures, numbers)
        if decoder.is_invariant:
            # As training has it, which is that of temperature one.
            is_plain = (temperatures == 1.0) | (temperatures <= 0.0)
            logprobs, _ = target_logprobs(logits.float(), drawn.tokens)
            drawn.facts[1].copy_(torch.where(is_plain, logprobs.double(), drawn.facts[1]))
        return StepOutput(logits, drawn)

    def _recur(
        self, x: Tensor, layer: Layer, mixer: DeltaMixer, index: int, shape: StepShape
    ) -> Tensor:
        """A recurrent layer up to its output projection: (B, hidden) to (B, H · V)."""
        with self._beside():
            b, a = mixer.ba.product(x).chunk(2, dim=1)
        mixed = self._product(x, layer.qkv, index, "qkv", shape)
        if mixer.z is None:
            mixed, gate = mixer.split(mixed)
        else:
            gate = self._product(x, mixer.z, index, "z", shape)
        if self._side is not None:
            torch.cuda.current_stream(x.device).wait_stream(self._side)
        place = self._decoder.config.place(index)
        states, rows = self._table.cache.states[place], self._table.states[: len(x)]
        y = step_in_place(mixed, a, b, mixer.core, states, rows)
        return pointwise.gated_norm(y.flatten(1), gate, mixer.norm, self._decoder.config.norm_eps)

    def _look(
        self,
        mixed: Tensor,
        mixer: LatentMixer,
        place: int,
        rows: RowBlocks,
        rotations: Mapping[Rope, Rotation],
    ) -> Tensor:
        """Latent attention up to its output projection, of what the first product gave:
        (B, H · value_dim)."""
        spec, heads = self._decoder.config.layers[place], mixer.heads
        assert spec.rope is not None, "our own decoder rotates"
        q, latents = mixer.split(mixed, rotations[spec.rope])
        rank = heads.spec.rank
        sums = attend_latents(heads.absorbed(q), latents, rows, spec.scale, place, rank)
        return heads.values_of(sums).flatten(1)

    def _mlp(
        self, x: Tensor, mlp: DenseMlp | SharedExpert, index: int, shape: StepShape
    ) -> tuple[Tensor, Part | None]:
        # (B, hidden) to gate and up (B, 2 · inner), to (B, inner), to (B, hidden).
        activation, stream = self._decoder.config.activation, self._decoder.stream_dtype
        z, part = self._open_product(x, mlp.gate_up, index, "gate_up", shape)
        if part is None:
            z = pointwise.swiglu(z, activation)
            return self._open_product(z, mlp.down, index, "down", shape, stream)
        place, down = self._projections[index, "down"]
        z, part = decode_joins.swiglu(z, part, activation == "silu", place, down)
        if part is None:
            return self._open_product(z, mlp.down, index, "down", shape, stream)
        return mlp.down.product(z, stream), part

    def _experts(
        self,
        x: Tensor,
        mlp: ExpertMlp,
        index: int,
        shape: StepShape,
        token_adapters: TokenAdapters | None,
        steer: Steer | None,
    ) -> Tensor:
        """`token_adapters` are the numbers of the rows' adapters, where there is any."""
        adapters = None
        if token_adapters is not None:
            up, down = (self._projections[index, name] for name in ("experts_up", "experts_down"))
            adapters = ExpertAdapters(self._tiled(shape), token_adapters, up, down)
        activation, stream = self._decoder.config.activation, self._decoder.stream_dtype
        y = run_experts(x, mlp, activation, adapters, steer, stream)
        if mlp.shared is None:
            return y
        shared = _whole(*self._mlp(x, mlp.shared, index, shape))
        return mlp.shared.add(y, shared, mlp.shared.shares(x))

    def _add_and_norm(
        self, x: Tensor, y: Tensor | None, part: Part | None, weight: Tensor
    ) -> Tensor:
        """Add y and what belongs to it to the residual stream x, in place, and return the RMS norm
        of the sum."""
        eps, dtype = self._decoder.config.norm_eps, self._decoder.dtype
        if y is None:
            return pointwise.rms_norm(x, weight, eps, dtype)
        if part is None:
            return add_rms_norm(x, y, weight, eps, dtype)
        return decode_joins.add_rms_norm(x, y, part, weight, eps)

    def _product(
        self,
        x: Tensor,
        linear: Linear,
        layer: int | None,
        name: str,
        shape: StepShape,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return _whole(*self._begin_product(x, linear, layer, name, shape, dtype))

    def _open_product(
        self,
        x: Tensor,
        linear: Linear,
        layer: int,
        name: str,
        shape: StepShape,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Part | None]:
        """For a kernel that adds the adapters' part itself; in the exact mode all of the product,
        since its bits are those of the kernel for training."""
        y, part = self._begin_product(x, linear, layer, name, shape, dtype)
        return (_whole(y, part), None) if self._decoder.is_invariant else (y, part)

    def _begin_product(
        self,
        x: Tensor,
        linear: Linear,
        layer: int | None,
        name: str,
        shape: StepShape,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Part | None]:
        """x Wᵀ + bias, and what adapters add to it, where there are any."""
        if not shape.num_tiles:
            return linear.product(x, dtype), None
        index, projection = self._projections[layer, name]
        adapters = self._tiled(shape)
        # LoRA: shrink x to the rank beside the base product.
        inner = adapters.new_inner(x, projection)
        with self._beside():
            adapters.shrink(inner, x, index, projection)
        y = linear.product(x, dtype)
        if self._side is not None:
            torch.cuda.current_stream(x.device).wait_stream(self._side)
        return y, Part(adapters, inner, index, projection)

    def _tiled(self, shape: StepShape) -> TiledAdapters:
        return TiledAdapters(
            self._table.tiles[:, : shape.num_tiles],
            self._table.adapters[: shape.num_rows],
            self._adapters.addresses,
            self._adapters.facts,
            self._decoder.dtype,
            shape.max_rank,
            shape.is_aligned,
        )

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """What is asked for inside may run at the same time as what follows."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._decoder.device))
        with torch.cuda.stream(self._side):
            yield


def _whole(y: Tensor, part: Part | None) -> Tensor:
    """A product with its adapters' part, in the place of y."""
    return y if part is None else part.add_to(y)


def _by_adapter(running: list[Sequence]) -> list[Sequence]:
    """The sequences of one adapter together, in the order in which adapters first appear."""
    groups: dict[Adapter | None, list[Sequence]] = {}
    for sequence in running:
        groups.setdefault(sequence.request.adapter, []).append(sequence)
    return [sequence for group in groups.values() for sequence in group]
