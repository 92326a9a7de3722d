"""From a model folder's `config.json` to the few numbers our decoder needs (`families`).

Every spelling of the settings that `transformers` has used is read. An architecture that is not
listed, or a setting that the decoder does not know, is refused by name: a model that is almost
right is worse than none.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.model.experts.clamped_swiglu import ClampedSwiglu
from tinsmith.engine.local.model.families import (
    AttentionSpec,
    DecoderConfig,
    DeltaSpec,
    ExpertsSpec,
)
from tinsmith.engine.local.model.family_settings import (
    BY_LAYER_TYPES,
    DEFAULTS,
    FAMILIES,
    INNER_SIZE,
    NO_O_BIAS,
    OF_DELTA_RULE,
    READ_BY,
    WITH_EXPERTS,
    WITH_QK_NORM,
    WITH_SHARED_EXPERT,
)
from tinsmith.engine.local.model.latent.settings import (
    OF_LATENTS,
    read_grouped_experts,
    read_latent,
)
from tinsmith.engine.local.model.pointwise import Activation
from tinsmith.engine.local.model.projections import projections_of
from tinsmith.engine.local.model.rope import (
    UnsupportedModelError,
    read_rope,
    read_sharpening,
)
from tinsmith.errors import EngineError
from tinsmith.text_model import TextModel

logger = logging.getLogger(__name__)


def read_config(folder: Path) -> DecoderConfig:
    """The decoder's configuration for the model in `folder`."""
    settings = read_settings(folder / "config.json")
    check_counts(settings)
    try:
        return decoder_config(settings)
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
        # A file from anywhere: null, text or a list may stand where a number is meant.
        raise EngineError(f"config.json has a setting of the wrong kind: {error}") from error


_MOST_MODULES = 10_000
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "depth")
_OTHERS = ("n_shared_experts", "num_mtp_layers", "num_nextn_predict_layers")


def check_counts(settings: Mapping[str, Any]) -> None:
    """Refuse numbers of layers and the like, of any part of the model, that would be found to be
    wrong only after so many had been made."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            check_counts(value)
        elif name in (*_LAYERS, *_OTHERS) and isinstance(value, int):
            least = int(name in _LAYERS)
            if not least <= value <= _MOST_MODULES:
                raise EngineError(
                    f"config.json has {value:.6g} for {name}; known: {least} to {_MOST_MODULES}"
                )


def end_tokens(folder: Path, settings: tuple[int, ...]) -> tuple[int, ...]:
    """Which tokens end a sequence of the model in `folder`, whose own settings name these.

    `generation_config.json` goes before those, which often say how a text ends and not how
    a message does. The tokenizer's own end, with which chat templates end a message, is always one
    of them.
    """
    named = _of_generation(folder) or settings
    own = _of_tokenizer(folder)
    return named if own is None or own in named else (*named, own)


def _of_generation(folder: Path) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    found = read_settings(file).get("eos_token_id") if file.exists() else None
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in tokens):
        raise EngineError(f"eos_token_id in {file} must be a token or a list of them, got {found}")
    return tuple(tokens)


def _of_tokenizer(folder: Path) -> int | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return TextModel(folder.name, folder).special_token("eos_token")
    except Exception as error:  # a file from anywhere, which the model itself does not need
        logger.warning("%s: its tokenizer cannot be read: %s", folder.name, error)
        return None


def read_settings(path: Path) -> dict[str, Any]:
    """A model folder's JSON file of settings."""
    try:
        settings = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise EngineError(f"no model in {path.parent}: it has no {path.name}") from error
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise EngineError(f"{path} must hold a JSON object")
    return settings


_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Types whose modules `transformers` has under another name."""


IN_PARTS = ("kimi_k25",)
"""Types whose language part is that of another one, for which every release that we support has a
class, and which has none of its own."""


def as_transformers_knows(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings as every release that we support has a class for: of types in parts, those
    of the language part."""
    if settings.get("model_type") in IN_PARTS:
        settings = dict(_of_language_part(settings))
    model_type = _SAME_AS.get(str(settings.get("model_type")))
    return settings if model_type is None else {**settings, "model_type": model_type}


