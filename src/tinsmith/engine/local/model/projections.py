"""The matrix products of our decoder that adapters may extend, with the names of their modules."""

from __future__ import annotations

from tinsmith.engine.local.model.families import (
    DecoderConfig,
    DeltaSpec,
    ExpertFactors,
    ExpertsSpec,
    LatentSpec,
    Part,
    Projection,
)


def projections_of(config: DecoderConfig, root: str) -> tuple[Projection, ...]:
    """`root` is what `transformers` has before the layers' names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    projections: list[Projection] = []
    gated = 2 if config.has_output_gate else 1
    for layer in range(config.num_blocks):
        prefix = f"{root}layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        if layer in config.recurring:
            assert config.delta is not None, "that is what recurs"
            shapes = _of_delta_rule(config.delta, f"{prefix}linear_attn.", hidden)
        elif config.latent is not None:
            shapes = _of_latents(config.latent, attention, hidden, config.num_heads)
        else:
            shapes = [
                (
                    "qkv",
                    "attn",
                    hidden,
                    (
                        (attention + "q_proj", gated * queries),
                        (attention + "k_proj", keys),
                        (attention + "v_proj", keys),
                    ),
                ),
                ("o", "attn", queries, ((attention + "o_proj", hidden),)),
            ]
        if config.experts is None or layer not in config.experts.layers:
            gates = ((mlp + "gate_proj", inner), (mlp + "up_proj", inner))
            shapes += [
                ("gate_up", "mlp", hidden, gates),
                ("down", "mlp", inner, ((mlp + "down_proj", hidden),)),
            ]
        for name, part, inputs, modules in shapes:
            names, outputs = zip(*modules, strict=True)
            projections.append(
                Projection(
                    layer=layer, name=name, part=part, inputs=inputs, modules=names, outputs=outputs
                )
            )
        if config.experts is not None and layer in config.experts.layers:
            projections += _of_experts(config.experts, layer, mlp, hidden)
    projections.append(
        Projection(
            layer=None,
            name="lm_head",
            part="unembed",
            inputs=hidden,
            modules=("lm_head",),
            outputs=(config.vocab_size,),
        )
    )
    return tuple(projections)


_Shape = tuple[str, Part, int, tuple[tuple[str, int], ...]]
"""Of a projection: name, part, inputs, and modules with their outputs."""


def _of_delta_rule(spec: DeltaSpec, prefix: str, hidden: int) -> list[_Shape]:
    """All but the two small projections that gate the memory. Queries, keys and values have an
    adapter each, though their weight is one."""
    out: _Shape = ("o", "attn", spec.values, ((prefix + "out_proj", hidden),))
    if spec.is_interleaved:
        size = spec.channels + spec.values
        return [("qkv", "attn", hidden, ((prefix + "in_proj_qkvz", size),)), out]
    qkv = (("in_proj_q", spec.keys), ("in_proj_k", spec.keys), ("in_proj_v", spec.values))
    return [
        ("qkv", "attn", hidden, tuple((prefix + name, size) for name, size in qkv)),
        ("z", "attn", hidden, ((prefix + "in_proj_z", spec.values),)),
        out,
    ]


def _of_latents(spec: LatentSpec, prefix: str, hidden: int, num_heads: int) -> list[_Shape]:
    """The halves that make small vectors, and the last product. What makes queries, keys and values
    of such vectors is of low rank itself."""
    queries = ("q_proj", num_heads * spec.key_dim)
    if spec.query_rank is not None:
        queries = ("q_a_proj", spec.query_rank)
    first = (queries, ("kv_a_proj_with_mqa", spec.kept_dim))
    return [
        ("qkv", "attn", hidden, tuple((prefix + name, size) for name, size in first)),
        ("o", "attn", num_heads * spec.value_dim, ((prefix + "o_proj", hidden),)),
    ]


def _of_experts(spec: ExpertsSpec, layer: int, mlp: str, hidden: int) -> list[Projection]:
    """Gate and up of all experts, and down: the factor on the hidden side is one for all. A shared
    expert is a plain MLP."""
    experts, shared = mlp + "experts.", f"{mlp}{spec.shared_as}."
    found = [
        Projection(
            layer=layer,
            name="experts_up",
            part="mlp",
            inputs=hidden,
            modules=(experts + "w1", experts + "w3"),
            outputs=(spec.inner_size,) * 2,
            experts=ExpertFactors(a=1, b=spec.num_experts),
        ),
        Projection(
            layer=layer,
            name="experts_down",
            part="mlp",
            inputs=spec.inner_size,
            modules=(experts + "w2",),
            outputs=(hidden,),
            experts=ExpertFactors(a=spec.num_experts, b=1),
        ),
    ]
    if spec.shared_size is not None:
        found += [
            Projection(
                layer=layer,
                name="gate_up",
                part="mlp",
                inputs=hidden,
                modules=(shared + "gate_proj", shared + "up_proj"),
                outputs=(spec.shared_size,) * 2,
            ),
            Projection(
                layer=layer,
                name="down",
                part="mlp",
                inputs=spec.shared_size,
                modules=(shared + "down_proj",),
                outputs=(hidden,),
            ),
        ]
    return found
