"""One new token for every running sequence on a GPU: a forward pass captured as CUDA graphs.

At the sizes of decoding a GPU finishes its kernels faster than a program can ask for them. Here
the whole step, from token ids to chosen tokens, is a fixed list of kernels over buffers that never
move (`decode_tables`), captured once for each number of rows, rounded up, and then replayed. It
reads the same weights as `Decoder` and rounds where that does. Prompts, other devices,
deterministic mode and foreign models take the plain path in `mixed_step`.

Nor does the GPU wait for the program between steps. A step is launched without being read, and the
next one may be launched before it is: a row whose last token the program does not know yet finds
it on the device, in the row's seat.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.kernels.decode_attention import Heads, attend, prepare
from tinsmith.engine.local.kernels.decode_choice import Drawn, draw
from tinsmith.engine.local.kernels.decode_lora import TILE_ROWS, TiledAdapters
from tinsmith.engine.local.kernels.ordered_attention import append, attend_cached, tiles_of_rows
from tinsmith.engine.local.kernels.pointwise import add_rms_norm
from tinsmith.engine.local.kernels.scores import target_logprobs
from tinsmith.engine.local.model import pointwise
from tinsmith.engine.local.model.blocks import DenseMlp
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts.mlp import ExpertMlp, SharedExpert
from tinsmith.engine.local.model.experts.routing import TokenAdapters
from tinsmith.engine.local.model.experts.steering import Steer
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.rope import Rope
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

        A step may run again: it writes the same keys and values to the same places.
        """
        stream = torch.cuda.Stream(self._decoder.device)
        stream.wait_stream(torch.cuda.current_stream(self._decoder.device))
        with torch.cuda.stream(stream):
            self._forward(shape)
        torch.cuda.current_stream(self._decoder.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._forward(shape)
        return graph, output

    def _forward(self, shape: StepShape) -> StepOutput:
        decoder, config, count = self._decoder, self._decoder.config, shape.num_rows
        rows = self._table.rows(count)
        positions = self._table.positions[:count]
        rotations = {rope: self._rotation(rope, positions) for rope in self._frequencies}
        # Embedding: tokens (B,), from the table or else the row's seat, to the residual stream x
        # (B, hidden).
        tokens = self._table.tokens[:count]
        tokens = torch.where(tokens < 0, self._last[self._table.seats[:count]], tokens)
        x = F.embedding(tokens, decoder.embedding)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        tiles = tiles_of_rows(rows, self._group) if decoder.is_invariant else None
        token_adapters = (
            TokenAdapters(self._table.adapters[:count], count) if shape.num_tiles else None
        )
        choices = self._table.choices(count)
        y: Tensor | None = None
        for index, layer in enumerate(decoder.layers):
            spec = config.layers[index]
            assert spec.rope is not None, "our own decoder rotates"
            # Attention: add the last block's y to x, normalize, project to (B, (H + 2K) · D).
            z = self._add_and_norm(x, y, layer.input_norm)
            z, norms = self._product(z, layer.qkv, index, "qkv", shape), layer.qk_norms
            if norms is not None and config.has_wide_qk_norm:
                z, norms = pointwise.wide_norm(z, norms, config.norm_eps), None
            # Rotate queries and keys, append keys and values to the KV cache, attend: (B, H · D).
            rotation = rotations[spec.rope]
            if tiles is None:
                prepare(z, rows, rotation, norms, config.norm_eps, index, self._heads)
                z = attend(z, rows, spec, index, self._heads)
            else:
                q, k, v = pointwise.apply_rope(
                    z, norms, rotation, config.num_kv_heads, config.norm_eps
                )
                append(k, v, rows, index)
                z = attend_cached(spec, q, rows.keys, rows.values, rows.blocks, index, tiles)
                z = z.flatten(1)
            # Output projection: back to (B, hidden).
            y = self._product(z, layer.o, index, "o", shape)
            if layer.post_attention_norm is not None:
                y = pointwise.rms_norm(y, layer.post_attention_norm, config.norm_eps)
            # MLP, or experts: (B, hidden) to (B, hidden).
            z = self._add_and_norm(x, y, layer.mlp_norm)
            if isinstance(layer.mlp, ExpertMlp):
                steer = None if choices is None else functools.partial(choices, index)
                y = self._experts(z, layer.mlp, index, shape, token_adapters, steer)
            else:
                y = self._mlp(z, layer.mlp, index, shape)
            if layer.post_mlp_norm is not None:
                y = pointwise.rms_norm(y, layer.post_mlp_norm, config.norm_eps)
        # Unembedding: (B, hidden) to logits (B, V).
        z = self._add_and_norm(x, y, decoder.final_norm)
        logits = self._product(z, decoder.head, None, "lm_head", shape)
        if config.final_softcap is not None:
            logits = torch.tanh(logits.float() / config.final_softcap) * config.final_softcap
        # Draw a token per row.
        temperatures, numbers = self._table.temperatures[:count], self._table.uniforms[:count]
        drawn = draw(logits, temperatures, numbers)
        if decoder.is_invariant:
            # The trainer's number, which is that of temperature one.
            is_plain = (temperatures == 1.0) | (temperatures <= 0.0)
            logprobs, _ = target_logprobs(logits.float(), drawn.tokens)
            drawn.facts[1].copy_(torch.where(is_plain, logprobs.double(), drawn.facts[1]))
        return StepOutput(logits, drawn)

    def _mlp(self, x: Tensor, mlp: DenseMlp | SharedExpert, index: int, shape: StepShape) -> Tensor:
        # (B, hidden) to gate and up (B, 2 · inner), to (B, inner), to (B, hidden).
        z = self._product(x, mlp.gate_up, index, "gate_up", shape)
        z = pointwise.swiglu(z, self._decoder.config.activation)
        return self._product(z, mlp.down, index, "down", shape)

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
        y = run_experts(x, mlp, self._decoder.config.activation, adapters, steer)
        if mlp.shared is None:
            return y
        return torch.addcmul(y, self._mlp(x, mlp.shared, index, shape), mlp.shared.shares(x))

    def _add_and_norm(self, x: Tensor, y: Tensor | None, weight: Tensor) -> Tensor:
        """Add y to the residual stream x, in place, and return the RMS norm of the sum."""
        eps = self._decoder.config.norm_eps
        if y is None:
            return pointwise.rms_norm(x, weight, eps)
        return add_rms_norm(x, y, weight, eps)

    def _product(
        self, x: Tensor, linear: Linear, layer: int | None, name: str, shape: StepShape
    ) -> Tensor:
        if not shape.num_tiles:
            return linear.product(x)
        index, projection = self._projections[layer, name]
        adapters = self._tiled(shape)
        # LoRA: shrink x to the rank beside the base product, then expand onto its result.
        inner = adapters.new_inner(x, projection)
        with self._beside():
            adapters.shrink(inner, x, index, projection)
        y = linear.product(x)
        if self._side is not None:
            torch.cuda.current_stream(x.device).wait_stream(self._side)
        adapters.expand(y, inner, index, projection)
        return y

    def _tiled(self, shape: StepShape) -> TiledAdapters:
        return TiledAdapters(
            self._table.tiles[:, : shape.num_tiles],
            self._adapters.addresses,
            self._adapters.facts,
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

    def _rotation(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, D / 2)."""
        angles = positions[:, None].float() * self._frequencies[rope]
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        return cos.to(self._decoder.dtype), sin.to(self._decoder.dtype)


def _by_adapter(running: list[Sequence]) -> list[Sequence]:
    """The sequences of one adapter together, in the order in which adapters first appear."""
    groups: dict[Adapter | None, list[Sequence]] = {}
    for sequence in running:
        groups.setdefault(sequence.request.adapter, []).append(sequence)
    return [sequence for group in groups.values() for sequence in group]
