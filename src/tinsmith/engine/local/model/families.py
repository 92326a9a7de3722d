"""In what model families differ, as far as our decoder cares.

Several families are one decoder with small differences: Llama, Mistral, Qwen2, Qwen3, Gemma 2,
Gemma 3 (text), with experts Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE and gpt-oss, with recurrent layers
Qwen3.5, with and without experts, and Qwen3-Next, and with latent attention DeepSeek-V3 and
Kimi-K2. `settings` reads the differences from a model's folder; the arithmetic is in `decoder`.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.model.pointwise import Activation
from tinsmith.engine.local.model.recurrent.recurrence import StateShape
from tinsmith.engine.local.model.rope import Rope
from tinsmith.engine.local.ranks.cut import Cut

Part = Literal["attn", "mlp", "unembed"]
"""The parts of a model that a LoRA configuration switches on or off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How one layer attends."""

    scale: float
    """Factor on the scores."""

    rope: Rope | None
    """None where queries and keys come rotated already."""

    softcap: float | None = None
    """Scores are squeezed into ±softcap by tanh before the softmax."""

    window: int | None = None
    """A position sees itself and the `window - 1` positions before it; None sees them all."""

    extent: int | None = None
    """Where scores depend on distances: queries have as many columns more, which are added to the
    scores of the keys at distance 0, 1, and so on; nothing is further on."""


class ExpertFactors(NamedTuple):
    """How many low-rank factors the experts of a layer have: one for all of them, or one each."""

    a: int
    b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A matrix product that adapters may extend: one or more linear modules over one input."""

    layer: int | None
    """None for the unembedding."""

    name: str
    """Which one within the layer: "qkv", "z", "o", "gate_up", "down", "experts_up",
    "experts_down", or "lm_head"."""

    part: Part
    inputs: int
    modules: tuple[str, ...]
    """Full names in the `transformers` model, as in `model.layers.0.self_attn.q_proj`."""

    outputs: tuple[int, ...]
    """Rows of each module's weight."""

    experts: ExpertFactors | None = None
    """Where every expert of a layer has such a product with a weight of its own."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts scored one by one, in groups of which a token goes to few."""

    count: int
    per_token: int
    scale: float
    """Of the shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Experts in place of a block's MLP."""

    num_experts: int
    per_token: int
    inner_size: int
    is_normalized: bool
    """Whether the shares of a token's experts sum up to one."""

    layers: frozenset[int]
    """Where they are; other layers have a plain MLP."""

    shared_size: int | None = None
    """Inner columns of an expert that every token goes to, where there is one."""

    shared_as: str = "shared_expert"
    """What that is called."""

    has_shared_gate: bool = True
    """Whether its output has a share, which tokens decide."""

    groups: ExpertGroups | None = None
    """Where a sigmoid scores each expert; None for a softmax over all of them."""

    stored_in: str = "mlp"
    """The part of a layer that has them, in the model's files."""

    stored_as: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    is_biased: bool = False
    """Whether routers and experts have biases, and files the experts' weights in the form of
    gpt-oss; see `experts.interleaved`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """The gated delta rule in place of attention; see `recurrent.delta_rule`."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Of one head, as `value_dim`."""

    value_dim: int
    taps: int
    """Of the short convolution."""

    is_interleaved: bool = False
    """Whether one projection has the rows of each key head together: its query and key, and the
    values and gates of the heads that it serves."""

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What is convolved: queries, keys and values."""
        return 2 * self.keys + self.values

    def state(self, num_layers: int) -> StateShape:
        return StateShape(
            num_layers=num_layers,
            taps=self.taps,
            channels=self.channels,
            num_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention: of a token one vector is kept, from which all heads have their keys and
    values, and one rotated key that they share; see `latent.mixer`."""

    query_rank: int | None
    """Size of the vector that queries are made of; None where they are made of the hidden state."""

    rank: int
    """R, the size of the latent vector."""

    plain_dim: int
    """Of a head's query and key, what is not rotated."""

    rotated_dim: int
    """P, what is rotated behind that."""

    value_dim: int
    is_interleaved: bool
    """Whether neighbours turn together, and not halves."""

    @property
    def key_dim(self) -> int:
        return self.plain_dim + self.rotated_dim

    @property
    def kept_dim(self) -> int:
        """What the cache keeps of a token in a layer."""
        return self.rank + self.rotated_dim


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """Layers whose routers can be told where to send tokens."""

    layers: tuple[int, ...]
    """Their numbers, in order."""

    num_experts: int
    per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of one model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_length: int
    norm_eps: float
    layers: tuple[AttentionSpec, ...]
    """Those that attend."""

    recurring: tuple[int, ...] = ()
    """The numbers of blocks that have a recurrent layer in place of attention."""

    delta: DeltaSpec | None = None
    """What that layer is, in our own decoder."""

    latent: LatentSpec | None = None
    """How all layers attend, in our own decoder, where it is by latent vectors. `head_dim` is then
    the larger of what keys and values have."""

    num_predictors: int = 0
    """Layers behind the last, in the files alone, that predict further tokens."""

    eos_token_ids: tuple[int, ...] = ()
    activation: Activation = "silu"
    norm_weight_offset: float = 0.0
    """Gemma stores the norm's weight minus one."""

    has_post_norms: bool = False
    """Whether a block's output is normed again before it joins the residual stream."""

    has_qk_norm: bool = False
    has_wide_qk_norm: bool = False
    """Whether that is over all heads together, and not of each."""

    has_sinks: bool = False
    """Whether each head has a frozen score of one more key, whose value is zero."""

    has_output_gate: bool = False
    """Whether queries come with a gate, by which what attention gives is multiplied."""

    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    is_tied: bool = False
    """Whether the unembedding is the embedding matrix."""

    embedding_scale: float = 1.0
    final_softcap: float | None = None
    experts: ExpertsSpec | None = None
    projections: tuple[Projection, ...] = ()
    state: StateShape | None = None
    """What recurrent layers keep of a sequence, where there are any."""

    images: ImageRules | None = None
    """How the model reads images, where it does."""

    cut: Cut | None = None
    """Which part of the model this is, where several ranks have it together. Heads, inner columns
    and projections are then those of the part."""

    @property
    def num_layers(self) -> int:
        """Those that attend."""
        return len(self.layers)

    @property
    def num_blocks(self) -> int:
        return len(self.layers) + len(self.recurring)

    @property
    def predictors(self) -> range:
        return range(self.num_blocks, self.num_blocks + self.num_predictors)

    def place(self, block: int) -> int:
        """Which one a block is of those that attend, or of those that do not."""
        before = bisect.bisect_left(self.recurring, block)
        return before if block in self.recurring else block - before

    @property
    def routed(self) -> RoutedLayers | None:
        """Where experts can be chosen for tokens."""
        experts = self.experts
        if experts is None:
            return None
        return RoutedLayers(tuple(sorted(experts.layers)), experts.num_experts, experts.per_token)
