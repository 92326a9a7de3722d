"""Layers of experts of a `transformers` model, computed by `products`.

All models of `transformers` hold their experts in one form: the weights of all of them in one
tensor of three dimensions, and a forward pass that is given each token's experts and their
weights. What the router does is the model's own.

An adapter shares the factor on the hidden side between all experts, and has one of the other for
each: gate (`w1`) and up (`w3`) have one A and a B each, down (`w2`) has an A each and one B.
Routers have no adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.engine.local.config import BaseWeights
from tinsmith.engine.local.model.experts.products import Batch, Down, Up
from tinsmith.engine.local.model.experts.routing import Routing
from tinsmith.engine.local.model.experts.weights import ExpertWeights
from tinsmith.engine.local.model.families import ExpertFactors, Projection
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.quantized import QuantizedStack
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.ranks.group import ALONE, Ranks

_ONE_A = ("InklingExperts",)


def is_experts(module: nn.Module) -> bool:
    """Whether this is a layer of experts in the form that `transformers` gives them."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "down_proj"))


class Experts:
    """One layer of experts, called `name` in its model."""

    def __init__(self, name: str, module: Any) -> None:
        if getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModelError("its experts norm what they compute")
        self._name = name
        self._module = module
        self._quantized: dict[str, QuantizedStack] = {}

    def projections(self) -> tuple[Projection, Projection]:
        """What adapters extend."""
        num_experts, inner, hidden = self._down.weight.shape
        if not self._module.has_gate:
            letters: tuple[str, ...] = ("w1",)
        else:
            letters = ("w13",) if self._shares_a else ("w1", "w3")
        up = Projection(
            layer=None,
            name=f"{self._name}.up",
            part="mlp",
            inputs=hidden,
            modules=tuple(f"{self._name}.{letter}" for letter in letters),
            outputs=(inner * (1 + self._shares_a),) * len(letters),
            experts=ExpertFactors(a=1, b=num_experts),
        )
        down = Projection(
            layer=None,
            name=f"{self._name}.down",
            part="mlp",
            inputs=inner,
            modules=(f"{self._name}.w2",),
            outputs=(hidden,),
            experts=ExpertFactors(a=num_experts, b=1),
        )
        return up, down

    def run(
        self,
        x: Tensor,
        choices: Tensor,
        shares: Tensor,
        adapters: AdapterSegments,
        ranks: Ranks = ALONE,
    ) -> Tensor:
        """(T, hidden) from x (T, hidden) and each token's experts and their shares (T, k).

        `ranks` are those among which the inner columns of every expert are divided.
        """
        up, down, module = self._up, self._down, self._module
        batch = Batch(Routing(choices, up.weight.shape[0]), adapters, ranks)
        # Up and down: (T, hidden) to (S, inner), sorted by expert, and summed to (T, hidden).
        rows = _run(Up(x, up, batch, (None, f"{self._name}.up")), adapters, x)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        return _run(Down(rows, down, batch, (None, f"{self._name}.down")), adapters, rows, shares)

    def keep(self, inner: range) -> None:
        """Forget all inner columns of every expert but these."""
        up, down = self._up, self._down
        assert isinstance(up.weight, Tensor) and isinstance(down.weight, Tensor), "kept in full"
        outputs = torch.arange(up.weight.shape[2], device=up.weight.device)
        kept = torch.cat([outputs[each][inner.start : inner.stop] for each in up.columns])
        kept = kept.sort().values
        name = "gate_up_proj" if self._module.has_gate else "up_proj"
        self._replace(name, up.weight.index_select(2, kept))
        if up.bias is not None:
            self._set(f"{name}_bias", up.bias.index_select(1, kept))
        self._replace("down_proj", down.weight[:, inner.start : inner.stop])

    def quantize(self, kind: BaseWeights, device: torch.device) -> None:
        """Keep the weights in few bits, on this device."""
        for name in ("gate_up_proj" if self._module.has_gate else "up_proj", "down_proj"):
            weight = self._weights(name, ()).weight
            assert isinstance(weight, Tensor), "quantized once"
            matrices = weight.transpose(1, 2).to(device).contiguous()
            self._quantized[name] = QuantizedStack(matrices, kind)
            setattr(self._module, name, None)

    @property
    def quantized_bytes(self) -> int:
        return sum(stack.nbytes for stack in self._quantized.values())

    def _replace(self, name: str, weight: Tensor) -> None:
        self._set(name, weight if self._module.is_transposed else weight.transpose(1, 2))

    def _set(self, name: str, tensor: Tensor) -> None:
        # A copy, so that what it is a part of can go.
        copy = tensor.clone(memory_format=torch.contiguous_format)
        setattr(self._module, name, nn.Parameter(copy, requires_grad=False))

    def matrix(self, projection: str, expert: int) -> Tensor:
        """One expert's (inputs, outputs) of `gate_proj`, `up_proj` or `down_proj`, as a view."""
        of = self._down if projection == "down_proj" else self._up
        assert isinstance(of.weight, Tensor), "kept in full"
        is_second = self._module.has_gate and projection == "up_proj"
        return of.weight[expert][:, of.columns[is_second]]

    @property
    def _shares_a(self) -> bool:
        """Whether gate and up have one A, and one B of the rows of both (`w13`)."""
        return type(self._module).__name__ in _ONE_A

    @property
    def _up(self) -> ExpertWeights:
        module = self._module
        if not module.has_gate:
            return self._weights("up_proj", (slice(None),))
        if self._shares_a:
            return self._weights("gate_up_proj", (slice(None),))
        if not _is_concatenated(module):
            return self._weights("gate_up_proj", (slice(0, None, 2), slice(1, None, 2)))
        inner = self._down.weight.shape[1]
        return self._weights("gate_up_proj", (slice(inner), slice(inner, None)))

    @property
    def _down(self) -> ExpertWeights:
        return self._weights("down_proj", (slice(None),))

    def _weights(self, name: str, columns: tuple[slice, ...]) -> ExpertWeights:
        module = self._module
        if name in self._quantized:
            bias = getattr(module, f"{name}_bias", None)
            return ExpertWeights(self._quantized[name], bias, columns)
        weight: Tensor = getattr(module, name)
        if not module.is_transposed:
            weight = weight.transpose(1, 2)
        return ExpertWeights(weight, getattr(module, f"{name}_bias", None), columns)


