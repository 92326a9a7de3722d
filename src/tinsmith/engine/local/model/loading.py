"""A model's weights from the files of its folder, in the parts that the decoder computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from tinsmith.engine.local.config import BaseWeights
from tinsmith.engine.local.model.blocks import DenseMlp, Layer
from tinsmith.engine.local.model.experts.grouped_router import GroupedRouter
from tinsmith.engine.local.model.experts.interleaved import load_interleaved
from tinsmith.engine.local.model.experts.mlp import ExpertMlp, SharedExpert
from tinsmith.engine.local.model.experts.router import Router
from tinsmith.engine.local.model.experts.weights import ExpertWeights
from tinsmith.engine.local.model.families import (
    DecoderConfig,
    DeltaSpec,
    ExpertsSpec,
    LatentSpec,
)
from tinsmith.engine.local.model.latent.heads import LatentHeads
from tinsmith.engine.local.model.latent.mixer import LatentMixer
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.quantized import QuantizedStack, quantize
from tinsmith.engine.local.model.recurrent.delta_mixer import DeltaMixer
from tinsmith.engine.local.model.recurrent.delta_rule import DeltaWeights
from tinsmith.engine.stored_tensors import weight_files
from tinsmith.errors import EngineError


class Weights(Protocol):
    """Where a model's tensors come from, by their names without the model's own prefix."""

    def __contains__(self, name: str) -> bool: ...

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor: ...


class Parts(NamedTuple):
    """All that a decoder of our own has in memory."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Linear


class WeightFiles:
    """The tensors of a model folder by name, whichever files and prefix they are under."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        paths = weight_files(folder)
        if not paths:
            raise EngineError(f"no safetensors files in {folder}; convert the model to safetensors")
        self._folder = folder
        reads = "cpu" if device.type == "meta" else str(device)
        self._files = [safe_open(path, framework="pt", device=reads) for path in paths]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self._unread = set(self._where)
        self._prefix = self._find_prefix()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Mapped files are released with their last reference; nothing else may hold one.
        self._where.clear()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return self._full_name(name) in self._where

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        part: tuple[slice, ...] = (),
    ) -> Tensor:
        """One tensor, or a part of one that is read alone, of which `shape` is demanded."""
        full = self._full_name(name)
        if full not in self._where:
            raise EngineError(f"the model in {self._folder} has no tensor {full!r}")
        self._unread.discard(full)
        tensor = self._read(full, part)
        if tuple(tensor.shape) != shape:
            found = tuple(tensor.shape)
            raise EngineError(f"{full!r} in {self._folder} has shape {found}, expected {shape}")
        return tensor.to(device=self._device, dtype=dtype or self._dtype)

    def check_all_read(self, predictors: range) -> None:
        """Refuse layers of which nothing, or not all, was read: a model without some of its layers
        or biases would be another one, whatever its settings say. `predictors` are layers that
        predict further tokens, which nobody reads."""
        stem = f"{self._prefix}layers."
        ignored = tuple(f"{stem}{layer}." for layer in predictors)
        layers = sorted(
            name for name in self._unread if name.startswith(stem) and not name.startswith(ignored)
        )
        check_unread(
            self._folder, layers, lambda name: bool(self._where[name].get_tensor(name).any())
        )

    def _read(self, full: str, part: tuple[slice, ...]) -> Tensor:
        file = self._where[full]
        if self._device.type == "meta":
            whole = torch.empty(file.get_slice(full).get_shape(), device=self._device)
            return whole[part] if part else whole
        tensor: Tensor = file.get_slice(full)[part] if part else file.get_tensor(full)
        return tensor

    def _find_prefix(self) -> str:
        """What stands before `embed_tokens.weight`: "model.", "language_model.model.", …"""
        ending = "embed_tokens.weight"
        for name in self._where:
            if name.endswith(ending):
                return name.removesuffix(ending)
        raise EngineError(f"no token embedding among the tensors in {self._folder}")

    def _full_name(self, name: str) -> str:
        if name != "lm_head.weight":
            return self._prefix + name
        beside = self._prefix.removesuffix("model.") + name
        return beside if beside in self._where else name


def check_unread(folder: Path, names: Iterable[str], has_numbers: Callable[[str], bool]) -> None:
    """Refuse tensors of layers that a model of the folder's settings does not have. Those of zeros
    may be there, and what follows from the settings."""
    for name in names:
        if ".rotary_emb." not in name and has_numbers(name):
            raise EngineError(
                f"{folder} has a tensor {name!r}, and a model of its config.json none: one of its "
                "settings, such as num_hidden_layers or attention_bias, is not that of its weights"
            )


def load_parts(config: DecoderConfig, weights: Weights, base_weights: BaseWeights) -> Parts:
    """Projections that share an input are fused.

    What is in few bits are the blocks' linear layers, not the embedding nor the unembedding.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = weights.get("embed_tokens.weight", (vocab, hidden))
    head = tied = embedding
    if config.cut is not None and config.cut.is_head_cut:
        head = tied = embedding[config.cut.vocab.start : config.cut.vocab.stop]
    if "lm_head.weight" in weights:
        # As in transformers, a matrix in the files wins over a setting that says it is tied.
        own = weights.get("lm_head.weight", (len(tied), hidden))
        is_known = own.device.type != "meta"
        head = tied if config.is_tied and is_known and torch.equal(own, tied) else own
    elif not config.is_tied:
        raise EngineError("the model says its unembedding is its own, but has no lm_head.weight")
    return Parts(
        embedding=embedding,
        layers=tuple(
            _load_layer(config, weights, layer, base_weights) for layer in range(config.num_blocks)
        ),
        final_norm=_load_norm(config, weights, "norm", hidden),
        head=Linear(head, is_exact=True),
    )


