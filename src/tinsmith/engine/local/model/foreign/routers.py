"""Routers of a `transformers` model, where tokens can be sent to other experts than they choose.

Such a router says its logits, and the shares and numbers of the experts that it chose. What share
another expert would have had follows from the logits, by one of a few rules. Which one is found by
trying: a copy with random weights must give the shares that the rule gives. Where none does, or a
router has another form, the model routes by itself.

Shapes: T tokens, k experts of each, E experts, d hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.engine.local.model.experts.foreign import is_experts
from tinsmith.engine.local.model.families import RoutedLayers
from tinsmith.engine.local.model.foreign import inkling

_TRIED_TOKENS = 16
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class ShareRule:
    """How a router makes shares of its logits."""

    is_sigmoid: bool
    """Whether each expert is scored by itself; else a softmax over all."""

    is_normalized: bool
    scale: float

    def shares(self, logits: Tensor, choices: Tensor) -> Tensor:
        """(T, k) in float32, of logits (T, E) and the experts of each token (T, k)."""
        logits = logits.float()
        scores = logits.sigmoid() if self.is_sigmoid else logits.softmax(dim=-1)
        shares = scores.gather(1, choices)
        if self.is_normalized:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares * self.scale


@dataclass(frozen=True, slots=True)
class ForeignRouters:
    """The routers of a model, which all go by one rule."""

    names: tuple[str, ...]
    """Of their modules, from the first layer on."""

    layers: RoutedLayers
    rule: ShareRule | None
    """None where we route ourselves."""


def find_routers(model: Any) -> ForeignRouters | None:
    """The routers of a model without weights; None where it routes by itself."""
    experts = [name for name, module in model.named_modules() if is_experts(module)]
    names = [_router_beside(model, name) for name in experts]
    routers: dict[tuple[object, ...], Any] = {}
    for name in names:
        if name is None:
            return None
        module = model.get_submodule(name)
        routers[type(module), module.weight.shape, module.top_k] = module
    if len(routers) != 1:
        return None
    (router,) = routers.values()
    found = tuple(name for name in names if name is not None)
    numbers = tuple(range(len(names)))
    if inkling.is_router(router):
        layers = RoutedLayers(numbers, router.num_experts, router.top_k)
        return ForeignRouters(found, layers, None)
    try:
        rule = _rule_of(router)
    except Exception:  # foreign code: whatever it raises means that it has another form
        return None
    if rule is None:
        return None
    layers = RoutedLayers(numbers, len(router.weight), router.top_k)
    return ForeignRouters(found, layers, rule)


def _router_beside(model: Any, experts: str) -> str | None:
    """The module that chooses among experts: it says how many, and has a row for each."""
    parent = experts.rpartition(".")[0]
    for name, module in model.get_submodule(parent).named_children():
        weight = getattr(module, "weight", None)
        if isinstance(getattr(module, "top_k", None), int) and isinstance(weight, nn.Parameter):
            return f"{parent}.{name}"
    return None


def _rule_of(module: Any) -> ShareRule | None:
    trial = copy.deepcopy(module).to_empty(device="cpu").float().requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    for tensor in (*trial.parameters(), *trial.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=random) / tensor.shape[-1] ** 0.5)
    x = torch.randn(_TRIED_TOKENS, trial.weight.shape[1], generator=random)
    logits, shares, choices = trial(x)
    if choices.shape != (_TRIED_TOKENS, module.top_k):
        return None
    for rule in _rules(getattr(module, "routed_scaling_factor", 1.0)):
        if torch.allclose(rule.shares(logits, choices), shares.float(), rtol=_TOLERANCE):
            return rule
    return None


def _rules(scale: float) -> Iterator[ShareRule]:
    for is_sigmoid in (False, True):
        for is_normalized in (True, False):
            yield ShareRule(is_sigmoid, is_normalized, float(scale))
