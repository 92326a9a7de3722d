"""`TensorData` beside the official class: the same inputs give the same tensors and errors."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker.types as official
import torch

from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.types import TensorData
from tinsmith.wire import json, proto

Case = Callable[[Any], Any]


def outcome(case: Case, cls: Any) -> Any:
    """What a case gives with one package's class: everything a user can see, or the error."""
    try:
        tensor = case(cls)
    except Exception as error:
        return error
    return {
        "data": tensor.data,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "rows": tensor.sparse_crow_indices,
        "columns": tensor.sparse_col_indices,
        "tolist": tensor.tolist(),
        "padded": tensor.tolist(pad_value=-1),
        "numpy": (tensor.to_numpy().tolist(), str(tensor.to_numpy().dtype)),
        "torch": (tensor.to_torch().tolist(), str(tensor.to_torch().dtype)),
    }


MATRIX = [[0, 7, 0, 0], [0, 0, 0, 0], [1, 0, 0, 2]]
CSR = {
    "data": [7, 1, 2],
    "shape": [3, 4],
    "sparse_crow_indices": [0, 1, 1, 3],
    "sparse_col_indices": [1, 0, 3],
}

SAME: dict[str, Case] = {
    "a flat list": lambda T: T(data=[1, 2, 3], dtype="int64"),
    "a flat list and its shape": lambda T: T(data=[1, 2, 3], dtype="int64", shape=[3]),
    "positional arguments": lambda T: T([1, 2], "int64", [2]),
    "integers as floats": lambda T: T(data=[1, 2], dtype="float32", shape=[2]),
    "a matrix as a flat list": lambda T: T(
        data=[1.0, 2.0, 3.0, 4.0], dtype="float32", shape=[2, 2]
    ),
    "a matrix as nested lists": lambda T: T(data=[[1, 2], [3, 4]], dtype="int64"),
    "nothing": lambda T: T(dtype="float32"),
    "an empty list": lambda T: T(data=[], dtype="int64", shape=[0]),
    "no rows": lambda T: T(data=[], dtype="int64", shape=[0, 5]),
    "a scalar": lambda T: T(data=[5], dtype="int64", shape=[]),
    "the ends of int64": lambda T: T(data=[-(2**63), 2**63 - 1], dtype="int64"),
    "a number float32 rounds": lambda T: T(data=[0.1, 1 / 3], dtype="float32"),
    "an array of another width": lambda T: T(data=np.arange(4, dtype=np.int32), dtype="int64"),
    "an integer array as floats": lambda T: T(data=np.arange(4), dtype="float32"),
    "a read-only array": lambda T: T(data=read_only(np.arange(4)), dtype="int64"),
    "a transposed array": lambda T: T.from_numpy(np.arange(6).reshape(2, 3).T),
    "numpy float64": lambda T: T.from_numpy(np.linspace(0, 1, 5)),
    "numpy float16": lambda T: T.from_numpy(np.linspace(0, 1, 5, dtype=np.float16)),
    "numpy int8": lambda T: T.from_numpy(np.arange(3, dtype=np.int8)),
    "numpy 0-d": lambda T: T.from_numpy(np.array(2.5)),
    "numpy infinities": lambda T: T.from_numpy(np.array([np.inf, -np.inf])),
    "torch float32": lambda T: T.from_torch(torch.linspace(0, 1, 4)),
    "torch float64": lambda T: T.from_torch(torch.linspace(0, 1, 4, dtype=torch.float64)),
    "torch bfloat16": lambda T: T.from_torch(torch.linspace(0, 1, 4).bfloat16()),
    "torch int32": lambda T: T.from_torch(torch.arange(4, dtype=torch.int32)),
    "torch int64": lambda T: T.from_torch(torch.arange(6).reshape(2, 3)),
    "torch non-contiguous": lambda T: T.from_torch(torch.arange(12).reshape(3, 4).T[1:, ::2]),
    "torch 0-d": lambda T: T.from_torch(torch.tensor(3)),
    "torch empty": lambda T: T.from_torch(torch.empty(0, 3)),
    "CSR integers": lambda T: T(dtype="int64", **CSR),
    "CSR floats": lambda T: T(dtype="float32", **CSR),
    "CSR without cells": lambda T: T([], "int64", [2, 3], [0, 0, 0], []),
    "torch to CSR": lambda T: T.from_torch_sparse(torch.tensor(MATRIX)),
    "torch floats to CSR": lambda T: T.from_torch_sparse(torch.tensor(MATRIX) * 0.5),
    "torch with pad -1": lambda T: T.from_torch_sparse(torch.tensor(MATRIX) - 1, pad_value=-1),
    "torch with a numpy pad": lambda T: T.from_torch_sparse(torch.tensor(MATRIX), np.int64(0)),
    "torch too full for CSR": lambda T: T.from_torch_sparse(torch.ones(3, 3)),
    "torch vector to CSR": lambda T: T.from_torch_sparse(torch.zeros(9)),
    # Errors: ours must be of the official kind.
    "no dtype": lambda T: T(data=[1]),
    "an unknown dtype": lambda T: T(data=[1], dtype="float64"),
    "a shape that does not fit": lambda T: T(data=[1, 2, 3], dtype="int64", shape=[2]),
    "text": lambda T: T(data=["a"], dtype="int64"),
    "ragged rows": lambda T: T(data=[[1], [2, 3]], dtype="int64"),
    "numpy bool": lambda T: T.from_numpy(np.array([True])),
    "numpy unsigned": lambda T: T.from_numpy(np.array([1], dtype=np.uint8)),
    "numpy text": lambda T: T.from_numpy(np.array(["a"])),
    "torch bool": lambda T: T.from_torch(torch.tensor([True])),
    "torch complex": lambda T: T.from_torch(torch.tensor([1j])),
    "a fractional pad": lambda T: T.from_torch_sparse(torch.tensor(MATRIX), pad_value=0.5),
    "a boolean pad": lambda T: T.from_torch_sparse(torch.tensor(MATRIX), pad_value=True),
}


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", SAME)
def test_the_same_input_gives_the_same_tensor_or_kind_of_error(name):
    """S5, S14"""
    expected, actual = outcome(SAME[name], official.TensorData), outcome(SAME[name], TensorData)
    if isinstance(expected, Exception):
        assert isinstance(actual, type(expected)), actual
    else:
        assert actual == expected


