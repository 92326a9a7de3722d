"""Values as a notebook shows them: a small piece of HTML in which all text is escaped.

Tokens are shown as numbers, because a value does not know its tokenizer. Blue is learned or likely
to be learned from, orange is pushed away or unlikely; both show on light and on dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

MOST_TOKENS = 500
"""Most tokens of a sequence that are shown; the rest is counted."""

_BLUE, _ORANGE = "31,111,235", "230,126,34"


def table(rows: Mapping[str, object], title: str) -> str:
    """Names and what they are, without those that are None."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
        if value is not None
    )
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"


def weighted(tokens: Sequence[int], weights: Sequence[float], title: str, name: str) -> str:
    """Tokens by how much is learned from each: blue above zero, orange below, grey for nothing."""
    largest = max((abs(weight) for weight in weights if math.isfinite(weight)), default=0.0) or 1.0

    def style(weight: float) -> str:
        if weight == 0:
            return "opacity:.5"
        share = abs(weight) / largest if math.isfinite(weight) else 1.0
        return _background(_BLUE if weight > 0 else _ORANGE, 0.15 + 0.45 * share)

    return _sequence(
        title,
        ((t, style(w), f"{name} {w:.4g}") for t, w in zip(tokens, weights, strict=True)),
        len(tokens),
    )


def scored(tokens: Sequence[int], logprobs: Sequence[float] | None, title: str) -> str:
    """Tokens by their log-probability: the less likely, the more orange."""
    if logprobs is None:
        return _sequence(title, ((token, "", "") for token in tokens), len(tokens))
    return _sequence(
        title,
        (
            (token, _background(_ORANGE, 0.8 * _surprise(value)), f"log-probability {value:.4g}")
            for token, value in zip(tokens, logprobs, strict=True)
        ),
        len(tokens),
    )


def _surprise(logprob: float) -> float:
    return 1.0 - math.exp(min(logprob, 0.0)) if math.isfinite(logprob) else 1.0


def _background(colour: str, opacity: float) -> str:
    return f"background:rgba({colour},{opacity:.2f})"


def _sequence(title: str, tokens: Iterable[tuple[int, str, str]], count: int) -> str:
    spans = [
        f"<span style='{style}' title='{escape(about)}'>{int(token)}</span>"
        for (token, style, about), _ in zip(tokens, range(MOST_TOKENS), strict=False)
    ]
    if count > MOST_TOKENS:
        spans.append(f"… and {count - MOST_TOKENS:,} more")
    return f"<div><b>{escape(title)}</b><br><code>{' '.join(spans)}</code></div>"