def _run(product: Up | Down, adapters: AdapterSegments, *inputs: Tensor) -> Tensor:
    """A product as autograd sees it: an operation on its inputs alone."""
    if not torch.is_grad_enabled():
        return product.forward(*inputs)[0]
    # Empty, and only there to make autograd call `backward` when no input needs a gradient itself.
    has_gradients = any(buffer is not None for buffer in adapters.gradients)
    anchor = inputs[0].new_empty(0).requires_grad_(has_gradients)
    return _Product.apply(anchor, product, *inputs)


class _Product(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, anchor, product, *inputs):  # type: ignore[no-untyped-def]
        y, inners = product.forward(*inputs)
        ctx.save_for_backward(*inputs, *inners)
        ctx.product, ctx.num_inputs = product, len(inputs)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors
        inputs, inners = saved[: ctx.num_inputs], list(saved[ctx.num_inputs :])
        found = ctx.product.backward(grad.contiguous(), *inputs, inners)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def _is_concatenated(module: Any) -> bool:
    """Whether all gates come before all ups, or the two are interleaved.

    Older releases of `transformers` do not say it: there, an interleaved layer has a gate of
    its own in place of the one that all share.
    """
    said = getattr(module, "is_concatenated", None)
    if said is not None:
        return bool(said)
    return type(module)._apply_gate.__module__ == "transformers.integrations.moe"