def _load_layer(
    config: DecoderConfig, weights: Weights, layer: int, base_weights: BaseWeights
) -> Layer:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    prefix = f"layers.{layer}."

    def linear(
        inputs: int, has_bias: bool, modules: dict[str, int], unbiased: tuple[str, ...] = ()
    ) -> Linear:
        weight = [
            weights.get(f"{prefix}{module}.weight", (outputs, inputs))
            for module, outputs in modules.items()
        ]
        kept = quantize(torch.cat(weight), base_weights)
        if not has_bias:
            return Linear(kept)
        bias = [
            weight[0].new_zeros(outputs)
            if module in unbiased
            else weights.get(f"{prefix}{module}.bias", (outputs,))
            for module, outputs in modules.items()
        ]
        return Linear(kept, torch.cat(bias))

    def dense(module: str, size: int, has_bias: bool) -> DenseMlp:
        gates = {f"{module}.gate_proj": size, f"{module}.up_proj": size}
        down = linear(size, has_bias, {f"{module}.down_proj": hidden})
        return DenseMlp(linear(hidden, has_bias, gates), down)

    def norm(name: str, size: int = hidden) -> Tensor:
        return _load_norm(config, weights, prefix + name, size)

    mlp: DenseMlp | ExpertMlp
    if config.experts is not None and layer in config.experts.layers:
        shared = None
        if (size := config.experts.shared_size) is not None:
            name, share = f"mlp.{config.experts.shared_as}", None
            if config.experts.has_shared_gate:
                share = weights.get(f"{prefix}{name}_gate.weight", (1, hidden))
            shared = SharedExpert(*dense(name, size, has_bias=False), share)
        mlp = _load_experts(config.experts, hidden, weights, prefix, base_weights, shared)
    else:
        mlp = dense("mlp", inner, config.has_mlp_bias)
    post, wide = config.has_post_norms, config.has_wide_qk_norm
    if layer in config.recurring:
        assert config.delta is not None, "that is what recurs"
        delta = config.delta
        first, size = "linear_attn.in_proj_qkv", delta.channels
        z = None
        if delta.is_interleaved:
            first, size = first + "z", size + delta.values
        else:
            z = linear(hidden, False, {"linear_attn.in_proj_z": delta.values})
        return Layer(
            input_norm=norm("input_layernorm"),
            qkv=linear(hidden, False, {first: size}),
            q_norm=None,
            k_norm=None,
            o=linear(delta.values, False, {"linear_attn.out_proj": hidden}),
            post_attention_norm=None,
            mlp_norm=norm("post_attention_layernorm"),
            mlp=mlp,
            post_mlp_norm=None,
            delta=DeltaMixer(
                core=_load_core(delta, weights, f"{prefix}linear_attn."),
                z=z,
                ba=_load_small(delta, hidden, weights, f"{prefix}linear_attn."),
                norm=weights.get(f"{prefix}linear_attn.norm.weight", (delta.value_dim,)),
            ),
        )
    if config.latent is not None:
        latent, name = config.latent, "self_attn.q_proj"
        sizes = [config.num_heads * latent.key_dim, latent.kept_dim]
        if latent.query_rank is not None:
            name, sizes[0] = "self_attn.q_a_proj", latent.query_rank
        return Layer(
            input_norm=norm("input_layernorm"),
            qkv=linear(
                hidden,
                config.has_qkv_bias,
                dict(zip((name, "self_attn.kv_a_proj_with_mqa"), sizes, strict=True)),
                unbiased=("self_attn.q_proj",),
            ),
            q_norm=None,
            k_norm=None,
            o=linear(
                config.num_heads * latent.value_dim, config.has_o_bias, {"self_attn.o_proj": hidden}
            ),
            post_attention_norm=None,
            mlp_norm=norm("post_attention_layernorm"),
            mlp=mlp,
            post_mlp_norm=None,
            latent=_load_mixer(latent, config.num_heads, weights, f"{prefix}self_attn."),
        )
    gated = 2 if config.has_output_gate else 1
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=linear(
            hidden,
            config.has_qkv_bias,
            {
                "self_attn.q_proj": gated * queries,
                "self_attn.k_proj": keys,
                "self_attn.v_proj": keys,
            },
        ),
        q_norm=norm("self_attn.q_norm", queries if wide else head) if config.has_qk_norm else None,
        k_norm=norm("self_attn.k_norm", keys if wide else head) if config.has_qk_norm else None,
        o=linear(queries, config.has_o_bias, {"self_attn.o_proj": hidden}),
        post_attention_norm=norm("post_attention_layernorm") if post else None,
        mlp_norm=norm("pre_feedforward_layernorm" if post else "post_attention_layernorm"),
        mlp=mlp,
        post_mlp_norm=norm("post_feedforward_layernorm") if post else None,
        sinks=weights.get(f"{prefix}self_attn.sinks", (config.num_heads,), torch.float32)
        if config.has_sinks
        else None,
    )


