"""Micro-batches of few tokens on a GPU: the decoder there and back, captured as CUDA graphs.

A pass over a few hundred tokens is a thousand kernels, which a GPU runs faster than a program can
ask for them. Here the decoder's forward pass is one list of kernels over tables that never move
(`pass_tables`), and its backward pass another. Between the two, `scoring` does what it always does.
Both are captured when a shape comes for the second time, and replayed from then on. The activations
of all shapes share their memory (`graph_memory`).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.batch import PackedAttention, is_by_hand
from tinsmith.engine.local.model.blocks import Layer
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts.mlp import ExpertMlp
from tinsmith.engine.local.model.lora import AdapterSegments, GradientBuffer
from tinsmith.engine.local.train.batch_limits import GRAPHS_PART
from tinsmith.engine.local.train.graph_memory import GraphMemory
from tinsmith.engine.local.train.pass_tables import PassShape, PassTables, shape_of

logger = logging.getLogger(__name__)

MOST_TOKENS = 4096
MOST_WORK = 12 * 10**12
"""Tokens times the weights that each is multiplied with. With more of either the device has enough
to do, and memory for activations would be held for nothing: on an H200 8x256 tokens of a 4B model
take 0.84 of the time that they take otherwise, 16x256 just as long; of a 0.6B model 0.51 and 0.58.
"""

MOST_GRAPHS = 32
"""Of those used last."""

_MOST_SHAPES = 1024
"""Shapes that came once, of which we remember that they did."""


class PassGraphs:
    """The captured passes of one base model."""

    def __init__(
        self,
        decoder: Decoder,
        pass_bytes: int | None = None,
        memory: GraphMemory | None = None,
    ) -> None:
        """`pass_bytes` is the memory for passes, where it was planned, and `memory` what the
        graphs of all base models have of it."""
        self._max_tokens = most_tokens(decoder, pass_bytes)
        self._graphs: OrderedDict[PassShape, CapturedPass] = OrderedDict()
        self._seen: set[PassShape] = set()
        self._memory = memory or GraphMemory()
        self._memory.share(self)

    def begin(
        self,
        decoder: Decoder,
        tokens: np.ndarray,
        positions: np.ndarray,
        lengths: Sequence[int],
        adapters: AdapterSegments,
    ) -> CapturedPass | None:
        """What computes a batch, told all about it; None where that is left to others, as it is
        when a shape comes for the first time."""
        if not 0 < len(tokens) <= self._max_tokens:
            return None
        shape = shape_of(lengths, adapters)
        if shape is None or not self._is_expected(shape):
            return None
        captured = self._graphs.get(shape) or CapturedPass(decoder, shape)
        captured.tables.fill(tokens, positions, lengths, adapters)
        if shape not in self._graphs:
            if not self._capture(captured, decoder, adapters):
                return None
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.popitem(last=False)
            self._graphs[shape] = captured
        self._graphs.move_to_end(shape)
        return captured

    def __len__(self) -> int:
        return len(self._graphs)

    def drop(self) -> None:
        """Give memory back, other base models' too, as somebody needs it."""
        self._memory.give_back()

    def forget(self) -> None:
        """A shape has to come twice again: where memory is given back each time, nothing is
        captured for one use."""
        self._graphs.clear()
        self._seen.clear()

    def _capture(self, captured: CapturedPass, decoder: Decoder, adapters: AdapterSegments) -> bool:
        """Whether it could be done."""
        memory = self._memory
        for is_last in (False, True):
            try:
                captured.capture(decoder, adapters, memory.stream(decoder.device), memory.pool())
                return True
            except torch.OutOfMemoryError as error:
                if is_last:
                    logger.warning("no memory to capture a pass of few tokens: %s", error)
            except Exception as error:  # Triton's own, too: the batch runs without
                logger.warning("passes of few tokens are not captured", exc_info=error)
                self._max_tokens = 0
                break
            # While it captures, torch cannot use what it keeps of other work. This is outside the
            # handlers, which hold on to what was made.
            captured.discard()
            torch.cuda.empty_cache()
        self.drop()
        return False

    def _is_expected(self, shape: PassShape) -> bool:
        """Whether the shape came before."""
        if shape in self._seen:
            return True
        if len(self._seen) >= _MOST_SHAPES:
            self._seen.clear()
        self._seen.add(shape)
        return False


