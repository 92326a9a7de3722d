"""Who has a say, or only listens, when routers choose.

In training, tokens whose experts were recorded go to these again, whatever the router would choose
now; the shares are still the router's, so that gradients flow through it. In sampling, what routers
choose is noted (`sample.cached_choices`).

Shapes: N tokens, L layers with experts, k experts of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.expert_choices import are_known
from tinsmith.engine.local.model.families import RoutedLayers
from tinsmith.errors import ValidationError

Steer = Callable[[Tensor], Tensor]
"""From the experts (N, k) that a router chose to those that the tokens go to."""


class Steering(Protocol):
    def __call__(self, layer: int, choices: Tensor) -> Tensor:
        """The experts (N, k) that tokens go to in a layer whose router has chosen `choices`."""
        ...


class GivenChoices:
    """The recorded experts of a micro-batch; where there are none, the router's."""

    def __init__(
        self,
        parts: Sequence[tuple[int, np.ndarray | None]],
        spec: RoutedLayers,
        device: torch.device,
    ) -> None:
        """`parts` are the sequences of the batch: how long each is, and its (T, L, k) if any."""
        layers = spec.layers
        rows = [
            np.full((length, len(layers), spec.per_token), -1, np.int64)
            if choices is None
            else np.where(are_known(choices)[:, None, None], choices.astype(np.int64), -1)
            for length, choices in parts
        ]
        # (L, N, k): a layer's part lies together.
        given = torch.from_numpy(np.concatenate(rows)).to(device).transpose(0, 1).contiguous()
        self._of_layer = dict(zip(layers, given, strict=True))

    def __call__(self, layer: int, choices: Tensor) -> Tensor:
        given = self._of_layer[layer]
        return torch.where(given < 0, choices, given)


def check_choices(choices: np.ndarray, num_tokens: int, spec: RoutedLayers | None) -> None:
    """Refuse experts that this model does not have: they were recorded with another one."""
    if spec is None:
        raise ValidationError("came with experts, and the model has none that can be chosen for it")
    expected = (num_tokens, len(spec.layers), spec.per_token)
    if choices.shape != expected:
        raise ValidationError(f"came with experts of shape {choices.shape}, expected {expected}")
    chosen = choices[are_known(choices)]
    if chosen.size and int(chosen.max()) >= spec.num_experts:
        raise ValidationError(
            f"came with expert {int(chosen.max())}, and the model has {spec.num_experts}"
        )