def _load_core(delta: DeltaSpec, weights: Weights, prefix: str) -> DeltaWeights:
    """What fades a memory is kept in float32: it is small, and an exponent."""
    conv = weights.get(f"{prefix}conv1d.weight", (delta.channels, 1, delta.taps))
    heads = (delta.num_value_heads,)
    return DeltaWeights(
        conv=conv[:, 0],
        a_log=weights.get(f"{prefix}A_log", heads, torch.float32),
        dt_bias=weights.get(f"{prefix}dt_bias", heads, torch.float32),
        num_key_heads=delta.num_key_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
    )


def _load_small(delta: DeltaSpec, hidden: int, weights: Weights, prefix: str) -> Linear:
    """The projections to b and a, which are in full."""
    num_heads = delta.num_value_heads
    if not delta.is_interleaved:
        names = (f"{prefix}in_proj_{part}.weight" for part in "ba")
        return Linear(torch.cat([weights.get(name, (num_heads, hidden)) for name in names]))
    # Those of each key head together: all of b first, then of a.
    joined = weights.get(f"{prefix}in_proj_ba.weight", (2 * num_heads, hidden))
    by_head = joined.view(delta.num_key_heads, 2, -1, hidden)
    return Linear(by_head.transpose(0, 1).reshape(2 * num_heads, hidden))


