"""The states of recurrent layers in one sampling step: found in the cache, and left there.

A chunk of a prompt goes on from the state in its span, and a running sequence from that in its
slot. The states of the next step replace them, since a recurrent layer never looks back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.model.recurrent.recurrence import Walk

if TYPE_CHECKING:
    from tinsmith.engine.local.sample.cached_attention import PromptChunk, SlabRows


class CachedStates:
    """The `SequenceStates` of one step: its sequences in the order of their rows."""

    def __init__(
        self, prompts: Sequence[PromptChunk], running: Sequence[SlabRows], device: torch.device
    ) -> None:
        self._prompts = prompts
        self._running = running
        rows = [prompt.start for prompt in prompts]
        rows += [row for part in running for row in part.rows]
        lengths = [prompt.stop - prompt.start for prompt in prompts]
        lengths += [1] * (len(rows) - len(prompts))
        order = np.argsort(rows)
        self.walk = Walk([lengths[place] for place in order])
        self._is_in_order = bool((np.diff(order) > 0).all())
        self._order = torch.from_numpy(order).to(device)
        self._back = torch.from_numpy(np.argsort(order)).to(device)

    def read(self, layer: int) -> Tensor:
        found = [place[layer] for place in self._places()]
        states = found[0] if len(found) == 1 else torch.cat(found)
        return states if self._is_in_order else states[self._order]

    def write(self, layer: int, inputs: Tensor, memory: Tensor) -> None:
        inputs, memory = inputs.flatten(1), memory.flatten(1)
        if not self._is_in_order:
            inputs, memory = inputs[self._back], memory[self._back]
        num_inputs = inputs.shape[1]
        start = 0
        for place in self._places():
            stop = start + place.shape[1]
            place[layer, :, :num_inputs] = inputs[start:stop]
            place[layer, :, num_inputs:] = memory[start:stop]
            start = stop

    def _places(self) -> list[Tensor]:
        """(layers, sequences, size) each: views of spans and slabs."""
        spans = [prompt.span.states for prompt in self._prompts]
        slabs = [
            part.slab.states[:, part.first : part.first + len(part.rows)] for part in self._running
        ]
        return [*spans, *slabs]
