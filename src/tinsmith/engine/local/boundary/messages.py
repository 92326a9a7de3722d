"""Messages: what an engine's owner and its process say to each other.

The owner sends one message a frame; the process sends lists of them, because one decoding
turn advances many jobs. Every request has a number, chosen by the owner, and ends with exactly
one `Result`, `Done` or `Trouble` of that number, unless it is abandoned; streams have `Item`s
before it. `Beat`s come in between, at regular times, also during a long turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Patience(NamedTuple):
    """When a process counts as hanging, and is killed. A long turn is not a hang."""

    silence_seconds: float = 60.0
    """How long it may give no sign of life at all."""

    turn_seconds: float = 900.0
    """How long a turn may take, whatever it does: a base model may have to be fetched first..."""

    token_seconds: float = 0.1
    """... and this much longer for every token of the passes that it works on."""


class Start(NamedTuple):
    """The first message: what to build. Answered like request number 0."""

    core: str
    """Where the core class is, as `module:name`; it is called with `config`."""

    config: Any
    patience: Patience


class Request(NamedTuple):
    """Call one of the core's methods. `run_passes` and `sample` are answered with a stream."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Abandon(NamedTuple):
    """The owner no longer wants the rest of this stream."""

    number: int


class Result(NamedTuple):
    number: int
    value: Any


class Item(NamedTuple):
    number: int
    value: Any


class Done(NamedTuple):
    """The stream is complete."""

    number: int


class Trouble(NamedTuple):
    """The request failed in a way that is not the caller's mistake; `text` is for the log."""

    number: int
    text: str


class Beat(NamedTuple):
    """A sign of life of the process, belonging to no request (its number is -1)."""

    turn_seconds: float
    """How long the turn under way has taken so far; 0 between turns."""

    patience_seconds: float
    """How long it may take: more for more work."""

    what: str
    """What the turn does, for the log."""

    number: int = -1


Reply = Result | Item | Done | Trouble | Beat
