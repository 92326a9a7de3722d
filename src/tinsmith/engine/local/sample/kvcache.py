"""The memory that sampling keeps of tokens already seen: blocks of fixed size, allocated once.

Keys and values of all sequences lie in two tensors of *blocks*, each with room for a few tokens in
all layers. A sequence has a *table* of the blocks it reads, in order; it grows by a block at a time
and nothing is ever moved. A block may be in several tables: samples share their prompt's blocks,
and a prompt those of one that begins alike (`prefixes`). What is shared is never written to. The
last block of a prompt, which its samples would go on filling, is copied when the first of them does
(copy on write). Where it is asked for, the experts that tokens went to lie beside their keys
(`cached_choices`). For models with recurrent layers a table also has a *state*, which stands for
all tokens up to its end and is shared and copied in the same way.

This module hands out blocks and states and counts who reads them; who gives way when there are none
left is the scheduler's affair.

Of models with latent attention a token has one vector in place of keys, and nothing in place of
values, which are a part of it.

Shapes: L layers that attend, N blocks, K key/value heads, S tokens of a block, D head size,
P recurrent layers, R states, n numbers in the state of one layer, E layers with experts, k experts
of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine import expert_choices
from tinsmith.engine.local.model.families import DecoderConfig, RoutedLayers
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.recurrent.recurrence import StateShape
from tinsmith.engine.local.sample.pages import Pages
from tinsmith.engine.local.sample.prefixes import (
    Known,
    Prefixes,
    Readers,
    Realm,
    WholePrompts,
)
from tinsmith.errors import EngineError

_BLOCK_TOKENS = {"cuda": 32}
"""What the decoding kernel reads at a time."""

_BLOCK_TOKENS_ELSEWHERE = 16
"""Blocks are copied together before they are read: the smaller, the less is copied in vain."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a token and a state cost, and where they are kept."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_context_length: int
    device: torch.device
    dtype: torch.dtype
    state: StateShape | None = None
    routed: RoutedLayers | None = None
    """Given where the experts that tokens went to are kept too."""

    has_values: bool = True
    """Whether values are kept beside keys, and are not a part of these."""

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keeps_choices: bool = False,
    ) -> CacheShape:
        latent = config.latent
        return cls(
            config.num_layers,
            config.num_kv_heads if latent is None else 1,
            config.head_dim if latent is None else latent.kept_dim,
            config.max_context_length,
            device,
            dtype,
            config.state,
            config.routed if keeps_choices else None,
            has_values=latent is None,
        )

    @property
    def block_tokens(self) -> int:
        """S: how many tokens a block holds."""
        return _BLOCK_TOKENS.get(self.device.type, _BLOCK_TOKENS_ELSEWHERE)

    @property
    def bytes_per_token(self) -> int:
        keys = self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return keys * (2 if self.has_values else 1) + self._choices_bytes

    @property
    def _choices_bytes(self) -> int:
        """What the experts of a token take."""
        if self.routed is None:
            return 0
        size = expert_choices.dtype_for(self.routed.num_experts).itemsize
        return len(self.routed.layers) * self.routed.per_token * size

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token

    @property
    def state_bytes(self) -> int:
        """What a sequence takes beside its tokens."""
        return 0 if self.state is None else self.state.nbytes

    @property
    def max_blocks(self) -> int:
        """Blocks of a sequence that fills the context."""
        return self.blocks_for(self.max_context_length)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def zero_blocks(self, num_blocks: int) -> Tensor:
        """(L, N, K, S, D)."""
        size = (self.num_layers, num_blocks, self.num_kv_heads, self.block_tokens, self.head_dim)
        return _zeros(size, self.dtype, self.device)

    def zero_values(self, num_blocks: int) -> Tensor:
        """The same; with no numbers where values are a part of keys."""
        return self.zero_blocks(num_blocks if self.has_values else 0)

    def zero_choices(self, num_blocks: int) -> Tensor | None:
        """(E, N, S, k), where they are kept."""
        if self.routed is None:
            return None
        is_small = expert_choices.dtype_for(self.routed.num_experts).itemsize == 1
        size = (len(self.routed.layers), num_blocks, self.block_tokens, self.routed.per_token)
        return _zeros(size, torch.uint8 if is_small else torch.int16, self.device)

    def zero_states(self, num_states: int) -> Tensor:
        """(P, R, n)."""
        layers, size = (0, 0) if self.state is None else (self.state.num_layers, self.state.size)
        return _zeros((layers, num_states, size), torch.float32, self.device)


