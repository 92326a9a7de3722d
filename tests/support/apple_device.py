"""A GPU of Apple's, without one: tensors that say they are on `mps` and are computed on the CPU.

What the real one refuses is refused here: float64, operations that torch has no kernel for there,
and operands of which some are on the device and some are not. So what runs here has a chance there;
speed, precision and torch's own faults on that device can only be seen on a Mac.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

APPLE = torch.device("mps", 0)

_TO_CPU = (torch.Tensor.cpu, torch.Tensor.tolist)


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, torch finds a device of the kind `mps`."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    # Tensors made of others cannot be made in inference mode.
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.set_grad_enabled(not mode))
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    # What stands beside the CPU's own kernel, and what MPS takes where gradients are wanted.
    with sdpa_kernel(SDPBackend.MATH), _Device():
        yield


class OnApple(torch.Tensor):
    """A tensor on the device; `inner` is where it really is."""

    inner: Tensor
    device = property(lambda self: APPLE)  # type: ignore[assignment]  # a read-only attribute
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_mps = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnApple:
        if inner.dtype in (torch.float64, torch.complex128):
            raise TypeError("the MPS framework doesn't support float64")
        made: OnApple = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # as torch calls it
        kwargs = kwargs or {}
        if not has_kernel(func):
            raise NotImplementedError(f"{func} is not implemented for the MPS device")
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        strangers = [x for x in given if not isinstance(x, OnApple) and x.ndim]
        if strangers and func not in _BETWEEN_DEVICES:
            raise RuntimeError(f"{func}: some operands are on the CPU and some on {APPLE}")
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        out = tree_map(lambda x: OnApple(x) if isinstance(x, Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


class _Device(TorchFunctionMode):
    """Makes tensors on the device where a call names it, and brings them back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        if func is scaled_dot_product_attention and kwargs.pop("is_causal", False):
            # Written in C++, it would make the mask where the tensors really are.
            shape = args[0].shape[-2], args[1].shape[-2]
            kwargs["attn_mask"] = OnApple(torch.ones(shape, dtype=torch.bool).tril())
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], args[1].device, args[1].dtype, *args[2:])
        places = {_place(x) for x in (*args, *kwargs.values())} - {None}
        here = tree_map(lambda x: "cpu" if _place(x) == "mps" else x, (args, kwargs))
        if "mps" in places:
            if isinstance(args[0], OnApple) and func is not torch.Tensor.to:
                return func(*here[0], **here[1])
            made = func(*here[0], **here[1])
            return made if isinstance(made, OnApple) else _Move.apply(made, True)
        if func is torch.Tensor.numpy and isinstance(args[0], OnApple):
            raise TypeError("can't convert mps:0 device type tensor to numpy")
        if func in _TO_CPU or (func is torch.Tensor.to and "cpu" in places):
            here = tree_map(
                lambda x: _Move.apply(x, False) if isinstance(x, OnApple) else x, (args, kwargs)
            )
        return func(*here[0], **here[1])


class _Move(torch.autograd.Function):
    """To the device and back, the gradient the other way."""

    @staticmethod
    def forward(ctx: Any, x: Any, is_to_device: bool) -> Any:
        ctx.is_to_device = is_to_device
        return OnApple(x.clone()) if is_to_device else x.inner.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]  # torch's is `*grads`
        return (grad.inner if ctx.is_to_device else OnApple(grad)), None


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, OnApple) else x


def _place(x: Any) -> str | None:
    """The kind of device that an argument names."""
    if isinstance(x, torch.device):
        return x.type
    return x if isinstance(x, str) and x in ("mps", "cpu") else None


_BETWEEN_DEVICES = {
    torch.ops.aten.copy_.default,
    # Numbers of rows may be told from the CPU.
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
}


@functools.cache
def has_kernel(func: Any) -> bool:
    """Whether torch's own table has a kernel for MPS, or makes it of operations that have one."""
    name = func.name().removeprefix("aten::")
    row = _kernels().get(name)
    if row is None:
        return False
    if "structured_delegate" in row:
        row = _kernels()[row["structured_delegate"]]
    kinds = {kind.strip() for kinds in row.get("dispatch", {}) for kind in kinds.split(",")}
    return not row.get("dispatch") or any(
        kind == "MPS" or kind.startswith("Composite") for kind in kinds
    )


@functools.cache
def _kernels() -> dict[str, dict[str, Any]]:
    """The rows of torch's table of operations by name with overload."""
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = yaml.load(table.read_text(), loader)
    return {row["func"].partition("(")[0]: row for row in rows}
