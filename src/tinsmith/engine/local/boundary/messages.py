"""Messages: what an engine's process and its caller say to each other.

The caller sends one message a frame; the process sends lists of them, because one decoding
turn advances many jobs. Every request has a number, chosen by the caller, and ends with exactly
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


class Hello(NamedTuple):
    """The first message of an engine that connected to its caller: who it is."""

    slot: int
    epoch: int
    """Which of the engines that the slot has had, and will have, this one is."""

    version: str
    host: str
    pid: int


class SharedFile(NamedTuple):
    """A file that both machines must see: they work on one data folder, under one path."""

    path: str
    text: str


class Start(NamedTuple):
    """The caller's first message: what to build. Answered like request number 0."""

    core: str
    """Where the core class is, as `module:name`; it is called with `config`."""

    config: Any
    patience: Patience
    epoch: int = 1
    """The slot's. An engine that was made for a later one refuses."""

    shared: SharedFile | None = None


class Request(NamedTuple):
    """Call one of the core's methods. `run_passes` and `sample` are answered with a stream."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Abandon(NamedTuple):
    """The caller no longer wants the rest of this stream."""

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
