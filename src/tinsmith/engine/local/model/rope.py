"""Rotary position embeddings: the frequencies of a layer, and what `config.json` says of them.

Files have spelled these settings in many ways, and what `transformers` makes of each is the
meaning: a model trained with one set of frequencies is another model with the next. What is not
known here is refused by name, and `verification` compares the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.errors import EngineError


class Rotation(NamedTuple):
    """How queries and keys of size D are turned: a pair of dimensions by its angle.

    Where only the first R dimensions of a head turn, a pair is (i, i + R/2); the pairs of the
    others have angles of zero.
    """

    cos: Tensor
    """(N, 1, D / 2)."""

    sin: Tensor
    distance: int
    """R/2: how far apart the two of a pair are."""

    @property
    def inverse(self) -> Rotation:
        return self._replace(sin=-self.sin)


class UnsupportedModelError(EngineError):
    """The model is of an architecture, or has a setting, that the decoder does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding of a layer: the frequencies by which positions rotate."""

    theta: float
    head_dim: int
    """Dimensions of a head that are rotated, its first ones."""

    num_plain: int = 0
    """Those behind, which are not."""

    sections: tuple[int, ...] = ()
    """Where positions have three axes: how many frequencies each has."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    is_truncated: bool = True
    """Whether yarn's ramp begins and ends at whole dimensions."""

    def inverse_frequencies(self) -> Tensor:
        """One frequency per pair of rotated dimensions, (head_dim / 2,) float32."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        wavelengths = self.theta**exponents
        frequencies = 1.0 / wavelengths
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._llama3(frequencies)
        if self.kind == "yarn":
            return self._yarn(frequencies, 1.0 / (self.factor * wavelengths))
        return frequencies

    def rotation(self, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """By its frequencies, of positions (N,), or (3, N) on axes of their own."""
        if positions.ndim == 2:
            # Row by row in memory, as kernels read what is made of it.
            positions = positions[self._axes(frequencies.device)].t().contiguous()
        else:
            positions = positions[:, None]
        angles = (positions.float() * frequencies)[:, None]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        if self.num_plain:
            behind = (0, self.num_plain // 2)
            cos, sin = F.pad(cos, behind, value=1.0), F.pad(sin, behind)
        return Rotation(cos.to(dtype), sin.to(dtype), self.head_dim // 2)

    def _axes(self, device: torch.device) -> Tensor:
        """(head_dim / 2,): each frequency's axis. They take turns, as long as there are some."""
        axes = torch.zeros(self.head_dim // 2, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = axis
        return axes.to(device)

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Long waves are stretched by `factor`, short ones kept, those between blended."""
        rotations = self.original_context * frequencies / (2 * math.pi)
        kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = kept * frequencies + (1 - kept) * frequencies / self.factor
        is_long = rotations < self.low_freq_factor
        is_between = ~is_long & (rotations <= self.high_freq_factor)
        return torch.where(
            is_between, blended, torch.where(is_long, frequencies / self.factor, frequencies)
        )

    def _yarn(self, frequencies: Tensor, slower: Tensor) -> Tensor:
        """The same idea with a ramp that is linear in the index of the dimension.

        Rounded as in transformers: at the end of a long context an angle is a frequency's last bit
        times a hundred thousand.
        """

        def dimension(rotations: float) -> float:
            waves = self.original_context / (rotations * 2 * math.pi)
            return self.head_dim * math.log(waves) / (2 * math.log(self.theta))

        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.is_truncated:
            first, last = math.floor(first), math.ceil(last)
        low, high = max(first, 0), min(last, self.head_dim - 1)
        index = torch.arange(self.head_dim // 2, dtype=torch.float32)
        # Swapped betas reverse the ramp, as they do in transformers.
        kept = 1 - ((index - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
        return slower * (1 - kept) + frequencies * kept


_PARTLY_ROTATING = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families that rotate the first dimensions of a head only."""

_WITH_AXES = ("qwen3_5_text", "qwen3_5_moe_text")
"""Families whose positions may have three axes."""


def read_rope(family: str, values: Mapping[str, Any], head_dim: int, kind: str) -> Rope:
    """The rope of a kind of layer, from the settings of a `config.json` with defaults filled in."""
    settings = _settings(family, values, kind)
    name = settings.get("rope_type", settings.get("type", "default"))
    rotated = int(head_dim * _number(settings, "partial_rotary_factor"))
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise UnsupportedModelError(
            f"a partial_rotary_factor that rotates {rotated} of {head_dim} dimensions is not known"
        )
    rope = Rope(
        theta=_number(settings, "rope_theta"),
        head_dim=rotated,
        num_plain=head_dim - rotated,
        sections=_sections(settings) if family in _WITH_AXES else (),
    )
    match name:
        case "default":
            return rope
        case "linear":
            return replace(rope, kind="linear", factor=_number(settings, "factor"))
        case "llama3":
            return replace(
                rope,
                kind="llama3",
                factor=_number(settings, "factor"),
                low_freq_factor=_number(settings, "low_freq_factor"),
                high_freq_factor=_number(settings, "high_freq_factor"),
                original_context=_original_context(family, values, settings),
            )
        case "yarn":
            return _yarn(rope, settings, _original_context(family, values, settings))
    raise UnsupportedModelError(
        f"the rope_type {name!r} is not known; known: default, linear, llama3, yarn"
    )


def _settings(family: str, values: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The rope settings of a kind of layer, as `transformers` finds them.

    Older files say `rope_scaling`, newer ones `rope_parameters`, and some both: the older name
    wins. Gemma 3 has settings for each kind of layer; what it says for all of them at once is
    not looked at, and `rope_scaling` is added to what full attention has.
    """
    parameters = _table(values, "rope_parameters")
    scaling = _table(values, "rope_scaling")
    theta = values["rope_theta"]
    if family != "gemma3_text":
        settings = scaling or parameters
        if nested := sorted({"full_attention", "sliding_attention"} & settings.keys()):
            raise UnsupportedModelError(
                f"rope settings by kind of layer ({nested[0]}) are known for Gemma 3 only"
            )
    elif kind == "sliding_attention":
        settings, theta = _table(parameters, kind), values["rope_local_base_freq"]
    else:
        settings = {**_table(parameters, kind), **scaling}
        if scaling and parameters and kind not in parameters:
            raise UnsupportedModelError(f"rope_scaling beside rope_parameters without {kind!r}")
    part = values.get("partial_rotary_factor", 1.0)
    settings = {"rope_theta": theta, "partial_rotary_factor": part, **settings}
    if family not in _PARTLY_ROTATING and settings["partial_rotary_factor"] != 1.0:
        raise UnsupportedModelError("a partial_rotary_factor is not known")
    return settings


def _sections(settings: Mapping[str, Any]) -> tuple[int, ...]:
    sections = settings.get("mrope_section", (11, 11, 10))
    if len(sections) != 3 or not all(isinstance(size, int) and size >= 0 for size in sections):
        raise EngineError(f"mrope_section in config.json must be three numbers, got {sections!r}")
    return tuple(sections)


def _original_context(family: str, values: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """The context before it was stretched. The model's own setting wins over its rope's."""
    name = "original_max_position_embeddings"
    if family != "gemma3_text" and name in values:
        return int(_number(values, name))
    return int(_number({name: values["max_position_embeddings"], **settings}, name))


def _yarn(rope: Rope, settings: Mapping[str, Any], original_context: int) -> Rope:
    factor = _number(settings, "factor")
    attention = settings.get("attention_factor")
    if attention is None:
        some, all_ = settings.get("mscale"), settings.get("mscale_all_dim")
        attention = (
            _sharpened(factor, some) / _sharpened(factor, all_)
            if some and all_
            else (_sharpened(factor, 1.0))
        )
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        original_context=original_context,
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        attention_factor=float(attention),
        is_truncated=bool(settings.get("truncate", True)),
    )


def read_sharpening(family: str, values: Mapping[str, Any]) -> float:
    """The factor on the scores of latent attention where the context was stretched."""
    settings = _settings(family, values, "full_attention")
    name = settings.get("rope_type", settings.get("type", "default"))
    if name == "default" or not settings.get("mscale_all_dim"):
        return 1.0
    return _sharpened(_number(settings, "factor"), _number(settings, "mscale_all_dim")) ** 2


def _sharpened(factor: float, weight: float) -> float:
    """How much sharper attention has to look in a context that was stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = values.get(name)
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise EngineError(f"{name!r} in config.json must be an object, got {table!r}")
    return table


def _number(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EngineError(f"the rope setting {name!r} in config.json must be a number, got {value}")
    return float(value)
