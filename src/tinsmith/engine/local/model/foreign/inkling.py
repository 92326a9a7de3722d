"""What of Inkling's modules we compute ourselves, by its own weights.

Its attention adds to every score a number that depends on the query and on how far back the key
lies; its own code takes positions from the places in a batch, which packed sequences are not. Its
routers send every token to some shared experts too, whose shares depend on the chosen ones'. Its
gates and ups are one product, whose adapter has one A, as the hosted service's parameter counts
show: so here they are one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinsmith.engine.local.config import BaseWeights
from tinsmith.engine.local.model.adapted_linear import lora_linear
from tinsmith.engine.local.model.families import Projection
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.quantized import quantize

_ATTENTION, _ROUTER = "InklingAttention", "InklingTopkRouter"
_MLPS = ("InklingMLP", "InklingSharedExperts")


class Attending(Protocol):
    """What attention needs of a call."""

    positions: Tensor | None

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor: ...


def counts_places(settings: Any) -> bool:
    """Whether the model's own code takes a token's place in its batch for its position."""
    return str(settings.model_type) == "inkling_text"


def is_attention(module: nn.Module) -> bool:
    return type(module).__name__ == _ATTENTION


def attention(call: Attending, module: Any, x: Tensor, mask: object) -> Tensor:
    """A layer's attention: x (1, N, d) to (1, N, d)."""
    by_head = (*x.shape[:-1], -1, module.head_dim)
    q = module.q_norm(module.q_proj(x).view(by_head))
    k = module.k_norm(module.k_sconv(module.k_proj(x)).view(by_head))
    v = module.v_sconv(module.v_proj(x)).view(by_head)
    # What each head adds to scores by distance: (1, N, H, extent).
    relative = module.r_proj(x).view(*x.shape[:-1], module.num_heads, -1)
    by_distance = relative @ module.rel_logits_proj.proj
    floor = module.config.log_scaling_n_floor
    if not module.is_sliding and floor is not None and call.positions is not None:
        length = (call.positions + 1).float()
        tau = 1 + module.config.log_scaling_alpha * torch.log((length / floor).clamp(min=1))
        q, by_distance = (
            (part.float() * tau[:, None, None]).to(x.dtype) for part in (q, by_distance)
        )
    options = {
        "scaling": module.scaling,
        "sliding_window": module.sliding_window,
        "mask": mask,
        "by_distance": by_distance,
    }
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = call.attend(module, q, k, v, options)
    joined: Tensor = module.o_proj(out.reshape(*x.shape[:-1], -1))
    return joined


def is_router(module: nn.Module) -> bool:
    return type(module).__name__ == _ROUTER


def route(
    module: Any, x: Tensor, choose: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (T, E), shares and choices (T, k), and the shares of the shared experts.

    `choose` may take other experts than the router has chosen.
    """
    logits = F.linear(x.reshape(-1, module.hidden_dim), module.weight)
    routed, shared = logits.split([module.num_experts, module.n_shared_experts], dim=1)
    scores = routed.sigmoid() + module.e_score_correction_bias
    choices = choose(scores.topk(module.top_k, dim=-1, sorted=False).indices)
    # A softmax over the log-probabilities of the chosen and the shared ones.
    log_probs = F.logsigmoid(torch.cat([routed.gather(1, choices), shared], dim=1))
    shares = torch.exp(log_probs - log_probs.logsumexp(dim=1, keepdim=True))
    shares = shares * module.route_scale * module.global_scale
    own, of_shared = shares.split([module.top_k, module.n_shared_experts], dim=1)
    return routed, own.contiguous(), choices, of_shared.contiguous()


def has_fused_gate(module: nn.Module) -> bool:
    """Whether it is a plain MLP, or the shared experts of a layer."""
    return type(module).__name__ in _MLPS


class FusedMlps:
    """An MLP, or the shared experts of a layer, called `name` in its model."""

    def __init__(self, name: str, module: Any) -> None:
        self._module = module
        self.quantized_bytes = 0
        if isinstance(module.down_proj, nn.Parameter):
            fused = torch.cat([module.gate_proj, module.up_proj], dim=1)
            inner = module.gate_proj.shape[1]
            module.gate_proj, module.up_proj = _frozen(fused[:, :inner]), _frozen(fused[:, inner:])
            self._ups = [Linear(each, None) for each in fused.detach()]
            self._downs = [Linear(each, None) for each in module.down_proj.detach()]
            self._names = [f"{name}.{number}" for number in range(len(fused))]
        else:
            gate, up, down = module.gate_proj, module.up_proj, module.down_proj
            fused = torch.cat([gate.weight, up.weight])
            gate.weight, up.weight = map(_frozen, fused.split(len(gate.weight)))
            self._ups = [Linear(fused.detach(), None)]
            self._downs = [Linear(down.weight.detach(), None)]
            self._names = [name]

    def projections(self) -> Iterator[Projection]:
        """What adapters extend: `w13` are the rows of the gate, and then those of up."""
        for name, up, down in zip(self._names, self._ups, self._downs, strict=True):
            for letters, linear in (("w13", up), ("w2", down)):
                outputs, inputs = linear.weight.shape
                yield Projection(
                    layer=None,
                    name=f"{name}.{letters}",
                    part="mlp",
                    inputs=inputs,
                    modules=(f"{name}.{letters}",),
                    outputs=(outputs,),
                )

    def run(self, x: Tensor, shares: Tensor | None, adapters: AdapterSegments) -> Tensor:
        """(…, d) of x (…, d); of shared experts the sum by their shares (T, experts)."""
        flat = x.reshape(-1, x.shape[-1])
        parts = []
        for number, (name, up, down) in enumerate(
            zip(self._names, self._ups, self._downs, strict=True)
        ):
            gate, inner = lora_linear(flat, up, adapters, None, f"{name}.w13").chunk(2, dim=-1)
            inner = self._module.act_fn(gate) * inner
            if shares is not None:
                inner = inner * shares[:, number, None]
            parts.append(lora_linear(inner, down, adapters, None, f"{name}.w2"))
        if shares is None:
            y = parts[0] * self._module.global_scale
        else:
            y = torch.stack(parts).float().sum(dim=0).to(x.dtype)
        return y.view(x.shape)

    def quantize(self, kind: BaseWeights, device: torch.device) -> None:
        """Keep the weights in few bits, on this device."""
        for linears in (self._ups, self._downs):
            weights = [quantize(each.weight.to(device), kind) for each in linears]
            self.quantized_bytes += sum(weight.nbytes for weight in weights)
            linears[:] = [Linear(weight, None) for weight in weights]
        for name in ("gate_proj", "up_proj", "down_proj"):
            part = getattr(self._module, name)
            if isinstance(part, nn.Parameter):
                setattr(self._module, name, None)
            else:
                part.weight = None


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)
