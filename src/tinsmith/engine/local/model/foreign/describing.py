"""What a foreign model is like: found by watching one forward pass without weights, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tinsmith.engine.local.model.experts.foreign import Experts, is_experts
from tinsmith.engine.local.model.families import Part, Projection
from tinsmith.engine.local.model.foreign.building import build_empty, text_model
from tinsmith.engine.local.model.foreign.calls import ProbeCall, calling
from tinsmith.engine.local.model.foreign.config import ForeignConfig
from tinsmith.engine.local.model.foreign.inkling import FusedMlps, has_fused_gate
from tinsmith.engine.local.model.foreign.routers import find_routers
from tinsmith.engine.local.model.images.settings import read_image_rules
from tinsmith.engine.local.model.model_types import nearest_type, needed_transformers
from tinsmith.engine.local.model.recurrent.layers import recurrent_layer
from tinsmith.engine.local.model.recurrent.recurrence import StateShape
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import IN_PARTS, read_settings

_PROBE_TOKENS = 8


def read_foreign_config(folder: Path, reason: UnsupportedModelError) -> ForeignConfig:
    """The model's shape, or a refusal that begins with why our own decoder cannot run it."""
    settings = read_settings(folder / "config.json")
    model_type = str(settings.get("model_type"))
    if model_type in IN_PARTS:
        raise UnsupportedModelError(
            f"{reason}; and the language part of {model_type} runs in our own decoder only; "
            f"{nearest(folder)}"
        )
    named = settings.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else model_type
    if (needed := needed_transformers(model_type)) is not None:
        raise UnsupportedModelError(
            f"{model_type} needs transformers {needed} or later, and {version('transformers')} is "
            f"installed: pip install 'transformers>={needed}'"
        )
    try:
        images = read_image_rules(folder)
        with torch.device("meta"):
            model = build_empty(folder, images)
        return replace(describe(model, architecture), images=images)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{reason}; and {architecture} cannot run: {error}; {nearest(folder)}"
        ) from None
    except Exception as error:  # foreign code: whatever it raises means that it does not fit
        said = str(error).partition("\n")[0]  # behind it are the names of hundreds of classes
        raise UnsupportedModelError(
            f"{reason}; and transformers could not run {architecture}: {said}; {nearest(folder)}"
        ) from error


def nearest(folder: Path) -> str:
    """What ends a refusal: a type that does work."""
    model_type = str(read_settings(folder / "config.json").get("model_type"))
    return f"the nearest type that works is {nearest_type(model_type)!r}"


def differs(config: ForeignConfig) -> str:
    """What is said of a model whose logits are not those of its own code."""
    return (
        f"{config.architecture} does more between hidden states and logits, or in its attention, "
        "than we know of"
    )


def does_not_run(config: ForeignConfig, error: Exception) -> str:
    return (
        f"{config.architecture} does not run with our attention, experts and adapters "
        f"({type(error).__name__}: {error})"
    )


def describe(model: Any, architecture: str) -> ForeignConfig:
    """The shape of a model that has no weights and calls our attention."""
    settings = model.config.get_text_config()
    projections = tuple(_projections(model))
    _refuse_changing_rope(settings)
    probe = ProbeCall(_PROBE_TOKENS)
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.zeros_like(tokens)
    with calling(probe), torch.no_grad():
        text_model(model)(input_ids=tokens, position_ids=positions, use_cache=False)
    _check_layers(settings, {*probe.specs, *probe.recurring})
    if not probe.shapes:
        raise UnsupportedModelError("none of its layers attends (layers_block_type, layer_types)")
    heads, kv_heads, head_dim = (max(sizes) for sizes in zip(*probe.shapes, strict=True))
    # Where layers have fewer key/value heads than others, each is there several times.
    if any(kv_heads % of_keys or of_queries % kv_heads for of_queries, of_keys, _ in probe.shapes):
        raise UnsupportedModelError("its layers differ in the number of heads")
    eos = model.generation_config.eos_token_id
    return ForeignConfig(
        architecture=architecture,
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=getattr(settings, "intermediate_size", None) or 0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_length=settings.max_position_embeddings,
        norm_eps=0.0,
        layers=tuple(probe.specs[layer] for layer in sorted(probe.specs)),
        attending=tuple(sorted(probe.specs)),
        recurring=tuple(sorted(probe.states)),
        state=_common_state(list(probe.states.values())),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        is_tied=bool(getattr(model.config, "tie_word_embeddings", False)),
        final_softcap=_of_type(settings, "final_logit_softcapping"),
        projections=projections,
        routers=find_routers(model),
        hidden_divisor=float(_of_type(settings, "logits_mup_width_multiplier") or 1.0),
        num_logits=_of_type(settings, "unpadded_vocab_size"),
    )


def _of_type(settings: Any, name: str) -> Any:
    """Of types that have one; a setting that its type does not know becomes an attribute, too."""
    of_type = type(settings)
    is_known = hasattr(of_type, name) or name in inspect.signature(of_type).parameters
    return getattr(settings, name, None) if is_known else None