def _load_mixer(latent: LatentSpec, num_heads: int, weights: Weights, prefix: str) -> LatentMixer:
    """What makes queries, keys and values of small vectors stays in full: it is small, and parts of
    it are multiplied by themselves."""
    q_norm = q_b = None
    if (size := latent.query_rank) is not None:
        q_norm = weights.get(f"{prefix}q_a_layernorm.weight", (size,))
        q_b = weights.get(f"{prefix}q_b_proj.weight", (num_heads * latent.key_dim, size))
    by_head = latent.plain_dim + latent.value_dim
    kv_b = weights.get(f"{prefix}kv_b_proj.weight", (num_heads * by_head, latent.rank))
    return LatentMixer(
        heads=LatentHeads(latent, kv_b.view(num_heads, by_head, latent.rank)),
        q_norm=q_norm,
        q_b=q_b,
        kv_norm=weights.get(f"{prefix}kv_a_layernorm.weight", (latent.rank,)),
    )


def _load_experts(
    spec: ExpertsSpec,
    hidden: int,
    weights: Weights,
    prefix: str,
    base_weights: BaseWeights,
    shared: SharedExpert | None,
) -> ExpertMlp:
    """The router stays in full."""
    if spec.is_biased:
        return load_interleaved(spec, hidden, weights, f"{prefix}mlp", base_weights)
    stored = f"{prefix}{spec.stored_in}"
    gate, up, down = spec.stored_as
    inner = spec.inner_size
    router = _load_router(spec, hidden, weights, f"{stored}.gate.")

    def stacked(joined: str, modules: tuple[str, ...], outputs: int, inputs: int) -> ExpertWeights:
        """Of all experts, whose modules are beside each other; some files have them joined."""
        name, rows = f"{stored}.experts.{joined}", outputs * len(modules)
        if name in weights:
            whole = weights.get(name, (spec.num_experts, rows, inputs))
        else:
            names = [
                [f"{stored}.experts.{expert}.{module}.weight" for module in modules]
                for expert in range(spec.num_experts)
            ]
            first = weights.get(names[0][0], (outputs, inputs))
            whole = first.new_empty(spec.num_experts, rows, inputs)
            for of_expert, of_modules in zip(whole, names, strict=True):
                for name, part in zip(of_modules, of_expert.split(outputs), strict=True):
                    part.copy_(weights.get(name, (outputs, inputs)))
        starts = range(0, rows, outputs)
        columns = tuple(slice(start, start + outputs) for start in starts)
        if base_weights == "full":
            return ExpertWeights(whole.transpose(1, 2), None, columns)
        return ExpertWeights(QuantizedStack(whole, base_weights), None, columns)

    return ExpertMlp(
        router=router,
        gate_up=stacked("gate_up_proj", (gate, up), inner, hidden),
        down=stacked("down_proj", (down,), hidden, inner),
        shared=shared,
    )


def _load_router(
    spec: ExpertsSpec, hidden: int, weights: Weights, prefix: str
) -> Router | GroupedRouter:
    shape = (spec.num_experts, hidden)
    if spec.groups is None:
        return Router(weights.get(f"{prefix}weight", shape), spec.per_token, spec.is_normalized)
    return GroupedRouter(
        weight=weights.get(f"{prefix}weight", shape, torch.float32),
        bias=weights.get(f"{prefix}e_score_correction_bias", (spec.num_experts,), torch.float32),
        per_token=spec.per_token,
        is_normalized=spec.is_normalized,
        groups=spec.groups,
    )


def _load_norm(config: DecoderConfig, weights: Weights, name: str, size: int) -> Tensor:
    if config.norm_weight_offset:
        # One plus the weight, in float32: half precision would lose the weight beside the one.
        stored = weights.get(name + ".weight", (size,), torch.float32)
        return stored + config.norm_weight_offset
    return weights.get(name + ".weight", (size,))
