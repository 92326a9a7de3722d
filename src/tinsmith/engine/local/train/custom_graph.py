"""An uploaded loss as checked data: from the wire's nodes to calls of allowed operations.

A graph comes from a client and is not trusted. Everything that can be refused without
running it is refused here: operations, keywords and attributes that are not on the lists of
`custom_operations`, references to anything but earlier nodes, and sheer size. How the calls
are carried out, and what their tensors may grow to, is the matter of `custom_loss`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tinsmith.engine.base import CustomLoss
from tinsmith.engine.local.train.custom_operations import (
    ATTRIBUTES,
    DTYPES,
    FUNCTIONS,
    KEYWORDS,
    MEMORY_FORMATS,
    METHODS,
    RESULT_FIELDS,
    TEXT_KEYWORDS,
    Operation,
)
from tinsmith.errors import ValidationError
from tinsmith.types import CustomLossNode
from tinsmith.types.protocol import MAX_LOSS_INPUTS

MAX_NODES = 4096
MAX_METRICS = 64
MAX_ARGUMENTS = 65_536
"""Values in all argument lists of a graph together."""

MAX_ARGUMENT_DEPTH = 8
MAX_TEXT = 128

_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_KEY = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_MAX_INT = 2**63 - 1
_CPU = torch.device("cpu")
# What torch.nn.functional passes on by itself, whether or not the user wrote it.
_IDLE_KEYWORDS = (("inplace", False), ("_stacklevel", 3), ("_stacklevel", 5))

T = TypeVar("T")
Value = Any
"""An argument or a result: a tensor, a number, a dtype or device, or a tuple of those."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier node."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """One operation to carry out, its arguments perhaps references."""

    name: str
    target: str
    operation: Operation
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A checked graph. Values are numbered: the inputs first, then the result of each call."""

    input_names: tuple[str, ...]
    """`logprobs`, then the loss inputs that the graph reads."""

    input_ranks: tuple[int, ...]
    calls: tuple[Call, ...]
    loss: Ref
    metrics: Mapping[str, Ref]


def decode_graph(custom: CustomLoss) -> Graph:
    """Check an uploaded loss from end to end; the error names the node at fault."""
    names, ranks = _check_inputs(custom)
    nodes = custom.graph.nodes
    if custom.graph.format != 1:
        raise ValidationError(f"format {custom.graph.format!r} is not known; known: 1", "graph")
    if not len(names) < len(nodes) <= MAX_NODES:
        raise ValidationError(
            f"a graph has between {len(names) + 1} (its inputs and an output) and {MAX_NODES} "
            f"nodes, got {len(nodes)}",
            "graph.nodes",
        )
    decoder = _ArgumentDecoder()
    calls: list[Call] = []
    loss, metrics = Ref(0), dict[str, Ref]()
    for index, node in enumerate(nodes):
        try:
            if index < len(names):
                _check_placeholder(node, names[index])
            elif index == len(nodes) - 1:
                loss, metrics = _decode_output(node, decoder)
            else:
                calls.append(_decode_call(node, decoder))
            decoder.define(node.name)
        except ValidationError as error:
            shown = node.name[:MAX_TEXT] if isinstance(node.name, str) else "?"
            raise ValidationError(
                f"node {shown!r}: {error.problem}", f"graph.nodes[{index}]"
            ) from None
    _check_reaches_loss(calls, loss, num_inputs=len(names))
    return Graph(
        input_names=names, input_ranks=ranks, calls=tuple(calls), loss=loss, metrics=metrics
    )


class _ArgumentDecoder:
    """Turns wire arguments into values and references, counting them across the graph."""

    def __init__(self) -> None:
        self._index_by_name: dict[str, int] = {}
        self._count = 0

    def define(self, name: object) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_TEXT:
            raise ValidationError(f"a node's name is a text of 1 to {MAX_TEXT} characters")
        if name in self._index_by_name:
            raise ValidationError("another node has the same name")
        self._index_by_name[name] = len(self._index_by_name)

    def decode(self, value: object, depth: int = 0) -> Value:
        self._count += 1
        if self._count > MAX_ARGUMENTS:
            raise ValidationError(f"the graph has more than {MAX_ARGUMENTS} argument values")
        if depth > MAX_ARGUMENT_DEPTH:
            raise ValidationError(f"arguments are nested more than {MAX_ARGUMENT_DEPTH} deep")
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return bounded_int(value)
        if isinstance(value, str):
            if len(value) > MAX_TEXT:
                raise ValidationError(f"a text argument is longer than {MAX_TEXT} characters")
            return value
        if isinstance(value, list | tuple):
            return [self.decode(item, depth + 1) for item in value]
        if isinstance(value, Mapping) and len(value) == 1:
            ((kind, content),) = value.items()
            return self._decode_tagged(kind, content, depth)
        raise ValidationError(f"an argument of type {type(value).__name__} is not understood")

    def ref(self, value: object) -> Ref:
        """Decode something that must be a reference."""
        decoded = self.decode(value)
        if not isinstance(decoded, Ref):
            raise ValidationError('expected a reference to a node, {"ref": name}')
        return decoded

    def _decode_tagged(self, kind: object, content: object, depth: int) -> Value:
        if kind == "ref":
            if not isinstance(content, str) or content not in self._index_by_name:
                raise ValidationError(f"no earlier node is called {_short(content)}")
            return Ref(self._index_by_name[content])
        if kind == "tuple" and isinstance(content, list | tuple):
            return tuple(self.decode(item, depth + 1) for item in content)
        if kind == "slice" and isinstance(content, list | tuple) and len(content) == 3:
            return slice(*(self.decode(item, depth + 1) for item in content))
        if kind == "ellipsis" and content is True:
            return ...
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(str(content))
        if kind == "dtype":
            return _from_table(DTYPES, "dtype", content)
        if kind == "device":
            return _from_table({"cpu": _CPU}, "device", content)
        if kind == "layout":
            return _from_table({"strided": torch.strided}, "layout", content)
        if kind == "memory_format":
            return _from_table(MEMORY_FORMATS, "memory format", content)
        raise ValidationError(f"an argument tagged {_short(kind)} is not understood here")


def _check_inputs(custom: CustomLoss) -> tuple[tuple[str, ...], tuple[int, ...]]:
    inputs = custom.inputs
    if not 1 <= len(inputs) <= MAX_LOSS_INPUTS:
        raise ValidationError(
            f"a custom loss takes 1 to {MAX_LOSS_INPUTS} inputs, logprobs first; got {len(inputs)}",
            "inputs",
        )
    seen: set[str] = set()
    for index, declared in enumerate(inputs):
        path = f"inputs[{index}]"
        if not isinstance(declared.name, str) or not _INPUT_NAME.fullmatch(declared.name):
            raise ValidationError(
                f"{_short(declared.name)} is not a name of lower-case letters, digits and "
                "underscores, at most 64 long",
                f"{path}.name",
            )
        if declared.name in seen:
            raise ValidationError(f"{declared.name!r} is declared twice", f"{path}.name")
        seen.add(declared.name)
        if isinstance(declared.rank, bool) or declared.rank not in (0, 1, 2):
            raise ValidationError(f"the rank is 0, 1 or 2, got {declared.rank!r}", f"{path}.rank")
    if inputs[0].name != "logprobs" or inputs[0].rank == 0:
        raise ValidationError("the first input must be logprobs, of rank 1 or 2", "inputs[0]")
    return tuple(i.name for i in inputs), tuple(i.rank for i in inputs)


def _check_placeholder(node: CustomLossNode, name: str) -> None:
    if node.op != "placeholder" or node.target != name:
        raise ValidationError(
            f"expected the placeholder of input {name!r}, got {_short(node.op)} of "
            f"{_short(node.target)}: a graph starts with its inputs as declared"
        )
    if node.args or node.kwargs:
        raise ValidationError("an input cannot have a default value")


def _decode_call(node: CustomLossNode, decoder: _ArgumentDecoder) -> Call:
    """The call a node stands for, if what it calls is on the lists."""
    if not isinstance(node.target, str):
        raise ValidationError("a node's target is a text")
    if node.op == "call_function":
        table = FUNCTIONS
    elif node.op == "call_method":
        table = METHODS
    else:
        raise ValidationError(
            f"op {_short(node.op)} (of {_short(node.target)}) cannot be used here: after its "
            "inputs a graph calls functions and methods, and ends in one output"
        )
    if node.target not in table:
        kind = "function" if node.op == "call_function" else "tensor method"
        raise ValidationError(f"custom losses cannot use the {kind} {_short(node.target)}")
    args = tuple(decoder.decode(arg) for arg in node.args)
    kwargs = {
        key: _check_keyword(key, decoder.decode(arg))
        for key, arg in node.kwargs.items()
        if (key, arg) not in _IDLE_KEYWORDS
    }
    if node.target == "getattr":
        _check_getattr(args, kwargs)
    elif any(_holds_text(arg) for arg in args):
        raise ValidationError(f"{node.target} is given a text, which no operation here takes")
    return Call(node.name, node.target, table[node.target], args, kwargs)


def _check_keyword(key: str, value: Value) -> Value:
    if key not in KEYWORDS:
        raise ValidationError(f"custom losses cannot use the keyword {_short(key)}")
    if key == "device" and value == "cpu":
        return _CPU
    if _holds_text(value) and key not in TEXT_KEYWORDS:
        raise ValidationError(f"keyword {key!r} cannot be {_short(value)}")
    return value


def _check_getattr(args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> None:
    if len(args) != 2 or kwargs or not isinstance(args[0], Ref) or not isinstance(args[1], str):
        raise ValidationError("getattr takes a node and the name of an attribute")
    if args[1] not in ATTRIBUTES | RESULT_FIELDS:
        known = ", ".join(sorted(ATTRIBUTES | RESULT_FIELDS))
        raise ValidationError(f"the attribute {_short(args[1])} cannot be read; known: {known}")


def _decode_output(node: CustomLossNode, decoder: _ArgumentDecoder) -> tuple[Ref, dict[str, Ref]]:
    if node.op != "output" or node.kwargs or len(node.args) != 1:
        raise ValidationError("the last node must be the output, with one argument")
    returned = node.args[0]
    pair = returned.get("tuple", returned) if isinstance(returned, Mapping) else returned
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ValidationError("the output must be a pair of a loss and a dictionary of metrics")
    metrics = pair[1].get("dict") if isinstance(pair[1], Mapping) else None
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise ValidationError(f"the metrics must be a dictionary of at most {MAX_METRICS} nodes")
    for key in metrics:
        if not isinstance(key, str) or not _METRIC_KEY.fullmatch(key):
            raise ValidationError(
                f"metric {_short(key)} must be called custom/<name>:sum or custom/<name>:mean"
            )
    return decoder.ref(pair[0]), {key: decoder.ref(value) for key, value in metrics.items()}


def _check_reaches_loss(calls: Sequence[Call], loss: Ref, *, num_inputs: int) -> None:
    depends = [index == 0 for index in range(num_inputs)]
    for call in calls:
        refs = leaves([*call.args, *call.kwargs.values()], Ref)
        depends.append(any(depends[ref.index] for ref in refs))
    if not depends[loss.index]:
        raise ValidationError("the loss does not depend on logprobs", "graph")


def leaves(value: Value, kind: type[T]) -> Iterator[T]:
    """The parts of a value, however deep in lists and slices, that are of a kind."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item, kind)
    elif isinstance(value, slice):
        yield from leaves([value.start, value.stop, value.step], kind)


def _holds_text(value: Value) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_text(item) for item in value)
    return isinstance(value, str)


def bounded_int(value: int) -> int:
    if not isinstance(value, bool) and abs(value) > _MAX_INT:
        raise ValidationError("a whole number is beyond 64 bits")
    return value


def _from_table(table: Mapping[str, Value], kind: str, name: object) -> Value:
    if not isinstance(name, str) or name not in table:
        known = ", ".join(table)
        raise ValidationError(f"{kind} {_short(name)} cannot be used; known: {known}")
    return table[name]


def _short(value: object) -> str:
    """`repr`, cut in length and depth: the value comes from a client."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = MAX_TEXT