# Where the official class is silently wrong, or refuses what it could take.
REFUSED: dict[str, tuple[Case, str]] = {
    "fractions as integers": (lambda T: T(data=[1.5], dtype="int64"), r"data\[0\]"),
    "a float array as integers": (lambda T: T(data=np.array([1.5]), dtype="int64"), "float64"),
    "beyond int64": (lambda T: T(data=[1, 2**63], dtype="int64"), r"data\[1\].*int64"),
    "a negative size": (lambda T: T(data=[1, 2], dtype="int64", shape=[-1, 2]), "shape"),
    "text among numbers": (lambda T: T(data=[1.0, "2"], dtype="float32"), r"data\[1\].*str"),
    "null among numbers": (lambda T: T(data=[1, None], dtype="int64"), r"data\[1\].*null"),
    "row pointers alone": (
        lambda T: T([1], "int64", [1, 1], [0, 1]),
        "sparse_col_indices.*together",
    ),
    "CSR without a shape": (lambda T: T([1], "int64", None, [0, 1], [0]), "shape"),
    "a column outside": (lambda T: T([1], "int64", [1, 2], [0, 1], [2]), "sparse_col_indices"),
    "falling row pointers": (
        lambda T: T([1, 2], "int64", [2, 2], [0, 2, 1], [0, 1]),
        "sparse_crow_indices",
    ),
    "too few row pointers": (lambda T: T([1], "int64", [2, 2], [0, 1], [0]), "sparse_crow_indices"),
    "a cell listed twice": (lambda T: T([1, 2], "int64", [1, 2], [0, 2], [1, 1]), "rise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_silently_wrong_is_refused(name):
    """S5: numpy would truncate, wrap or misplace these."""
    case, message = REFUSED[name]
    with pytest.raises(ValidationError, match=message):
        case(TensorData)


TORCH_VARIANTS: dict[str, torch.Tensor] = {
    "requires grad": torch.linspace(0, 1, 6, requires_grad=True),
    "the result of a computation": torch.linspace(0, 1, 6, requires_grad=True) * 2,
    "requires grad, bfloat16": torch.linspace(0, 1, 6).bfloat16().requires_grad_(),
    "requires grad, non-contiguous": torch.arange(6.0).reshape(2, 3).T.requires_grad_(),
    "requires grad, 0-d": torch.tensor(1.5, requires_grad=True),
    "a conjugate view": torch.view_as_real(torch.tensor([1 + 2j])).T,
    "a negated view": torch.tensor([1 - 2j]).conj().imag,
}


@pytest.mark.parametrize("name", TORCH_VARIANTS)
def test_any_torch_tensor_encodes_like_its_plain_form(name):
    """S14"""
    tensor = TORCH_VARIANTS[name]
    plain = tensor.detach().cpu().resolve_neg().contiguous().float()
    mine = TensorData.from_torch(tensor)
    assert mine.numpy.tobytes() == plain.numpy().tobytes()
    assert json.encode(mine) == json.encode(TensorData.from_numpy(plain.numpy()))
    assert (
        ours.Datum(model_input=ours.ModelInput.empty(), loss_fn_inputs={"logprobs": tensor})
        .loss_fn_inputs["logprobs"]
        .data
        == plain.flatten().tolist()
    )


@pytest.mark.parametrize("pad", [0, -1, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_csr_conversion_is_the_official_one(pad, dtype):
    rng = np.random.default_rng(0)
    for density in (0.0, 0.05, 0.2, 0.5, 1.0):
        matrix = np.where(rng.random((9, 11)) < density, rng.integers(-5, 10, (9, 11)), pad)
        tensor = torch.tensor(matrix, dtype=dtype)
        mine = TensorData.from_torch_sparse(tensor, pad_value=pad)
        theirs = official.TensorData.from_torch_sparse(tensor, pad_value=pad)
        assert mine.is_sparse == (theirs.sparse_crow_indices is not None)
        assert mine.sparse_crow_indices == theirs.sparse_crow_indices
        assert mine.sparse_col_indices == theirs.sparse_col_indices
        assert mine.data == theirs.data
        assert torch.equal(mine.to_torch(pad), tensor)
        assert np.array_equal(mine.to_numpy(pad), tensor.numpy())


def test_a_torch_tensor_made_from_decoded_data_can_be_written_to():
    decoded = TensorData(data=read_only(np.arange(3)), dtype="int64")
    tensor = decoded.to_torch()
    tensor[0] = 9
    assert decoded.data == [0, 1, 2]


def test_tensors_compare_by_content():
    tensor = TensorData(data=[1.0, float("nan")], dtype="float32")
    assert tensor == TensorData(data=np.array([1, np.nan]), dtype="float32", shape=[2])
    assert tensor != TensorData(data=[1.0, 2.0], dtype="float32")
    assert TensorData([1, 0], "int64", [1, 2]) != TensorData([1], "int64", [1, 2], [0, 1], [0])
    assert TensorData([1], "int64") != TensorData([1], "float32")
    with pytest.raises(TypeError):
        hash(tensor)


def test_tensors_are_immutable_and_pickle_and_copy():
    """S7"""
    for tensor in (TensorData([1.5, 2.5], "float32", [2]), TensorData(dtype="int64", **CSR)):
        with pytest.raises(AttributeError):
            tensor.dtype = "int64"
        for twin in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor), copy.copy(tensor)):
            assert twin == tensor
        assert TensorData.model_validate(tensor.model_dump()) == tensor


def test_tensors_work_in_a_program_without_torch():
    """S12, S13: build, encode, decode, list; a conversion says what to install."""
    program = """
        import sys
        sys.modules["torch"] = None
        from tinsmith import types
        from tinsmith.wire import json, proto
        tensor = types.TensorData(data=[1, 2, 3], dtype="int64", shape=[3])
        sparse = types.TensorData([5], "int64", [2, 2], [0, 0, 1], [1])
        assert json.encode(tensor) == b'{"data":[1,2,3],"dtype":"int64","shape":[3]}'
        assert types.TensorData.model_validate(json.parse(json.encode(tensor))) == tensor
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": sparse},
        )
        pass_ = types.ForwardRequest(types.ForwardBackwardInput([datum], "cross_entropy"), "m", 1)
        [back] = proto.decode_pass(proto.encode_pass(pass_)).forward_input.data
        assert back == datum and back.loss_fn_inputs["weights"].tolist() == [[0, 0], [0, 5]]
        for call in (tensor.to_torch, lambda: types.TensorData.from_torch(object())):
            try:
                call()
            except ImportError as error:
                assert "pip install torch" in str(error)
            else:
                raise AssertionError("torch is not there")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_importing_the_package_does_not_import_torch():
    """S13, S27"""
    program = (
        "import sys, tinsmith, tinsmith.types, tinsmith.wire.dialects;"
        "assert not {'torch', 'transformers', 'pydantic'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_encoding_a_large_array_takes_less_than_twice_its_size():
    """S15: 50 MB of float32."""
    array = np.arange(12_500_000, dtype=np.float32) % 1000
    tensor = TensorData.from_numpy(array)
    datum = ours.Datum(model_input=ours.ModelInput.from_ints([1]), loss_fn_inputs={"w": tensor})
    request = ours.ForwardRequest(ours.ForwardBackwardInput([datum], "cross_entropy"), "m", 1)
    tracemalloc.start()
    try:
        body = proto.encode_pass(request)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert array.nbytes < len(body)
    assert peak < 2 * array.nbytes


def test_from_numpy_and_from_torch_share_memory_when_they_can():
    """S15"""
    array = np.zeros(10, dtype=np.float32)
    assert np.shares_memory(TensorData.from_numpy(array).to_numpy(), array)
    tensor = torch.zeros(10)
    assert np.shares_memory(TensorData.from_torch(tensor).to_numpy(), tensor.numpy())
