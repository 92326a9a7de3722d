"""Causal models outside our families, through `transformers`' own modules.

`transformers` lets a model's attention be a function of ours, and positions be given; that is
all our packed batches need, so such a model trains and samples through the same interface as
`decoder.Decoder`, only slower. Linear layers inside its blocks become `lora_linear`, layers of
experts `experts.Experts`, and the recurrent layers we know (`recurrent.layers`) are computed by us.

What the model asks of attention is found out by watching one forward pass without weights.
Whatever does not fit (other recurrent layers, projections that are not linear layers, another way
of attending) is refused, and when a model is loaded its logits are compared with
those of an untouched copy of its code: a model that would be slightly wrong is not served.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.config import BaseWeights
from tinsmith.engine.local.model.adapted_linear import lora_linear
from tinsmith.engine.local.model.blocks import Attention
from tinsmith.engine.local.model.comparison import agree, our_logits, own_logits
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts import Experts, is_experts
from tinsmith.engine.local.model.families import (
    FAMILIES,
    AttentionSpec,
    DecoderConfig,
    Part,
    Projection,
    read_settings,
)
from tinsmith.engine.local.model.images.settings import model_class, read_image_rules
from tinsmith.engine.local.model.images.vision import Vision
from tinsmith.engine.local.model.inputs import Seen
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.model_types import nearest_type, needed_transformers
from tinsmith.engine.local.model.quantized import quantize
from tinsmith.engine.local.model.recurrent.layers import RecurrentLayer, recurrent_layer
from tinsmith.engine.local.model.recurrent.recurrence import StateShape
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.sources import quiet_transformers
from tinsmith.engine.local.ranks.group import ALONE, Ranks
from tinsmith.engine.local.ranks.models import cut_config

ATTENTION_NAME = "tinsmith"
"""What our attention is called among `transformers`' attention functions."""

_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig(DecoderConfig):
    """The shape of a model that runs through `transformers`' modules."""

    attending: tuple[int, ...]
    """The model's own numbers of the layers that attend; `layers` describes these."""

    recurring: tuple[int, ...]
    """Those of the recurrent layers."""


def is_foreign(config: DecoderConfig) -> bool:
    return isinstance(config, ForeignConfig)


def read_config(folder: Path, reason: UnsupportedModelError) -> ForeignConfig:
    """The model's shape, or a refusal that begins with why our own decoder cannot run it."""
    settings = read_settings(folder / "config.json")
    model_type = str(settings.get("model_type"))
    architecture = (settings.get("architectures") or [model_type])[0]
    nearest = f"the nearest type that works is {nearest_type(model_type)!r}"
    if (needed := needed_transformers(model_type)) is not None:
        raise UnsupportedModelError(
            f"{model_type} needs transformers {needed} or later, and {version('transformers')} is "
            f"installed: pip install 'transformers>={needed}'"
        )
    try:
        images = read_image_rules(folder)
        with torch.device("meta"):
            model = _build_empty(folder, images)
        return replace(_describe(model, str(architecture)), images=images)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{reason}; and {architecture} cannot run: {error}; {nearest}"
        ) from None
    except Exception as error:  # foreign code: whatever it raises means that it does not fit
        raise UnsupportedModelError(
            f"{reason}; and transformers could not run {architecture}: {error}; {nearest}"
        ) from error


def load(
    folder: Path,
    config: ForeignConfig,
    device: torch.device,
    dtype: torch.dtype,
    base_weights: BaseWeights = "full",
    image_cache_bytes: int = 0,
    ranks: Ranks = ALONE,
) -> ForeignDecoder:
    """The model in memory, after its logits were found equal to those of its own code.

    Weights in few bits come after that, so that for a moment it is there in full. Of several ranks
    each reads the whole model, on the CPU, and keeps its part.
    """
    with quiet_transformers():
        settings = _transformers_config(folder)
        model = model_class(settings.model_type, config.images).from_pretrained(
            folder,
            config=settings,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            trust_remote_code=False,
        )
    model = model.eval().requires_grad_(False)
    if ranks.count == 1:
        model = model.to(device)
    expected = own_logits(model, config)
    if ranks.count > 1:
        config = cut_config(config, ranks.index, ranks.count)
        _keep_part(model, config)
        model = model.to(device)
    decoder = ForeignDecoder(config, model, image_cache_bytes, ranks)
    if not agree(our_logits(decoder), expected.to(device), dtype):
        raise UnsupportedModelError(
            f"{config.architecture} does more between hidden states and logits, or in its "
            f"attention, than we know of; supported model types: {', '.join(FAMILIES)}"
        )
    decoder.quantize(base_weights)
    return decoder


