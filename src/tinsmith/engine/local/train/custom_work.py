"""What an uploaded loss may cost: units of work for a datum and for a pass, and seconds.

A unit is about two nanoseconds of one core, forward and backward together. What an operation costs
for each element is in `custom_operations`; how many elements there are is known before it runs:
from the shapes of its arguments, or from torch on the meta device, where nothing is allocated. Work
is the same wherever a pass runs, so a pass that is within it once always is. Seconds are not; they
end what the units have underrated, and are left aside when a pass is replayed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tinsmith.engine.local.train.custom_graph import Call, Value, leaves
from tinsmith.errors import ValidationError

MAX_PARTS = 1024
"""Tensors that one `split`, `chunk` or `unbind` may return."""

MAX_ELEMENTS = 2**24
"""Elements of one intermediate tensor."""

MAX_WORK = 2**28
"""Units of work of one evaluation, which is one datum's: about half a second."""

MAX_PASS_WORK = 2**31
"""Units of work of all evaluations of one pass together: a few seconds."""

NODE_WORK = 2**13
"""What a node costs by itself, however small its tensors are..."""

ARGUMENT_WORK = 2**8
"""... and each tensor among its arguments."""

FAST_PRODUCTS_A_UNIT = 16
"""How many multiplications of a matrix product of a type that the processor is made for cost one
unit; of any other type, one costs `Operation.cost`."""


