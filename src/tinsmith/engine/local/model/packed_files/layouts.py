"""How other programs store weights in few bits, and the numbers that these stand for.

A weight is then several tensors: its codes, their scales, and what else says which number a code
is. The file's own settings name the layout (`quantization_config`, `quant_method`):

    fp8                 8-bit floats, a scale for each block of 128 by 128 (DeepSeek, Qwen)
    mxfp4               4-bit floats, a power of two for each 32 of a row (gpt-oss)
    compressed-tensors  whole numbers of 4 or 8 bits in words of 32, or 8-bit numbers (Kimi-K2)
    gptq, awq           whole numbers of 4 or 8 bits in words of 32, with zero points

What is read is the weight alone. Where a program also rounds activations, ours does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.model.packed_files.parts import (
    WORD_BITS,
    Tensors,
    dimensions,
    expect,
    misshapen,
    num_words,
    parts_of,
    unpacked,
)
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.errors import EngineError

_FP8 = ("F8_E4M3", "F8_E5M2")

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the eight codes without a sign stand for; the fourth bit is the sign."""

_FP4_BLOCK = 32
_POWER_OF_ONE = 127
"""The stored power that stands for a scale of one."""

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word the number of each of eight neighbouring outputs lies."""

_NOT_WEIGHTS = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Scales of activations, which are not rounded here."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in few bits."""

    shape: tuple[int, ...]
    parts: Mapping[str, str]
    """What it is made of, by what each is for: the names of stored tensors."""

    dense: Callable[[Mapping[str, Tensor]], Tensor]
    """From its parts the numbers that they stand for, in float32."""


_Found = Iterator[tuple[str, Packed]]


