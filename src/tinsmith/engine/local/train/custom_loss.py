"""Uploaded losses, run: an interpreter for checked graphs on one datum's tensors.

What a node receives and returns is a dense tensor, a number, or a tuple of those, so that a graph
can reach nothing else. What a node may cost is looked at before it runs (`custom_work`).

Graphs run on the CPU whatever the model runs on: there an index out of range is an error of
that graph, while on a GPU it would take down the device with every model on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tinsmith.engine.base import CustomLoss
from tinsmith.engine.local.train.custom_graph import (
    Call,
    Graph,
    Ref,
    Value,
    bounded_int,
    decode_graph,
)
from tinsmith.engine.local.train.custom_operations import ATTRIBUTES, DTYPES, METHODS, RESULT_FIELDS
from tinsmith.engine.local.train.custom_work import (
    MAX_PASS_WORK,
    Budget,
    Meter,
    has_tensor,
    operation_kind,
)
from tinsmith.errors import ValidationError

_MAX_REMEMBERED_SHAPES = 1024
_CPU = torch.device("cpu")


def compile_loss(
    custom: CustomLoss, max_seconds: float = math.inf, max_work: int = MAX_PASS_WORK
) -> CompiledLoss:
    """Check an uploaded loss and make it callable for one pass; the error names the node at fault.

    `max_seconds` is how long the evaluations may take together, and `max_work` their work.
    """
    return CompiledLoss(decode_graph(custom), Budget(max_seconds, max_work))


class CompiledLoss:
    """A checked graph. Calling it gives a datum's loss and metrics.

    The loss is a scalar on the device of `logprobs`, differentiable in it; metrics are
    detached scalars by name.
    """

    def __init__(self, graph: Graph, budget: Budget) -> None:
        self.input_names = graph.input_names
        self.input_ranks = graph.input_ranks
        self._graph = graph
        self._budget = budget
        # Sizes follow from the shapes of the inputs alone unless a mask selects elements, so
        # shapes that were measured once need no second look.
        self._measured: dict[tuple[Any, ...], int] = {}

    def __call__(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with self._budget.timed():
            return self._evaluate(logprobs, inputs)

    def give_up(self) -> None:
        """Nobody waits for what is being evaluated any more."""
        self._budget.give_up()

    def _evaluate(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wants_gradient = torch.is_grad_enabled() and logprobs.requires_grad
        leaf = logprobs.detach().to(_CPU).requires_grad_(wants_gradient)
        values: list[Value] = [leaf]
        values += [inputs[name].detach().to(_CPU) for name in self.input_names[1:]]
        shapes = tuple((value.shape, value.dtype) for value in values)
        known_work = self._measured.get(shapes)
        meter = None if known_work is not None else Meter(len(self._graph.calls))
        self._budget.charge(known_work or 0)
        for call in self._graph.calls:
            self._budget.check_time()
            values.append(_run(call, values, meter))
        self._budget.check_time()
        if meter is not None:
            self._budget.charge(meter.work)
            if not meter.selects_by_value:
                if len(self._measured) >= _MAX_REMEMBERED_SHAPES:
                    self._measured.clear()
                self._measured[shapes] = meter.work

        loss = values[self._graph.loss.index]
        if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point()):
            raise ValidationError(
                f"the loss must be a floating-point scalar, got {_describe(loss)}", "graph"
            )
        device = logprobs.device
        metrics = {
            key: _metric(key, values[ref.index]).to(device)
            for key, ref in self._graph.metrics.items()
        }
        if not wants_gradient:
            return loss.detach().float().to(device), metrics
        gradient = _gradient(loss, leaf)
        known = loss.detach().float().to(device), gradient.to(device)
        return _KnownGradient.apply(logprobs, *known), metrics


def _gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    """The loss differentiated here, so that what goes wrong is the error of the graph alone."""
    gradient = None
    if loss.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValidationError(
                f"the loss cannot be differentiated: {_first_line(error)}", "graph"
            ) from error
    if gradient is None:
        raise ValidationError(
            "the loss has no gradient in logprobs: every path from them is detached", "graph"
        )
    return gradient


class _KnownGradient(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped
    """A scalar whose gradient in `logprobs` has been computed already."""

    @staticmethod
    def forward(ctx, logprobs, loss, gradient):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return grad * gradient, None, None


def _run(call: Call, values: Sequence[Value], meter: Meter | None) -> Value:
    args = _filled_in(call.args, values)
    kwargs = {key: _filled_in(value, values) for key, value in call.kwargs.items()}
    try:
        result = _evaluate(call, args, kwargs, meter)
        _check_result(result)
    except torch.OutOfMemoryError:
        raise
    except ValidationError as error:
        raise ValidationError(
            f"node {call.name!r} ({call.target}): {error.problem}", "graph"
        ) from None
    except Exception as error:  # with a client's arguments torch may raise anything
        raise ValidationError(
            f"node {call.name!r} ({call.target}) failed: {_first_line(error)}", "graph"
        ) from error
    return result


def _evaluate(
    call: Call, args: tuple[Value, ...], kwargs: dict[str, Value], meter: Meter | None
) -> Value:
    operation = call.operation
    if call.target == "getattr":
        return _attribute(*args)
    if call.target == "operator.getitem" and not isinstance(args[0], Tensor):
        return _item(*args)
    if not operation.is_creation and not has_tensor([*args, *kwargs.values()]):
        return _on_numbers(call, args, kwargs)
    if call.target.startswith("math."):
        raise ValidationError("math functions take numbers; use the torch function on tensors")
    if call.target == "view" and any(isinstance(arg, torch.dtype) for arg in args):
        raise ValidationError("view cannot reinterpret a tensor's bytes as another dtype; use to()")
    if call.target in METHODS and not isinstance(args[0], Tensor):
        raise ValidationError(f"a method of tensors was called on {_describe(args[0])}")
    if operation.is_creation:
        kwargs.setdefault("device", _CPU)
    if operation.is_rounding_division:
        _refuse_integer_division(call, args, kwargs)
    if call.target == "operator.getitem":
        _check_index(args[1])
    if meter is not None:
        meter.measure(call, args, kwargs)
    return operation.function(*args, **kwargs)


def _on_numbers(call: Call, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> Value:
    """Arithmetic on sizes and constants."""
    if not call.target.startswith(("operator.", "math.")) or kwargs:
        raise ValidationError("none of the arguments is a tensor")
    if not all(isinstance(arg, int | float) for arg in args):
        raise ValidationError("arithmetic outside tensors is on numbers only")
    if call.target in ("operator.pow", "operator.lshift") and len(args) == 2:
        base, exponent = args
        if isinstance(base, int) and isinstance(exponent, int) and exponent > 63 and base:
            raise ValidationError("the result is beyond 64 bits")
    result = call.operation.function(*args)
    return bounded_int(result) if isinstance(result, int) else result


def _item(holder: Value, index: Value) -> Value:
    """One entry, or a run of them, of a shape or of the results of an operation."""
    if not isinstance(holder, tuple | list) or not _is_plain_index(index):
        raise ValidationError(f"{_describe(holder)} cannot be indexed by {_describe(index)}")
    return holder[index]


def _attribute(holder: Value, name: str) -> Value:
    if isinstance(holder, Tensor) and name in ATTRIBUTES:
        return getattr(holder, name)
    # Plain tuples have no such fields; the named tuples of reductions keep them as tuple items.
    if isinstance(holder, tuple) and name in RESULT_FIELDS and hasattr(type(holder), name):
        return getattr(holder, name)
    raise ValidationError(f"{_describe(holder)} has no attribute {name!r} to read")


def _check_index(index: Value) -> None:
    """An index of a tensor: whole numbers, slices of them, None, ..., and tensors or lists."""
    items = index if isinstance(index, tuple) else (index,)
    masks = [item for item in items if isinstance(item, Tensor) and item.dtype == torch.bool]
    others = [item for item in items if isinstance(item, Tensor | list)]
    if masks and len(others) > 1:
        raise ValidationError("a boolean mask cannot be combined with another index tensor")
    for item in items:
        if isinstance(item, slice) and has_tensor(item):
            raise ValidationError("the ends of a slice must be numbers")


def _refuse_integer_division(
    call: Call, args: Sequence[Value], kwargs: Mapping[str, Value]
) -> None:
    # On some processors the smallest integer divided by -1 stops the whole process.
    if operation_kind(call) in ("div", "divide") and "rounding_mode" not in kwargs:
        return
    floats = (
        value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)
        for value in [*args, *kwargs.values()]
    )
    if not any(floats):
        raise ValidationError("division of integers is not supported; convert with .float() first")


def _check_result(value: Value, depth: int = 0) -> None:
    """Nothing but dense tensors of known dtypes, numbers, and tuples of those may come out."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.dtype not in DTYPES.values():
            raise ValidationError(f"gives {_describe(value)}, which custom losses cannot use")
    elif isinstance(value, list | tuple) and depth < 2:
        for item in value:
            _check_result(item, depth + 1)
    elif not isinstance(value, int | float | torch.dtype | torch.device):
        raise ValidationError(f"gives a {type(value).__name__}, which custom losses cannot use")


def _metric(key: str, value: Value) -> Tensor:
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor) or value.ndim != 0:
        raise ValidationError(f"metric {key!r} must be a scalar, got {_describe(value)}", "graph")
    return value.detach().float()


def _filled_in(value: Value, values: Sequence[Value]) -> Value:
    """An argument with its references replaced by what they refer to."""
    if isinstance(value, Ref):
        return values[value.index]
    if isinstance(value, tuple):
        return tuple(_filled_in(item, values) for item in value)
    if isinstance(value, list):
        return [_filled_in(item, values) for item in value]
    if isinstance(value, slice):
        return slice(*(_filled_in(end, values) for end in (value.start, value.stop, value.step)))
    return value


def _first_line(error: Exception) -> str:
    """torch's messages may go on with a stack trace."""
    return str(error).split("\n", 1)[0]


def _is_plain_index(index: Value) -> bool:
    if isinstance(index, slice):
        return all(
            _is_plain_index(part)
            for part in (index.start, index.stop, index.step)
            if part is not None
        )
    return isinstance(index, int)


def _describe(value: Value) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
