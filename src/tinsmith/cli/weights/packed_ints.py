"""A model's folder with its matrices in integers of 8 or 4 bits, as `compressed-tensors` packs.

vLLM, SGLang and, with the package compressed-tensors, `transformers` load it. Every 32 numbers of a
row share a scale: the best of a few candidates; embeddings, unembedding and vectors stay as they
are. Works on the files, one matrix at a time and without torch (docs/decisions/0027).
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.cli.progress import Tell
from tinsmith.engine.stored_tensors import (
    Array,
    Entry,
    Stored,
    decode,
    encode,
    encode_header,
    stored_tensors,
    weight_files,
)
from tinsmith.errors import ValidationError

NUM_BITS = {"int8": 8, "int4": 4}

_GROUP = 32
"""Numbers of a row that share a scale: the fewest that the readers' kernels know."""

_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Fractions of the range that are tried: a smaller one rounds most numbers better, and clips the
largest."""

_WORD = 32
"""Bits of the integers that numbers are packed into."""

_ROWS = 1024
"""Rows that are worked on at a time, so that no copy of a large matrix is made."""

_MATRIX = re.compile(r".*\blayers\.\d+\.(?!.*\bexperts?\b).*_proj\.weight")
_LEFT = re.compile(r".*\b(lm_head|embed_tokens)\.weight")


def check(folder: Path) -> None:
    """An error if the model cannot be packed, or this machine could not load it back."""
    _packed(stored_tensors(weight_files(folder)))
    if importlib.util.find_spec("compressed_tensors") is None:
        raise ValidationError(
            "an export in integers is loaded back with the package compressed-tensors: "
            "pip install compressed-tensors"
        )


def write(folder: Path, target: Path, quantization: str, tell: Tell) -> None:
    """Write the model in `folder` packed into the folder `target`.

    A matrix whose rows do not divide into groups stays as it is.
    """
    num_bits = NUM_BITS[quantization]
    weights = stored_tensors(weight_files(folder))
    packed = _packed(weights)
    entries: dict[str, Entry] = {}
    for name, stored in weights.items():
        entries |= _entries(name, stored, num_bits) if name in packed else {name: stored.entry}
    target.mkdir(parents=True)
    with (target / "model.safetensors").open("wb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        for number, (name, stored) in enumerate(weights.items(), 1):
            if name in packed:
                for part in _pack(stored, num_bits):
                    file.write(part)
            else:
                file.write(stored.read_bytes())
            tell(number, len(weights), name)
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith("model.safetensors"):
            shutil.copyfile(path, target / path.name)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    left = [name for name in weights if _MATRIX.fullmatch(name) and name not in packed]
    config["quantization_config"] = _settings(num_bits, left)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _packed(weights: Mapping[str, Stored]) -> set[str]:
    """The matrices that are packed; an error names one that no reader would expect to be."""
    for name, stored in weights.items():
        if len(stored.shape) > 1 and not _MATRIX.fullmatch(name) and not _LEFT.fullmatch(name):
            raise ValidationError(
                f"the model has {name!r}, which cannot be packed; only the matrices of attention "
                "and of a dense MLP (q_proj … down_proj) can"
            )
    matrices = {name: each.shape[1] for name, each in weights.items() if _MATRIX.fullmatch(name)}
    packed = {name for name, length in matrices.items() if length % _GROUP == 0}
    if not packed:
        lengths = ", ".join(str(length) for length in sorted(set(matrices.values())))
        raise ValidationError(
            f"the model's matrices have rows of {lengths} numbers; only rows that are multiples "
            f"of {_GROUP} can be packed"
        )
    return packed


def _entries(name: str, stored: Stored, num_bits: int) -> dict[str, Entry]:
    """What the header says of a matrix: the three tensors that it is packed into."""
    rows, length = stored.shape
    words, groups = length * num_bits // _WORD, length // _GROUP
    return {
        f"{name}_packed": Entry("I32", [rows, words], 4 * rows * words),
        f"{name}_scale": Entry(stored.dtype, [rows, groups], stored.num_bytes // _GROUP),
        f"{name}_shape": Entry("I64", [2], 16),
    }


def _pack(stored: Stored, num_bits: int) -> tuple[bytes, bytes, bytes]:
    """The bytes of a matrix: numbers, the first in the lowest bits, then scales, then shape."""
    half = 1 << (num_bits - 1)
    packed, scales = [], []
    matrix = stored.read()
    for start in range(0, len(matrix), _ROWS):
        groups = matrix[start : start + _ROWS].reshape(-1, _GROUP)
        scale = _best_scales(groups, num_bits, stored.dtype)
        scales.append(encode(scale, stored.dtype))
        numbers: Array = (_rounded(groups, scale, half) + half).astype(np.uint8)
        if num_bits == 4:
            numbers = numbers[:, ::2] | (numbers[:, 1::2] << 4)
        packed.append(numbers.tobytes())
    return b"".join(packed), b"".join(scales), np.array(stored.shape, "<i8").tobytes()


def _best_scales(groups: Array, num_bits: int, dtype: str) -> Array:
    """For each group the scale, as it is stored, with the least sum of squared errors."""
    half = 1 << (num_bits - 1)
    widest = np.abs(groups).max(axis=1) / (half - 0.5)
    best = np.ones(len(groups), np.float32)
    least = np.full(len(groups), np.inf)
    # With 8 bits the whole range is the best, or nearly.
    for part in _SHRUNK if num_bits == 4 else _SHRUNK[:1]:
        scale = decode(encode(widest * np.float32(part), dtype), dtype)
        scale = np.where(scale > 0, scale, np.float32(1))
        errors = np.square(_rounded(groups, scale, half) * scale[:, None] - groups).sum(axis=1)
        is_better = errors < least
        best, least = np.where(is_better, scale, best), np.where(is_better, errors, least)
    return best


def _rounded(groups: Array, scale: Array, half: int) -> Array:
    numbers: Array = np.clip(np.rint(groups / scale[:, None]), -half, half - 1)
    return numbers


def _settings(num_bits: int, left: Sequence[str]) -> dict[str, Any]:
    """What `config.json` tells readers."""
    numbers = {
        "num_bits": num_bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": _GROUP,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}},
        "ignore": ["lm_head", *(name.removesuffix(".weight") for name in left)],
    }
