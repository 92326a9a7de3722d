"""Logits after what requests ask of them (`engine.shaping`), many rows at once on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.grammar import token_masks
from tinsmith.engine.shaping import Shaper


def shaped_logits(logits: Tensor, shapers: Sequence[Shaper]) -> Tensor:
    """`logits` (M, V), changed in place by each row's shaper."""
    _mask(logits, shapers)
    edits = [shaper.edits() for shaper in shapers]
    rows = np.repeat(np.arange(len(edits)), [len(edit.tokens) for edit in edits])
    if not len(rows):
        return logits
    # (5, N) in one copy to the device; rows and tokens are below 2**24, exact in float32.
    numbers = np.stack([rows, *(np.concatenate(parts) for parts in zip(*edits, strict=True))])
    moved = torch.from_numpy(numbers.astype(np.float32)).to(logits.device)
    row, token = moved[:2].long()
    added, factor, taken = moved[2:]
    values = logits[row, token] + added
    values = torch.where(values > 0, values / factor, values * factor) - taken
    logits[row, token] = values
    return logits


def _mask(logits: Tensor, shapers: Sequence[Shaper]) -> None:
    """Leave out what the rows' grammars do not allow: a bit per token goes to the device."""
    matchers = {row: s.matcher for row, s in enumerate(shapers) if s.matcher is not None}
    if not matchers:
        return
    vocab_size = logits.shape[1]
    masks = token_masks([*matchers.values()], vocab_size).view(np.uint8)
    packed = torch.from_numpy(masks).to(logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    # (M, bytes) to (M, bytes, 8) to (M, V).
    is_allowed = ((packed[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size].bool()
    rows = torch.tensor(list(matchers), device=logits.device)
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)