class BlockTable:
    """The blocks that hold a sequence's tokens, in order, and its state."""

    def __init__(self, cache: KVCache, held: Known) -> None:
        self.cache = cache
        self.blocks = list(held.blocks)
        self.num_tokens = held.num_tokens
        """How many tokens they hold; whoever writes them counts."""
        self.state = held.state
        self.common: tuple[int, ...] = ()
        """Its first blocks, where the very same tuple is that of other samples of the prompt."""

    @property
    def held(self) -> Known:
        return Known(tuple(self.blocks), self.num_tokens, self.state)


class KVCache:
    """Blocks and states, who reads them, and what is remembered of prompts."""

    def __init__(self, shape: CacheShape, max_bytes: int, *, has_padding: bool = True) -> None:
        """`has_padding` says that whoever reads a block also reads what is behind its last token,
        though with weight zero: nothing there may be NaN."""
        self.shape = shape
        self.max_bytes = max_bytes
        self._has_padding = has_padding
        state_share = max_bytes // 2 if shape.state_bytes else 0
        # Memory of the CPU is taken only once it is written to. So there is room beyond the budget
        # for one sequence that runs alone, up to the end of its context.
        is_cpu = shape.device.type == "cpu"
        num_blocks = (max_bytes - state_share) // max(1, shape.block_bytes)
        self._blocks = Pages(num_blocks, shape.max_blocks if is_cpu else 0)
        num_states = state_share // max(1, shape.state_bytes)
        self._states = Pages(num_states, 2 if is_cpu and shape.state_bytes else 0)
        self._readers = Readers(self._blocks, self._states)
        self.keys = shape.zero_blocks(self._blocks.count)
        self.values = shape.zero_values(self._blocks.count)
        self.states = shape.zero_states(self._states.count + 1)
        """The last state is for rows that are padding."""
        self.choices = shape.zero_choices(self._blocks.count + 1)
        """Where they are kept; the last block is for rows that are padding."""
        self._remembered: Prefixes | WholePrompts
        if shape.state is None:
            self._remembered = Prefixes(self._blocks, shape.block_tokens)
        else:
            self._remembered = WholePrompts(self._readers)

    @property
    def nbytes(self) -> int:
        """What sequences and remembered prompts take."""
        return self.bytes_of(self._blocks.num_used, self._states.num_used)

    @property
    def max_tokens(self) -> int:
        """Of one sequence that has the cache to itself."""
        return self._blocks.count * self.shape.block_tokens

    def bytes_of(self, num_blocks: int, num_states: int) -> int:
        return num_blocks * self.shape.block_bytes + num_states * self.shape.state_bytes

    def bytes_for(self, num_tokens: int, num_samples: int) -> int:
        """What a prompt takes, and its samples with their first tokens."""
        num_states = num_samples if self.shape.state_bytes else 0
        return self.bytes_of(self.shape.blocks_for(num_tokens) + num_samples, num_states)

    def close(self) -> None:
        """Free the memory, whoever still refers to the cache."""
        self.keys = self.values = self.states = torch.empty(0)
        self.choices = None

    def read_choices(self, table: BlockTable, start: int, stop: int) -> np.ndarray:
        """(stop - start, E, k): the experts that these tokens of a table went to; waits for the
        device."""
        assert self.choices is not None, "they are kept"
        size = self.shape.block_tokens
        blocks = table.blocks[start // size : self.shape.blocks_for(stop)]
        # (E, blocks, S, k) to (E, tokens, k), to (tokens, E, k).
        found = self.choices[:, torch.tensor(blocks, device=self.shape.device)].flatten(1, 2)
        first = start - start % size
        found = found[:, start - first : stop - first].transpose(0, 1).contiguous().cpu()
        # Torch counts in few types; no expert has a number that needs a sign.
        return found.numpy().view(np.uint8 if found.dtype == torch.uint8 else np.uint16)

    # Tables

    def new_table(
        self, num_tokens: int, known: Known, *, num_samples: int, force: bool = False
    ) -> BlockTable | None:
        """Room for a prompt that begins with what is known, or None where there is too little for
        it and for the first tokens of its samples.

        With `force` too little is an error: nobody is left who could give way.
        """
        self._readers.share(known)
        table = BlockTable(self, known)
        num_new = self.shape.blocks_for(num_tokens) - len(table.blocks)
        num_states = num_samples if self.shape.state_bytes else 0
        if not self._make_room(num_new + num_samples, num_states, force=force):
            self.free(table)
            if force:
                raise EngineError(self._too_small(num_tokens + 1))
            return None
        if self.shape.state_bytes and table.state is None:
            table.state = self._new_state()
        if num_tokens > known.num_tokens:
            self._own(table)
        table.blocks += [self._new_block() for _ in range(num_new)]
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """Another table of the same tokens."""
        self._readers.share(table.held)
        return BlockTable(self, table.held)

    def extend(self, table: BlockTable, num_tokens: int, *, force: bool = False) -> bool:
        """Give a table room for so many tokens, of which it alone writes the next; False where
        there is too little, which is an error with `force`."""
        num_new = max(0, self.shape.blocks_for(num_tokens) - len(table.blocks))
        shared = (self._is_block_shared(table), self._is_state_shared(table))
        if not self._make_room(num_new + shared[0], int(shared[1]), force=force):
            if force:
                raise EngineError(self._too_small(num_tokens))
            return False
        self._own(table)
        table.blocks += [self._new_block() for _ in range(num_new)]
        return True

    def free(self, table: BlockTable) -> None:
        """Leave all that a table reads."""
        self._readers.leave(table.held)
        table.blocks, table.num_tokens, table.state, table.common = [], 0, None, ()

    # Remembered prompts

    def known(self, realm: Realm, tokens: np.ndarray) -> Known:
        """What is known of the beginning of a prompt."""
        return self._remembered.find(realm, tokens)

    def reusable(self, num_shared: int, num_tokens: int) -> int:
        """How much of a prompt of `num_tokens` another can use that begins with `num_shared` of
        its tokens: full blocks, or with states all or nothing."""
        if self.shape.state is not None:
            return num_shared if num_shared == num_tokens else 0
        return num_shared - num_shared % self.shape.block_tokens

    def full_blocks(self, table: BlockTable) -> tuple[int, ...]:
        return tuple(table.blocks[: table.num_tokens // self.shape.block_tokens])

    def remember(self, realm: Realm, tokens: np.ndarray, table: BlockTable) -> None:
        """Keep what a prompt left, for later ones that begin alike, as long as there is room."""
        self._remembered.remember(realm, tokens, table.held)

    def forget(self, adapter: Adapter | None) -> None:
        """Drop what is remembered of an adapter's prompts."""
        self._remembered.forget(adapter)

    # Blocks and states

    def _own(self, table: BlockTable) -> None:
        """Copy what the next token changes, where others read it too."""
        if self._is_block_shared(table):
            at = table.num_tokens // self.shape.block_tokens
            old, new = table.blocks[at], self._blocks.take()
            self.keys[:, new] = self.keys[:, old]
            if self.shape.has_values:
                self.values[:, new] = self.values[:, old]
            if self.choices is not None:
                self.choices[:, new] = self.choices[:, old]
            self._blocks.leave(old)
            table.blocks[at] = new
        if self._is_state_shared(table):
            assert table.state is not None
            old, new = table.state, self._states.take()
            self.states[:, new] = self.states[:, old]
            self._states.leave(old)
            table.state = new

    def _is_block_shared(self, table: BlockTable) -> bool:
        """Whether others read the block that the next token goes to."""
        at = table.num_tokens // self.shape.block_tokens
        return at < len(table.blocks) and self._blocks.users[table.blocks[at]] > 1

    def _is_state_shared(self, table: BlockTable) -> bool:
        return table.state is not None and self._states.users[table.state] > 1

    def _new_block(self) -> int:
        block = self._blocks.take()
        if self._has_padding:
            self.keys[:, block] = 0
            if self.shape.has_values:
                self.values[:, block] = 0
        return block

    def _new_state(self) -> int:
        state = self._states.take()
        self.states[:, state] = 0
        return state

    def _make_room(self, num_blocks: int, num_states: int, *, force: bool) -> bool:
        """Forget prompts until there is room, or until none is left."""
        while not (self._blocks.has_room(num_blocks) and self._states.has_room(num_states)):
            if not self._remembered.evict():
                return (
                    force
                    and self._blocks.has_room(num_blocks, force=True)
                    and self._states.has_room(num_states, force=True)
                )
        return True

    def _too_small(self, num_tokens: int) -> str:
        needed = self.bytes_for(num_tokens, 1)
        return (
            f"a sequence of {num_tokens:,} tokens takes {needed:,} bytes of keys and values, and "
            f"the cache has {self.max_bytes:,}; raise kv_cache_bytes or ask for fewer tokens"
        )


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU of memory that is taken page by page, as it is written to."""
    if device.type != "cpu" or not all(size):
        return torch.zeros(size, dtype=dtype, device=device)
    numbers = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(numbers).view(dtype).view(size)
