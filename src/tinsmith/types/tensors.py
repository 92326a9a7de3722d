"""`TensorData`: an array on its way to or from the service.

The protocol knows two dtypes, int64 and float32, dense or in CSR form (only the listed cells of a
matrix; what the others hold is agreed by context). The array is kept as numpy in the declared
dtype, never as a Python list, and torch is touched only when the user hands in or wants a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from tinsmith.errors import ValidationError
from tinsmith.types.arrays import NUMPY_DTYPES, TensorDtype, as_array, int_array, short_array
from tinsmith.types.convert import kind_of
from tinsmith.types.model import Frozen
from tinsmith.types.non_finite import array_to_json

if TYPE_CHECKING:
    import torch

MAX_RANK = 32
"""Most dimensions of a tensor; numpy would go to 64."""


class TensorData(Frozen):
    """An int64 or float32 array, dense or CSR.

    >>> TensorData(data=[1, 2, 3], dtype="int64", shape=[3]).tolist()
    [1, 2, 3]
    >>> TensorData.from_numpy(np.eye(2)).dtype
    'float32'
    """

    __slots__ = ("csr_columns", "csr_rows", "dtype", "numpy", "shape")

    dtype: TensorDtype
    shape: list[int] | None
    numpy: npt.NDArray[Any]
    """The stored array itself: shaped if dense, the flat listed values if CSR."""
    csr_rows: npt.NDArray[np.int64] | None
    """CSR row pointers, rows + 1 of them; None for a dense tensor."""
    csr_columns: npt.NDArray[np.int64] | None
    """CSR column indices, one per listed value."""

    def __init__(
        self,
        data: Sequence[Any] | npt.NDArray[Any] | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | npt.NDArray[np.int64] | None = None,
        sparse_col_indices: Sequence[int] | npt.NDArray[np.int64] | None = None,
    ) -> None:
        if dtype is None:
            raise TypeError("TensorData needs `dtype`: 'int64' or 'float32'")
        if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
            raise ValidationError(f"dtype must be 'int64' or 'float32', got {dtype!r}", "dtype")
        values = as_array(data, dtype)
        extents = _indices(shape, "shape")
        shape_list = None if extents is None else extents.tolist()
        if sparse_crow_indices is not None or sparse_col_indices is not None:
            rows = _indices(sparse_crow_indices, "sparse_crow_indices")
            columns = _indices(sparse_col_indices, "sparse_col_indices")
            _check_csr(values, shape_list, rows, columns)
        else:
            rows = columns = None
            if shape_list is not None and list(values.shape) != shape_list:
                values = _reshape(values, shape_list)
        _fill(self, dtype, shape_list, values, rows, columns)

    @classmethod
    def dense(cls, values: npt.NDArray[Any], shape: list[int]) -> Self:
        """From a flat array that already has one of the two dtypes; decoders use it."""
        tensor = cls.__new__(cls)
        dtype: TensorDtype = "float32" if values.dtype.kind == "f" else "int64"
        if len(shape) != 1 or shape[0] != values.size:
            values = _reshape(values, shape)
        _fill(tensor, dtype, shape, values, None, None)
        return tensor

    @property
    def data(self) -> list[Any]:
        """The numbers as a flat list; for CSR, the listed values."""
        return self.numpy.ravel().tolist()

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        return None if self.csr_rows is None else self.csr_rows.tolist()

    @property
    def sparse_col_indices(self) -> list[int] | None:
        return None if self.csr_columns is None else self.csr_columns.tolist()

    @property
    def is_sparse(self) -> bool:
        return self.csr_rows is not None

    @property
    def nbytes(self) -> int:
        """Payload size: values in their dtype, and 8 bytes for each CSR index."""
        if self.csr_rows is None or self.csr_columns is None:
            return self.numpy.nbytes
        return self.numpy.nbytes + self.csr_rows.nbytes + self.csr_columns.nbytes

    @classmethod
    def from_list(cls, values: Sequence[Any], dtype: TensorDtype) -> Self:
        """A list, nested for a matrix; its shape is taken from the nesting."""
        array = as_array(values, dtype)
        tensor = cls.__new__(cls)
        _fill(tensor, dtype, [*array.shape], array, None, None)
        return tensor

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> Self:
        """Floating arrays become float32, signed integers int64; others are refused."""
        return cls(data=array, dtype=_public_dtype(array.dtype), shape=array.shape)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """Takes any tensor: on a GPU, requiring grad, non-contiguous, a lazy view, bfloat16."""
        torch = _torch()
        tensor = tensor.detach()
        dtype: TensorDtype = "float32" if tensor.is_floating_point() else "int64"
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValidationError(
                f"a {tensor.dtype} tensor is neither integers nor floats", "dtype"
            )
        wanted = torch.float32 if dtype == "float32" else torch.int64
        values = tensor.to(device="cpu", dtype=wanted).resolve_neg().contiguous().numpy()
        return cls(data=values, dtype=dtype, shape=list(tensor.shape))

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> Self:
        """CSR for a matrix that is mostly `pad_value`, dense where CSR would not be smaller."""
        pad_value = _check_pad(pad_value)
        dense = cls.from_torch(tensor)
        if tensor.ndim != 2:
            return dense
        matrix = dense.numpy
        listed = matrix != pad_value
        rows, _ = matrix.shape
        per_row = listed.sum(axis=1)
        if rows + 1 + 2 * int(per_row.sum()) >= matrix.size:
            return dense
        return cls(
            data=matrix[listed],
            dtype=dense.dtype,
            shape=list(matrix.shape),
            sparse_crow_indices=np.concatenate(([0], np.cumsum(per_row))),
            sparse_col_indices=np.nonzero(listed)[1],
        )

    def to_numpy(self, pad_value: int = 0) -> npt.NDArray[Any]:
        """The dense array; cells that CSR does not list hold `pad_value`."""
        if self.csr_rows is None:
            return self.numpy
        assert self.shape is not None, "checked on construction"
        dense = np.full(self.shape, _check_pad(pad_value), dtype=self.numpy.dtype)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.csr_rows))
        dense[rows, self.csr_columns] = self.numpy
        return dense

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        torch = _torch()
        values = self.to_numpy(pad_value)
        # torch warns about memory it may not write to; decoded arrays are such.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """Nested lists in the tensor's shape."""
        return self.to_numpy(pad_value).tolist()  # type: ignore[no-any-return]  # numpy says Any

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """From the protocol's JSON form (a mapping), or an instance as it is."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ValidationError(f"expected a tensor object, got {kind_of(obj)}")
        unknown = obj.keys() - set(_JSON_FIELDS)
        if unknown:
            raise ValidationError("a tensor has no such field", str(sorted(unknown)[0])[:80])
        for name in ("data", "dtype"):
            if obj.get(name) is None:
                raise ValidationError("a tensor needs this field", name)
        return cls(**{name: obj.get(name) for name in _JSON_FIELDS})

    def model_dump(
        self, *, exclude_none: bool = False, exclude_defaults: bool = False, **_: Any
    ) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in _JSON_FIELDS}
        drop_none = exclude_none or exclude_defaults  # None is the only default there is
        return {k: v for k, v in fields.items() if v is not None or not drop_none}

    def to_wire(self, *, words: bool = False) -> dict[str, Any]:
        """The JSON form. The numbers stay a numpy array, which the JSON encoder writes directly;
        with `words`, for results, those that JSON has no form for are written as words."""
        flat = np.ascontiguousarray(self.numpy).ravel()
        if self.dtype == "float32" and not words and not np.isfinite(flat).all():
            index = int(np.flatnonzero(~np.isfinite(flat))[0])
            raise ValidationError(f"{flat[index]} cannot be sent as JSON", f"data[{index}]")
        fields: dict[str, Any] = {"data": array_to_json(flat), "dtype": self.dtype}
        for name in _JSON_FIELDS[2:]:
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        return fields

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return (
            self.dtype == other.dtype
            and self._resolved_shape() == other._resolved_shape()
            and _same_indices(self.csr_rows, other.csr_rows)
            and _same_indices(self.csr_columns, other.csr_columns)
            and np.array_equal(self.numpy, other.numpy, equal_nan=self.dtype == "float32")
        )

    __hash__ = None  # type: ignore[assignment]  # arrays are compared by content

    def _resolved_shape(self) -> list[int]:
        return list(self.numpy.shape) if self.shape is None else self.shape

    def __repr__(self) -> str:
        parts = [f"data={short_array(self.numpy.ravel())}", f"dtype={self.dtype!r}"]
        parts.append(f"shape={self._resolved_shape()}")
        if self.is_sparse:
            parts.append(f"csr, {self.numpy.size} listed")
        return f"TensorData({', '.join(parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.numpy, self.dtype, self.shape, self.csr_rows, self.csr_columns)


# Slots are filled through their descriptors: attributes cannot be assigned, and this is on the
# path of every tensor that is decoded.
_SET_DTYPE, _SET_SHAPE, _SET_NUMPY, _SET_ROWS, _SET_COLUMNS = (
    TensorData.__dict__[name].__set__
    for name in ("dtype", "shape", "numpy", "csr_rows", "csr_columns")
)


def _fill(
    tensor: TensorData,
    dtype: TensorDtype,
    shape: list[int] | None,
    values: npt.NDArray[Any],
    rows: npt.NDArray[np.int64] | None,
    columns: npt.NDArray[np.int64] | None,
) -> None:
    _SET_DTYPE(tensor, dtype)
    _SET_SHAPE(tensor, shape)
    _SET_NUMPY(tensor, values)
    _SET_ROWS(tensor, rows)
    _SET_COLUMNS(tensor, columns)


_JSON_FIELDS = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")


def _reshape(values: npt.NDArray[Any], shape: list[int]) -> npt.NDArray[Any]:
    if len(shape) > MAX_RANK:
        raise ValidationError(f"{len(shape)} dimensions; the limit is {MAX_RANK}", "shape")
    size = 1
    for extent in shape:
        size *= extent
    if any(extent < 0 for extent in shape) or size != values.size:
        raise ValidationError(f"{values.size} values do not fill shape {shape}", "shape")
    return values.reshape(shape)


def _indices(values: Any, name: str) -> npt.NDArray[np.int64] | None:
    try:
        return None if values is None else int_array(values, "int64")
    except ValidationError as error:
        raise error.under(name) from None


def _same_indices(left: npt.NDArray[Any] | None, right: npt.NDArray[Any] | None) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left, right)


def _check_csr(
    values: npt.NDArray[Any],
    shape: list[int] | None,
    rows: npt.NDArray[np.int64] | None,
    columns: npt.NDArray[np.int64] | None,
) -> None:
    if rows is None or columns is None:
        missing = "sparse_crow_indices" if rows is None else "sparse_col_indices"
        raise ValidationError("CSR needs row pointers and column indices together", missing)
    if shape is None or len(shape) != 2 or min(shape) < 0:
        raise ValidationError(f"CSR needs the shape [rows, columns], got {shape}", "shape")
    if rows.shape != (shape[0] + 1,):
        problem = f"needs rows + 1 = {shape[0] + 1} entries, got {rows.size}"
        raise ValidationError(problem, "sparse_crow_indices")
    if rows[0] != 0 or rows[-1] != columns.size or (np.diff(rows) < 0).any():
        problem = f"must rise from 0 to the number of listed cells, {columns.size}"
        raise ValidationError(problem, "sparse_crow_indices")
    if values.shape != columns.shape:
        raise ValidationError(f"{values.size} values for {columns.size} listed cells", "data")
    if columns.size and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise ValidationError(f"must lie in 0..{shape[1] - 1}", "sparse_col_indices")
    starts_row = np.zeros(columns.size + 1, dtype=bool)
    starts_row[rows] = True
    if ((np.diff(columns) <= 0) & ~starts_row[1:-1]).any():
        raise ValidationError("must rise within each row", "sparse_col_indices")


def _public_dtype(dtype: np.dtype[Any]) -> TensorDtype:
    if dtype.kind == "f":
        return "float32"
    if dtype.kind == "i":
        return "int64"
    cure = "; a mask is given as floats: mask.astype('float32')" if dtype.kind == "b" else ""
    raise ValidationError(f"numpy dtype {dtype} is neither float nor signed integer{cure}", "dtype")


def _check_pad(pad_value: Any) -> int:
    if isinstance(pad_value, bool) or not isinstance(pad_value, (int, np.integer)):
        raise TypeError(f"pad_value must be an integer, got {kind_of(pad_value)}: {pad_value!r}")
    return int(pad_value)


def _torch() -> Any:
    """torch, if it is installed; imported only when the user hands in or wants a tensor."""
    try:
        import torch
    except ImportError:
        raise ImportError(
            "this needs PyTorch, which is not installed: pip install torch (or use to_numpy)"
        ) from None
    return torch


def is_torch_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor, without importing torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