def decoder_config(settings: Mapping[str, Any]) -> DecoderConfig:
    """The decoder's configuration from the content of a `config.json`.

    A model that also sees images keeps its language part under `text_config`. Of some of these
    `transformers` has a class for the language part alone, which has other names.
    """
    nested = settings.get("text_config")
    root = "model."
    if isinstance(nested, Mapping):
        if nested.get("model_type") not in OF_DELTA_RULE:
            root = "model.language_model."
        settings = _of_language_part(settings)
    family = str(settings.get("model_type"))
    if family not in DEFAULTS:
        raise UnsupportedModelError(
            f"model type {family!r} is not one the decoder knows; known: {', '.join(FAMILIES)}"
        )
    given = {
        name: value
        for name, value in settings.items()
        if (value is not None or name in _NONE_HAS_MEANING)
        and family in READ_BY.get(name, FAMILIES)
    }
    values = {**DEFAULTS[family], **given}
    config = _Reader(family, values).config()
    return replace(config, projections=projections_of(config, root))


def _of_language_part(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that also sees images, with what is said of the whole."""
    nested = settings.get("text_config")
    if not isinstance(nested, Mapping):
        raise EngineError("config.json must have an object of its language part as text_config")
    inherited = {name: settings[name] for name in _INHERITED if name in settings}
    # `transformers`' class for the whole looks at one of them, that for the language part alone
    # at the other. Where the files have a matrix, it is taken all the same.
    said = [part[_TIED] for part in (settings, nested) if part.get(_TIED) is not None]
    return {**inherited, **nested, **({_TIED: any(said)} if said else {})}


def with_images(config: DecoderConfig, rules: ImageRules) -> DecoderConfig:
    """A model of `transformers`' class for the language part alone, as the whole that also reads
    images: there its modules have other names."""
    projections = tuple(
        replace(
            each,
            modules=tuple(
                re.sub(r"^model\.(?=layers\.)", "model.language_model.", name)
                for name in each.modules
            ),
        )
        for each in config.projections
    )
    return replace(config, images=rules, projections=projections)


_TIED = "tie_word_embeddings"
_INHERITED = ("eos_token_id", "architectures")
_NONE_HAS_MEANING = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window",
    "q_lora_rank",
)


@dataclass(frozen=True, slots=True)
class _Reader:
    """One file's settings, and what they mean in its family."""

    family: str
    values: Mapping[str, Any]

    def config(self) -> DecoderConfig:
        values = self.values
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            if name not in values:
                raise EngineError(f"config.json of a {self.family} model has no {name!r}")
        hidden = int(values["hidden_size"])
        heads = int(values["num_attention_heads"])
        is_gemma = self.family.startswith("gemma")
        is_recurrent = self.family in OF_DELTA_RULE
        attention_bias = bool(values.get("attention_bias", False))
        if values.get("use_bidirectional_attention"):
            raise UnsupportedModelError("use_bidirectional_attention is not supported")
        if values.get("clip_qkv") is not None:
            raise UnsupportedModelError(
                "bounds of queries, keys and values (clip_qkv) are not known"
            )
        eos = values.get("eos_token_id")
        delta = self._delta() if is_recurrent else None
        latent = read_latent(values) if self.family in OF_LATENTS else None
        recurring = tuple(
            layer for layer, kind in enumerate(self._layer_kinds()) if kind == _RECURRENT
        )
        return DecoderConfig(
            architecture=self._architecture(),
            vocab_size=int(values["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(values["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(values.get("num_key_value_heads", heads)),
            head_dim=self._head_dim() if latent is None else max(latent.key_dim, latent.value_dim),
            latent=latent,
            num_predictors=int(values.get("num_nextn_predict_layers") or 0),
            max_context_length=int(values["max_position_embeddings"]),
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            layers=tuple(self._layers()),
            recurring=recurring,
            delta=delta,
            state=delta.state(len(recurring)) if delta is not None and recurring else None,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            activation=self._activation(),
            norm_weight_offset=1.0 if is_gemma or is_recurrent else 0.0,
            has_post_norms=is_gemma,
            has_qk_norm=self.family in WITH_QK_NORM,
            has_wide_qk_norm=self.family == "olmoe",
            has_sinks=self.family == "gpt_oss",
            has_output_gate=is_recurrent,
            has_qkv_bias=self._has_qkv_bias(attention_bias),
            has_o_bias=self.family not in NO_O_BIAS and attention_bias,
            has_mlp_bias=bool(values.get("mlp_bias", False)),
            is_tied=bool(values.get(_TIED, False)),
            embedding_scale=math.sqrt(hidden) if is_gemma else 1.0,
            final_softcap=values.get("final_logit_softcapping") if is_gemma else None,
            experts=self._experts(),
        )

    def _delta(self) -> DeltaSpec:
        values = self.values
        if (activation := values.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(
                f"linear attention with the hidden_act {activation!r} is not known; known: silu"
            )
        spec = DeltaSpec(
            num_key_heads=int(values["linear_num_key_heads"]),
            num_value_heads=int(values["linear_num_value_heads"]),
            key_dim=int(values["linear_key_head_dim"]),
            value_dim=int(values["linear_value_head_dim"]),
            taps=int(values["linear_conv_kernel_dim"]),
            is_interleaved=self.family == "qwen3_next",
        )
        if spec.num_value_heads % spec.num_key_heads:
            raise EngineError(
                f"config.json has {spec.num_value_heads} for linear_num_value_heads, which its "
                f"linear_num_key_heads, {spec.num_key_heads}, do not divide"
            )
        return spec

    def _has_qkv_bias(self, attention_bias: bool) -> bool:
        match self.family:
            case "qwen2":
                return True
            case "qwen2_moe":
                return bool(self.values["qkv_bias"])
            case "mixtral":
                return False
        return attention_bias

    def _experts(self) -> ExpertsSpec | None:
        values = self.values
        if self.family in OF_LATENTS:
            return read_grouped_experts(values)
        if self.family not in WITH_EXPERTS:
            return None
        # Two names of one setting; of Qwen3-MoE `transformers` writes the one and reads both.
        names = ("num_local_experts", "num_experts")
        num_experts = next(int(values[name]) for name in names if name in values)
        dense, step = values.get("mlp_only_layers", ()), int(values.get("decoder_sparse_step", 1))
        layers = frozenset(
            layer
            for layer in range(int(values["num_hidden_layers"]))
            if layer not in dense and (layer + 1) % step == 0
        )
        if not num_experts or not layers:
            return None
        spec = ExpertsSpec(
            num_experts=num_experts,
            per_token=int(values["num_experts_per_tok"]),
            inner_size=int(values[INNER_SIZE.get(self.family, "intermediate_size")]),
            is_normalized=bool(values.get("norm_topk_prob", False)),
            layers=layers,
        )
        if not 0 < spec.per_token <= num_experts:
            raise EngineError(
                f"config.json has {spec.per_token} for num_experts_per_tok, and {num_experts} "
                "experts"
            )
        if self.family in WITH_SHARED_EXPERT:
            return replace(spec, shared_size=int(values["shared_expert_intermediate_size"]))
        if self.family == "mixtral":
            return replace(spec, stored_in="block_sparse_moe", stored_as=("w1", "w3", "w2"))
        if self.family == "gpt_oss":
            return replace(spec, is_normalized=True, is_biased=True)
        return spec

    def _architecture(self) -> str:
        named = self.values.get("architectures")
        return str(named[0]) if named else self.family

    def _head_dim(self) -> int:
        if self.family in OF_LATENTS:
            return int(self.values["qk_rope_head_dim"])
        shared = int(self.values["hidden_size"]) // int(self.values["num_attention_heads"])
        return int(self.values.get("head_dim", shared))

    def _activation(self) -> Activation:
        if self.family == "gpt_oss":
            limit = float(self.values["swiglu_limit"])
            return ClampedSwiglu(float(self.values["swiglu_alpha"]), limit)
        name = self.values.get("hidden_activation") or self.values.get("hidden_act", "silu")
        if name == "silu":
            return "silu"
        if name == "gelu_pytorch_tanh":
            return "gelu_tanh"
        raise UnsupportedModelError(
            f"the activation {name!r} (hidden_act) is not known; known: silu, gelu_pytorch_tanh"
        )

    def _layers(self) -> Iterator[AttentionSpec]:
        scale = float(self.values.get("query_pre_attn_scalar", self._head_dim())) ** -0.5
        if self.family in OF_LATENTS:
            scale = read_latent(self.values).key_dim ** -0.5
            scale *= read_sharpening(self.family, self.values)
        softcap = self.values.get("attn_logit_softcapping")
        for kind in self._layer_kinds():
            if kind == _RECURRENT:
                continue
            is_sliding = kind == "sliding_attention"
            yield AttentionSpec(
                scale=scale,
                rope=read_rope(self.family, self.values, self._head_dim(), kind),
                softcap=float(softcap) if softcap is not None else None,
                window=self._window() if is_sliding else None,
            )

    def _window(self) -> int:
        """Of a layer that slides."""
        window = self.values.get("sliding_window")
        if window is None or not self.values.get("use_sliding_window", True):
            raise EngineError(
                "config.json has layers of sliding attention and no window for them: see "
                "layer_types, sliding_window and use_sliding_window"
            )
        if int(window) < 1:
            raise EngineError(f"config.json has a sliding_window of {window}: nothing is seen")
        return int(window)

    def _layer_kinds(self) -> list[str]:
        """Of each layer, as `layer_types` has them."""
        values = self.values
        count = int(values["num_hidden_layers"])
        kinds = values.get("layer_types") if self.family in BY_LAYER_TYPES else None
        other = _RECURRENT if self.family in OF_DELTA_RULE else "sliding_attention"
        if kinds is None and other == _RECURRENT:
            interval = int(values["full_attention_interval"])
            kinds = [
                other if (layer + 1) % interval else "full_attention" for layer in range(count)
            ]
        elif kinds is None:
            kinds = [other if self._slides(layer) else "full_attention" for layer in range(count)]
        if len(kinds) != count or not set(kinds) <= {"full_attention", other}:
            raise UnsupportedModelError(f"layer_types {kinds} do not describe {count} known layers")
        if set(kinds) == {_RECURRENT}:
            raise UnsupportedModelError("none of its layers attends (layer_types)")
        return list(kinds)

    def _slides(self, layer: int) -> bool:
        values = self.values
        if self.family in ("mistral", "mixtral"):
            return values.get("sliding_window") is not None
        if self.family == "qwen3_moe":
            return bool(values["use_sliding_window"]) and values["sliding_window"] is not None
        if self.family == "qwen2_moe":
            is_early = layer < int(values.get("max_window_layers", 28))
            return bool(values["use_sliding_window"]) and is_early and layer % 2 == 0
        if self.family in ("qwen2", "qwen3"):
            is_late = layer >= int(values.get("max_window_layers", 28))
            has_window = values["sliding_window"] is not None
            return bool(values["use_sliding_window"]) and has_window and is_late
        if self.family in ("gemma2", "gpt_oss"):
            return layer % 2 == 0
        if self.family == "gemma3_text":
            return (layer + 1) % int(values["sliding_window_pattern"]) != 0
        return False


_RECURRENT = "linear_attention"
