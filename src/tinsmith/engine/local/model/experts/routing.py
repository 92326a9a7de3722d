"""Which rows go to which expert: every choice of every token, sorted by expert.

A router gives each token to k of E experts. The sort is stable, so that the rows of an expert are
in the order of their tokens, and those of one adapter lie together. Nothing here waits for the
device, except where a host asks for numbers (`host_edges`).

Shapes: T tokens, k experts of each, S = k · T rows, E experts.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels


class Tiles(NamedTuple):
    """Rows in tiles of one expert each, as many as there can be; the last ones may be empty."""

    table: Tensor
    """(2, N) int64: a tile's first row, and how many it has."""

    num_rows: int
    """Most rows of a tile."""


class TokenAdapters:
    """The adapters of tokens, of one expert's rows or another's."""

    def __init__(self, of_tokens: Tensor, most: int) -> None:
        """`of_tokens` (T,) has a number for each token, of which those of one adapter lie together;
        there are `most` runs of one number at most."""
        self.of_tokens = of_tokens
        self.most = most

    @functools.cached_property
    def numbers(self) -> Tensor:
        """(T,): a number that rises from run to run."""
        is_other = self.of_tokens[1:] != self.of_tokens[:-1]
        return F.pad(is_other.cumsum(0), (1, 0))


class Routing:
    def __init__(self, choices: Tensor, num_experts: int) -> None:
        """`choices` (T, k) are the experts of each token, each once."""
        self.choices = choices
        self.num_experts = num_experts
        self.num_tokens, self.per_token = choices.shape
        self._is_small = kernels.are_usable(choices) and self.num_rows <= _own().MAX_SORTED
        if self._is_small:
            self.experts, self._order, self.tokens, self._places = _own().sort(choices)
        else:
            self.experts, self._order = choices.flatten().sort(stable=True)
            self.tokens = self._order // self.per_token
            numbers = torch.arange(self.num_rows, device=choices.device)
            self._places = torch.empty_like(self._order).scatter_(0, self._order, numbers)
        # (S,) all: of each row its expert, its token and its choice; and of each choice its row.
        self._host_edges: dict[tuple[int, ...], list[list[int]]] = {}
        self._tiles: dict[tuple[int, TokenAdapters | None], Tiles] = {}

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.per_token

    def expanded(self, x: Tensor) -> Tensor:
        """(S, …) for the rows, of (T, …) for their tokens."""
        return x.index_select(0, self.tokens)

    def of_choices(self, x: Tensor) -> Tensor:
        """(S,) for the rows, of (T, k) for the choices."""
        return x.flatten().index_select(0, self._order)

    def restored(self, rows: Tensor) -> Tensor:
        """(T, k, …) for the choices, of (S, …) for the rows."""
        restored = rows.index_select(0, self._places)
        return restored.view(self.num_tokens, self.per_token, *rows.shape[1:])

    def sums(self, rows: Tensor) -> Tensor:
        """(T, …): the sum of each token's rows."""
        if kernels.are_usable(rows):
            return _own().sums(rows, self._places, self.per_token)
        return self.restored(rows).sum(dim=1)

    def weighed_sums(
        self, rows: Tensor, shares: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """(T, n): the sum of each token's rows (S, n) by their shares (T, k), which are rounded as
        the rows are. So is the sum, unless another `dtype` is asked for."""
        if kernels.are_usable(rows):
            return _own().sums(rows, self._places, self.per_token, shares, dtype)
        of_tokens, shares = self.restored(rows), shares.to(rows.dtype)[:, None]
        if dtype is not None and dtype != rows.dtype:
            of_tokens, shares = of_tokens.to(dtype), shares.to(dtype)
        return torch.bmm(shares, of_tokens)[:, 0]

    def by_expert(self, shares: Tensor) -> Tensor:
        """(T, E) of shares (T, k): zero where a token does not go."""
        whole = shares.new_zeros(self.num_tokens, self.num_experts)
        return whole.scatter_(1, self.choices, shares)

    def edges(self, points: Tensor) -> Tensor:
        """(E, P): each expert's first row of token `points` (P,) or a later one."""
        experts = torch.arange(self.num_experts, device=points.device)
        # Rows are in the order of expert and then token, so this rises.
        rising = self.experts * self.num_tokens + self.tokens
        return torch.searchsorted(rising, experts[:, None] * self.num_tokens + points)

    @functools.cached_property
    def offsets(self) -> Tensor:
        """(E,) int32: the row behind each expert's last."""
        experts = torch.arange(self.num_experts, device=self.experts.device)
        return torch.searchsorted(self.experts, experts, right=True, out_int32=True)

    def host_edges(self, points: tuple[int, ...]) -> list[list[int]]:
        """`edges` as numbers, once the device has got there."""
        if points not in self._host_edges:
            on_device = torch.tensor(points, device=self.experts.device)
            self._host_edges[points] = self.edges(on_device).tolist()
        return self._host_edges[points]

    def tiles(self, num_rows: int, adapters: TokenAdapters | None = None) -> Tiles:
        """The rows in tiles of up to `num_rows`, of one expert each and where given one adapter."""
        key = (num_rows, adapters)
        if key not in self._tiles:
            self._tiles[key] = self._divided(num_rows, adapters)
        return self._tiles[key]

    def _divided(self, num_rows: int, adapters: TokenAdapters | None) -> Tiles:
        num_runs = 1 if adapters is None else adapters.most
        total, num_keys = self.num_rows, min(self.num_rows, self.num_experts * num_runs)
        num_tiles = min(total, total // num_rows + num_keys)
        if self._is_small:
            runs = None if adapters is None else (adapters.numbers, num_runs)
            table = _own().tiles(self.experts, self.tokens, runs, num_rows, num_tiles)
            return Tiles(table, num_rows)
        keys = self.experts
        if adapters is not None:
            keys = keys * num_runs + self.expanded(adapters.numbers)
        # Every so many rows of a key begin a tile. Each row knows its tile's number, from 1 on.
        row = torch.arange(total, device=keys.device)
        within = row - torch.searchsorted(keys, keys)
        numbers = (within % num_rows == 0).cumsum(0)
        firsts = torch.searchsorted(numbers, torch.arange(1, num_tiles + 1, device=keys.device))
        inside = firsts.clamp(max=total - 1)
        ends = torch.searchsorted(keys, keys.index_select(0, inside), right=True)
        counts = torch.where(firsts < total, (ends - firsts).clamp(max=num_rows), 0)
        return Tiles(torch.stack([inside, counts]), num_rows)


def _own() -> Any:  # a module that is imported where there is Triton
    return kernels.module("routing")
