"""`Cut`: which part of a model one of several ranks has.

Attention is cut by heads, the MLP by its inner columns, the unembedding by rows of the vocabulary.
Norms and the embedding are on every rank. Where there are fewer key/value heads than ranks, several
ranks have the same one; where the vocabulary cannot be divided, the unembedding is on every rank.

Of a model that runs on the modules of `transformers`, experts are cut, each by its inner columns,
so that every rank has as much to do whatever the router chooses; all else is on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    index: int
    count: int
    head_dim: int
    heads: range
    num_kv_heads: int
    """Of the whole model."""

    kv_heads: range
    inner: range
    vocab: range
    is_head_cut: bool
    experts: range | None = None
    """The inner columns of each expert, where experts are what is cut."""

    @classmethod
    def of_experts(cls, index: int, count: int, inner: int) -> Cut:
        whole = range(0)
        return cls(
            index=index,
            count=count,
            head_dim=0,
            heads=whole,
            num_kv_heads=count,
            kv_heads=whole,
            inner=whole,
            vocab=whole,
            is_head_cut=False,
            experts=share_of(index, count, inner),
        )

    @property
    def kv_copies(self) -> int:
        """How many ranks have the same key/value heads."""
        return max(1, self.count // self.num_kv_heads)

    @property
    def has_own_kv(self) -> bool:
        """Whether this rank is the first of those that have its key/value heads."""
        return self.index % self.kv_copies == 0

    def outputs(self, module: str) -> range | None:
        """The rows that this rank has of a module's weight; None where it has all."""
        name = module.rpartition(".")[2]
        if self.experts is not None:
            return self.experts if name in ("w1", "w3") else None
        match name:
            case "q_proj":
                return _scaled(self.heads, self.head_dim)
            case "k_proj" | "v_proj":
                return _scaled(self.kv_heads, self.head_dim)
            case "gate_proj" | "up_proj":
                return self.inner
            case "lm_head" if self.is_head_cut:
                return self.vocab
        return None

    def inputs(self, module: str) -> range | None:
        """The columns that this rank has of a module's weight; None where it has all."""
        name = module.rpartition(".")[2]
        if self.experts is not None:
            return self.experts if name == "w2" else None
        match name:
            case "o_proj":
                return _scaled(self.heads, self.head_dim)
            case "down_proj":
                return self.inner
        return None


def share_of(index: int, count: int, total: int) -> range:
    """The share of one rank where `total` can be divided."""
    size = total // count
    return range(index * size, (index + 1) * size)


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)
