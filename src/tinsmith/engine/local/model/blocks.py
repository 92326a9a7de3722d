"""One block of the decoder, forward and backward, by hand.

The backward pass is written out rather than left to autograd: it keeps only what it cannot
cheaply compute again (the block's input, the inputs of RoPE and SwiGLU, and what attention
keeps), and consists of few and large operations. Autograd sees a block as one operation on
the residual stream.

Shapes: N tokens, d hidden size; `decoder` has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tinsmith.engine.local.model import adapted_linear
from tinsmith.engine.local.model.adapted_linear import Inner
from tinsmith.engine.local.model.experts.mlp import ExpertMlp, ExpertPass
from tinsmith.engine.local.model.experts.mlp import Kept as KeptExperts
from tinsmith.engine.local.model.experts.steering import Steering
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.latent.mixer import (
    LatentAttention,
    LatentMixer,
    LatentPass,
    Looked,
)
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.pointwise import (
    Norms,
    apply_rope,
    apply_rope_backward,
    gate_backward,
    join_gate,
    rms_norm,
    rms_norm_backward,
    split_gate,
    swiglu,
    swiglu_backward,
    wide_norm,
    wide_norm_backward,
)
from tinsmith.engine.local.model.recurrent.delta_mixer import (
    DeltaMixer,
    DeltaPass,
    Gradients,
    Recurred,
)
from tinsmith.engine.local.model.recurrent.recurrence import SequenceStates
from tinsmith.engine.local.model.rope import Rope, Rotation
from tinsmith.engine.local.ranks.group import ALONE, Ranks


class Attention(LatentAttention, Protocol):
    """What the tokens of a batch see. Scale, softcap and window are in `config.layers[layer]`."""

    @property
    def sequences(self) -> SequenceStates:
        """The same tokens for recurrent layers."""
        ...

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q (N, H, D) and k, v (N, K, D), normed and rotated already; the answer is (N, H, D).

        `sinks` (H,) are frozen scores of one more key of each head, whose value is zero.
        """
        ...


class DenseMlp(NamedTuple):
    """The frozen weights of a plain MLP."""

    gate_up: Linear
    down: Linear

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(self)


