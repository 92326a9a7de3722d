"""Causal attention of whole sequences in float32 on the CPU, forward and backward, by hand.

torch's kernel multiplies by way of the library behind `torch.mm`, in small pieces, and reaches a
sixth of what a core can do. Here queries are taken a block at a time, with the heads that share
keys as rows of one product, and oneDNN multiplies. Keys that no query of a block sees are left out.
One core of an AMD EPYC, 9 heads and 3 of keys, forward and backward, milliseconds:

    tokens          128   192   256   361   512  1024  4096
    torch's own     1.6   3.5   6.0  12.1  24.8    70   815
    here            1.7   3.3   4.5   7.5  14.2    45   495

Nothing is kept but queries, keys and values. What a sequence gets depends on nothing but itself.

Shapes: n tokens, H query heads, K key/value heads, G = H / K, D head size, b queries of a block, e
keys that they see.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.local.model.cpu.cores import on_all_cores
from tinsmith.engine.local.model.linear import can_pack, plain_product

_FEWEST_TOKENS = 192
_BLOCK = 128
_MASKED = -1e30


def is_quicker(num_tokens: int, q: Tensor, v: Tensor) -> bool:
    """Whether sequences of so many tokens are better attended to here; values are of the size of
    keys."""
    is_float = q.device.type == "cpu" and q.dtype == torch.float32
    is_square = q.shape[-1] == v.shape[-1]
    return is_float and is_square and num_tokens >= _FEWEST_TOKENS and can_pack()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One sequence: q (n, H, D), k and v (n, K, D) to (n, H, D)."""
    found: Tensor = _CausalAttention.apply(q, k, v, scale)
    return found


class _Block(NamedTuple):
    """Queries `start` to `stop` of the heads that share a head of keys."""

    head: int
    start: int
    stop: int

    def queries_of(self, x: Tensor) -> Tensor:
        """(b · G, D) of x (n, K, G, D)."""
        return x[self.start : self.stop, self.head].flatten(0, 1)

    def put(self, found: Tensor, into: Tensor) -> None:
        """The inverse."""
        place = into[self.start : self.stop, self.head]
        place.copy_(found.view(place.shape))


class _CausalAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, q, k, v, scale):  # type: ignore[no-untyped-def]
        ctx.scale = scale
        ctx.save_for_backward(q, k, v)
        grouped, keys, values = _by_key_head(q, k), _in_rows(k), _in_rows(v)
        out = q.new_empty(grouped.shape)

        def attend(blocks: Sequence[_Block]) -> list[None]:
            for block in blocks:
                seen = keys[block.head, : block.stop]
                weights = _weights(block.queries_of(grouped), seen, block.start, scale)
                found = plain_product(weights, values[block.head, : block.stop].t())
                block.put(found, out)
            return [None] * len(blocks)

        on_all_cores(attend, _blocks(len(q), k.shape[1]))
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v = ctx.saved_tensors
        grouped, grads = _by_key_head(q, k), _by_key_head(grad.contiguous(), k)
        keys, values = _in_rows(k), _in_rows(v)
        q_grad = torch.empty_like(grouped)

        def attend_back(blocks: Sequence[_Block]) -> list[tuple[Tensor, Tensor]]:
            """Also what a block adds to the gradients of the keys and values it sees, (D, e): with
            few rows a product is quicker than with few columns."""
            found = []
            for block in blocks:
                queries, out_grad = block.queries_of(grouped), block.queries_of(grads)
                seen, its_values = (x[block.head, : block.stop] for x in (keys, values))
                weights = _weights(queries, seen, block.start, ctx.scale)
                values_grad = plain_product(out_grad.t(), weights.t())
                weights_grad = plain_product(out_grad, its_values)
                scores_grad = torch._softmax_backward_data(weights_grad, weights, -1, q.dtype)
                scores_grad *= ctx.scale
                block.put(plain_product(scores_grad, seen.t()), q_grad)
                found.append((plain_product(queries.t(), scores_grad.t()), values_grad))
            return found

        blocks = _blocks(len(q), k.shape[1])
        keys_grad, values_grad = (torch.zeros_like(x.transpose(1, 2)) for x in (keys, values))
        # In the order of the blocks, whichever was ready first.
        for block, (own_keys, own_values) in zip(
            blocks, on_all_cores(attend_back, blocks), strict=True
        ):
            keys_grad[block.head, :, : block.stop] += own_keys
            values_grad[block.head, :, : block.stop] += own_values
        # (K, D, n) to (n, K, D).
        k_grad, v_grad = (x.permute(2, 0, 1).contiguous() for x in (keys_grad, values_grad))
        return q_grad.flatten(1, 2), k_grad, v_grad, None


def _weights(queries: Tensor, keys: Tensor, start: int, scale: float) -> Tensor:
    """Probabilities (b · G, e) of queries (b · G, D), the first of which is token `start`."""
    scores = plain_product(queries, keys)
    # (b, G, e): each query sees all keys before the block, and of the block those up to itself.
    size = len(keys) - start
    scores.view(size, -1, len(keys))[:, :, start:] += _later(size)
    return torch.softmax(scores.mul_(scale), dim=-1)


@functools.lru_cache(maxsize=2 * _BLOCK)
def _later(size: int) -> Tensor:
    """(b, 1, b): so little for keys that come after the query that they have no weight."""
    with torch.inference_mode(False):
        return torch.full((size, size), _MASKED).triu(1)[:, None]


def _blocks(num_tokens: int, num_kv_heads: int) -> list[_Block]:
    """Of each head the same after each other, so that cores which take turns have as much to do."""
    return [
        _Block(head, start, min(start + _BLOCK, num_tokens))
        for start in range(0, num_tokens, _BLOCK)
        for head in range(num_kv_heads)
    ]


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """(n, H, D) as (n, K, G, D)."""
    return x.unflatten(1, (k.shape[1], -1))


def _in_rows(x: Tensor) -> Tensor:
    """(n, K, D) as (K, n, D)."""
    return x.transpose(0, 1).contiguous()
