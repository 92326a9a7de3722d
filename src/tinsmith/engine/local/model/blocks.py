"""One block of the decoder, forward and backward, by hand.

The backward pass is written out rather than left to autograd: it keeps only what it cannot
cheaply compute again (the block's input, the inputs of RoPE and SwiGLU, and what attention
keeps), and consists of few and large operations. Autograd sees a block as one operation on
the residual stream.

Shapes: N tokens, d hidden size; `decoder` has the rest.
"""

from __future__ import annotations

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
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.pointwise import (
    Norms,
    Rotation,
    apply_rope,
    apply_rope_backward,
    rms_norm,
    rms_norm_backward,
    swiglu,
    swiglu_backward,
    wide_norm,
    wide_norm_backward,
)
from tinsmith.engine.local.model.recurrent.recurrence import SequenceStates
from tinsmith.engine.local.ranks.group import ALONE, Ranks


class Attention(Protocol):
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

    @property
    def qk_norms(self) -> Norms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, *self.mlp.linears


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

    inputs: tuple[Tensor, Tensor, Tensor]
    output: Tensor


@dataclass(slots=True)
class _Kept:
    """What the backward pass of a block needs of its forward pass."""

    x: Tensor
    qkv: Tensor
    qkv_inner: Inner
    attended: _Attended
    o_inner: Inner
    attention_part: Tensor | None
    """As in `_KeptMlp`."""

    middle: Tensor
    """The residual stream between attention and MLP."""

    mlp: _KeptMlp | KeptExperts


class Block:
    """A block under the adapters, positions and attention of one batch."""

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        layer: Layer,
        rotation: Rotation,
        attention: Attention,
        adapters: AdapterSegments,
        ranks: Ranks = ALONE,
        steering: Steering | None = None,
    ) -> None:
        """`ranks` are those among which heads and inner columns are divided: the products that
        join the residual stream are summed over them, and so is the gradient on its way back.
        `steering` hears what routers choose, and may choose otherwise."""
        self._config = config
        self._ranks = ranks
        self._index = index
        self._layer = layer
        self._rotation = rotation
        self._attention = attention
        self._adapters = adapters
        self._steering = steering

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
        layer, eps = self._layer, self._config.norm_eps
        qkv, qkv_inner = self._linear(rms_norm(x, layer.input_norm, eps), "qkv")
        attended = self._attend(qkv, keep)
        flat = attended.output.detach().reshape(len(x), -1)
        middle, o_inner, attention_part = self._join(x, flat, "o", layer.post_attention_norm)
        normed = rms_norm(middle, layer.mlp_norm, eps)
        mlp: _KeptMlp | KeptExperts
        if isinstance(layer.mlp, ExpertMlp):
            y, mlp = self._experts(layer.mlp).forward(normed)
            y = y.add_(middle)
        else:
            y, mlp = self._mlp(middle, normed)
        if not keep:
            return y, None
        return y, _Kept(x, qkv, qkv_inner, attended, o_inner, attention_part, middle, mlp)

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
        """The gradient for the block's input; those of adapters go to their buffers."""
        layer, eps = self._layer, self._config.norm_eps

        if isinstance(kept.mlp, _KeptMlp):
            grad = self._mlp_backward(grad, kept.middle, kept.mlp)
        else:
            assert isinstance(layer.mlp, ExpertMlp), "it has kept what experts keep"
            normed = rms_norm(kept.middle, layer.mlp_norm, eps)
            grad_normed = self._experts(layer.mlp).backward(grad, normed, kept.mlp)
            grad, _ = rms_norm_backward(grad_normed, kept.middle, layer.mlp_norm, eps, grad)

        part = self._leave(grad, kept.attention_part, layer.post_attention_norm)
        grad_flat, o_grad = self._linear_backward(part, "o")
        assert grad_flat is not None, "it was asked for"
        flat = kept.attended.output.detach().reshape(len(grad), -1)
        self._add_gradients("o", part, flat, kept.o_inner, o_grad)
        grad_qkv = self._attend_backward(grad_flat, kept)
        grad_input, qkv_grad = self._linear_backward(grad_qkv, "qkv", needs_input)
        self._sum_shared(grad_input, qkv_grad, grad_qkv)
        if grad_input is None:
            normed = rms_norm(kept.x, layer.input_norm, eps)
        else:
            grad, normed = rms_norm_backward(grad_input, kept.x, layer.input_norm, eps, grad)
        self._add_gradients("qkv", grad_qkv, normed, kept.qkv_inner, qkv_grad)
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

    def _attend(self, qkv: Tensor, keep: bool) -> _Attended:
        config = self._config
        norms = self._layer.qk_norms
        if norms is not None and config.has_wide_qk_norm:
            qkv, norms = wide_norm(qkv, norms, config.norm_eps), None
        q, k, v = apply_rope(qkv, norms, self._rotation, config.num_kv_heads, config.norm_eps)
        with torch.set_grad_enabled(keep):
            inputs = tuple(x.detach().requires_grad_(keep) for x in (q, k, v))
            return _Attended(inputs, self._attention(self._index, *inputs))

    def _attend_backward(self, grad: Tensor, kept: _Kept) -> Tensor:
        attended = kept.attended
        grads = torch.autograd.grad(
            attended.output, attended.inputs, grad.view(attended.output.shape)
        )
        norms, eps = self._layer.qk_norms, self._config.norm_eps
        if norms is None or not self._config.has_wide_qk_norm:
            return apply_rope_backward(grads, kept.qkv, norms, self._rotation, eps)
        grad = apply_rope_backward(grads, kept.qkv, None, self._rotation, eps)
        return wide_norm_backward(grad, kept.qkv, norms, eps)

    def _join(
        self, stream: Tensor, x: Tensor, name: str, post_norm: Tensor | None
    ) -> tuple[Tensor, Inner, Tensor | None]:
        """The residual stream with a product added to it, through a norm where there is one."""
        if self._ranks.count > 1:
            return self._join_all(stream, x, name, post_norm)
        if post_norm is None:
            return *self._linear(x, name, stream), None
        part, inner = self._linear(x, name)
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

    def _linear(self, x: Tensor, name: str, residual: Tensor | None = None) -> tuple[Tensor, Inner]:
        key = (self._index, name)
        return adapted_linear.forward(x, self._weights(name), self._adapters, key, residual)

    def _linear_backward(
        self, grad: Tensor, name: str, needs_input: bool = True
    ) -> tuple[Tensor | None, Inner]:
        key, weights = (self._index, name), self._weights(name)
        return adapted_linear.backward_input(grad, weights, self._adapters, key, needs_input)

    def _weights(self, name: str) -> Linear:
        of = self._layer if name in ("qkv", "o") else self._layer.mlp
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
