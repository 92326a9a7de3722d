"""The operations that an uploaded loss may use; for it, nothing else exists.

An operation is on the list when it computes tensors from tensors, has no effect beside its
result, draws no random numbers, reads no memory it has not filled (so no `empty`, no
`as_strided`), and says on the meta device how large its result will be. Names are those that
tracing gives, which for some functions differ between versions of torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Operation:
    function: Callable[..., Any]
    is_creation: bool = False
    """Whether it makes a tensor from numbers alone."""

    is_rounding_division: bool = False
    """Whether it may divide integers by integers."""

    multiplies_matrices: bool = False

    cost: int = 1
    """Units of work for each element, forward and backward (`custom_work`)."""

    keeps_size: bool = False
    """Whether the result is never larger than the arguments broadcast together."""


def _operations(
    namespace: object, prefixes: Sequence[str], names: str, **flags: bool
) -> Iterator[tuple[str, Operation]]:
    """The named functions of a namespace, under each prefix that tracing may give them."""
    for name in names.split():
        for prefix in prefixes:
            yield prefix + name, Operation(getattr(namespace, name), cost=_cost(name), **flags)


def _cost(name: str) -> int:
    if name in _SLOWEST:
        return 64
    return 16 if name in _SLOW else 4


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SLOW = _words(
    """
    cummax cummin cumprod cumsum float_power lgamma log_ndtr logaddexp logaddexp2 logit median
    pow xlog1py xlogy
    """
)
_SLOWEST = _words("argsort logcumsumexp sort topk")
_ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh
    deg2rad eq erf erfc erfinv exp exp2 expm1 float_power floor fmax fmin frac ge greater
    greater_equal gt heaviside hypot isclose isfinite isinf isnan isneginf isposinf le lerp
    less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg
    negative not_equal positive pow rad2deg reciprocal relu round rsqrt sgn sigmoid sign sin
    sinc sinh sqrt square sub subtract tan tanh true_divide trunc xlogy
"""
_REDUCING = """
    all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum
    log_softmax logcumsumexp logsumexp max mean median min nanmean nansum norm prod softmax
    sort std sum topk var
"""
_SHAPING = """
    chunk diag_embed diagonal diff flatten flip gather index_select masked_select movedim narrow
    permute ravel repeat_interleave reshape roll select split squeeze t take_along_dim tile
    transpose tril triu unbind unsqueeze where
"""
_FUNCTIONS_ONLY = """
    broadcast_to cat concat full_like hstack ones_like rsub stack vstack zeros_like
"""
_CONVERTING = "bool clone contiguous detach double float int long to"
_METHODS_ONLY = """
    dim expand expand_as index_add index_copy index_fill new_full new_ones new_zeros numel
    repeat reshape_as scatter scatter_add size sum_to_size type_as view view_as
"""
_ROUNDING_DIVISIONS = "div divide floor_divide fmod remainder"
_MATRIX_PRODUCTS = "dot inner matmul mm mv outer"

_TORCH = ("torch.", "torch.functional.")
_FUNCTIONAL = ("torch.nn.functional.", "torch._C._nn.")

FUNCTIONS: Mapping[str, Operation] = dict(
    [
        *_operations(torch, _TORCH, _ELEMENTWISE + _REDUCING, keeps_size=True),
        *_operations(torch, _TORCH, _SHAPING + _FUNCTIONS_ONLY),
        *_operations(torch, _TORCH, _ROUNDING_DIVISIONS, is_rounding_division=True),
        *_operations(torch, _TORCH, _MATRIX_PRODUCTS, multiplies_matrices=True),
        *_operations(torch, _TORCH, "arange full linspace ones zeros", is_creation=True),
        *_operations(
            functional,
            _FUNCTIONAL,
            """
            binary_cross_entropy binary_cross_entropy_with_logits elu gelu hardtanh huber_loss
            kl_div l1_loss leaky_relu log_softmax logsigmoid mse_loss relu relu6 sigmoid
            silu smooth_l1_loss softmax softmin softplus softsign tanh
            """,
            keeps_size=True,
        ),
        *_operations(functional, _FUNCTIONAL, "pad"),
        ("torch._C._nn.log_sigmoid", Operation(functional.logsigmoid)),
        *_operations(
            torch.special,
            ("torch.special.", "torch._C._special.special_"),
            """
            entr erf erfc exp2 expit expm1 log1p log_ndtr log_softmax logit logsumexp ndtr round
            sinc softmax xlog1py xlogy
            """,
            keeps_size=True,
        ),
        ("torch.linalg.vector_norm", Operation(torch.linalg.vector_norm)),
        ("torch._C._linalg.linalg_vector_norm", Operation(torch.linalg.vector_norm)),
        *_operations(
            operator,
            ("operator.",),
            """
            abs add and_ eq ge gt inv invert le lshift lt mul ne neg or_ pos pow rshift sub
            truediv xor
            """,
            keeps_size=True,
        ),
        *_operations(operator, ("operator.",), "getitem"),
        *_operations(operator, ("operator.",), "floordiv mod", is_rounding_division=True),
        *_operations(operator, ("operator.",), "matmul", multiplies_matrices=True),
        *_operations(
            math,
            ("math.",),
            """
            acos asin atan atan2 ceil cos cosh erf erfc exp expm1 fabs floor fmod hypot isfinite
            isinf isnan lgamma log log10 log1p log2 pow sin sinh sqrt tan tanh trunc
            """,
        ),
        ("getattr", Operation(getattr)),
    ]
)
"""By the name that a node gives. `getattr` reads the attributes below and no others."""

METHODS: Mapping[str, Operation] = dict(
    [
        *_operations(Tensor, ("",), _ELEMENTWISE + _REDUCING + _CONVERTING, keeps_size=True),
        *_operations(Tensor, ("",), _SHAPING + _METHODS_ONLY),
        *_operations(Tensor, ("",), _ROUNDING_DIVISIONS, is_rounding_division=True),
        *_operations(Tensor, ("",), _MATRIX_PRODUCTS, multiplies_matrices=True),
    ]
)

ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "T", "mT"})

RESULT_FIELDS = frozenset({"values", "indices"})
"""Fields of the named tuples that reductions along a dimension return."""

KEYWORDS = _words(
    """
    alpha append axis beta chunks condition copy correction decimals delta descending device
    diagonal dim dim0 dim1 dim2 dims dtype end end_dim eps equal_nan exponent fill_value index
    indices input k keepdim largest layout length log_target mask mat2 max memory_format min
    mode n nan negative_slope neginf offset ord other p pos_weight posinf prepend reduction
    repeats rounding_mode shape shifts size sorted source split_size split_size_or_sections
    src stable start start_dim step steps target tensor tensor1 tensor2 tensors threshold
    unbiased value values vec vec2 weight
    """
)
TEXT_KEYWORDS = frozenset({"reduction", "rounding_mode", "mode"})
"""The keywords whose value may be a text."""

DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
}
MEMORY_FORMATS = {name: getattr(torch, name) for name in ("contiguous_format", "preserve_format")}
