"""One mixed step: chunks of prompts (prefill) and new tokens (decode) in one forward pass.

Rows are ordered so that those of one adapter lie together. What the results mean for the sequences
is decided in `generation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.images.vision import Vision
from tinsmith.engine.local.model.inputs import Seen
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments
from tinsmith.engine.local.model.stacked_adapters import AdapterStacks
from tinsmith.engine.local.sample.cached_attention import CachedAttention
from tinsmith.engine.local.sample.cached_choices import CachedChoices
from tinsmith.engine.local.sample.cached_rows import Rows
from tinsmith.engine.local.sample.next_tokens import NextToken, next_tokens
from tinsmith.engine.local.sample.sequences import Prefill, Request, Sequence
from tinsmith.errors import ValidationError

_LOGITS_NUMBERS = 1 << 25
"""Most logits held at a time: 128 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a prefill."""

    prefill: Prefill
    num_tokens: int
    seen: Seen | None = None
    """What is seen in them, once it was looked at."""

    def looked_at(self, vision: Vision | None) -> Chunk:
        """With what is seen; an image that cannot be decoded is a `ValidationError`."""
        prefill = self.prefill
        start, request = prefill.num_done, prefill.request
        try:
            seen = request.input.seen(start, start + self.num_tokens, vision, request.scope)
        except ValidationError as error:
            raise error.under("prompt") from None
        return replace(self, seen=seen)


class MixedStep:
    """What goes through the model together."""

    def __init__(
        self,
        decoder: Decoder,
        chunks: list[Chunk],
        running: list[Sequence],
        stacks: AdapterStacks | None = None,
    ) -> None:
        """`stacks` are for adapters with few rows each."""
        self.chunks = chunks
        self.running = running
        self._decoder = decoder
        self._row_of: dict[Sequence, int] = {}
        self._rows_of: dict[Prefill, range] = {}
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        seen: list[tuple[int, Seen | None]] = []
        runs: list[tuple[int, int, Adapter | None]] = []
        row = 0
        for adapter, own_chunks, own_running in _by_adapter(chunks, running):
            start = row
            # Prefill: a row for each token of the chunk.
            for chunk in own_chunks:
                prefill = chunk.prefill
                stop = prefill.num_done + chunk.num_tokens
                self._rows_of[prefill] = range(row, row + chunk.num_tokens)
                tokens.append(prefill.tokens[prefill.num_done : stop])
                positions.append(prefill.request.input.positions(prefill.num_done, stop))
                seen.append((row, chunk.seen))
                row += chunk.num_tokens
            # Decode: one row per sequence, for the token that was drawn last.
            for sequence in own_running:
                self._row_of[sequence] = row
                row += 1
            tokens.append(np.array([s.last_token for s in own_running], dtype=np.int64))
            positions.append(np.array([s.position for s in own_running], dtype=np.int64))
            if row > start:
                runs.append((start, row, adapter))
        # (N,) each: tokens and positions of all rows.
        self._tokens = np.concatenate(tokens).astype(np.int64)
        self._positions = np.concatenate(positions)
        self._seen = Seen.joined(seen)
        self._segments = AdapterSegments(runs)
        if stacks is not None:
            self._segments.stacked = stacks.rows_of(runs)
        self._hidden: Tensor | None = None

    @property
    def requests(self) -> list[Request]:
        """Whose work this is, each once."""
        return requests_of(self.chunks, self.running)

    def run(self) -> None:
        """The forward pass. The cache then holds the step's tokens."""
        if not len(self._tokens):
            return  # only prompts of which the cache knew everything
        device = self._decoder.device
        prompts, running = self._prompt_rows(), self._running_rows()
        attention = CachedAttention(
            self._decoder.config, prompts, running, is_invariant=self._decoder.is_invariant
        )
        # (N,) to (N, hidden); attention writes the KV cache and reads it.
        self._hidden = self._decoder.hidden(
            torch.from_numpy(self._tokens).to(device),
            torch.from_numpy(self._positions).to(device),
            attention,
            self._segments,
            seen=self._seen,
            steering=CachedChoices.of([*prompts, *running]),
        )
        for chunk in self.chunks:
            chunk.prefill.num_done += chunk.num_tokens
            assert chunk.prefill.table is not None
            chunk.prefill.table.num_tokens = chunk.prefill.num_done
        for sequence in self.running:
            assert sequence.table is not None
            sequence.table.num_tokens += 1

    def prompt_logits(self, chunk: Chunk) -> Iterator[tuple[int, Tensor]]:
        """The logits (R, V) a fresh prompt has to score, each with the row where they start."""
        prefill = chunk.prefill
        if not prefill.is_fresh:
            return
        first = prefill.num_done - chunk.num_tokens
        wanted = prefill.request.scores.rows_within(first, prefill.num_done)
        shift = self._rows_of[prefill].start - first
        for part in _parts(wanted, self._max_logit_rows):
            yield part.start, self._logits(np.arange(part.start, part.stop) + shift)

    def next_tokens(self) -> Iterator[NextToken]:
        """The choices for all sequences whose next token this step decides."""
        # Decode rows, and the last row of each prompt whose prefill is complete.
        deciding = [(row, [sequence]) for sequence, row in self._row_of.items()]
        deciding += [
            (rows.stop - 1, prefill.sequences)
            for prefill, rows in self._rows_of.items()
            if not prefill.num_left and prefill.decides_next
        ]
        deciding.sort(key=lambda item: item[0])
        for part in _parts(range(len(deciding)), self._max_logit_rows):
            chosen = deciding[part.start : part.stop]
            logits = self._logits(np.array([row for row, _ in chosen]))
            yield from next_tokens(logits, [who for _, who in chosen])

    @property
    def _max_logit_rows(self) -> int:
        return max(1, _LOGITS_NUMBERS // self._decoder.config.vocab_size)

    def _logits(self, rows: np.ndarray) -> Tensor:
        assert self._hidden is not None
        index = torch.from_numpy(rows).to(self._hidden.device)
        # (R, hidden) to (R, V).
        return self._decoder.unembed(self._hidden[index], self._segments.gather(rows))

    def _prompt_rows(self) -> list[Rows]:
        tables = [(self._rows_of[chunk.prefill], chunk.prefill.table) for chunk in self.chunks]
        return [Rows(rows.start, rows.stop, table) for rows, table in tables if rows and table]

    def _running_rows(self) -> list[Rows]:
        tables = [(row, sequence.table) for sequence, row in self._row_of.items()]
        return [Rows(row, row + 1, table) for row, table in tables if table]


def requests_of(chunks: list[Chunk], running: list[Sequence]) -> list[Request]:
    """The requests behind some work, each once."""
    requests = [chunk.prefill.request for chunk in chunks]
    requests += [sequence.request for sequence in running]
    return list(dict.fromkeys(requests))


def _by_adapter(
    chunks: list[Chunk], running: list[Sequence]
) -> Iterator[tuple[Adapter | None, list[Chunk], list[Sequence]]]:
    """Each adapter with its part of the work."""
    adapters = [chunk.prefill.request.adapter for chunk in chunks]
    adapters += [sequence.request.adapter for sequence in running]
    for adapter in dict.fromkeys(adapters):
        own = [sequence for sequence in running if sequence.request.adapter is adapter]
        yield adapter, [c for c in chunks if c.prefill.request.adapter is adapter], own


def _parts(whole: range, size: int) -> Iterator[range]:
    for start in range(whole.start, whole.stop, size):
        yield range(start, min(start + size, whole.stop))
