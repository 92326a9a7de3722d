"""What a server and its placer say to each other, in frames over a socket pair."""

from __future__ import annotations

from typing import NamedTuple

from tinsmith.engine.cluster import Node

Key = tuple[int, int]
"""A slot and the epoch of an engine in it."""


class Begin(NamedTuple):
    """The server's first message."""

    address: str
    """Address of the Ray cluster; "auto" is one that has a node on this machine."""

    namespace: str
    """Ray's namespace for the server's engines."""

    placed: tuple[Key, ...]
    """What an earlier placer of this server was asked to place, and is still wanted."""


class Place(NamedTuple):
    """Start an engine wherever there is room; wait while there is none."""

    key: Key
    credentials: str
    """The file with what it needs. Ray sees its name, never what is in it."""

    num_cpus: float
    num_gpus: float


class Release(NamedTuple):
    """The engine is no longer wanted, or its connection is gone."""

    key: Key


class Nodes(NamedTuple):
    """The cluster's machines; comes every second as long as the cluster answers."""

    nodes: tuple[Node, ...]


class Ended(NamedTuple):
    """An engine has ended, or could not be placed."""

    key: Key
    reason: str


class Unable(NamedTuple):
    """The placer's last message, when it cannot work at all."""

    reason: str


Command = Begin | Place | Release
Report = Nodes | Ended | Unable
