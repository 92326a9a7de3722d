"""`adapter_config.json`, PEFT's description of an adapter: ours written, anybody's read.

PEFT knows many variants of LoRA. We hold the plain one with alpha 32; a plain adapter with
another alpha is the same adapter with B scaled. Everything else is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.engine.local.model.lora import ALPHA
from tinsmith.errors import ValidationError

MAX_JSON_BYTES = 2**20

# Settings that change the mathematics when they are set to anything that is not empty.
_VARIANTS = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
    "velora_config",
)
# Initialisations that leave the base model's weights as they are.
_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What we need to know of an adapter that PEFT wrote."""

    rank: int
    b_factor: float
    """What B is multiplied by so that alpha 32 gives the adapter's own scale."""


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
        if settings.get(key):
            raise ValidationError(
                f"this variant of LoRA is not supported, got {settings[key]!r}", f"{name}.{key}"
            )
    if settings.get("init_lora_weights") not in _HARMLESS_STARTS:
        raise ValidationError(
            f"{settings['init_lora_weights']!r} changes the base model's weights; convert the "
            "adapter to a plain one with PEFT first",
            f"{name}.init_lora_weights",
        )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValidationError(f"must be a positive whole number, got {rank!r}", f"{name}.r")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValidationError(f"must be a number, got {alpha!r}", f"{name}.lora_alpha")
    return PeftConfig(rank=rank, b_factor=alpha / ALPHA)


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
