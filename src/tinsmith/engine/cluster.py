"""What a server may ask of the cluster that its engines run in, when they are not its children."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Node(NamedTuple):
    """A machine of the cluster."""

    node_id: str
    address: str
    is_alive: bool
    num_cpus: float
    num_gpus: float
    memory_bytes: int
    """What engines there may use, as the cluster's own software counts it."""


class Cluster(Protocol):
    @property
    def trouble(self) -> str:
        """Why nothing new is placed; empty when nothing is in the way."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The machines, as last reported; none where they are not known."""

    def detail(self, slot: int) -> str:
        """What a slot without an engine waits for; empty when it waits for nothing."""

    def host(self, slot: int) -> str:
        """The machine of the slot's engine; empty when it has none."""

    async def close(self) -> None: ...
