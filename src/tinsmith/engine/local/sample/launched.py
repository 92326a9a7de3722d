"""Decoding steps that were asked of a device and not read yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.mixed_step import requests_of
from tinsmith.engine.local.sample.next_tokens import NextToken
from tinsmith.engine.local.sample.sequences import Request, Sequence


class Launched:
    """One step of some sequences, in parts of as many rows as the device takes at a time."""

    def __init__(self, running: list[Sequence]) -> None:
        self.running = running
        self._attempts = {sequence: sequence.attempt for sequence in running}
        self._parts: list[tuple[list[Sequence], Tensor, torch.cuda.Event | None]] = []
        self._found: dict[Sequence, NextToken] = {}

    @property
    def requests(self) -> list[Request]:
        """Whose work this is, each once."""
        return requests_of([], self.running)

    @property
    def has_found(self) -> bool:
        """Whether some tokens were chosen by the program, which the device does not know."""
        return bool(self._found)

    def add(self, rows: list[Sequence], facts: Tensor, found: list[NextToken]) -> None:
        """A part of the step: what was drawn for its rows, and what was chosen otherwise."""
        self._found.update((choice.sequence, choice) for choice in found)
        if facts.is_cuda:
            host = torch.empty(facts.shape, dtype=facts.dtype, pin_memory=True)
            host.copy_(facts, non_blocking=True)
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(facts.device))
            self._parts.append((rows, host, done))
        else:
            self._parts.append((rows, facts, None))

    def next_tokens(self) -> Iterator[NextToken]:
        """Wait for the device. Sequences that have lost their blocks since are passed over."""
        for rows, facts, done in self._parts:
            if done is not None:
                done.synchronize()
            tokens, logprobs, is_finite = facts.tolist()
            for row, sequence in enumerate(rows):
                if sequence.attempt != self._attempts[sequence]:
                    continue
                sequence.num_ahead -= 1
                yield self._found.get(sequence) or NextToken(
                    sequence, int(tokens[row]), logprobs[row], None, is_finite[row] != 0
                )


class Launches(Protocol):
    """What decodes without waiting: `decode_step`, and its double in tests."""

    def launch(self, running: list[Sequence]) -> Launched:
        """Ask for the next token of each sequence. The cache then holds the one it had."""
        ...

    def forget(self, adapter: Adapter) -> None:
        """Let go of an adapter's weights."""
        ...
