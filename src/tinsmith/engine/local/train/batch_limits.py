"""How much a micro-batch of training holds: tokens, and rows of logits at a time.

What the settings leave open goes by the device and the size of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.engine.local import device_memory
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder

CPU_WORK = 2**33
"""Tokens times bytes of weights that make a micro-batch on the CPU..."""

FEWEST_TOKENS = 512
"""... and how many it has at least: with two threads 256 take a tenth longer than 2,048, token by
token, and 512 as long."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    batch_tokens: int
    shared_tokens: int
    """Of a micro-batch whose end others may wait for."""

    logits_rows: int
    """Most rows that are unembedded at a time."""

    score_rows: int
    """Most rows whose log-probabilities and losses are worked out together, logits kept."""

    checkpoint_layers: bool

    @classmethod
    def of(cls, config: LocalEngineConfig, decoder: Decoder) -> BatchLimits:
        is_cuda = decoder.device.type == "cuda"
        logits_bytes = config.logits_bytes or (2**31 if is_cuda else 2**28)
        logits_rows = max(1, logits_bytes // (4 * decoder.config.vocab_size))
        score_rows = logits_rows
        if is_cuda and config.logits_bytes is None:
            # Losses are worked out on the CPU: the fewer times the device waits for it, the better.
            unused = int(min(decoder.ranks.numbers(device_memory.unused(decoder.device))))
            row_bytes = decoder.dtype.itemsize * decoder.config.vocab_size
            score_rows = max(logits_rows, min(4 * logits_bytes, unused // 4) // row_bytes)
        fixed = config.micro_batch_tokens or (16_384 if is_cuda else None)
        return cls(
            batch_tokens=fixed or _cpu_tokens(decoder),
            shared_tokens=fixed or _cpu_tokens(decoder) // 2,
            logits_rows=logits_rows,
            score_rows=score_rows,
            checkpoint_layers=config.checkpoint_layers,
        )


def _cpu_tokens(decoder: Decoder) -> int:
    """Tokens of a micro-batch on the CPU: not many, since whoever comes waits for its end. It goes
    by the model's size and not by measured time, so that one owner alone gets the same bits."""
    return min(max(CPU_WORK // decoder.nbytes, FEWEST_TOKENS), 1024)
