"""The K types of GGUF, as `Q4_K_M` mixes them: about five bits a number.

The gguf package reads these types and does not write them. `xllamacpp`, a package of llama.cpp,
has the function that does in its library, though not among its Python names: ggml's own
`ggml_quantize_chunk`, which ggml's header declares for everybody (docs/decisions/0014).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tinsmith.engine.stored_tensors import Array
from tinsmith.errors import ValidationError

_BLOCK = 256
"""Numbers of a row that lie together."""

_INSTEAD = "llama.cpp's own tool makes it from an export without --quantize: llama-quantize"

_Quantize = Callable[[int, int, int, int, int, int, None], int]


def check() -> None:
    """An error if this machine has nothing that writes K types."""
    _ggml_quantize_chunk()


def kind_of(name: str, row_length: int, num_layers: int, *, is_tied: bool) -> GGMLQuantizationType:
    """The type that llama.cpp gives a matrix in a file of `Q4_K_M`.

    The matrices that matter most get more bits: the unembedding, and in half of the layers the
    values and the MLP's last matrix. Rows that do not divide into blocks have an older type of
    about the size.
    """
    is_last = name == "output.weight" or (is_tied and name == "token_embd.weight")
    found = re.fullmatch(r"blk\.(\d+)\.(attn_v|ffn_down)\.weight", name)
    has_more = is_last or (found is not None and _has_more_bits(int(found[1]), num_layers))
    if row_length % _BLOCK:
        return GGMLQuantizationType.Q8_0 if has_more else GGMLQuantizationType.Q5_0
    return GGMLQuantizationType.Q6_K if has_more else GGMLQuantizationType.Q4_K


def quantize(values: Array, kind: GGMLQuantizationType) -> Array:
    """Rows of numbers (rows, n) as rows of bytes."""
    rows, length = values.shape
    block, num_bytes = GGML_QUANT_SIZES[kind]
    given = np.ascontiguousarray(values, dtype=np.float32)
    made = np.empty((rows, length // block * num_bytes), dtype=np.uint8)
    written = _ggml_quantize_chunk()(
        kind.value, given.ctypes.data, made.ctypes.data, 0, rows, length, None
    )
    if written != made.nbytes:
        raise ValidationError(f"ggml wrote {written} bytes of {kind.name}, not {made.nbytes}")
    return made


def _has_more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _ggml_quantize_chunk() -> _Quantize:
    try:
        from xllamacpp import xllamacpp as extension
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"Q4_K_M needs the package xllamacpp: pip install xllamacpp. Or {_INSTEAD}"
        ) from error
    try:
        function = ctypes.CDLL(extension.__file__).ggml_quantize_chunk
    except AttributeError as error:
        raise ValidationError(
            f"this build of xllamacpp does not show ggml's quantizer. {_INSTEAD}"
        ) from error
    number = ctypes.c_int64
    function.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(number, number, number, ctypes.c_void_p),
    ]
    function.restype = ctypes.c_size_t
    return function
