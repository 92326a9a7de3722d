"""What the modules of a foreign model call in place of their own code, and who answers.

Linear layers, layers of experts and recurrent layers are replaced once; during a pass they ask the
call that is under way, which computes, or only watches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinsmith.engine.local.config import BaseWeights
from tinsmith.engine.local.model.adapted_linear import lora_linear
from tinsmith.engine.local.model.blocks import Attention
from tinsmith.engine.local.model.experts.foreign import Experts, is_experts
from tinsmith.engine.local.model.experts.steering import Steering
from tinsmith.engine.local.model.families import AttentionSpec, Projection
from tinsmith.engine.local.model.foreign import inkling
from tinsmith.engine.local.model.foreign.config import ForeignConfig
from tinsmith.engine.local.model.foreign.routers import ForeignRouters, ShareRule
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.quantized import quantize
from tinsmith.engine.local.model.recurrent.layers import RecurrentLayer, recurrent_layer
from tinsmith.engine.local.model.recurrent.recurrence import StateShape
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.ranks.group import Ranks

ATTENTION_NAME = "tinsmith"
"""What our attention is called among `transformers`' attention functions."""


class Call(Protocol):
    adapters: AdapterSegments
    positions: Tensor | None
    """(N,): where the tokens are in their sequences; None where no numbers are computed."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor: ...

    def run_experts(self, experts: Experts, x: Tensor, choices: Tensor, shares: Tensor) -> Tensor:
        """From x (T, d), and the experts of each token and their shares (T, k)."""
        ...

    def route(self, number: int, rule: ShareRule, routed: Any) -> Any:
        """What a router says: logits, shares and choices; or others in their place."""
        ...

    def choose(self, number: int, choices: Tensor) -> Tensor:
        """The experts (T, k) that tokens go to where router `number` has chosen `choices`."""
        ...

    def recur(self, layer: RecurrentLayer, module: nn.Module, x: Tensor) -> Tensor: ...


class ForwardCall:
    """What the modules need to know during one forward pass."""

    def __init__(
        self,
        config: ForeignConfig,
        attention: Attention,
        adapters: AdapterSegments,
        ranks: Ranks,
        positions: Tensor,
        steering: Steering | None = None,
    ) -> None:
        self.config = config
        self.positions: Tensor | None = positions
        self.attention = attention
        self.adapters = adapters
        self.ranks = ranks
        self.steering = steering

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        layer = self.config.attending.index(layer_number(module))
        size, copies = v.shape[-1], self.config.num_kv_heads // v.shape[1]
        q, k, v = (_widened(x[0].transpose(0, 1), self.config.head_dim) for x in (q, k, v))
        if copies > 1:
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
        if (by_distance := options.get("by_distance")) is not None:
            q = torch.cat([q, by_distance[0]], dim=-1)
        return self.attention(layer, q, k, v, options.get("s_aux"))[None, ..., :size]

    def run_experts(self, experts: Experts, x: Tensor, choices: Tensor, shares: Tensor) -> Tensor:
        return experts.run(x, choices, shares, self.adapters, self.ranks)

    def route(self, number: int, rule: ShareRule, routed: Any) -> Any:
        if self.steering is None:
            return routed
        logits, own_shares, own = routed
        choices = self.steering(number, own)
        if choices is own:
            return routed
        shares = rule.shares(logits, choices).to(own_shares.dtype)
        # Where both agree, the router's own numbers, to the last bit.
        is_own = (choices == own).all(dim=-1, keepdim=True)
        return logits, torch.where(is_own, own_shares, shares), choices

    def choose(self, number: int, choices: Tensor) -> Tensor:
        return choices if self.steering is None else self.steering(number, choices)

    def recur(self, layer: RecurrentLayer, module: nn.Module, x: Tensor) -> Tensor:
        place = self.config.recurring.index(layer.number(module))
        return layer.forward(module, x[0], self.attention.sequences, place)[None]


def _widened(heads: Tensor, head_dim: int) -> Tensor:
    """(N, heads, D) with zeros behind; they change nothing where keys and values differ in size."""
    missing = head_dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads


class ProbeCall:
    """Watches what each layer asks of attention, and which layers are recurrent."""

    positions: Tensor | None = None

    def __init__(self, num_tokens: int) -> None:
        self.adapters = AdapterSegments.whole(num_tokens)
        self.specs: dict[int, AttentionSpec] = {}
        self.shapes: set[tuple[int, int, int]] = set()
        self.states: dict[int, StateShape] = {}
        """Of recurrent layers by their numbers."""

        self.recurring: set[int] = set()
        """Layers that have one in place of attention."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        layer = layer_number(module)
        if layer in self.specs:
            raise UnsupportedModelError("its attention layers are not numbered")
        if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
            raise UnsupportedModelError("its keys and values differ in number")
        if not getattr(module, "is_causal", True):
            raise UnsupportedModelError("its attention is not causal")
        window = options.get("sliding_window")
        if window is not None and window < 1:
            raise UnsupportedModelError(f"sliding_window is {window}, so that nothing is seen")
        scale, by_distance = options.get("scaling"), options.get("by_distance")
        self.specs[layer] = AttentionSpec(
            scale=float(scale) if scale is not None else q.shape[-1] ** -0.5,
            rope=None,
            softcap=options.get("softcap"),
            window=window,
            extent=by_distance.shape[-1] if by_distance is not None else None,
        )
        self.shapes.add((q.shape[1], k.shape[1], max(q.shape[3], v.shape[3])))
        return v.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

    def run_experts(self, experts: Experts, x: Tensor, choices: Tensor, shares: Tensor) -> Tensor:
        # Which experts are chosen depends on numbers that are not there.
        return torch.empty_like(x)

    def route(self, number: int, rule: ShareRule, routed: Any) -> Any:
        return routed

    def choose(self, number: int, choices: Tensor) -> Tensor:
        return choices

    def recur(self, layer: RecurrentLayer, module: nn.Module, x: Tensor) -> Tensor:
        self.states[layer.number(module)] = layer.state_shape(module)
        if not layer.is_beside_attention:
            self.recurring.add(layer_number(module))
        return torch.empty_like(x)


