"""A foreign model is tried before it is served: does ours compute what its own code does?

The question is about code and settings, so it needs no weights. A small model is built from the
settings: one layer of each kind, a few experts, few rows of the vocabulary, random weights large
enough for every part to show. Its own code and our decoder around it are asked the same in float32,
sequences longer than a chunk and far positions included, and must agree to rounding. In bfloat16 a
fault of a percent would pass for rounding; here it is refused, whatever type the weights have.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.engine.local.model.foreign import inkling
from tinsmith.engine.local.model.foreign.building import (
    build_untouched,
    call_ours,
    text_model,
    transformers_config,
)
from tinsmith.engine.local.model.foreign.config import ForeignConfig
from tinsmith.engine.local.model.foreign.decoder import ForeignDecoder, check_tensors
from tinsmith.engine.local.model.foreign.describing import (
    describe,
    differs,
    does_not_run,
    nearest,
)
from tinsmith.engine.local.model.foreign.masks import check_masks
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.sources import quiet_transformers
from tinsmith.engine.local.model.verifying.comparison import Sequence, our_logits, own_logits
from tinsmith.engine.local.model.verifying.verification import TOLERANCE, remembered
from tinsmith.errors import EngineError
from tinsmith.memory import machine_bytes

logger = logging.getLogger(__name__)

_MAX_ROWS = 512
_MAX_EXPERTS = 8
_MAX_INNER = 256
_MAX_KINDS = 8
_NUM_TOKENS = 80
"""Of the longest sequence, which is longer than the chunks of the delta rule."""

_MAGNIFIED = 10
"""A difference of so many times what other last bits of the weights give is rounding."""

_MOST_ROUNDING = 1e-5
"""More of that is not taken into account."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_INNER = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
)


def try_out(folder: Path, config: ForeignConfig, cache_folder: Path) -> None:
    """Refuse a model whose logits under our decoder are not those of its own code, or whose files
    lack something. What was found is remembered, as `verification` does it."""

    def compared() -> float | None:
        check_tensors(folder, config)
        return difference(folder, config)

    _refuse(folder, config, lambda: remembered(folder, cache_folder, "transformers", compared))


def try_settings(folder: Path, config: ForeignConfig) -> None:
    """The same for a folder that has no weights."""
    _refuse(folder, config, lambda: difference(folder, config))


def _refuse(folder: Path, config: ForeignConfig, compare: Callable[[], float | None]) -> None:
    try:
        found = compare()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; {nearest(folder)}") from None
    if found is not None and not found <= TOLERANCE:
        raise UnsupportedModelError(
            f"{differs(config)}: in float32 their logits differ by {found:.2g} of the largest "
            f"(limit {TOLERANCE:g}); {nearest(folder)}"
        )


def difference(folder: Path, config: ForeignConfig) -> float | None:
    """The largest difference between the logits, relative to the largest logit.

    A model that cannot be made smaller is tried as it is, and is None where that takes too much
    memory: what it computes is then seen when it is loaded.
    """
    with quiet_transformers(), torch.random.fork_rng(devices=()):
        try:
            settings, max_kinds = _smaller(transformers_config(folder)), _MAX_KINDS
            trial = _Trial(settings, config, max_kinds)
        except Exception as error:  # foreign code, on settings that its authors have not seen
            logger.info("%s cannot be made smaller: %s", folder.name, error)
            settings = transformers_config(folder)
            max_kinds = settings.get_text_config().num_hidden_layers
            if 4 * _num_parameters(settings, config) > machine_bytes() // 4:
                logger.warning("%s is too large to be tried before it is loaded", folder.name)
                return None
            trial = _Trial(settings, config, max_kinds)
        found = trial.difference()
        if found <= TOLERANCE:
            return found
        # The norms of small recurrent layers magnify rounding: how much, their own code says.
        again = _Trial(settings, config, max_kinds, is_rounded_otherwise=True)
        return max(found - _MAGNIFIED * min(again.distance(trial), _MOST_ROUNDING), 0.0)


class _Trial:
    """A small model with random weights, and what its own code makes of a question."""

    def __init__(
        self,
        settings: Any,
        config: ForeignConfig,
        max_kinds: int,
        *,
        is_rounded_otherwise: bool = False,
    ) -> None:
        settings = copy.deepcopy(settings)
        images = config.images
        if images is not None:
            images = replace(images, token_id=settings.image_token_id)
        with torch.device("meta"):
            self._model = build_untouched(settings, images)
        kept = _shorten(self._model, config, max_kinds)
        # What is found out about attention is what is tried, so that it is not found out again.
        described = describe(call_ours(copy.deepcopy(self._model)), config.architecture)
        specs = dict(zip(config.attending, config.layers, strict=True))
        self._config = replace(
            described,
            layers=tuple(specs[layer] for layer in kept if layer in specs),
            final_softcap=config.final_softcap,
            hidden_divisor=config.hidden_divisor,
            images=images,
        )
        _fill(self._model)
        if is_rounded_otherwise:
            _change_last_bits(self._model)
        self._sequences = tuple(_sequences(settings.get_text_config()))
        self._expected = own_logits(self._model, self._config, self._sequences)

    def difference(self) -> float:
        try:
            decoder = ForeignDecoder(self._config, self._model)
            check_masks(decoder.text, self._config, decoder.device)
            logits = our_logits(decoder, self._sequences)
        except (EngineError, MemoryError):
            raise
        except Exception as error:  # foreign code: whatever it raises means that it does not fit
            raise UnsupportedModelError(does_not_run(self._config, error)) from error
        return self._relative(logits)

    def distance(self, other: _Trial) -> float:
        """Between what both models' own codes give."""
        return self._relative(other._expected)

    def _relative(self, logits: Tensor) -> float:
        logits = logits[:, : self._expected.shape[1]]
        return float((logits - self._expected).abs().max() / self._expected.abs().max())


