"""How much a micro-batch of training holds: tokens, and rows of logits at a time.

What the settings leave open goes by the device, the size of the model and the share of memory that
passes have. A single sequence that does not fit into it with all its activations keeps those of as
many layers as do, and of the others the input; the backward pass computes their rest again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.engine.local import device_memory
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder

CPU_WORK = 2**33
"""Tokens times bytes of weights that make a micro-batch on the CPU..."""

MOST_KEPT = 0.9
"""Part of the memory for passes that activations may take which the backward pass needs."""

FEWEST_TOKENS = 512
"""... and how many it has at least: with two threads 256 take a tenth longer than 2,048, token by
token, and 512 as long."""

GROUPS = 4
"""Into so many groups the rows of a micro-batch are divided where scoring goes ahead of losses."""

FEWEST_GROUP_ROWS = 1024

GRAPHS_PART = 8
"""Activations of captured passes take at most one part in so many of the memory for passes."""

SHARED_PART = 4
"""A micro-batch whose end others may wait for is so many times smaller. Token by token it takes a
tenth longer then (128 tokens of SmolLM2-135M), and a sixth with a tiny model (256 tokens)."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    batch_tokens: int
    shared_tokens: int
    """Of a micro-batch whose end others may wait for."""

    logits_rows: int
    """Most rows that are unembedded at a time."""

    score_rows: int
    """Most rows whose logits are kept while their losses are worked out."""

    is_ahead: bool
    """Whether the device scores the next rows while the host works out losses."""

    num_layers: int
    kept_tokens: int | None
    """Most tokens whose activations are all kept for the backward pass, where there is a limit."""

    input_share: float
    """What a layer's input takes of its activations; it is always kept."""

    pass_bytes: int | None
    """The memory for passes, where it was planned."""

    are_reduced: bool
    """Whether memory ran out before."""

    @classmethod
    def of(
        cls,
        config: LocalEngineConfig,
        decoder: Decoder,
        pass_bytes: int | None = None,
        max_tokens: int | None = None,
    ) -> BatchLimits:
        """`max_tokens` is given when memory ran out before: a micro-batch holds no more then."""
        is_cuda = decoder.device.type == "cuda"
        logits_bytes = config.logits_bytes or (2**31 if is_cuda else 2**28)
        logits_rows = max(1, logits_bytes // (4 * decoder.config.vocab_size))
        score_rows = logits_rows
        if is_cuda and config.logits_bytes is None:
            row_bytes = decoder.stream_dtype.itemsize * decoder.config.vocab_size
            room = _score_bytes(config, decoder, pass_bytes)
            score_rows = max(logits_rows, min(4 * logits_bytes, room // 4) // row_bytes)
        kept = _kept_tokens(decoder, pass_bytes)
        usual = 16_384 if kept is None else max(1, min(kept, 16_384))
        fixed = max_tokens or config.micro_batch_tokens or (usual if is_cuda else None)
        return cls(
            batch_tokens=fixed or _cpu_tokens(decoder),
            shared_tokens=fixed or _cpu_tokens(decoder) // SHARED_PART,
            logits_rows=logits_rows,
            score_rows=score_rows,
            is_ahead=is_cuda,
            num_layers=decoder.config.num_blocks,
            kept_tokens=0 if config.checkpoint_layers else kept,
            input_share=_input_share(decoder),
            pass_bytes=pass_bytes,
            are_reduced=max_tokens is not None,
        )

    def group_rows(self, num_rows: int) -> int:
        """How many rows of so many are scored together; on a device that works ahead, several
        groups, each large enough for the device to be busy with it."""
        if not self.is_ahead:
            return self.score_rows
        part = max(-(-num_rows // GROUPS), FEWEST_GROUP_ROWS)
        return max(1, min(part, self.score_rows // 2))

    def has_room_beside_graphs(self, num_tokens: int) -> bool:
        """Whether the activations of so many tokens fit beside those of captured passes."""
        kept = self.kept_tokens
        return kept is None or num_tokens <= kept - kept // GRAPHS_PART

    def kept_layers(self, num_tokens: int) -> int | None:
        """How many layers keep the activations of so many tokens; None where all do."""
        if self.kept_tokens is None or num_tokens <= self.kept_tokens:
            return None
        # Of the layers whose activations there is memory for, the inputs of all take some, and one
        # layer at a time is computed again.
        room = self.num_layers * (self.kept_tokens / num_tokens - self.input_share)
        return max(0, int(room / (1 - self.input_share)) - 1)


def _score_bytes(config: LocalEngineConfig, decoder: Decoder, pass_bytes: int | None) -> int:
    """Of which logits may have a part. Logits computed again have other last bits than those that
    were kept, so that in deterministic mode what others hold of the memory must not count."""
    if config.deterministic:
        return pass_bytes or 0
    return int(min(decoder.ranks.numbers(device_memory.unused(decoder.device))))


def _kept_tokens(decoder: Decoder, pass_bytes: int | None) -> int | None:
    """Tokens whose activations fit into the memory for passes, of all ranks' the fewest."""
    bytes_a_token = decoder.kept_bytes_a_token
    if pass_bytes is None or bytes_a_token is None:
        return None
    return int(min(decoder.ranks.numbers(int(MOST_KEPT * pass_bytes) // bytes_a_token)))


def _input_share(decoder: Decoder) -> float:
    """Of all ranks' the largest; those of recurrent layers and others are taken together."""
    bytes_a_token = decoder.kept_bytes_a_token
    if bytes_a_token is None:
        return 0.0
    of_input = decoder.config.hidden_size * decoder.stream_dtype.itemsize
    return max(decoder.ranks.numbers(decoder.config.num_blocks * of_input / bytes_a_token))


def _cpu_tokens(decoder: Decoder) -> int:
    """Tokens of a micro-batch on the CPU: not many, since whoever comes waits for its end. It goes
    by the model's size and not by measured time, so that one owner alone gets the same bits."""
    return min(max(CPU_WORK // decoder.nbytes, FEWEST_TOKENS), 1024)