class ForeignDecoder(Decoder):
    """A `transformers` model behind the interface of our decoder."""

    config: ForeignConfig

    def __init__(
        self,
        config: ForeignConfig,
        model: Any,
        image_cache_bytes: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.device = model.device
        self.dtype = model.dtype
        self._model = model
        self._text = _text_model(model)
        if config.images is not None:
            self.vision = Vision(config.images, model.base_model.visual, image_cache_bytes)
        head = model.get_output_embeddings()
        self.head = Linear(head.weight, head.bias)
        self._text.set_attn_implementation(ATTENTION_NAME)
        self._linears_adapted = [
            _AdaptedLinear(model.get_submodule(projection.name), projection)
            for projection in config.projections
            if projection.part != "unembed" and projection.experts is None
        ]
        _replace_experts(model)
        _replace_recurrent_layers(model)

    @property
    def packed_bytes(self) -> int:
        return 0

    def allow_packing(self) -> None:
        """Nothing: the products are those of `transformers`."""

    @property
    def nbytes(self) -> int:
        quantized = sum(linear.quantized_bytes for linear in self._linears_adapted)
        return quantized + sum(parameter.nbytes for parameter in self._model.parameters())

    def quantize(self, kind: BaseWeights) -> None:
        """Keep the weights of its linear layers in few bits."""
        if kind == "full":
            return
        if any(projection.experts is not None for projection in self.config.projections):
            raise UnsupportedModelError(
                f"base_weights = {kind!r} keeps linear layers in few bits, and most weights of "
                f"{self.config.architecture} are in experts; serve it with base_weights = 'full'"
            )
        for linear in self._linears_adapted:
            linear.quantize(kind)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        adapters: AdapterSegments,
        *,
        checkpoint_layers: bool = False,
        seen: Seen | None = None,
    ) -> Tensor:
        """As in `Decoder`; activations are kept whether or not layers are to be checkpointed."""
        inputs: dict[str, Any]
        if seen is None:
            inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
        else:
            inputs = self._with_images(tokens, positions, seen)
        with _calling(_ForwardCall(self.config, attention, adapters, self.ranks)):
            output = self._text(**inputs, use_cache=False)
        return output.last_hidden_state[0]

    def _with_images(self, tokens: Tensor, positions: Tensor, seen: Seen) -> dict[str, Any]:
        """Embeddings with what is seen in their place, and positions on three axes."""
        x = self._model.get_input_embeddings()(tokens.clamp(min=0))
        on_axes = positions.expand(3, -1).clone()
        on_axes[:, seen.rows] += seen.offsets
        features, *deep = seen.features
        inputs = {
            "inputs_embeds": x.index_copy(0, seen.rows, features.to(x.dtype))[None],
            "position_ids": on_axes[:, None],
        }
        if deep:
            is_seen = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, seen.rows, True)
            inputs |= {"visual_pos_masks": is_seen[None], "deepstack_visual_embeds": deep}
        return inputs


class _Call(Protocol):
    adapters: AdapterSegments

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor: ...

    def run_experts(self, experts: Experts, x: Tensor, choices: Tensor, shares: Tensor) -> Tensor:
        """From x (T, d), and the experts of each token and their shares (T, k)."""
        ...

    def recur(self, layer: RecurrentLayer, module: nn.Module, x: Tensor) -> Tensor: ...


class _ForwardCall:
    """What the modules need to know during one forward pass."""

    def __init__(
        self,
        config: ForeignConfig,
        attention: Attention,
        adapters: AdapterSegments,
        ranks: Ranks,
    ) -> None:
        self.config = config
        self.attention = attention
        self.adapters = adapters
        self.ranks = ranks

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        layer = self.config.attending.index(_number(module))
        size = v.shape[-1]
        q, k, v = (_widened(x[0].transpose(0, 1), self.config.head_dim) for x in (q, k, v))
        return self.attention(layer, q, k, v, options.get("s_aux"))[None, ..., :size]

    def run_experts(self, experts: Experts, x: Tensor, choices: Tensor, shares: Tensor) -> Tensor:
        return experts.run(x, choices, shares, self.adapters, self.ranks)

    def recur(self, layer: RecurrentLayer, module: nn.Module, x: Tensor) -> Tensor:
        place = self.config.recurring.index(_number(module))
        return layer.forward(module, x[0], self.attention.sequences, place)[None]


def _widened(heads: Tensor, head_dim: int) -> Tensor:
    """(N, heads, D) with zeros behind; they change nothing where keys and values differ in size."""
    missing = head_dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads


class _ProbeCall:
    """Watches what each layer asks of attention, and which layers are recurrent."""

    def __init__(self, num_tokens: int) -> None:
        self.adapters = AdapterSegments.whole(num_tokens)
        self.specs: dict[int, AttentionSpec] = {}
        self.shapes: set[tuple[int, int, int]] = set()
        self.states: dict[int, StateShape] = {}

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        layer = _number(module)
        if layer in self.specs:
            raise UnsupportedModelError("its attention layers are not numbered")
        if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
            raise UnsupportedModelError("its keys and values differ in number")
        if not getattr(module, "is_causal", True):
            raise UnsupportedModelError("its attention is not causal")
        scale = options.get("scaling")
        self.specs[layer] = AttentionSpec(
            scale=float(scale) if scale is not None else q.shape[-1] ** -0.5,
            rope=None,
            softcap=options.get("softcap"),
            window=options.get("sliding_window"),
        )
        self.shapes.add((q.shape[1], k.shape[1], max(q.shape[3], v.shape[3])))
        return v.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

    def run_experts(self, experts: Experts, x: Tensor, choices: Tensor, shares: Tensor) -> Tensor:
        # Which experts are chosen depends on numbers that are not there.
        return torch.empty_like(x)

    def recur(self, layer: RecurrentLayer, module: nn.Module, x: Tensor) -> Tensor:
        self.states[_number(module)] = layer.state_shape(module)
        return torch.empty_like(x)


def _number(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError("its attention layers are not numbered")
    return layer


_CURRENT: ContextVar[_Call] = ContextVar("foreign_call")


@contextmanager
def _calling(call: _Call) -> Iterator[None]:
    token = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, **options: Any
) -> tuple[Tensor, None]:
    """`transformers`' form: (1, heads, N, D) in, (1, N, heads, D) out."""
    return _CURRENT.get().attend(module, query, key, value, options), None


class _AdaptedLinear:
    """Takes the place of a linear layer, of which adapters extend the first rows or all."""

    def __init__(self, module: Any, projection: Projection) -> None:
        self.quantized_bytes = 0
        self._module = module
        self._name = projection.name
        num_adapted = sum(projection.outputs)
        sizes = [size for size in (num_adapted, module.out_features - num_adapted) if size]
        weights = module.weight.split(sizes)
        biases = [None] * len(sizes) if module.bias is None else module.bias.split(sizes)
        self._parts = [Linear(*each) for each in zip(weights, biases, strict=True)]
        module.forward = self._forward

    def quantize(self, kind: BaseWeights) -> None:
        weights = [quantize(part.weight, kind) for part in self._parts]
        self._parts = [
            Linear(weight, part.bias) for weight, part in zip(weights, self._parts, strict=True)
        ]
        self._module.weight = None
        self.quantized_bytes = sum(weight.nbytes for weight in weights)

    def _forward(self, x: Tensor) -> Tensor:
        adapters = _CURRENT.get().adapters
        flat = x.reshape(-1, self._module.in_features)
        # Nothing is adapted under the names of further parts.
        names = [self._name, f"{self._name} others"]
        outputs = [
            lora_linear(flat, part, adapters, None, name)
            for part, name in zip(self._parts, names, strict=False)
        ]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return y.view(*x.shape[:-1], self._module.out_features)


def _replace_experts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_experts(module):
            module.forward = functools.partial(_experts_forward, Experts(name, module))


def _keep_part(model: nn.Module, config: ForeignConfig) -> None:
    """Keep of each expert what is this rank's."""
    assert config.cut is not None and config.cut.experts is not None, "experts are what is cut"
    for name, module in model.named_modules():
        if is_experts(module):
            Experts(name, module).keep(config.cut.experts)


def _experts_forward(experts: Experts, x: Tensor, choices: Tensor, shares: Tensor) -> Tensor:
    """In the form in which `transformers` calls a layer of experts."""
    return _CURRENT.get().run_experts(experts, x, choices, shares)


def _replace_recurrent_layers(model: nn.Module) -> None:
    for module in model.modules():
        layer = recurrent_layer(module)
        if layer is not None:
            module.forward = functools.partial(_recurrent_forward, layer, module)


def _recurrent_forward(
    layer: RecurrentLayer, module: nn.Module, hidden_states: Tensor, **options: object
) -> Tensor:
    """As `transformers` calls it, which offers a cache and a mask that we have no use for."""
    return _CURRENT.get().recur(layer, module, hidden_states)


def _build_empty(folder: Path, images: ImageRules | None) -> Any:
    """The model without memory for its weights, calling our attention."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, _attention_function)
    config = _transformers_config(folder)
    built_by = model_class(config.model_type, images)
    text, classes = config.get_text_config(), MODEL_FOR_CAUSAL_LM_MAPPING
    # Older releases do not find the language part of a model that sees by themselves here.
    is_same = classes.get(type(config), None) is classes.get(type(text), None)
    if built_by is AutoModelForCausalLM and is_same:
        config = text
    model = built_by.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    _replace_experts(model)
    _replace_recurrent_layers(model)
    return model


def _text_model(model: Any) -> Any:
    """The part that reads embeddings: all below the unembedding, or beside a vision tower."""
    return getattr(model.base_model, "language_model", model.base_model)


_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Types whose modules `transformers` has under another name."""