class CapturedPass:
    """The forward and the backward pass of one shape."""

    def __init__(self, decoder: Decoder, shape: PassShape) -> None:
        self.tables = PassTables(shape, decoder.device)
        self._shape = shape
        self._hidden = self._hidden_grad = torch.empty(0)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

    def discard(self) -> None:
        """Let go of what was captured, of a pass that could not be to its end."""
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

    def forward(self, num_tokens: int) -> Tensor:
        """Hidden states (N, d)."""
        self._forward.replay()
        return self._hidden[:num_tokens]

    def backward(self, hidden_grad: Tensor) -> None:
        """Add the gradients of adapters to where they lie; `hidden_grad` is (N, d)."""
        num_tokens = len(hidden_grad)
        self._hidden_grad[:num_tokens].copy_(hidden_grad)
        self._hidden_grad[num_tokens:].zero_()
        self._backward.replay()

    def capture(
        self,
        decoder: Decoder,
        adapters: AdapterSegments,
        stream: torch.cuda.Stream,
        pool: tuple[int, int],
    ) -> None:
        """Run both passes once by themselves, which compiles kernels, and once into graphs."""
        gradient = next((each for each in adapters.gradients if each is not None), None)
        with self.tables.without_gradients():
            hidden = self._run(decoder, gradient)
            self._hidden_grad = torch.zeros_like(hidden, requires_grad=False)
            if hidden.requires_grad:
                hidden.backward(self._hidden_grad)
        del hidden
        device = decoder.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            with _capturing(self._forward, pool):
                hidden = self._run(decoder, gradient)
            if hidden.requires_grad:
                with _capturing(self._backward, pool):
                    hidden.backward(self._hidden_grad)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._hidden = hidden.detach()

    def _run(self, decoder: Decoder, gradient: GradientBuffer | None) -> Tensor:
        tables, num_tokens = self.tables, [self._shape.num_tokens]
        attention = PackedAttention(
            decoder.config, num_tokens, bounds=tables.bounds, tables=tables.chunks
        )
        # What is worked out about them on the device belongs to the run.
        segments = tables.segments(gradient)
        with torch.set_grad_enabled(self._shape.has_gradients):
            return decoder.hidden(tables.tokens, tables.positions, attention, segments)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> Iterator[None]:
    """What is asked of the device inside goes into the graph.

    `torch.cuda.graph` would first give back all memory that torch keeps, for which the passes that
    come next would have to ask again.
    """
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        try:
            graph.capture_end()
        except RuntimeError:
            _end_allocations(pool)
            raise


def _end_allocations(pool: tuple[int, int]) -> None:
    """Of a capture that was not ended: torch would go on as if it were under way, and give back
    nothing of what it keeps when memory runs out."""
    device = torch.cuda.current_device()
    with contextlib.suppress(AttributeError, RuntimeError):  # where they had ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def most_tokens(decoder: Decoder, pass_bytes: int | None) -> int:
    """Of a batch; 0 where the model's passes cannot be captured."""
    bytes_a_token = decoder.kept_bytes_a_token
    if bytes_a_token is None or not _can_capture(decoder):
        return 0
    most = min(MOST_TOKENS, MOST_WORK // sum(map(_weights_met, decoder.layers)))
    return most if pass_bytes is None else min(most, pass_bytes // GRAPHS_PART // bytes_a_token)


def _can_capture(decoder: Decoder) -> bool:
    """Whether all of the decoder is kernels that read what changes from tables."""
    return (
        decoder.dtype in (torch.bfloat16, torch.float16)
        and kernels.are_usable(decoder.embedding)
        and decoder.ranks.count == 1
        and not decoder.is_invariant
        and not torch.are_deterministic_algorithms_enabled()
        and not any(is_by_hand(spec) for spec in decoder.config.layers)
        and all(layer.delta is None or layer.delta.core.have_kernels for layer in decoder.layers)
    )


def _weights_met(layer: Layer) -> int:
    """Numbers of a layer's weights that a token is multiplied with."""
    count = sum(math.prod(linear.shape) for linear in layer.linears)
    if isinstance(layer.mlp, ExpertMlp):
        experts = (layer.mlp.gate_up.weight, layer.mlp.down.weight)
        share = layer.mlp.router.per_token / len(layer.mlp.router.weight)
        count += int(share * sum(math.prod(weight.shape) for weight in experts))
    return count
