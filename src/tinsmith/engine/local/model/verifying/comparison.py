"""The same question to a model's own code and to our decoder around it.

It is a few tokens in packed sequences and, where the model reads images, one more with an image of
random patches. `foreign.trial` asks it before a model is served, of a few layers; when the model is
loaded it is asked again, of all of it and on its device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.inputs import Seen, rows_of
from tinsmith.engine.local.model.lora import AdapterSegments


class Sequence(NamedTuple):
    """Tokens at positions that follow each other."""

    start: int
    length: int


_SEQUENCES = (Sequence(0, 5), Sequence(0, 3))
_GRID = (2, 3)
_BEFORE = 2
"""Tokens before the image, and as many behind it."""


def own_logits(
    model: Any, config: DecoderConfig, sequences: tuple[Sequence, ...] = _SEQUENCES
) -> Tensor:
    """(rows, V): what the model's own code gives. `model` has not been changed yet."""
    with torch.no_grad():
        parts = _tokens(model.device, config, sequences).split([each.length for each in sequences])
        found = [
            model(part[None], **_places(each, part.device), use_cache=False).logits[0]
            for part, each in zip(parts, sequences, strict=True)
        ]
        if config.images is not None:
            rules, tokens = config.images, _tokens_around(model.device, config.images)
            merge = rules.merge_size
            output = model(
                input_ids=tokens[None],
                pixel_values=_patches(rules).to(model.device, model.dtype),
                image_grid_thw=tokens.new_tensor([[1, _GRID[0] * merge, _GRID[1] * merge]]),
                mm_token_type_ids=(tokens == rules.token_id).int()[None],
                use_cache=False,
            )
            found.append(output.logits[0])
    return torch.cat(found).float()


def our_logits(decoder: Decoder, sequences: tuple[Sequence, ...] = _SEQUENCES) -> Tensor:
    """The same by our decoder around the model."""
    config, device = decoder.config, decoder.device
    tokens = _tokens(device, config, sequences)
    lengths = [each.length for each in sequences]
    positions = torch.cat(
        [torch.arange(start, start + length, device=device) for start, length in sequences]
    )
    seen: Seen | None = None
    with torch.no_grad():
        if config.images is not None and decoder.vision is not None:
            picture = decoder.vision.look(_patches(config.images), _GRID)
            first = len(tokens) + _BEFORE
            seen = Seen.joined([(first, rows_of(picture, 0, math.prod(_GRID)))])
            around = _tokens_around(device, config.images)
            tokens, lengths = torch.cat([tokens, around]), [*lengths, len(around)]
            within = [*range(_BEFORE), *[_BEFORE] * math.prod(_GRID)]
            behind = range(_BEFORE + max(_GRID), 2 * _BEFORE + max(_GRID))
            positions = torch.cat([positions, positions.new_tensor([*within, *behind])])
        segments = AdapterSegments.whole(len(tokens))
        attention = PackedAttention(config, lengths)
        hidden = decoder.hidden(tokens, positions, attention, segments, seen=seen)
        return decoder.unembed(hidden, segments)


def agree(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two ways of computing the same differ by rounding only.

    In half precision rounding may send a token to another expert, which shows in single logits.
    """
    difference = logits - expected
    if dtype == torch.float32:
        return bool(difference.abs().max() <= 1e-4 * expected.abs().max())
    return bool(difference.norm() <= 5e-2 * expected.norm())


def _places(sequence: Sequence, device: torch.device) -> dict[str, Tensor]:
    """What tells `transformers` that a sequence begins further on."""
    if sequence.start == 0:
        return {}
    positions = torch.arange(sequence.start, sequence.start + sequence.length, device=device)[None]
    # Without a mask, later positions could be taken for those of several sequences.
    return {"position_ids": positions, "attention_mask": torch.ones_like(positions)}


def _tokens(device: torch.device, config: DecoderConfig, sequences: tuple[Sequence, ...]) -> Tensor:
    """Those of images are left out."""
    count = sum(each.length for each in sequences)
    tokens = torch.arange(count, device=device) * 7 % config.vocab_size
    if config.images is not None:
        tokens[tokens == config.images.token_id] = 0
    return tokens


def _tokens_around(device: torch.device, rules: ImageRules) -> Tensor:
    """Text, the image's tokens, text."""
    text = [token for token in range(2 * _BEFORE + 1) if token != rules.token_id]
    image = [rules.token_id] * math.prod(_GRID)
    tokens = [*text[:_BEFORE], *image, *text[_BEFORE : 2 * _BEFORE]]
    return torch.tensor(tokens, device=device)


def _patches(rules: ImageRules) -> Tensor:
    count = math.prod(_GRID) * rules.merge_size**2
    size = 3 * rules.frames * rules.patch_size**2
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1))
