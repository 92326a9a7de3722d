"""When a sampled sequence ends, and why.

A sequence ends with "stop" at a stop token or when its text first contains a stop string, and with
"length" when it has as many tokens as it may have. The token that ends it is kept: a stop token is
the last of the sequence, and a stop string ends with the token that completes it.

What stops a sequence: without `stop`, the model's end-of-sequence tokens; with an empty list,
nothing; otherwise the given strings or tokens, and the end-of-sequence tokens as well, since what
a model writes after them is noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.detokenizer import Detokenize, Detokenizer
from tinsmith.types import SamplingParams, StopReason

_CONTEXT_TOKENS = 4
"""How many prompt tokens are shown to the tokenizer, so that the first piece keeps its space."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends the sequences of one request."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    max_tokens: int
    """The most tokens a sequence may have, by request or by the model's context; may be zero."""

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Sequence[int], room: int) -> StopRule:
        """`room` is how many tokens fit the model's context after the prompt."""
        given = params.stop
        entries: list[str | int] = [given] if isinstance(given, str) else list(given or ())
        strings = tuple(entry for entry in entries if isinstance(entry, str))
        token_ids = {int(entry) for entry in entries if not isinstance(entry, str)}
        if given is None or entries:
            token_ids.update(eos_token_ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        return cls(frozenset(token_ids), strings, max(limit, 0))


class StopWatch:
    """Watches one sequence grow. `detokenize` keeps special tokens: a stop string may name one."""

    def __init__(
        self, rule: StopRule, detokenize: Detokenize | None, prompt: Sequence[int]
    ) -> None:
        if rule.strings and detokenize is None:
            raise ValueError("stop strings cannot be watched without a tokenizer")
        self._rule = rule
        self._num_tokens = 0
        self._text: Detokenizer | None = None
        if rule.strings and detokenize is not None:
            self._text = Detokenizer(detokenize, prompt[-_CONTEXT_TOKENS:])
            self._tail = ""
            self._keep = max(map(len, rule.strings)) - 1

    def see(self, token: int) -> StopReason | None:
        """Why the sequence ends with this token, or None when it goes on."""
        self._num_tokens += 1
        if token in self._rule.token_ids or self._completes_string(token):
            return "stop"
        return "length" if self._num_tokens >= self._rule.max_tokens else None

    def _completes_string(self, token: int) -> bool:
        if self._text is None:
            return False
        text = self._tail + self._text.push([token])
        if any(string in text for string in self._rule.strings):
            return True
        self._tail = text[-self._keep :] if self._keep else ""
        return False
