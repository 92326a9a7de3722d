"""Grammars: which tokens may come next, so that a text matches a schema or an expression.

The matching is llguidance's: it knows the bytes of every token, and gives a bit for each that may
follow. Tokens that end a sequence are allowed exactly where the text is complete.

A grammar is an untrusted program. Its size and each step of it are bounded here (`_limits`); the
time of compiling is bounded by the caller (`grammar_check`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinsmith import extras
from tinsmith.engine.base import Grammar
from tinsmith.errors import ValidationError

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 64 * 1024

_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON without free white space: where it is allowed, a small model may write nothing else."""


def compile_grammar(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Drops the GIL meanwhile. A grammar that cannot be compiled is a `ValidationError`."""
    from llguidance import LLMatcher

    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise ValidationError(f"at most {MAX_GRAMMAR_BYTES} bytes, got {size}")
    if grammar.kind == "json_schema":
        try:
            source = LLMatcher.grammar_from_json_schema(grammar.text, defaults=_STYLE)
        except ValueError as error:
            raise ValidationError(f"is no JSON schema: {error}") from None
    elif grammar.kind == "regex":
        source = LLMatcher.grammar_from_regex(grammar.text)
    else:
        source = LLMatcher.grammar_from_lark(grammar.text)
    matcher = LLMatcher(tokenizer, source, limits=_limits(), log_level=0)
    if matcher.is_error():
        raise ValidationError(f"cannot be compiled: {_error(matcher)}")
    return matcher


def check_installed() -> None:
    try:
        import llguidance  # noqa: F401  # whether it is there
    except ImportError:
        raise ValidationError(
            f"this server lacks llguidance, which grammars need; its operator can install it: "
            f"{extras.install_line('grammar')}"
        ) from None


class Tokens:
    """A model's tokenizer as llguidance reads it, when first asked: that takes half a second."""

    def __init__(self, folder: Path | None, vocab_size: int) -> None:
        self._file = None if folder is None else folder / "tokenizer.json"
        self._vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """A `ValidationError` says what is wrong with the grammar, the tokenizer or the server."""
        check_installed()
        matcher = compile_grammar(grammar, self._tokenizer)
        return CompiledGrammar(matcher, frozenset(self._tokenizer.eos_tokens))

    @functools.cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        from llguidance import LLTokenizer

        if self._file is None or not self._file.is_file():
            raise ValidationError("grammars need the model's tokenizer, which was not found")
        try:
            return LLTokenizer(self._file.read_text(), n_vocab=self._vocab_size)
        except ValueError as error:
            problem = f"grammars cannot use the tokenizer of this model: {error}"
            raise ValidationError(problem[:500]) from None


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    matcher: llguidance.LLMatcher
    eos_tokens: frozenset[int]
    """What llguidance takes for the end of a text; the request says what ends a sequence."""

    def start(self, stop_tokens: frozenset[int]) -> Matcher:
        """A matcher for a sequence that any of these tokens ends."""
        return Matcher(self.matcher.deep_copy(), stop_tokens, self.eos_tokens - stop_tokens)


class Matcher:
    """Where one sequence is in its grammar."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        stop_tokens: frozenset[int],
        never: frozenset[int],
    ) -> None:
        self._matcher = matcher
        self._stop_tokens = stop_tokens
        self._never = never
        self.problem: str | None = None
        """Why the grammar cannot be followed further."""

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._stop_tokens, self._never)

    def see(self, token: int) -> None:
        if token not in self._stop_tokens:
            self._matcher.consume_token(token)

    @property
    def is_at_end(self) -> bool:
        """Whether the text is complete and cannot go on, and the request has no token that ends
        it."""
        is_stopped = self._matcher.is_stopped() and not self._matcher.is_error()
        return bool(is_stopped) and not self._stop_tokens

    def _settle(self, mask: npt.NDArray[np.int32]) -> None:
        """Add and remove the tokens that end a sequence."""
        if self._matcher.is_error():
            self.problem = f"the grammar cannot be followed: {_error(self._matcher)}"
        is_complete = self._matcher.is_accepting()
        words = mask.view(np.uint32)
        for token in self._stop_tokens | self._never:
            bit = np.uint32(1 << (token % 32))
            if is_complete and token in self._stop_tokens:
                words[token // 32] |= bit
            else:
                words[token // 32] &= ~bit
        if self.problem is None and not mask.any():
            self.problem = "the grammar allows no token of this model here"
        if self.problem is not None:
            mask[:] = -1


def _error(matcher: llguidance.LLMatcher) -> str:
    """What is wrong, in one line."""
    return " ".join(matcher.get_error().split())[:500]


def token_masks(matchers: Sequence[Matcher], vocab_size: int) -> npt.NDArray[np.int32]:
    """(M, ceil(V / 32)): a bit for each token that may come next, lowest first.

    A matcher that cannot go on has a `problem` afterwards, and a mask that leaves everything.
    """
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    masks: npt.NDArray[np.int32] = allocate_token_bitmask(len(matchers), vocab_size)
    numbered = [(matcher._matcher, row) for row, matcher in enumerate(matchers)]
    fill_next_token_bitmask_par(_executor(), numbered, masks)
    for mask, matcher in zip(masks, matchers, strict=True):
        matcher._settle(mask)
    return masks


@functools.cache
def _executor() -> Any:  # the class is not there without the package
    from llguidance import LLExecutor

    return LLExecutor()


@functools.cache
def _limits() -> llguidance.LLParserLimits:
    """A step of a grammar that is within them takes milliseconds, most of the time far less."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