class Budget:
    """What the evaluations of one pass may still cost."""

    def __init__(self, max_seconds: float, max_work: int = MAX_PASS_WORK) -> None:
        self._max_work = max_work
        self._max_seconds = max_seconds
        self._spent_seconds = 0.0
        self._deadline = math.inf
        self._is_given_up = False
        self._work = 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around one evaluation. What counts is the time of the thread: it gives way to others."""
        start = time.thread_time()
        self._deadline = start + self._max_seconds - self._spent_seconds
        try:
            yield
        finally:
            self._spent_seconds += time.thread_time() - start

    def give_up(self) -> None:
        """Nobody waits for the evaluation under way any more: it ends at its next node."""
        self._is_given_up = True

    def check_time(self) -> None:
        if self._is_given_up:
            raise ValidationError("the pass was given up")
        if time.thread_time() > self._deadline:
            raise ValidationError(
                f"the loss has taken more than {self._max_seconds:g} s in one pass; send fewer "
                "datums at a time, or make it smaller",
                "graph",
            )

    def charge(self, work: int) -> None:
        self._work += work
        if self._work > self._max_work:
            raise ValidationError(
                f"the loss takes {self._work} units of work in one pass, at most {self._max_work} "
                "are allowed; send fewer datums at a time, or make it smaller",
                "graph",
            )


class Meter:
    """Adds up the work of one evaluation and stops it at the limits, before the work is done."""

    def __init__(self, num_nodes: int) -> None:
        self.work = NODE_WORK * num_nodes
        self.selects_by_value = False
        """Whether sizes depended on the values of a mask."""

    def measure(self, call: Call, args: Sequence[Value], kwargs: Mapping[str, Value]) -> None:
        operation = call.operation
        tensors = list(leaves([*args, *kwargs.values()], Tensor))
        read = max((tensor.numel() for tensor in tensors), default=0)
        repeats = _repeats(call, args, kwargs)
        # Charged first: already to ask torch for the size takes as many repeats.
        self._charge(ARGUMENT_WORK * len(tensors) + (repeats - 1) * (NODE_WORK + read))
        _check_parts(call, args, kwargs)
        if _selects_by_mask(call, args):
            self.selects_by_value = True
            largest = total = _most_selected(call, args, kwargs)
        elif operation.keeps_size:
            largest = total = math.prod(torch.broadcast_shapes(*(t.shape for t in tensors)))
        else:
            sizes = _sizes(call, args, kwargs)
            largest, total = max(sizes, default=0), sum(sizes)
        if largest > MAX_ELEMENTS:
            raise ValidationError(
                f"the result would have {largest} elements; at most {MAX_ELEMENTS} are allowed"
            )
        self._charge(operation.cost * max(total, read))
        if operation.multiplies_matrices:
            factor = _first_tensor(args)
            products = largest * max(factor.shape[-1:], default=1)
            is_fast = factor.dtype in (torch.float32, torch.float64)
            self._charge(products // FAST_PRODUCTS_A_UNIT if is_fast else products * operation.cost)

    def _charge(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise ValidationError(
                f"the loss takes {self.work} units of work for one datum, at most {MAX_WORK} are "
                "allowed; an element counts 4 in an addition and 64 in a sort, so make the tensors "
                "smaller"
            )


def _repeats(call: Call, args: Sequence[Value], kwargs: Mapping[str, Value]) -> int:
    """How often an operation goes over its argument because it was told to."""
    if operation_kind(call) != "diff":
        return 1
    times = args[1] if len(args) > 1 else kwargs.get("n", 1)
    return max(1, times) if isinstance(times, int) else 1


def _sizes(call: Call, args: Sequence[Value], kwargs: Mapping[str, Value]) -> list[int]:
    """How many elements each tensor of the result will have."""
    if call.target == "operator.getitem":
        args = (args[0], _with_plain_numbers(args[1]))
    with torch.no_grad():
        result = call.operation.function(
            *_on_meta(tuple(args)), **{key: _on_meta(value) for key, value in kwargs.items()}
        )
    return [tensor.numel() for tensor in leaves(result, Tensor)]


def _selects_by_mask(call: Call, args: Sequence[Value]) -> bool:
    if call.target != "operator.getitem":
        return operation_kind(call) == "masked_select"
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(item, Tensor) and item.dtype == torch.bool for item in items)


def _most_selected(call: Call, args: Sequence[Value], kwargs: Mapping[str, Value]) -> int:
    """How many elements there are if the mask selects all of them."""
    if call.target == "operator.getitem":
        return _first_tensor(args).numel()
    shapes = [tensor.shape for tensor in leaves([*args, *kwargs.values()], Tensor)]
    return math.prod(torch.broadcast_shapes(*shapes))


def _with_plain_numbers(index: Value) -> Value:
    """The index with scalar tensors as the number 0: which row they name matters to no size."""
    if isinstance(index, tuple):
        return tuple(_with_plain_numbers(item) for item in index)
    return 0 if isinstance(index, Tensor) and index.ndim == 0 else index


def _check_parts(call: Call, args: Sequence[Value], kwargs: Mapping[str, Value]) -> None:
    """Refuse cutting a tensor into very many parts; each would be an object of its own."""
    kind = operation_kind(call)
    if kind not in ("chunk", "split", "unbind"):
        return
    whole = _first_tensor(args)
    longest = max(whole.shape, default=0)
    if kind == "unbind":
        parts = longest
    else:
        names = ("chunks", "split_size", "split_size_or_sections")
        given = [*args[1:2], *(kwargs[name] for name in names if name in kwargs)]
        part = given[0] if given else 0
        if kind == "split" and isinstance(part, int):
            parts = longest // max(part, 1)
        else:
            parts = len(part) if isinstance(part, list | tuple) else int(part)
    if parts > MAX_PARTS:
        raise ValidationError(f"{kind} into {parts} parts; at most {MAX_PARTS} are allowed")


def _on_meta(value: Value) -> Value:
    """The same value with every tensor replaced by one that has no memory."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, tuple):
        return tuple(_on_meta(item) for item in value)
    if isinstance(value, list):
        return [_on_meta(item) for item in value]
    return value


def has_tensor(value: Value) -> bool:
    return any(True for _ in leaves(value, Tensor))


def operation_kind(call: Call) -> str:
    """The operation's name without its module."""
    return call.target.rsplit(".", 1)[-1]


def _first_tensor(args: Sequence[Value]) -> Tensor:
    if not args or not isinstance(args[0], Tensor):
        raise ValidationError("argument 0 must be a tensor, given by position")
    return args[0]