def quantization_of(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a `config.json` says of weights in few bits; of a model that sees, its language part."""
    nested = settings.get("text_config")
    for part in (settings, nested if isinstance(nested, Mapping) else {}):
        found = part.get("quantization_config")
        if isinstance(found, Mapping):
            return found
    return None


def layout_name(quantization: Mapping[str, Any]) -> str:
    method, form = str(quantization.get("quant_method")), quantization.get("format")
    return f"{method} ({form})" if form else method


def packed_weights(quantization: Mapping[str, Any], stored: Tensors) -> dict[str, Packed]:
    """The weights in few bits among the stored tensors, by the names that they have in full."""
    method = str(quantization.get("quant_method"))
    if method not in LAYOUTS:
        raise UnsupportedModelError(
            f"its weights are stored as {layout_name(quantization)!r}, which is not read; known: "
            f"{', '.join(LAYOUTS)}; take the model in full, and serve it with --base-weights"
        )
    try:
        found = dict(LAYOUTS[method](quantization, stored))
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # A file from anywhere: text or a number may stand where a table is meant.
        raise EngineError(
            f"its weights are stored as {layout_name(quantization)!r}, and quantization_config has "
            f"a setting of the wrong kind, or a tensor a shape that it cannot have: {error}"
        ) from error
    used = {name for packed in found.values() for name in packed.parts.values()}
    for name, tensor in stored.items():
        if name not in used and tensor.dtype in (*_FP8, "I8", "U8", "I32"):
            raise EngineError(
                f"{name!r} is stored as {tensor.dtype} without what {layout_name(quantization)} "
                "has beside it"
            )
    return found


def is_of_activations(name: str) -> bool:
    return name.endswith(_NOT_WEIGHTS)


def _fp8(quantization: Mapping[str, Any], stored: Tensors) -> _Found:
    block = quantization.get("weight_block_size")
    for name, tensor in stored.items():
        if tensor.dtype in _FP8:
            yield name, _scaled(stored, name, f"{name}_scale_inv", _block(block, name))


def _mxfp4(quantization: Mapping[str, Any], stored: Tensors) -> _Found:
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            plain = name.removesuffix("_blocks")
            parts = parts_of(stored, {"blocks": name, "scales": f"{plain}_scales"})
            experts, outputs, groups, num_bytes = dimensions(name, tensor, 4)
            if stored[parts["scales"]].shape != [experts, outputs, groups] or (
                2 * num_bytes != _FP4_BLOCK
            ):
                raise misshapen(name, tensor, stored[parts["scales"]])
            yield plain, Packed((experts, groups * _FP4_BLOCK, outputs), parts, _mxfp4_dense)


def _mxfp4_dense(parts: Mapping[str, Tensor]) -> Tensor:
    blocks, powers = parts["blocks"], parts["scales"].int() - _POWER_OF_ONE
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])
    # (E, outputs, groups, 16) bytes to (E, outputs, groups, 16, 2) numbers, the low half first.
    numbers = values[torch.stack([blocks & 15, blocks >> 4], dim=-1).int()]
    scaled = torch.ldexp(numbers.flatten(3), powers[..., None])
    # The layer has (E, inputs, outputs).
    return scaled.flatten(2).transpose(1, 2)


def _compressed(quantization: Mapping[str, Any], stored: Tensors) -> _Found:
    known = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
    groups = [
        group
        for group in (quantization.get("config_groups") or {}).values()
        if isinstance(group, Mapping)
    ]
    forms = {
        str(form)
        for form in (quantization.get("format"), *(group.get("format") for group in groups))
        if form not in (None, "mixed-precision", "dense")
    }
    has_more = (
        (quantization.get("sparsity_config") or {}).get("format", "dense") != "dense",
        bool((quantization.get("transform_config") or {}).get("config_groups")),
    )
    if not forms <= set(known) or any(has_more):
        raise UnsupportedModelError(
            f"its weights are stored as compressed-tensors with {', '.join(sorted(forms))}, "
            f"sparse weights or transforms; of that format are known: {', '.join(known)}"
        )
    blocks = {str(_block_of(group)): _block_of(group) for group in groups}
    for name, tensor in stored.items():
        if name.endswith(".weight_packed"):
            yield _packed_words(stored, name.removesuffix("_packed"))
        elif name.endswith(".weight") and tensor.dtype in (*_FP8, "I8"):
            if len(blocks) > 1:
                raise UnsupportedModelError(
                    f"the layers have scales for blocks of {', '.join(blocks)}; one size is known"
                )
            block = next(iter(blocks.values()), None)
            yield name, _scaled(stored, name, f"{name}_scale", _block(block, name))


def _block_of(group: Mapping[str, Any]) -> object:
    weights = group.get("weights")
    return weights.get("block_structure") if isinstance(weights, Mapping) else None


def _packed_words(stored: Tensors, plain: str) -> tuple[str, Packed]:
    parts = parts_of(
        stored,
        {"codes": f"{plain}_packed", "scales": f"{plain}_scale"},
        {"zeros": f"{plain}_zero_point", "groups": f"{plain}_g_idx"},
    )
    shape_name = f"{plain}_shape"
    if shape_name not in stored:
        raise EngineError(f"the model has {plain}_packed and no {shape_name}")
    integers = {"I32": "<i4", "I64": "<i8"}.get(stored[shape_name].dtype)
    if integers is None:
        raise misshapen(shape_name, stored[shape_name])
    shape = tuple(int(n) for n in np.frombuffer(stored[shape_name].read_bytes(), integers))
    codes = stored[parts["codes"]]
    rows, words = dimensions(parts["codes"], codes, 2)
    fitting = [bits for bits in (4, 8) if len(shape) == 2 and words == num_words(shape[1], bits)]
    if len(fitting) != 1 or rows != shape[0]:
        raise EngineError(
            f"{parts['codes']!r} of shape {codes.shape} does not hold {list(shape)} numbers of "
            "4 or 8 bits"
        )
    (bits,) = fitting
    groups = stored[parts["scales"]].shape[-1]
    expect(stored, parts, "scales", [shape[0], groups], [shape[0]])
    expect(stored, parts, "zeros", [num_words(shape[0], bits), groups])
    expect(stored, parts, "groups", [shape[1]])

    def dense(read: Mapping[str, Tensor]) -> Tensor:
        numbers = unpacked(read["codes"], bits, shape[1]).float()
        middle = 1 << (bits - 1)
        if "zeros" in read:
            # Outputs are what is packed here: they are the first dimension.
            zeros = unpacked(read["zeros"].t().contiguous(), bits, shape[0]).t().float()
            return (numbers - _spread(zeros, shape, read)) * _spread(read["scales"], shape, read)
        return (numbers - middle) * _spread(read["scales"], shape, read)

    # The shape is a part too: it is not copied.
    return plain, Packed(shape, {**parts, "shape": shape_name}, dense)


def _spread(scales: Tensor, shape: tuple[int, ...], read: Mapping[str, Tensor]) -> Tensor:
    """(outputs, inputs) from one number for each group of a row's inputs."""
    scales = scales.float().reshape(-1, 1) if scales.ndim < 2 else scales.float()
    groups = read.get("groups")
    # A layer that was left out when groups were given in another order has -1 for all of them.
    if groups is not None and not bool((groups == -1).all()):
        if bool((groups < 0).any()):
            raise ValueError("some of its inputs are in a group below zero (g_idx)")
        return scales[:, groups.long()]
    if shape[1] % scales.shape[1]:
        raise ValueError(f"{shape[1]} inputs do not divide into {scales.shape[1]} groups")
    return scales.repeat_interleave(shape[1] // scales.shape[1], dim=1)


def _gptq(quantization: Mapping[str, Any], stored: Tensors) -> _Found:
    # The older form stores a zero point less one, which is the greatest code where it is zero.
    above = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    bits = _bits(quantization)
    for name, tensor in stored.items():
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            words, outputs = dimensions(name, tensor, 2)
            inputs = words * WORD_BITS // bits
            parts = _columns(quantization, stored, module, (outputs, inputs), bits)

            def dense(
                read: Mapping[str, Tensor], inputs: int = inputs, outputs: int = outputs
            ) -> Tensor:
                numbers = unpacked(read["codes"].t().contiguous(), bits, inputs).float()
                zeros = (unpacked(read["zeros"], bits, outputs) + above) % (1 << bits)
                return _of_columns(numbers, zeros.float(), read)

            yield f"{module}.weight", Packed((outputs, inputs), parts, dense)


def _awq(quantization: Mapping[str, Any], stored: Tensors) -> _Found:
    version = str(quantization.get("version", "gemm")).lower()
    if version != "gemm" or _bits(quantization) != 4:
        raise UnsupportedModelError(
            f"its weights are stored as awq in the form {version!r} with {_bits(quantization)} "
            "bits; known: gemm with 4"
        )
    places = torch.tensor(_AWQ_PLACES)

    def ordered(words: Tensor, outputs: int) -> Tensor:
        return unpacked(words, 4, outputs).unflatten(1, (-1, 8))[..., places].flatten(1).float()

    for name, tensor in stored.items():
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            inputs, words = dimensions(name, tensor, 2)
            outputs = words * 8
            parts = _columns(quantization, stored, module, (outputs, inputs), 4)

            def dense(read: Mapping[str, Tensor], outputs: int = outputs) -> Tensor:
                numbers = ordered(read["codes"], outputs).t()
                return _of_columns(numbers, ordered(read["zeros"], outputs), read)

            yield f"{module}.weight", Packed((outputs, inputs), parts, dense)


def _bits(quantization: Mapping[str, Any]) -> int:
    bits = quantization.get("bits", quantization.get("w_bit"))
    if bits not in (4, 8):
        raise UnsupportedModelError(
            f"its weights are stored as {layout_name(quantization)} with {bits} bits; known: 4, 8"
        )
    return int(bits)


def _columns(
    quantization: Mapping[str, Any],
    stored: Tensors,
    module: str,
    shape: tuple[int, int],
    bits: int,
) -> Mapping[str, str]:
    """The parts of a weight (outputs, inputs), which must be as large as each other say."""
    needed = {
        "codes": f"{module}.qweight",
        "zeros": f"{module}.qzeros",
        "scales": f"{module}.scales",
    }
    parts = parts_of(stored, needed, {"groups": f"{module}.g_idx"})
    if quantization.get("desc_act") and "groups" not in parts:
        raise EngineError(f"{module!r} has no g_idx, and its inputs are in another order: desc_act")
    (outputs, inputs), size = shape, quantization.get("group_size")
    num_groups = stored[parts["scales"]].shape[0]
    if type(size) is int and size > 0:
        num_groups = math.ceil(inputs / size)
    expect(stored, parts, "scales", [num_groups, outputs])
    expect(stored, parts, "zeros", [num_groups, num_words(outputs, bits)])
    expect(stored, parts, "groups", [inputs])
    return parts


def _of_columns(numbers: Tensor, zeros: Tensor, read: Mapping[str, Tensor]) -> Tensor:
    """(outputs, inputs), of codes in that order and of scales and zero points (groups, outputs)."""
    shape = tuple(numbers.shape)
    scales = _spread(read["scales"].t(), shape, read)
    return (numbers - _spread(zeros.t(), shape, read)) * scales


def _scaled(stored: Tensors, name: str, scale_name: str, block: tuple[int, int] | None) -> Packed:
    """Codes that are numbers themselves, with a scale for each block, for each row or for all."""
    parts = parts_of(stored, {"codes": name, "scales": scale_name}, {"zeros": f"{name}_zero_point"})
    shape, scales = stored[name].shape, stored[scale_name].shape
    if block is not None:
        in_blocks = [math.ceil(size / each) for size, each in zip(shape[-2:], block, strict=True)]
        if [*shape[:-2], *in_blocks] != scales:
            raise misshapen(name, stored[name], stored[scale_name])
    elif math.prod(scales) not in (1, shape[0]):
        raise misshapen(name, stored[name], stored[scale_name])

    def spread(numbers: Tensor) -> Tensor:
        numbers = numbers.float()
        if block is None:
            return numbers.reshape(-1, *[1] * (len(shape) - 1))
        rows, columns = block
        whole = numbers.repeat_interleave(rows, dim=-2).repeat_interleave(columns, dim=-1)
        return whole[..., : shape[-2], : shape[-1]]

    def dense(read: Mapping[str, Tensor]) -> Tensor:
        numbers = read["codes"].float()
        if "zeros" in read:
            numbers = numbers - spread(read["zeros"])
        return numbers * spread(read["scales"])

    return Packed(tuple(shape), parts, dense)


def _block(given: object, name: str) -> tuple[int, int] | None:
    if given is None:
        return None
    sizes = given if isinstance(given, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise EngineError(f"the block of scales of {name!r} must be two numbers, got {given!r}")
    return sizes[0], sizes[1]


LAYOUTS: Mapping[str, Callable[[Mapping[str, Any], Tensors], _Found]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}
"""By `quant_method`: who finds the weights in few bits."""