def _transformers_config(folder: Path) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    settings = read_settings(folder / "config.json")
    model_type = _SAME_AS.get(str(settings.get("model_type")))
    if model_type is None:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return CONFIG_MAPPING[model_type].from_dict({**settings, "model_type": model_type})


def _describe(model: Any, architecture: str) -> ForeignConfig:
    settings = model.config.get_text_config()
    projections = tuple(_projections(model))
    _refuse_changing_rope(settings)
    probe = _ProbeCall(_PROBE_TOKENS)
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.zeros_like(tokens)
    with _calling(probe), torch.no_grad():
        _text_model(model)(input_ids=tokens, position_ids=positions, use_cache=False)
    _check_layers(settings, {*probe.specs, *probe.states})
    if len(probe.shapes) != 1:
        raise UnsupportedModelError("its layers differ in the number or size of heads")
    ((heads, kv_heads, head_dim),) = probe.shapes
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
        is_tied=bool(model.config.tie_word_embeddings),
        final_softcap=getattr(settings, "final_logit_softcapping", None),
        projections=projections,
    )


def _refuse_unknown_experts(model: Any) -> None:
    """Experts in another form than `is_experts` knows would go without adapters."""
    settings = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    has_some = any(getattr(settings, name, None) for name in names)
    # Settings may speak of experts where no layer has any.
    has_some &= "moe" in (getattr(settings, "layers_block_type", None) or ["moe"])
    if has_some and not any(is_experts(module) for module in model.modules()):
        raise UnsupportedModelError("its experts are not in the form that transformers gives them")


def _check_layers(settings: Any, known: set[int]) -> None:
    """Refuse a model some of whose layers may mix tokens in a way that was not seen."""
    kinds = getattr(settings, "layers_block_type", None) or ()
    without_mixing = {layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe")}
    num_layers = settings.num_hidden_layers
    if known | without_mixing != set(range(num_layers)):
        raise UnsupportedModelError(
            f"{len(known)} of its {num_layers} layers attend in the usual way or are recurrent "
            "in one that we know"
        )


def _common_state(states: list[StateShape]) -> StateShape | None:
    if not states:
        return None
    if len(set(states)) != 1:
        raise UnsupportedModelError("its recurrent layers differ in the size of their states")
    return replace(states[0], num_layers=len(states))


def _refuse_changing_rope(settings: Any) -> None:
    """Frequencies that follow the longest sequence at hand would let neighbours change results."""
    rope = getattr(settings, "rope_parameters", None) or {}
    kinds = {
        str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)
    }
    if changing := kinds & {"dynamic", "longrope"}:
        raise UnsupportedModelError(f"rope scaling {min(changing)!r} is not supported")


_NOT_ADAPTED = ("q_b_proj", "kv_b_proj", "shared_expert_gate")
"""Linear layers without an adapter, as in the hosted service: the second halves of projections
that are of low rank themselves, and the weight of a shared expert."""


def _part(model: nn.Module, name: str) -> Part:
    """By the words of its module's path and class; some call every kind of layer a mixer."""
    path = name.rpartition(".")[0]
    kind = type(model.get_submodule(path)).__name__
    return "attn" if "att" in f"{path} {kind}".lower() else "mlp"


def _projections(model: Any) -> Iterator[Projection]:
    """What is adapted inside the blocks, and the unembedding under the name `lm_head`."""
    _refuse_unknown_experts(model)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError("its unembedding is not an ordinary linear layer")
    found: set[Part] = set()
    head_name = ""
    not_ours: tuple[str, ...] = ("model.visual.",)  # the vision tower is frozen
    for name, module in model.named_modules():
        layer = recurrent_layer(module)
        if module is head:
            head_name = name
        elif is_experts(module):
            found.add("mlp")
            yield from Experts(name, module).projections()
        elif layer is not None:
            found.add("attn")
            yield from layer.projections(name, module)
            not_ours += (f"{name}.",)
        elif name.startswith(not_ours):
            continue
        elif isinstance(module, nn.Linear) and name.rpartition(".")[2] not in _NOT_ADAPTED:
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
    if found != {"attn", "mlp"}:
        raise UnsupportedModelError("its projections are not ordinary linear layers")
    yield Projection(
        layer=None,
        name="lm_head",
        part="unembed",
        inputs=head.in_features,
        modules=(head_name,),
        outputs=(head.out_features,),
    )
