"""Whether a model's layers see what our attention lets them see, at any length.

A few tokens do not show it: a layer may see chunks of thousands of tokens, or a window that it does
not tell the attention of. `transformers` makes masks of functions from two positions to yes or no,
so these are asked, at positions as far as the context goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.engine.local.model.families import AttentionSpec
from tinsmith.engine.local.model.foreign.calls import (
    ProbeCall,
    attention_function,
    calling,
    layer_number,
)
from tinsmith.engine.local.model.foreign.config import ForeignConfig
from tinsmith.engine.local.model.rope import UnsupportedModelError

_NAME = "tinsmith-masks"
_NUM_TOKENS = 4

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From sequence, head, and the positions of query and key to whether the one sees the other."""


def check_masks(text: Any, config: ForeignConfig, device: torch.device) -> None:
    """Refuse a model of which a layer sees more or less than its `AttentionSpec` says."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, attention_function)
    AttentionMaskInterface.register(_NAME, _mask_itself)
    before = text.config._attn_implementation
    text.set_attn_implementation(_NAME)
    probe = _MaskProbe(_NUM_TOKENS)
    positions = torch.arange(_NUM_TOKENS, device=device)[None]
    try:
        with calling(probe), torch.no_grad():
            text(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    finally:
        text.set_attn_implementation(before)
    for layer, mask in probe.masks.items():
        spec = config.layers[config.attending.index(layer)]
        if not _agree(mask, spec, config.max_context_length, device):
            raise UnsupportedModelError(
                f"{config.architecture} cannot run: the mask of its layer {layer} is not causal "
                f"within a window of {spec.window or 'all'} tokens (layer_types, sliding_window)"
            )


class _MaskProbe(ProbeCall):
    """Hears which mask each layer attends with."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.masks: dict[int, Mask] = {}

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        if callable(mask := options["mask"]):
            self.masks[layer_number(module)] = mask
        return super().attend(module, q, k, v, options)


def _mask_itself(*, mask_function: Mask, **options: object) -> Mask:
    """In the form in which `transformers` asks for a mask: the function instead of a tensor."""
    return mask_function


def _agree(mask: Mask, spec: AttentionSpec, context: int, device: torch.device) -> bool:
    window = context if spec.window is None else spec.window
    ends = {0, 1, window - 1, window, window + 1, 2 * window + 3, context // 2, context - 1}
    pairs = []
    for query in ends:
        for key in (0, 1, query // 2, query - window, query - window + 1, query - 1, query):
            if 0 <= key <= query < context:
                pairs.append((query, key))
                pairs.append((key, query))
    queries, keys = torch.tensor(pairs, device=device).unbind(1)
    seen = mask(torch.zeros_like(queries), torch.zeros_like(queries), queries, keys)
    expected = (keys <= queries) & (keys > queries - window)
    return bool((seen == expected).all())
