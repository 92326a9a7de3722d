"""The compact decoder: packed tokens in, hidden states and logits out, adapters per run of rows.

All families of `families` run through this one forward pass. There is no batch dimension: a
batch is N tokens in a row, with a position each, and what a token may see is the business of
the `Attention` the caller brings (training packs whole sequences, sampling reads a cache).
Base weights are frozen; gradients flow through activations and into adapters only.

Shapes: N tokens, H query heads, K key/value heads, D head size, d hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.config import BaseWeights
from tinsmith.engine.local.model import invariant
from tinsmith.engine.local.model.adapted_linear import lora_linear, lora_linear_backward
from tinsmith.engine.local.model.blocks import (
    Attention,
    Block,
    Layer,
    kept_bytes_a_token,
)
from tinsmith.engine.local.model.cpu import cores
from tinsmith.engine.local.model.experts.steering import Steering
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.images.vision import Vision
from tinsmith.engine.local.model.inputs import Seen
from tinsmith.engine.local.model.linear import Linear, has_float32_products
from tinsmith.engine.local.model.loading import WeightFiles, Weights, load_parts
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.pointwise import differentiable_rms_norm
from tinsmith.engine.local.model.settings import read_config
from tinsmith.engine.local.ranks.group import ALONE, Ranks
from tinsmith.engine.local.ranks.models import CutWeights, cut_config


class Decoder:
    """One base model in memory."""

    vision: Vision | None = None
    """Where the model reads images."""

    ranks: Ranks = ALONE
    """Those that have the model together."""

    head_ranks: Ranks = ALONE
    """Those that have the unembedding together."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: tuple[Layer, ...],
        final_norm: Tensor,
        head: Linear,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.ranks = ranks
        if config.cut is not None and config.cut.is_head_cut:
            self.head_ranks = ranks
        self.device = embedding.device
        self.dtype = embedding.dtype
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        """The unembedding."""
        # Rounded as the weights are, which is what the models were trained with.
        scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self._embedding_scale = float(scale)
        self._frequencies = {
            rope: rope.inverse_frequencies().to(self.device)
            for rope in {spec.rope for spec in config.layers}
            if rope is not None
        }

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        base_weights: BaseWeights = "full",
        ranks: Ranks = ALONE,
        config: DecoderConfig | None = None,
    ) -> Decoder:
        """The model in a folder with `config.json` and safetensors files, or a rank's part.

        `config` is what is known of it already. On the device `meta` nothing is read but names and
        shapes.
        """
        config = config or read_config(folder)
        with WeightFiles(folder, torch.device(device), dtype) as weights:
            if ranks.count == 1:
                decoder = build(config, weights, base_weights)
            else:
                config = cut_config(config, ranks.index, ranks.count)
                assert config.cut is not None, "it has just been cut"
                decoder = build(config, CutWeights(weights, config.cut), base_weights, ranks)
            weights.check_all_read(config.predictors)
            return decoder

    @property
    def nbytes(self) -> int:
        """Memory that it takes, packed copies included once they are allowed."""
        parts = [self.final_norm, self.head, *(part for layer in self.layers for part in layer)]
        total = sum(part.nbytes for part in parts if part is not None)
        if self.vision is not None:
            total += self.vision.tower_nbytes
        return total if self.head.weight is self.embedding else total + self.embedding.nbytes

    @property
    def kept_bytes_a_token(self) -> int | None:
        """Activations of a training pass, for each of its tokens, where that is known."""
        return sum(
            kept_bytes_a_token(self.config, layer, self.dtype, self.stream_dtype)
            for layer in self.layers
        )

    @property
    def packed_bytes(self) -> int:
        """What `allow_packing` adds to that."""
        return sum(linear.packed_bytes for linear in self._linears())

    def allow_packing(self) -> None:
        """Take more memory for faster products; see `linear`."""
        for linear in self._linears():
            linear.allow_packing()

    @property
    def is_invariant(self) -> bool:
        """Whether a token's logits are the same to the last bit whatever is beside it."""
        return self.head.is_invariant

    @property
    def stream_dtype(self) -> torch.dtype:
        """What the residual stream and logits are in, and products that become them.

        With kernels it is float32, also beside weights in half precision: two programs that add up
        in different orders then differ by less than half. Without them there are no such products,
        those of several ranks are sent in half precision, and where all orders are one
        (`make_invariant`) there is nothing to gain.
        """
        is_plain = self.is_invariant or self.ranks.count > 1 or not has_float32_products()
        return self.dtype if is_plain or not kernels.are_usable(self.embedding) else torch.float32

    def make_invariant(self) -> None:
        """Take more time for that; see `invariant`."""
        if self.device.type == "cuda":
            invariant.prepare_cuda()
            for linear in {linear.shape: linear for linear in self._linears()}.values():
                invariant.check_cuda(linear.weight)
        for linear in self._linears():
            linear.is_invariant = True

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Where logits are made and read that must be the same to the last bit; nothing else is
        slower there."""
        has_cores = self.is_invariant and self.device.type == "cpu"
        return cores.undivided() if has_cores else contextlib.nullcontext()

    def _linears(self) -> list[Linear]:
        return [self.head, *(linear for layer in self.layers for linear in layer.linears)]

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        adapters: AdapterSegments,
        *,
        kept_layers: int | None = None,
        seen: Seen | None = None,
        steering: Steering | None = None,
    ) -> Tensor:
        """Hidden states (N, d) after the final norm, for tokens (N,) at positions (N,).

        `seen` are the rows that are parts of images, where the model has `vision`. `steering` is
        for routers, where `config.routed` has them.
        With `kept_layers` only so many blocks keep their activations, the last ones, whose memory
        is free first; the backward pass computes those of the others again.
        """
        if seen is not None:
            assert len(seen.features) == 1, "our own decoder adds nothing to later layers"
            if not (self.config.images is not None and self.config.images.is_in_line):
                positions = seen.on_axes(positions)
        with self.in_order():
            rotations = {
                rope: rope.rotation(frequencies, positions, self.dtype)
                for rope, frequencies in self._frequencies.items()
            }
            x = F.embedding(tokens if seen is None else tokens.clamp(min=0), self.embedding)
            if self._embedding_scale != 1.0:
                x = x * self._embedding_scale
            if seen is not None:
                x = seen.among(x)
            x = x.to(self.stream_dtype)
            first_kept = 0 if kept_layers is None else len(self.layers) - kept_layers
            for index, layer in enumerate(self.layers):
                block = Block(
                    self.config,
                    index,
                    layer,
                    rotations,
                    attention,
                    adapters,
                    self.ranks,
                    steering,
                    dtype=self.dtype,
                )
                x = block.run(x, recompute=index < first_kept)
            return differentiable_rms_norm(x, self.final_norm, self.config.norm_eps, self.dtype)

    def raw_logits(self, hidden: Tensor, adapters: AdapterSegments) -> Tensor:
        """Logits (M, V) as the product leaves them: in `stream_dtype`, not softcapped; of
        `head_ranks`, those of this rank's tokens."""
        return lora_linear(hidden, self.head, adapters, None, "lm_head", self.stream_dtype)

    def unembed(self, hidden: Tensor, adapters: AdapterSegments) -> Tensor:
        """Logits (M, V) in float32, softcapped. The caller takes few enough rows at a time."""
        logits = self.own_logits(hidden, adapters)
        if self.head_ranks.count == 1:
            return logits
        return torch.cat(self.head_ranks.gather(logits), dim=1)

    def own_logits(self, hidden: Tensor, adapters: AdapterSegments) -> Tensor:
        """The same, of `head_ranks` those of this rank's tokens."""
        logits = self.raw_logits(hidden, adapters).float()
        cap = self.config.final_softcap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def unembed_backward(
        self, hidden: Tensor, logits: Tensor, grad: Tensor, adapters: AdapterSegments
    ) -> Tensor:
        """The gradient for `hidden` (M, d), given `own_logits` and their gradient (M, V).

        Done by hand so that nothing of size (M, V) outlives the call. Overwrites `grad`.
        """
        cap = self.config.final_softcap
        if cap is not None:
            grad *= 1 - (logits / cap) ** 2
        grad = grad.to(self.dtype)
        return lora_linear_backward(
            grad, hidden, self.head, adapters, None, "lm_head", self.head_ranks
        )


def build(
    config: DecoderConfig,
    weights: Weights,
    base_weights: BaseWeights = "full",
    ranks: Ranks = ALONE,
) -> Decoder:
    """The model of this shape with these weights."""
    return Decoder(config, *load_parts(config, weights, base_weights), ranks)