class Layer(NamedTuple):
    """The frozen weights of one block."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    mlp: DenseMlp | ExpertMlp
    post_mlp_norm: Tensor | None
    delta: DeltaMixer | None = None
    """In place of attention, between the first product (`qkv`) and the last (`o`)."""

    sinks: Tensor | None = None
    """(H,) float32, where heads have such."""

    latent: LatentMixer | None = None
    """Between the same, where attention is by latent vectors."""

    @property
    def qk_norms(self) -> Norms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        mixing = () if self.delta is None else self.delta.linears
        return self.qkv, self.o, *mixing, *self.mlp.linears


@dataclass(slots=True)
class _KeptMlp:
    """What the backward pass of a plain MLP needs of its forward pass."""

    gate_up: Tensor
    gate_up_inner: Inner
    down_inner: Inner
    part: Tensor | None
    """What was normed before it joined the residual stream, where the model does that."""


@dataclass(slots=True)
class _Attended:
    """Attention by autograd, the one part whose backward pass is not written out."""

    qkv: Tensor
    inputs: tuple[Tensor, Tensor, Tensor]
    output: Tensor
    gate: Tensor | None
    """(N, H · D), where the output goes through one."""


@dataclass(slots=True)
class _Kept:
    """What the backward pass of a block needs of its forward pass."""

    x: Tensor
    qkv_inner: Inner
    z_inner: Inner
    """Of a recurrent layer."""

    mixed: _Attended | Recurred | Looked
    o_inner: Inner
    attention_part: Tensor | None
    """As in `_KeptMlp`."""

    middle: Tensor
    """The residual stream between attention and MLP."""

    mlp: _KeptMlp | KeptExperts


def kept_bytes_a_token(
    config: DecoderConfig, layer: Layer, dtype: torch.dtype, stream_dtype: torch.dtype
) -> int:
    """About how much of each token `_Kept` holds, what is of adapters not counted."""
    hidden, (count, _) = config.hidden_size, layer.qkv.shape
    if layer.latent is not None:
        # Queries, keys and values of all heads, and what attention gives.
        count += layer.latent.numbers_a_token
    elif layer.delta is None:
        # Rotated queries and keys, and what attention gives.
        count += (2 * config.num_heads + config.num_kv_heads) * config.head_dim
    else:
        # The rule's output, its gate, and what the small products gave.
        values = layer.o.shape[1]
        count += values + layer.delta.ba.shape[0]
        count += 0 if layer.delta.z is None else values
    if config.has_post_norms:
        count += 2 * hidden
    if isinstance(layer.mlp, ExpertMlp):
        assert config.experts is not None, "a layer has them"
        count += 2 * config.experts.per_token * config.experts.inner_size
        if layer.mlp.shared is not None:
            count += layer.mlp.shared.gate_up.shape[0] + hidden
    else:
        count += layer.mlp.gate_up.shape[0]
    return count * dtype.itemsize + 2 * hidden * stream_dtype.itemsize


class Block:
    """A block under the adapters, positions and attention of one batch."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        layer: Layer,
        rotations: Mapping[Rope, Rotation],
        attention: Attention,
        adapters: AdapterSegments,
        ranks: Ranks = ALONE,
        steering: Steering | None = None,
        *,
        dtype: torch.dtype,
    ) -> None:
        """`ranks` are those among which heads and inner columns are divided: the products that
        join the residual stream are summed over them, and so is the gradient on its way back.
        `steering` hears what routers choose, and may choose otherwise. `dtype` is that of the
        weights, and of all but the residual stream and what joins it, which the stream decides."""
        self._config = config
        self._ranks = ranks
        self._index = index
        self._layer = layer
        self._rotations = rotations
        self._place = config.place(index)
        self._attention = attention
        self._adapters = adapters
        self._steering = steering
        self._dtype = dtype

    def run(self, x: Tensor, *, recompute: bool = False) -> Tensor:
        """The residual stream (N, d) after the block.

        With `recompute` the backward pass runs the block again instead of keeping anything.
        """
        if not torch.is_grad_enabled():
            return self._forward(x, keep=False)[0]
        # Empty, and only there to make autograd call `backward` when x needs no gradient itself.
        has_gradients = any(buffer is not None for buffer in self._adapters.gradients)
        anchor = x.new_empty(0).requires_grad_(has_gradients)
        return _BlockFunction.apply(x, anchor, self, recompute)

    def _forward(self, x: Tensor, *, keep: bool) -> tuple[Tensor, _Kept | None]:
        layer = self._layer
        normed = self._norm(x, layer.input_norm)
        qkv, qkv_inner = self._linear(normed, "qkv")
        z_inner: Inner = []
        mixed: _Attended | Recurred | Looked
        if layer.latent is not None:
            flat, mixed = self._latent(layer.latent).forward(qkv, keep=keep)
        elif layer.delta is None:
            flat, mixed = self._attend(qkv, keep)
        else:
            if layer.delta.z is None:
                qkv, z = layer.delta.split(qkv)
            else:
                z, z_inner = self._linear(normed, "z")
            ba = layer.delta.ba.product(normed)
            flat, mixed = self._recurrent(layer.delta).forward(qkv, z, ba, keep=keep)
        middle, o_inner, attention_part = self._join(x, flat, "o", layer.post_attention_norm)
        normed = self._norm(middle, layer.mlp_norm)
        mlp: _KeptMlp | KeptExperts
        if isinstance(layer.mlp, ExpertMlp):
            y, mlp = self._experts(layer.mlp).forward(normed, middle.dtype)
            y = y.add_(middle)
        else:
            y, mlp = self._mlp(middle, normed)
        if not keep:
            return y, None
        return y, _Kept(x, qkv_inner, z_inner, mixed, o_inner, attention_part, middle, mlp)

    def _mlp(self, middle: Tensor, normed: Tensor) -> tuple[Tensor, _KeptMlp]:
        """The residual stream after a plain MLP."""
        gate_up, gate_up_inner = self._linear(normed, "gate_up")
        active = swiglu(gate_up, self._config.activation)
        y, down_inner, part = self._join(middle, active, "down", self._layer.post_mlp_norm)
        return y, _KeptMlp(gate_up, gate_up_inner, down_inner, part)

    def _experts(self, mlp: ExpertMlp) -> ExpertPass:
        steer = None if self._steering is None else partial(self._steering, self._index)
        return ExpertPass(mlp, self._index, self._config.activation, self._adapters, steer)

    def _backward(self, grad: Tensor, kept: _Kept, *, needs_input: bool) -> Tensor | None:
        """The gradient for the block's input, in its dtype; those of adapters go to their buffers.

        Inside the block the stream's gradient is rounded, as what is multiplied has to be."""
        layer, eps = self._layer, self._config.norm_eps
        grad = grad.to(self._dtype)

        if isinstance(kept.mlp, _KeptMlp):
            grad = self._mlp_backward(grad, kept.middle, kept.mlp)
        else:
            assert isinstance(layer.mlp, ExpertMlp), "it has kept what experts keep"
            normed = self._norm(kept.middle, layer.mlp_norm)
            grad_normed = self._experts(layer.mlp).backward(grad, normed, kept.mlp)
            grad, _ = rms_norm_backward(grad_normed, kept.middle, layer.mlp_norm, eps, grad)

        part = self._leave(grad, kept.attention_part, layer.post_attention_norm)
        grad_flat, o_grad = self._linear_backward(part, "o")
        assert grad_flat is not None, "it was asked for"
        grads: Gradients | None = None
        z_grad: Inner = []
        if isinstance(kept.mixed, Recurred):
            assert layer.delta is not None, "it has kept what recurrent layers keep"
            grads, flat = self._recurrent(layer.delta).backward(grad_flat, kept.mixed)
            grad_qkv = grads.qkv
            if layer.delta.z is None:
                grad_qkv = layer.delta.join(grad_qkv, grads.z)
        elif isinstance(kept.mixed, Looked):
            assert layer.latent is not None, "it has kept what latent attention keeps"
            grad_qkv, flat = self._latent(layer.latent).backward(grad_flat, kept.mixed)
        else:
            grad_qkv, flat = self._attend_backward(grad_flat, kept.mixed)
        self._add_gradients("o", part, flat, kept.o_inner, o_grad)
        grad_input, qkv_grad = self._linear_backward(grad_qkv, "qkv", needs_input)
        self._sum_shared(grad_input, qkv_grad, grad_qkv)
        if grads is not None and layer.delta is not None:
            if layer.delta.z is not None:
                of_z, z_grad = self._linear_backward(grads.z, "z", needs_input)
                if grad_input is not None and of_z is not None:
                    grad_input.add_(of_z)
            if grad_input is not None:
                grad_input.add_(layer.delta.ba.product_back(grads.ba))
        if grad_input is None:
            normed = self._norm(kept.x, layer.input_norm)
        else:
            grad, normed = rms_norm_backward(
                grad_input, kept.x, layer.input_norm, eps, grad, kept.x.dtype
            )
        self._add_gradients("qkv", grad_qkv, normed, kept.qkv_inner, qkv_grad)
        if grads is not None and layer.delta is not None and layer.delta.z is not None:
            self._add_gradients("z", grads.z, normed, kept.z_inner, z_grad)
        return grad if needs_input else None

    def _mlp_backward(self, grad: Tensor, middle: Tensor, kept: _KeptMlp) -> Tensor:
        """The gradient for the residual stream before a plain MLP."""
        layer, eps = self._layer, self._config.norm_eps
        part = self._leave(grad, kept.part, layer.post_mlp_norm)
        grad_active, down_grad = self._linear_backward(part, "down")
        assert grad_active is not None, "it was asked for"
        grad_gate_up, active = swiglu_backward(grad_active, kept.gate_up, self._config.activation)
        self._add_gradients("down", part, active, kept.down_inner, down_grad)
        grad_normed, gate_up_grad = self._linear_backward(grad_gate_up, "gate_up")
        assert grad_normed is not None, "it was asked for"
        self._ranks.sum_(grad_normed, *gate_up_grad)
        grad, normed = rms_norm_backward(grad_normed, middle, layer.mlp_norm, eps, grad)
        self._add_gradients("gate_up", grad_gate_up, normed, kept.gate_up_inner, gate_up_grad)
        return grad

    def _sum_shared(self, grad_x: Tensor | None, inner_grad: Inner, grad_qkv: Tensor) -> None:
        """Sum over ranks what each has a part of: the gradient of the input and of its product with
        A, and that of keys and values where several ranks have the same head."""
        cut = self._config.cut
        if cut is None:
            return
        self._ranks.sum_(*(() if grad_x is None else (grad_x,)), *inner_grad)
        if cut.kv_copies == 1:
            return
        size = cut.head_dim
        # (N, 2 · K · D) for the heads of the whole model, of which each rank fills in its own.
        summed = grad_qkv.new_zeros(len(grad_qkv), 2, cut.num_kv_heads, size)
        own = grad_qkv[:, len(cut.heads) * size :].view(len(grad_qkv), 2, size)
        summed[:, :, cut.kv_heads.start] = own
        self._ranks.sum_(summed)
        own.copy_(summed[:, :, cut.kv_heads.start])

    def _recurrent(self, mixer: DeltaMixer) -> DeltaPass:
        return DeltaPass(mixer, self._config.norm_eps, self._attention.sequences, self._place)

    def _latent(self, mixer: LatentMixer) -> LatentPass:
        return LatentPass(mixer, self._rotation, self._attention, self._place)

    @property
    def _rotation(self) -> Rotation:
        rope = self._config.layers[self._place].rope
        assert rope is not None, "our own decoder rotates"
        return self._rotations[rope]

    def _attend(self, qkv: Tensor, keep: bool) -> tuple[Tensor, _Attended]:
        """What attention gives, (N, H · D), for the last product."""
        config, gate = self._config, None
        if config.has_output_gate:
            qkv, gates = split_gate(qkv, config.num_heads, config.head_dim)
            gate = gates.flatten(1)
        norms, normed = self._layer.qk_norms, qkv
        if norms is not None and config.has_wide_qk_norm:
            normed, norms = wide_norm(qkv, norms, config.norm_eps), None
        q, k, v = apply_rope(normed, norms, self._rotation, config.num_kv_heads, config.norm_eps)
        with torch.set_grad_enabled(keep):
            q, k, v = (x.detach().requires_grad_(keep) for x in (q, k, v))
            output = self._attention(self._place, q, k, v, self._layer.sinks)
        flat = output.detach().reshape(len(qkv), -1)
        if gate is not None:
            flat = flat * gate.sigmoid()
        return flat, _Attended(qkv, (q, k, v), output, gate)

    def _attend_backward(self, grad: Tensor, attended: _Attended) -> tuple[Tensor, Tensor]:
        """The gradient for the first product; and what attention gives once more."""
        flat = attended.output.detach().reshape(len(grad), -1)
        if attended.gate is None:
            return self._inputs_backward(grad, attended), flat
        grad, grad_gate, flat = gate_backward(grad, flat, attended.gate)
        grad_qkv = self._inputs_backward(grad, attended)
        return join_gate(grad_qkv, grad_gate, self._config.head_dim), flat

    def _inputs_backward(self, grad: Tensor, attended: _Attended) -> Tensor:
        """The gradient for queries, keys and values, from that of what attention gives."""
        grads = torch.autograd.grad(
            attended.output, attended.inputs, grad.view(attended.output.shape)
        )
        norms, eps = self._layer.qk_norms, self._config.norm_eps
        if norms is None or not self._config.has_wide_qk_norm:
            return apply_rope_backward(grads, attended.qkv, norms, self._rotation, eps)
        grad = apply_rope_backward(grads, attended.qkv, None, self._rotation, eps)
        return wide_norm_backward(grad, attended.qkv, norms, eps)

    def _join(
        self, stream: Tensor, x: Tensor, name: str, post_norm: Tensor | None
    ) -> tuple[Tensor, Inner, Tensor | None]:
        """The residual stream with a product added to it, through a norm where there is one."""
        if self._ranks.count > 1:
            return self._join_all(stream, x, name, post_norm)
        if post_norm is None:
            return *self._linear(x, name, stream), None
        part, inner = self._linear(x, name, dtype=stream.dtype)
        return stream + rms_norm(part, post_norm, self._config.norm_eps), inner, part

    def _join_all(
        self, stream: Tensor, x: Tensor, name: str, post_norm: Tensor | None
    ) -> tuple[Tensor, Inner, Tensor | None]:
        """The same where each rank has a part of x. What A made of it is summed too: the gradient
        of B, which every rank has, is made of all of it."""
        part, inner = self._linear(x, name)
        self._ranks.sum_(part, *inner)
        if post_norm is None:
            return stream + part, inner, None
        return stream + rms_norm(part, post_norm, self._config.norm_eps), inner, part

    def _leave(self, grad: Tensor, part: Tensor | None, post_norm: Tensor | None) -> Tensor:
        """The gradient for the product that was added, from that of the residual stream."""
        if part is None or post_norm is None:
            return grad
        return rms_norm_backward(grad, part, post_norm, self._config.norm_eps)[0]

    def _norm(self, stream: Tensor, weight: Tensor) -> Tensor:
        """The norm of the residual stream, as products read it."""
        return rms_norm(stream, weight, self._config.norm_eps, self._dtype)

    def _linear(
        self,
        x: Tensor,
        name: str,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Inner]:
        key, weights = (self._index, name), self._weights(name)
        return adapted_linear.forward(x, weights, self._adapters, key, residual, dtype)

    def _linear_backward(
        self, grad: Tensor, name: str, needs_input: bool = True
    ) -> tuple[Tensor | None, Inner]:
        key, weights = (self._index, name), self._weights(name)
        return adapted_linear.backward_input(grad, weights, self._adapters, key, needs_input)

    def _weights(self, name: str) -> Linear:
        layer = self._layer
        of = layer if name in ("qkv", "o") else layer.delta if name == "z" else layer.mlp
        found: Linear = getattr(of, name)
        return found

    def _add_gradients(
        self, name: str, grad: Tensor, x: Tensor, inner: Inner, inner_grad: Inner
    ) -> None:
        key = (self._index, name)
        adapted_linear.backward_adapters(grad, x, inner, inner_grad, self._adapters, key)


class _BlockFunction(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, x, anchor, block, recompute):  # type: ignore[no-untyped-def]
        y, kept = block._forward(x, keep=not recompute)
        ctx.block, ctx.kept, ctx.x = block, kept, x.detach()
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        block, kept, x = ctx.block, ctx.kept, ctx.x
        # Let go of at once: the graph itself lives until the whole backward pass is over.
        ctx.kept = ctx.x = None
        if kept is None:
            _, kept = block._forward(x, keep=True)
        needs_input = ctx.needs_input_grad[0]
        return block._backward(grad.contiguous(), kept, needs_input=needs_input), None, None, None