def layer_number(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError("its attention layers are not numbered")
    return layer


_CURRENT: ContextVar[Call] = ContextVar("foreign_call")


@contextmanager
def calling(call: Call) -> Iterator[None]:
    token = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[Tensor, None]:
    """`transformers`' form: (1, heads, N, D) in, (1, N, heads, D) out."""
    options["mask"] = attention_mask
    return _CURRENT.get().attend(module, query, key, value, options), None


class AdaptedLinear:
    """Takes the place of a linear layer, of which adapters extend the first rows or all."""

    def __init__(self, module: Any, projection: Projection) -> None:
        self.quantized_bytes = 0
        self._module = module
        self._name = projection.name
        num_adapted = sum(projection.outputs)
        sizes = [size for size in (num_adapted, module.out_features - num_adapted) if size]
        weights = module.weight.split(sizes)
        biases = [None] * len(sizes) if module.bias is None else module.bias.split(sizes)
        self._parts = [Linear(*each) for each in zip(weights, biases, strict=True)]
        module.forward = self._forward

    def quantize(self, kind: BaseWeights, device: torch.device) -> None:
        weights = [quantize(part.weight.to(device), kind) for part in self._parts]
        self._parts = [
            Linear(weight, None if part.bias is None else part.bias.to(device))
            for weight, part in zip(weights, self._parts, strict=True)
        ]
        self._module.weight = None
        self.quantized_bytes = sum(weight.nbytes for weight in weights)

    def _forward(self, x: Tensor) -> Tensor:
        adapters = _CURRENT.get().adapters
        flat = x.reshape(-1, self._module.in_features)
        # The other rows have no adapter: no adapter knows this name.
        names = [self._name, f"{self._name} others"]
        outputs = [
            lora_linear(flat, part, adapters, None, name)
            for part, name in zip(self._parts, names, strict=False)
        ]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return y.view(*x.shape[:-1], self._module.out_features)


def replace_experts(model: nn.Module) -> list[Experts]:
    replaced = []
    for name, module in model.named_modules():
        if is_experts(module):
            replaced.append(Experts(name, module))
            module.forward = functools.partial(_experts_forward, replaced[-1])
    return replaced


def _experts_forward(experts: Experts, x: Tensor, choices: Tensor, shares: Tensor) -> Tensor:
    """In the form in which `transformers` calls a layer of experts."""
    return _CURRENT.get().run_experts(experts, x, choices, shares)


def replace_attention(model: nn.Module) -> None:
    """Where a model's own code around attention does not know of packed sequences."""
    for module in model.modules():
        if inkling.is_attention(module):
            module.forward = functools.partial(_attention_forward, module)


def _attention_forward(
    module: nn.Module, hidden_states: Tensor, attention_mask: object = None, **options: object
) -> tuple[Tensor, None]:
    """In the form in which `transformers` calls a layer's attention."""
    return inkling.attention(_CURRENT.get(), module, hidden_states, attention_mask), None


def replace_fused_mlps(model: nn.Module) -> list[inkling.FusedMlps]:
    replaced = []
    for name, module in model.named_modules():
        if inkling.has_fused_gate(module):
            replaced.append(inkling.FusedMlps(name, module))
            module.forward = functools.partial(_fused_mlps_forward, replaced[-1])
    return replaced


def _fused_mlps_forward(
    mlps: inkling.FusedMlps, hidden_states: Tensor, gammas: Tensor | None = None
) -> Tensor:
    """In the form in which `transformers` calls an MLP, or shared experts with their shares."""
    return mlps.run(hidden_states, gammas, _CURRENT.get().adapters)


def replace_routers(model: nn.Module, routers: ForeignRouters) -> None:
    for number, name in enumerate(routers.names):
        module: Any = model.get_submodule(name)
        if routers.rule is None:
            module.forward = functools.partial(_own_router_forward, module, number)
        else:
            module.forward = functools.partial(
                _router_forward, module.forward, number, routers.rule
            )


def _own_router_forward(module: Any, number: int, hidden_states: Tensor) -> Any:
    call = _CURRENT.get()
    return inkling.route(module, hidden_states, lambda choices: call.choose(number, choices))


def _router_forward(
    forward: Callable[..., Any], number: int, rule: ShareRule, *args: Any, **options: Any
) -> Any:
    """In the form in which `transformers` calls a router."""
    return _CURRENT.get().route(number, rule, forward(*args, **options))


def replace_recurrent_layers(model: nn.Module) -> None:
    for module in model.modules():
        layer = recurrent_layer(module)
        if layer is not None:
            module.forward = functools.partial(_recurrent_forward, layer, module)


def _recurrent_forward(
    layer: RecurrentLayer, module: nn.Module, hidden_states: Tensor, **options: object
) -> Tensor:
    """As `transformers` calls it, which offers a cache and a mask that we have no use for."""
    return _CURRENT.get().recur(layer, module, hidden_states)