def _smaller(settings: Any) -> Any:
    """The same settings with fewer rows, experts and inner columns."""
    text = settings.get_text_config()
    _lower(text, "vocab_size", _MAX_ROWS)
    for part in {id(part): part for part in (settings, text)}.values():
        names = [name for name in vars(part) if name.endswith("_token_id")]
        for number, name in enumerate(names):
            if isinstance(getattr(part, name), int):
                setattr(part, name, text.vocab_size - 1 - number)
    for name in _INNER:
        _lower(text, name, _MAX_INNER)
    groups = getattr(text, "n_group", None) or 1
    least = max(_MAX_EXPERTS, getattr(text, "num_experts_per_tok", None) or 1, 2 * groups)
    for name in _EXPERTS:
        _lower(text, name, math.ceil(least / groups) * groups)
    vision: Any = getattr(settings, "vision_config", None)
    if vision is not None:
        # What the tower sees at some of its layers is given to the language part as well.
        seen = getattr(vision, "deepstack_visual_indexes", None) or ()
        _lower(vision, "depth", len(seen) + 1)
        if seen:
            vision.deepstack_visual_indexes = list(range(len(seen)))
    return settings


def _lower(settings: Any, name: str, most: int) -> None:
    if isinstance(value := getattr(settings, name, None), int):
        setattr(settings, name, min(value, most))


def _shorten(model: Any, config: ForeignConfig, max_kinds: int) -> list[int]:
    """Keep the first layer of each kind, and return the numbers that these had."""
    text = text_model(model)
    settings = text.config
    count = settings.num_hidden_layers
    path, layers = next(
        (name, module)
        for name, module in text.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    )
    specs = dict(zip(config.attending, config.layers, strict=True))
    kinds = [(_kind(layer), repr(specs.get(number))) for number, layer in enumerate(layers)]
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:max_kinds]
    if len(kept) == count:
        return kept
    for new, old in enumerate(kept):
        for module in layers[old].modules():
            if getattr(module, "layer_idx", None) == old:
                module.layer_idx = new
    parent, _, name = path.rpartition(".")
    setattr(text.get_submodule(parent), name, nn.ModuleList(layers[old] for old in kept))
    for name, value in vars(settings).items():
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(settings, name, [value[old] for old in kept])
    settings.num_hidden_layers = len(kept)
    return kept


def _kind(layer: nn.Module) -> str:
    """What layers of one kind have in common: their modules, shapes and settings."""
    return repr(
        [
            (
                name,
                type(module).__name__,
                [tuple(each.shape) for each in module.parameters(recurse=False)],
                sorted(
                    (key, value)
                    for key, value in vars(module).items()
                    if key != "layer_idx" and isinstance(value, bool | int | float | str)
                ),
            )
            for name, module in layer.named_modules()
        ]
    )


def _fill(model: Any) -> None:
    """Random weights: matrices that keep the size of what they are given, and vectors near what
    they begin training with."""
    model.to_empty(device="cpu")
    model.requires_grad_(False)
    random = torch.Generator().manual_seed(1)
    for tensor in model.parameters():
        if tensor.ndim > 1:
            bound = (3 / tensor.shape[-1]) ** 0.5
            tensor.uniform_(-bound, bound, generator=random)
            tensor._is_hf_initialized = True  # `transformers` leaves it as it is
    model.initialize_weights()
    vectors = [each for each in model.parameters() if each.ndim <= 1]
    stored = model.state_dict()
    # Such as the bias of a router.
    vectors += [each for name, each in model.named_buffers() if name in stored and each.ndim == 1]
    for vector in vectors:
        if vector.is_floating_point():
            vector.add_(torch.randn(vector.shape, generator=random) * 0.2)
    model.tie_weights()
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:  # else logits would be large
        embedding.normal_(generator=random)


def _change_last_bits(model: Any) -> None:
    random = torch.Generator().manual_seed(2)
    for tensor in model.parameters():
        tensor.mul_(torch.empty_like(tensor).uniform_(1 - 1e-7, 1 + 1e-7, generator=random))


def _sequences(settings: Any) -> Iterator[Sequence]:
    """A long one, one beside it, and one at the end of the context where the model's own code asks
    for positions: some takes places for them."""
    context = settings.max_position_embeddings
    chunk = getattr(settings, "chunk_size", None) or 0
    long = min(max(_NUM_TOKENS, chunk + 5), context)
    yield Sequence(0, long)
    yield Sequence(0, min(9, context))
    if not inkling.counts_places(settings):
        yield Sequence(max(context - 9, 0), min(9, context))


def _num_parameters(settings: Any, config: ForeignConfig) -> int:
    with torch.device("meta"):
        model = build_untouched(settings, config.images)
    return sum(each.numel() for each in model.parameters())
