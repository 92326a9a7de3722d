"""`adapter_config.json`, PEFT's description of an adapter: ours written, anybody's read.

PEFT knows many variants of LoRA. We hold the plain one with one rank and alpha 32; an adapter with
another scale, or a scale of each module's own, is the same adapter with B scaled. Everything else
is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.engine.local.model.lora import ALPHA
from tinsmith.errors import ValidationError

MAX_JSON_BYTES = 2**20

_NAME = re.compile(r"[\w.]+", re.ASCII)

# Settings that change the mathematics when they are set to anything that is not empty.
_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
_REASONS = {
    "modules_to_save": "whole modules were trained beside the adapter, and only low-rank changes "
    "can be held; train them as target_modules",
    "target_parameters": "adapters of parameters are not supported; adapters of experts are read "
    "where each expert has tensors of its own",
}
# Initialisations that leave the base model's weights as they are.
_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """What we need to know of an adapter that PEFT wrote."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """Ranks of modules that have one of their own, by the ends of their names."""
    alphas: Mapping[str, float]
    is_rank_stabilized: bool

    def rank_of(self, module: str) -> int:
        return _of_module(self.ranks, module, self.rank)

    def b_factor(self, module: str, rank: int) -> float:
        """What a module's B is multiplied by to have its own scale in an adapter of ours, whose
        rank is `rank` and alpha 32."""
        own = self.rank_of(module)
        alpha = _of_module(self.alphas, module, self.alpha)
        return alpha * rank / ((math.sqrt(own) if self.is_rank_stabilized else own) * ALPHA)


def peft_config(base_model: str, rank: int, modules: Iterable[str]) -> dict[str, Any]:
    """The description of one of our adapters; `modules` are the full names of what it changes."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(_targets(list(modules))),
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def _targets(modules: list[str]) -> set[str]:
    """Last parts of names, by which PEFT finds them all; the part of a model that sees images has
    modules of the same names, so beside it they are whole."""
    if any(".language_model." in module for module in modules):
        return set(modules)
    return {module.rsplit(".", 1)[-1] for module in modules}


def read_peft_config(path: Path) -> PeftConfig:
    """Read a description, refusing the kinds of adapter that we cannot hold."""
    settings = read_json(path)
    name = path.name
    if settings.get("peft_type") != "LORA":
        raise ValidationError(
            f"must be LORA, got {settings.get('peft_type')!r}", f"{name}.peft_type"
        )
    if settings.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValidationError(
            f"must be CAUSAL_LM, got {settings['task_type']!r}", f"{name}.task_type"
        )
    if settings.get("bias", "none") != "none":
        raise ValidationError(
            f"trained biases are not supported, got {settings['bias']!r}", f"{name}.bias"
        )
    for key in _VARIANTS:
        if settings.get(key) and not (key == "target_parameters" and _are_matrices(settings[key])):
            reason = _REASONS.get(key, "this variant of LoRA is not supported")
            raise ValidationError(f"{reason}; got {settings[key]!r}", f"{name}.{key}")
    if settings.get("init_lora_weights") not in _HARMLESS_STARTS:
        raise ValidationError(
            f"{settings['init_lora_weights']!r} changes the base model's weights; convert the "
            "adapter to a plain one with PEFT first",
            f"{name}.init_lora_weights",
        )
    return PeftConfig(
        rank=_rank(settings.get("r"), f"{name}.r"),
        alpha=_number(settings.get("lora_alpha"), f"{name}.lora_alpha"),
        ranks={
            key: _rank(value, f"{name}.rank_pattern.{key}")
            for key, value in _pattern(settings, "rank_pattern", name).items()
        },
        alphas={
            key: _number(value, f"{name}.alpha_pattern.{key}")
            for key, value in _pattern(settings, "alpha_pattern", name).items()
        },
        is_rank_stabilized=bool(settings.get("use_rslora")),
    )


def _are_matrices(parameters: object) -> bool:
    """Of linear modules, whose adapters are those of the modules, in names and in effect."""
    return isinstance(parameters, list) and all(
        isinstance(each, str) and each.endswith("_proj.weight") for each in parameters
    )


def _rank(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValidationError(f"must be a positive whole number, got {value!r}", path)
    return value


def _number(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ValidationError(f"must be a number below 1e30, got {str(value)[:40]}", path)
    return value


def _pattern(settings: Mapping[str, Any], key: str, name: str) -> Mapping[str, object]:
    """Values by the ends of modules' names. To PEFT they are regular expressions, which could take
    us any time to match."""
    pattern = settings.get(key) or {}
    if not isinstance(pattern, dict):
        raise ValidationError(f"must be an object, got {pattern!r}", f"{name}.{key}")
    for end in pattern:
        if not _NAME.fullmatch(end):
            raise ValidationError(
                f"{end[:200]!r} is not the end of a module's name; regular expressions are not "
                "supported: write an entry for each module",
                f"{name}.{key}",
            )
    return pattern


_V = TypeVar("_V")


def _of_module(values: Mapping[str, _V], module: str, default: _V) -> _V:
    """The first value, in the file's order, whose key the module's name ends with."""
    parts = module.split(".")
    ends = {".".join(parts[start:]) for start in range(len(parts))} & values.keys()
    return (
        next((value for end, value in values.items() if end in ends), default) if ends else default
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from a file that may come from anywhere."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValidationError(f"is larger than {MAX_JSON_BYTES} bytes", path.name)
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValidationError("there is no such file in the checkpoint", path.name) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            raise
        raise ValidationError(f"is not valid JSON: {error}", path.name) from None
    if not isinstance(settings, dict):
        raise ValidationError("must hold a JSON object", path.name)
    return settings
