"""Short convolutions beside attention and MLPs: those of Inkling.

A causal convolution of each channel by itself, added to what it convolves. Of a sequence its last
inputs are kept; there is no memory beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.families import Projection
from tinsmith.engine.local.model.recurrent.recurrence import SequenceStates, StateShape, convolve

_PER_LAYER = 4
"""Of keys, of values, and of what attention and the MLP give."""


def number(module: Any) -> int:
    """Which one it is among all of its model."""
    place: int = _PER_LAYER * module.layer_idx + module.conv_idx
    return place


def state_shape(module: Any) -> StateShape:
    """Of one convolution."""
    return StateShape(
        num_layers=1,
        taps=module.conv_kernel_size,
        channels=module.conv1d.in_channels,
        num_heads=0,
        key_dim=0,
        value_dim=0,
    )


def projections(name: str, module: Any) -> Iterator[Projection]:
    """Nothing is adapted."""
    yield from ()


def forward(module: Any, x: Tensor, states: SequenceStates, place: int) -> Tensor:
    """x (N, C) with its convolution added, in x's dtype; computed in float32."""
    own = state_shape(module)
    past, width = None, own.channels
    if (found := states.read(place)) is not None:
        # States are as wide as the model's widest convolution.
        width = found.shape[1] // (own.taps - 1)
        past = found.unflatten(1, (own.taps - 1, width))[..., : own.channels]
    rows = x.float()
    y, kept = convolve(rows, module.conv1d.weight[:, 0].float(), None, states.walk, past)
    kept = F.pad(kept, (0, width - own.channels))
    states.write(place, kept, kept.new_zeros(len(kept), 0))
    return (y + rows).to(x.dtype)
