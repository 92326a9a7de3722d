"""Messages: what an engine's owner and its process say to each other.

The owner sends one message a frame; the process sends lists of them, because one decoding
turn advances many jobs. Every request has a number, chosen by the owner, and ends with exactly
one `Result`, `Done` or `Trouble` of that number, unless it is abandoned; streams have `Item`s
before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Start(NamedTuple):
    """The first message: what to build. Answered like request number 0."""

    core: str
    """Where the core class is, as `module:name`; it is called with `config`."""

    config: Any


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


Reply = Result | Item | Done | Trouble
