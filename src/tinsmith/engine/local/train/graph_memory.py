"""Where captured passes have their activations: one place for those of all base models.

No two batches are under way at a time, of one base model or of two, so that each may overwrite what
the last one left. Memory that is wanted for something else is given back by all of them.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

import torch


class Graphs(Protocol):
    """The captured passes of one base model."""

    def __len__(self) -> int: ...

    def forget(self) -> None:
        """Let go of them, and of the shapes that came."""
        ...

    def __hash__(self) -> int: ...


class GraphMemory:
    def __init__(self) -> None:
        self._graphs: WeakSet[Graphs] = WeakSet()
        self._pool: tuple[int, int] | None = None
        self._stream: torch.cuda.Stream | None = None

    def share(self, graphs: Graphs) -> None:
        """Count a base model's among those that have their memory here, while it is there."""
        self._graphs.add(graphs)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """On which to capture."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            with torch.cuda.stream(self._stream):
                # What products take for themselves is made once for a stream, and is not to lie in
                # a graph's memory.
                square = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
                square @ square
        return self._stream

    def pool(self) -> tuple[int, int]:
        """Into which to capture. It goes with the last of its graphs, as when a base model leaves
        memory, and is then another one."""
        if self._pool is None or not any(len(graphs) for graphs in self._graphs):
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def give_back(self) -> None:
        """Let go of all captured passes."""
        for graphs in list(self._graphs):
            graphs.forget()
        self._pool = None