def _refuse_unknown_experts(model: Any) -> None:
    """Experts in another form than `is_experts` knows would go without adapters."""
    settings = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    has_some = any(getattr(settings, name, None) for name in names)
    # Settings may speak of experts where no layer has any.
    modules = dict(text_model(model).named_modules())
    if (
        has_some
        and not any(map(is_experts, modules.values()))
        and any(_may_be_experts(name, module) for name, module in modules.items())
    ):
        raise UnsupportedModelError("its experts are not in the form that transformers gives them")


def _may_be_experts(name: str, module: nn.Module) -> bool:
    """By its name, or because it has a matrix for each of several."""
    if "expert" in name and "shared_expert" not in name:
        return True
    has_stack = any(weight.ndim == 3 for weight in module.parameters(recurse=False))
    return has_stack and not isinstance(module, nn.Conv1d)


def _check_layers(settings: Any, known: set[int]) -> None:
    """Refuse a model some of whose layers may mix tokens in a way that was not seen."""
    kinds = getattr(settings, "layers_block_type", None) or ()
    without_mixing = {layer for layer, kind in enumerate(kinds) if kind in _MIXING_NOTHING}
    num_layers = settings.num_hidden_layers
    if known | without_mixing != set(range(num_layers)):
        raise UnsupportedModelError(
            f"{len(known)} of its {num_layers} layers attend in the usual way or are recurrent "
            "in one that we know"
        )


def _common_state(states: list[StateShape]) -> StateShape | None:
    if not states:
        return None
    # Without a memory, what is kept of narrow layers is filled up to that of the widest.
    channels = max(state.channels for state in states)
    alike = {state if state.num_heads else replace(state, channels=channels) for state in states}
    if len(alike) != 1:
        raise UnsupportedModelError("its recurrent layers differ in the size of their states")
    return replace(alike.pop(), num_layers=len(states))


def _refuse_changing_rope(settings: Any) -> None:
    """Frequencies that follow the longest sequence at hand would let neighbours change results."""
    rope = getattr(settings, "rope_parameters", None) or {}
    kinds = {
        str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)
    }
    if changing := kinds & {"dynamic", "longrope"}:
        raise UnsupportedModelError(f"the rope_type {min(changing)!r} is not supported")


_NOT_ADAPTED = ("q_b_proj", "kv_b_proj", "shared_expert_gate")
"""Linear layers without an adapter, as in the hosted service: the second halves of projections
that are of low rank themselves, and the weight of a shared expert."""


def _part(model: nn.Module, name: str) -> Part:
    """By the words of its module's path and class; some call every kind of layer a mixer."""
    path = name.rpartition(".")[0]
    kind = type(model.get_submodule(path)).__name__
    return "attn" if "att" in f"{path} {kind}".lower() else "mlp"


_MIXING_NOTHING = ("mlp", "moe")
"""Kinds of layers in which tokens do not see each other, where each layer is of one kind."""


def _parts(model: Any) -> set[Part]:
    """What the layers of a model are made of."""
    kinds = getattr(model.config.get_text_config(), "layers_block_type", None)
    if not kinds:
        return {"attn", "mlp"}
    return {"mlp" if kind in _MIXING_NOTHING else "attn" for kind in kinds}


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer and does no more: some routers are linear layers that choose."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _projections(model: Any) -> Iterator[Projection]:
    """What is adapted inside the blocks, and the unembedding under the name `lm_head`."""
    _refuse_unknown_experts(model)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError("its unembedding is not an ordinary linear layer")
    found: set[Part] = set()
    head_name = ""
    # What sees and hears is frozen.
    not_ours: tuple[str, ...] = ("model.visual.", "model.vision_tower.", "model.audio_tower.")
    for name, module in model.named_modules():
        layer = recurrent_layer(module)
        if module is head:
            head_name = name
        elif is_experts(module):
            found.add("mlp")
            yield from Experts(name, module).projections()
        elif has_fused_gate(module):
            found.add("mlp")
            yield from FusedMlps(name, module).projections()
            not_ours += (f"{name}.",)
        elif layer is not None:
            found.add("attn")
            yield from layer.projections(name, module)
            not_ours += (f"{name}.",)
        elif name.startswith(not_ours):
            continue
        elif _is_linear(module) and name.rpartition(".")[2] not in _NOT_ADAPTED:
            part = _part(model, name)
            found.add(part)
            yield Projection(
                layer=None,
                name=name,
                part=part,
                inputs=module.in_features,
                modules=(name,),
                outputs=(module.out_features,),
            )
    if found != _parts(model):
        raise UnsupportedModelError("its projections are not ordinary linear layers")
    yield Projection(
        layer=None,
        name="lm_head",
        part="unembed",
        inputs=head.in_features,
        modules=(head_name,),
        outputs=(head.out_features,),
    )
