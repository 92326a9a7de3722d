"""The states of recurrent layers in one sampling step: found in the cache, and left there.

The states of the next step replace them, since a recurrent layer never looks back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinsmith.engine.local.model.recurrent.recurrence import Walk

if TYPE_CHECKING:
    from tinsmith.engine.local.sample.cached_rows import Rows


class CachedStates:
    """The `SequenceStates` of one step: its sequences in the order of their rows."""

    def __init__(self, states: Tensor, sequences: Sequence[Rows]) -> None:
        """`states` (P, R, n) are those of the cache."""
        self._states = states
        sequences = sorted(sequences, key=lambda rows: rows.start)
        self.walk = Walk([rows.stop - rows.start for rows in sequences])
        places = [rows.table.state for rows in sequences]
        self._places = torch.tensor(places, device=states.device)

    def read(self, layer: int) -> Tensor:
        return self._states[layer].index_select(0, self._places)

    def write(self, layer: int, inputs: Tensor, memory: Tensor) -> None:
        new = torch.cat([inputs.flatten(1), memory.flatten(1)], dim=1)
        self._states[layer].index_copy_(0, self._places, new)
