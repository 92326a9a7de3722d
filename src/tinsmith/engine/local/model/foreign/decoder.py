"""A foreign model behind the interface of our decoder, and how it is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.engine.local.config import BaseWeights
from tinsmith.engine.local.model.blocks import Attention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts.foreign import Experts, is_experts
from tinsmith.engine.local.model.experts.steering import Steering
from tinsmith.engine.local.model.foreign.building import (
    build_untouched,
    text_model,
    transformers_config,
)
from tinsmith.engine.local.model.foreign.calls import (
    ATTENTION_NAME,
    AdaptedLinear,
    ForwardCall,
    calling,
    replace_attention,
    replace_experts,
    replace_fused_mlps,
    replace_recurrent_layers,
    replace_routers,
)
from tinsmith.engine.local.model.foreign.config import ForeignConfig
from tinsmith.engine.local.model.foreign.describing import differs, does_not_run, nearest
from tinsmith.engine.local.model.foreign.inkling import FusedMlps
from tinsmith.engine.local.model.foreign.masks import check_masks
from tinsmith.engine.local.model.images.settings import model_class
from tinsmith.engine.local.model.images.vision import TOWER_ATTENTION, Vision
from tinsmith.engine.local.model.inputs import Seen
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.loading import check_unread
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.sources import quiet_transformers
from tinsmith.engine.local.model.verifying.comparison import agree, our_logits, own_logits
from tinsmith.engine.local.ranks.group import ALONE, Ranks
from tinsmith.engine.local.ranks.models import cut_config
from tinsmith.engine.stored_tensors import stored_tensors, weight_files
from tinsmith.errors import EngineError


def load_foreign(
    folder: Path,
    config: ForeignConfig,
    device: torch.device,
    dtype: torch.dtype,
    base_weights: BaseWeights = "full",
    image_cache_bytes: int = 0,
    ranks: Ranks = ALONE,
) -> ForeignDecoder:
    """The model in memory, after its logits were found near those of its own code, on the device
    and in the type in which it is served. `trial` has compared them exactly.

    Weights in few bits come after that: it is there in full for a moment, on the CPU, and on the
    device never. Of several ranks each reads the whole model, on the CPU, and keeps its part.
    """
    model = _read(folder, config, dtype)
    model = model.eval().requires_grad_(False)
    if ranks.count == 1 and base_weights == "full":
        model = model.to(device)
    expected = own_logits(model, config)
    if ranks.count > 1:
        config = cut_config(config, ranks.index, ranks.count)
        _keep_part(model, config)
        model = model.to(device)
    decoder = ForeignDecoder(config, model, image_cache_bytes, ranks)
    try:
        check_masks(decoder.text, config, decoder.device)
        logits = our_logits(decoder)
    except (EngineError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # foreign code: whatever it raises means that it does not fit
        raise UnsupportedModelError(f"{does_not_run(config, error)}; {nearest(folder)}") from error
    if not agree(logits[:, : expected.shape[1]], expected.to(decoder.device), dtype):
        raise UnsupportedModelError(f"{differs(config)}; {nearest(folder)}")
    decoder.quantize(base_weights, device)
    return decoder


def check_tensors(folder: Path, config: ForeignConfig) -> None:
    """Refuse files that lack a tensor, or have one of another shape, by their headers alone."""
    files = weight_files(folder)
    if not files:
        raise EngineError(f"no safetensors files in {folder}; convert the model to safetensors")
    shapes = {name: tensor.shape for name, tensor in stored_tensors(files).items()}
    with torch.device("meta"):
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
        model = build_untouched(transformers_config(folder), config.images)
    _loaded(folder, type(model), None, config=model.config, state_dict=tensors, device_map="meta")


def _read(folder: Path, config: ForeignConfig, dtype: torch.dtype) -> Any:
    """The model as its files have it."""
    settings = transformers_config(folder)
    return _loaded(
        folder,
        model_class(settings.model_type, config.images),
        folder,
        config=settings,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        trust_remote_code=False,
    )


def _loaded(folder: Path, model_class: Any, source: Path | None, **options: Any) -> Any:
    """A model that `transformers` loads. Where files lack a weight, it draws one at random, another
    each time: that is refused."""
    try:
        with quiet_transformers():
            model, found = model_class.from_pretrained(source, output_loading_info=True, **options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise EngineError(f"the weights of {folder} could not be read: {error}") from error
    if missing := sorted(found["missing_keys"]):
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise EngineError(f"the model in {folder} has no tensor {missing[0]!r}{others}")
    _check_unexpected(folder, found["unexpected_keys"])
    return model


_OF_LAYER = re.compile(r"(model|backbone|language_model)\.layers\.(\d+)\.")


def _check_unexpected(folder: Path, names: Iterable[str]) -> None:
    """Refuse what files say of layers beyond the settings; further tokens' predictors may follow
    the last of them."""
    settings = transformers_config(folder).get_text_config()
    num_layers, num_predictors = (
        getattr(settings, name, None) or 0
        for name in ("num_hidden_layers", "num_nextn_predict_layers")
    )
    stored = stored_tensors(weight_files(folder))
    predictors = range(num_layers, num_layers + num_predictors)
    found = [(name, _OF_LAYER.search(name)) for name in sorted(names) if name in stored]
    beyond = [name for name, layer in found if layer and int(layer[2]) not in predictors]
    check_unread(folder, beyond, lambda name: bool(stored[name].read().any()))


def _keep_part(model: nn.Module, config: ForeignConfig) -> None:
    """Keep of each expert what is this rank's."""
    assert config.cut is not None and config.cut.experts is not None, "experts are what is cut"
    for name, module in model.named_modules():
        if is_experts(module):
            Experts(name, module).keep(config.cut.experts)


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
        self.text = text_model(model)
        if config.images is not None:
            tower = model.base_model.visual
            tower.set_attn_implementation(TOWER_ATTENTION)
            self.vision = Vision(config.images, tower, image_cache_bytes)
        head = model.get_output_embeddings()
        self.head = Linear(head.weight, _head_bias(head, config.num_logits))
        self.text.set_attn_implementation(ATTENTION_NAME)
        self._linears_adapted = [
            AdaptedLinear(model.get_submodule(projection.name), projection)
            for projection in config.projections
            if projection.part != "unembed"
            and projection.experts is None
            and isinstance(_module_of(model, projection.name), nn.Linear)
        ]
        self._experts = replace_experts(model)
        self._mlps = replace_fused_mlps(model)
        replace_attention(model)
        if config.routers is not None:
            replace_routers(model, config.routers)
        replace_recurrent_layers(model)

    @property
    def kept_bytes_a_token(self) -> None:
        """What foreign modules keep is theirs to know."""

    @property
    def packed_bytes(self) -> int:
        return 0

    @property
    def stream_dtype(self) -> torch.dtype:
        """That of the weights: the modules of `transformers` round after each operation."""
        return self.dtype

    def allow_packing(self) -> None:
        """Nothing: the products are those of `transformers`."""

    @property
    def nbytes(self) -> int:
        quantized = sum(each.quantized_bytes for each in self._rounded())
        return quantized + sum(parameter.nbytes for parameter in self._model.parameters())

    def _rounded(self) -> list[AdaptedLinear | Experts | FusedMlps]:
        """What is kept in few bits, where that is asked for."""
        return [*self._linears_adapted, *self._experts, *self._mlps]

    def quantize(self, kind: BaseWeights, device: torch.device) -> None:
        """Keep the weights of its linear layers and experts in few bits, all on this device."""
        if kind == "full":
            return
        for each in self._rounded():
            each.quantize(kind, device)
        # Parameters are moved in place: whoever holds one sees it there.
        self._model.to(device)
        self.device = device

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        adapters: AdapterSegments,
        *,
        kept_layers: int | None = None,
        seen: Seen | None = None,
        steering: Steering | None = None,
    ) -> Tensor:
        """As in `Decoder`; activations are kept, of however many layers they are to be."""
        inputs: dict[str, Any]
        if seen is None:
            inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
        else:
            inputs = self._with_images(tokens, positions, seen)
        call = ForwardCall(self.config, attention, adapters, self.ranks, positions, steering)
        with calling(call):
            hidden: Tensor = self.text(**inputs, use_cache=False).last_hidden_state[0]
        divisor = self.config.hidden_divisor
        return hidden if divisor == 1.0 else hidden / divisor

    def _with_images(self, tokens: Tensor, positions: Tensor, seen: Seen) -> dict[str, Any]:
        """Embeddings, with those of images in their places, and positions on three axes."""
        x = self._model.get_input_embeddings()(tokens.clamp(min=0))
        inputs = {
            "inputs_embeds": seen.among(x)[None],
            "position_ids": seen.on_axes(positions)[:, None],
        }
        deep = list(seen.features[1:])
        if deep:
            is_seen = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, seen.rows, True)
            inputs |= {"visual_pos_masks": is_seen[None], "deepstack_visual_embeds": deep}
        return inputs


_NEVER = -1e4
"""A logit far below all others. Unlike infinity it makes no product with zero undefined."""


def _head_bias(head: Any, num_logits: int | None) -> Tensor | None:
    """The bias of an unembedding, some of whose last rows may be of tokens that are never next."""
    bias: Tensor | None = head.bias
    if num_logits is None or num_logits >= len(head.weight):
        return bias
    bias = head.weight.new_zeros(len(head.weight)) if bias is None else bias.detach().clone()
    bias[num_logits:] = _NEVER
    return bias


def _module_of(model: nn.Module, name: str) -> nn.Module | None:
    """None where the adapters of a projection have a name of their own."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
