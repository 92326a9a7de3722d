"""Uploaded graphs that no client would trace: what reaches for more than tensors is refused, and
what is not refused gets a loss or an error, and changes nothing."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tinsmith.engine.base import CustomLoss
from tinsmith.engine.local.train.custom_graph import MAX_ARGUMENTS, MAX_NODES, MAX_TEXT
from tinsmith.engine.local.train.custom_loss import CompiledLoss, compile_loss
from tinsmith.engine.local.train.custom_operations import FUNCTIONS, METHODS
from tinsmith.errors import ValidationError
from tinsmith.types import CustomLossGraph, CustomLossInput, CustomLossNode

Node = dict[str, Any]
PLACEHOLDER: Node = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
SUM: Node = {"op": "call_method", "name": "loss", "target": "sum", "args": [{"ref": "logprobs"}]}
OUTPUT: Node = {
    "op": "output",
    "name": "output",
    "target": "output",
    "args": [{"tuple": [{"ref": "loss"}, {"dict": {}}]}],
}


def call(
    target: str, *args: Any, op: str = "call_function", name: str = "bad", **kwargs: Any
) -> Node:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def method(target: str, *args: Any, **kwargs: Any) -> Node:
    return call(target, *args, op="call_method", **kwargs)


def loss_of(*nodes: Node, inputs: list[tuple[str, int]] | None = None) -> CustomLoss:
    declared = inputs or [("logprobs", 1)]
    return CustomLoss(
        inputs=tuple(CustomLossInput(name=name, rank=rank) for name, rank in declared),  # type: ignore[arg-type]
        graph=CustomLossGraph(nodes=[CustomLossNode(**node) for node in nodes]),
    )


def compiled_with(*nodes: Node) -> CompiledLoss:
    return compile_loss(loss_of(PLACEHOLDER, *nodes, SUM, OUTPUT))


P = {"ref": "logprobs"}

REFUSED_UNSEEN: dict[str, Node] = {
    "a function of the system": call("os.system", "true"),
    "a function of the interpreter": call("builtins.eval", "1"),
    "import": call("builtins.__import__", "os"),
    "another name of eval": call("eval", "1"),
    "a call by name": call("operator.methodcaller", "backward"),
    "an attribute by name": call("operator.attrgetter", "data"),
    "assignment": call("operator.setitem", P, 0, 1.0),
    "addition in place": call("operator.iadd", P, 1.0),
    "loading from disk": call("torch.load", "file"),
    "saving to disk": call("torch.save", P, "file"),
    "reading foreign memory": call("torch.as_strided", P, [99], [1]),
    "unfilled memory": call("torch.empty", 9),
    "random numbers": call("torch.rand", 9),
    "dropout": call("torch.nn.functional.dropout", P),
    "an operator library": call("torch.ops.aten.add", P, 1),
    "compiling": call("torch.compile", P),
    "einsum": call("torch.functional.einsum", "i,i->", P, P),
    "getattr of the class": call("getattr", P, "__class__"),
    "getattr of the data": call("getattr", P, "data"),
    "getattr of the gradient": call("getattr", P, "grad_fn"),
    "getattr with a default": call("getattr", P, "shape", 1),
    "getattr of a text": call("getattr", "text", "shape"),
    "backward": method("backward", P),
    "item": method("item", P),
    "numpy": method("numpy", P),
    "tolist": method("tolist", P),
    "a method in place": method("add_", P, 1),
    "copy in place": method("copy_", P, P),
    "another storage": method("set_", P),
    "resizing": method("resize_", P, 9),
    "apply": method("apply_", P, P),
    "a hook": method("register_hook", P, P),
    "storage": method("untyped_storage", P),
    "a dunder method": method("__reduce_ex__", P, 2),
    "pickle": method("__setstate__", P, P),
    "a device of its own": method("to", P, {"device": "cuda:0"}),
    "a device by name": method("to", P, "cuda"),
    "sparse layout": call("torch.zeros", 2, layout={"layout": "sparse_coo"}),
    "a complex dtype": method("to", P, {"dtype": "complex64"}),
    "output into an input": call("torch.exp", P, out=P),
    "an inplace flag": call("torch.nn.functional.relu", P, inplace=True),
    "gradients required": call("torch.ones", 2, requires_grad=True),
    "a text argument": call("torch.exp", "logprobs"),
    "a text in a keyword": call("torch.sum", P, dim=["a"]),
    "a dictionary argument": call("torch.exp", {"dict": {"a": 1}}),
    "an unknown tag": call("torch.exp", {"python": "1"}),
    "two tags": call("torch.exp", {"ref": "logprobs", "tuple": []}),
    "an unknown reference": call("torch.exp", {"ref": "nowhere"}),
    "a reference to itself": call("torch.exp", {"ref": "bad"}),
    "a reference to a later node": call("torch.exp", {"ref": "loss"}),
    "an enormous number": call("torch.add", P, 10**30),
    "a long text": call("torch.exp", "x" * (MAX_TEXT + 1)),
    "a module": {"op": "call_module", "name": "bad", "target": "linear", "args": [P]},
    "an attribute node": {"op": "get_attr", "name": "bad", "target": "weight"},
    "a placeholder too many": {"op": "placeholder", "name": "bad", "target": "weights"},
    "an early output": {**OUTPUT, "name": "bad", "args": [{"tuple": [P, {"dict": {}}]}]},
}


@pytest.mark.parametrize("node", REFUSED_UNSEEN.values(), ids=REFUSED_UNSEEN.keys())
def test_a_node_that_reaches_beyond_tensors_is_refused_by_name(node: Node) -> None:
    with pytest.raises(ValidationError, match="node 'bad': ") as caught:
        compiled_with(node)
    assert caught.value.path == "graph.nodes[1]"


def test_every_name_that_is_not_on_the_lists_is_refused() -> None:
    for name in dir(torch):
        if f"torch.{name}" not in FUNCTIONS:
            with pytest.raises(ValidationError, match="cannot use the function"):
                compiled_with(call(f"torch.{name}", P))
    for name in dir(Tensor):
        if name not in METHODS:
            with pytest.raises(ValidationError, match="cannot use the tensor method"):
                compiled_with(method(name, P))


def test_nothing_on_the_lists_works_in_place_or_leaves_tensors() -> None:
    assert not [name for name in METHODS if name.endswith("_") or name.startswith("_")]
    forbidden = {"backward", "item", "numpy", "tolist", "data", "empty", "as_strided", "set"}
    names = {name.rsplit(".", 1)[-1] for name in (*FUNCTIONS, *METHODS)}
    assert not forbidden & names
    assert not [name for name in names if "empty" in name or "rand" in name or "new_tensor" in name]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_deep_arguments_are_refused() -> None:
    for depth in (20, 5000):
        with pytest.raises(ValidationError, match="nested"):
            compiled_with(call("torch.exp", nested(depth)))
        with pytest.raises(ValidationError, match=r"no earlier node|nested deeper"):
            compiled_with(call("torch.exp", {"ref": nested(depth)}))


def test_too_many_arguments_are_refused() -> None:
    with pytest.raises(ValidationError, match=f"more than {MAX_ARGUMENTS}"):
        compiled_with(call("torch.stack", [1] * (MAX_ARGUMENTS + 1)))


def test_too_many_nodes_are_refused() -> None:
    nodes = [call("torch.exp", P, name=f"n{i}") for i in range(MAX_NODES)]
    with pytest.raises(ValidationError, match=f"and {MAX_NODES} nodes"):
        compiled_with(*nodes)


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="same name"):
        compiled_with(call("torch.exp", P), call("torch.log", P))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([("weights", 1)], "first input must be logprobs"),
        ([("logprobs", 0)], "first input must be logprobs"),
        ([("logprobs", 1), ("Advantages", 1)], "lower-case"),
        ([("logprobs", 1), ("a" * 65, 1)], "lower-case"),
        ([("logprobs", 1), ("__class__.x", 1)], "lower-case"),
        ([("logprobs", 1), ("logprobs", 1)], "declared twice"),
        ([("logprobs", 1), *((f"i{n}", 1) for n in range(16))], "1 to 16 inputs"),
    ],
)
def test_declared_inputs_are_checked(inputs: list[tuple[str, int]], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        compile_loss(loss_of(PLACEHOLDER, SUM, OUTPUT, inputs=inputs))


def test_placeholders_must_be_the_declared_inputs_in_order() -> None:
    other: Node = {"op": "placeholder", "name": "b", "target": "b"}
    declared = [("logprobs", 1), ("a", 1)]
    with pytest.raises(ValidationError, match="expected the placeholder of input 'a'"):
        compile_loss(loss_of(PLACEHOLDER, other, SUM, OUTPUT, inputs=declared))
    with pytest.raises(ValidationError, match="default"):
        compile_loss(loss_of({**PLACEHOLDER, "args": [1]}, SUM, OUTPUT))


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ({"ref": "loss"}, "pair"),
        ({"tuple": [{"ref": "loss"}]}, "pair"),
        ({"tuple": [{"ref": "loss"}, {"ref": "loss"}]}, "dictionary"),
        ({"tuple": [1.0, {"dict": {}}]}, "reference"),
        ({"tuple": [{"ref": "loss"}, {"dict": {"custom/x:sum": 1.0}}]}, "reference"),
        ({"tuple": [{"ref": "loss"}, {"dict": {"loss:sum": P}}]}, "custom/<name>"),
        ({"tuple": [{"ref": "loss"}, {"dict": {"custom/x:max": P}}]}, "custom/<name>"),
        ({"tuple": [{"ref": "loss"}, {"dict": {"custom/a:b:sum": P}}]}, "custom/<name>"),
        ({"tuple": [{"ref": "loss"}, {"dict": {f"custom/{i}:sum": P for i in range(65)}}]}, "64"),
    ],
)
def test_the_output_must_be_a_loss_and_metrics(returned: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as caught:
        compile_loss(loss_of(PLACEHOLDER, SUM, {**OUTPUT, "args": [returned]}))
    assert caught.value.path == "graph.nodes[2]"


def test_a_graph_must_end_in_an_output() -> None:
    with pytest.raises(ValidationError, match="last node must be the output"):
        compile_loss(loss_of(PLACEHOLDER, SUM))


def test_a_loss_that_does_not_depend_on_logprobs_is_refused() -> None:
    one = call("torch.ones", {"tuple": []}, name="loss")
    with pytest.raises(ValidationError, match="does not depend on logprobs"):
        compile_loss(loss_of(PLACEHOLDER, one, OUTPUT))


def run(*nodes: Node, size: int = 6) -> Tensor:
    """The loss of a graph that ends in a node called `loss`."""
    compiled = compile_loss(loss_of(PLACEHOLDER, *nodes, OUTPUT))
    return compiled(-torch.ones(size).requires_grad_(), {})[0]


def test_a_loss_whose_gradient_is_cut_off_is_refused() -> None:
    detached = method("detach", P)
    with pytest.raises(ValidationError, match="detached"):
        run(detached, method("sum", {"ref": "bad"}, name="loss"))
    with torch.no_grad():
        assert run(detached, method("sum", {"ref": "bad"}, name="loss")).item() == -6


def test_a_loss_that_cannot_be_differentiated_is_refused_before_the_backward_pass() -> None:
    rounded = call("operator.floordiv", P, 0.5)
    with pytest.raises(ValidationError, match="cannot be differentiated: derivative"):
        run(rounded, method("sum", {"ref": "bad"}, name="loss"))


@pytest.mark.parametrize("node", [method("exp", P, name="loss"), method("numel", P, name="loss")])
def test_a_loss_must_be_a_scalar(node: Node) -> None:
    with pytest.raises(ValidationError, match="floating-point scalar"):
        run(node)


def test_a_metric_must_be_a_scalar() -> None:
    output = {**OUTPUT, "args": [{"tuple": [{"ref": "loss"}, {"dict": {"custom/m:sum": P}}]}]}
    compiled = compile_loss(loss_of(PLACEHOLDER, SUM, output))
    with pytest.raises(ValidationError, match="metric 'custom/m:sum' must be a scalar"):
        compiled(torch.zeros(3), {})


BIG = 2**40
REFUSED_WHEN_RUN: dict[str, tuple[list[Node], str]] = {
    "zeros": ([call("torch.zeros", BIG)], "elements"),
    "full": ([call("torch.full", {"tuple": [BIG, 2]}, 1.0)], "elements"),
    "arange": ([call("torch.arange", BIG)], "elements"),
    "linspace": ([call("torch.linspace", 0, 1, steps=BIG)], "elements"),
    "expand": ([method("expand", P, BIG, -1)], "elements"),
    "repeat": ([method("repeat", P, BIG)], "elements"),
    "tile": ([call("torch.tile", P, {"tuple": [BIG]})], "elements"),
    "new_zeros": ([method("new_zeros", P, BIG)], "elements"),
    "pad": ([call("torch.nn.functional.pad", P, {"tuple": [0, BIG]})], "elements"),
    "repeat_interleave": ([method("repeat_interleave", P, BIG)], "elements"),
    "diag_embed": ([call("torch.diag_embed", P, offset=2**31)], "elements|failed"),
    "broadcasting": (
        [
            call("torch.arange", 2**14, name="a"),
            method("unsqueeze", {"ref": "a"}, 1, name="b"),
            call("operator.add", {"ref": "a"}, {"ref": "b"}),
        ],
        "elements",
    ),
    "outer": (
        [call("torch.ones", 2**14, name="a"), call("torch.outer", {"ref": "a"}, {"ref": "a"})],
        "elements",
    ),
    "a large matrix product": (
        [
            call("torch.ones", 2**11, 2**11, name="a"),
            call("operator.matmul", {"ref": "a"}, {"ref": "a"}),
        ],
        "units of work",
    ),
    "unbind": (
        [call("torch.ones", 5000, name="a"), call("torch.unbind", {"ref": "a"})],
        "5000 parts",
    ),
    "split": (
        [call("torch.ones", 5000, name="a"), method("split", {"ref": "a"}, 1)],
        "5000 parts",
    ),
    "a power of numbers": ([call("operator.pow", 10, 10**9)], "64 bits"),
    "a shift of numbers": ([call("operator.lshift", 1, 10**9)], "64 bits"),
    "a product of numbers": ([call("operator.mul", 2**62, 4)], "64 bits"),
    "a repeated list": ([call("operator.mul", [1], 10**9)], "numbers only"),
    "added shapes": (
        [call("getattr", P, "shape", name="s"), call("operator.add", {"ref": "s"}, {"ref": "s"})],
        "numbers only",
    ),
    "an index out of range": ([call("operator.getitem", P, 99)], "index 99"),
    "a gather out of range": (
        [
            call("torch.full", {"tuple": [6]}, 99, dtype={"dtype": "int64"}, name="i"),
            call("torch.gather", P, 0, {"ref": "i"}),
        ],
        "index 99",
    ),
    "the smallest integer by minus one": (
        [
            call("torch.full", {"tuple": [2]}, -(2**63) + 1, dtype={"dtype": "int64"}, name="i"),
            call("operator.sub", {"ref": "i"}, 1, name="j"),
            call("torch.div", {"ref": "j"}, -1, rounding_mode="trunc"),
        ],
        "division of integers",
    ),
    "bytes as another dtype": ([method("view", P, {"dtype": "bool"})], "reinterpret"),
    "shapes that do not fit": (
        [call("torch.ones", 5, name="a"), call("torch.add", P, {"ref": "a"})],
        "broadcast",
    ),
    "a size read from a tensor": (
        [
            call("torch.arange", 3, name="a"),
            method("sum", {"ref": "a"}, name="n"),
            call("torch.zeros", [{"ref": "n"}]),
        ],
        "failed",
    ),
    "positions of true": (
        [call("torch.gt", P, 0, name="m"), call("torch.where", {"ref": "m"})],
        "failed",
    ),
    "a number's method": ([method("exp", 1.0)], "none of the arguments is a tensor"),
    "a shape's method": (
        [call("getattr", P, "shape", name="s"), method("sum", {"ref": "s"})],
        "none of the arguments is a tensor",
    ),
    "an attribute of a shape": (
        [call("getattr", P, "shape", name="s"), call("getattr", {"ref": "s"}, "values")],
        "no attribute",
    ),
    "a number where a tensor belongs": (
        [call("torch.nn.functional.mse_loss", P, 1.0)],
        "failed: 'float' object",
    ),
    "math on tensors": ([call("math.exp", P)], "math functions take numbers"),
    "division by zero": ([call("operator.truediv", 1, 0)], "division by zero"),
    "a math domain": ([call("math.log", -1)], "math domain"),
}


@pytest.mark.parametrize(
    ("nodes", "reason"), REFUSED_WHEN_RUN.values(), ids=REFUSED_WHEN_RUN.keys()
)
def test_a_node_that_cannot_or_must_not_run_fails_by_name(nodes: list[Node], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as caught:
        run(*nodes, SUM)
    assert "node 'bad' (" in str(caught.value)


def test_many_tensors_of_allowed_size_are_too_much_together() -> None:
    nodes = [method("expand", P, 2**23, name=f"n{i}") for i in range(9)]
    run(*nodes[:7], SUM, size=1)
    with pytest.raises(ValidationError, match=r"node 'n7'.*units of work for one datum"):
        run(*nodes, SUM, size=1)


def random_argument(draw: random.Random, names: list[str], depth: int = 0) -> Any:
    choice = draw.random()
    if choice < 0.5:
        return {"ref": draw.choice(names)}
    if choice < 0.8 or depth == 2:
        return draw.choice([0, 1, -1, 3, 2**40, -(2**63) + 1, 0.5, 1e30, None, True, "sum"])
    if choice < 0.9:
        tags: list[Any] = [{"float": "nan"}, {"dtype": "int64"}, {"ellipsis": True}]
        return draw.choice([*tags, {"dtype": "bool"}, {"slice": [None, 2, None]}])
    items = [random_argument(draw, names, depth + 1) for _ in range(draw.randint(0, 3))]
    return draw.choice([items, {"tuple": items}])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore")
def test_whatever_a_graph_asks_for_it_gets_a_loss_or_a_refusal(seed: int) -> None:
    """Random calls of allowed operations with random arguments; anything else is a failure."""
    draw = random.Random(seed)
    targets = [("call_function", t) for t in FUNCTIONS] + [("call_method", t) for t in METHODS]
    declared = [("logprobs", 1), ("matrix", 2), ("extremes", 1)]
    inputs = {
        "matrix": torch.randn(6, 4),
        "extremes": torch.tensor([-(2**63), -1, 0, 1, 2**63 - 1, 3]),
    }
    start = [{"op": "placeholder", "name": n, "target": n} for n, _ in declared]
    for op, target in targets:
        names = [n for n, _ in declared]
        args = [{"ref": draw.choice(names)}]
        args += [random_argument(draw, names) for _ in range(draw.randint(0, 2))]
        nodes = [*start, call(target, *args, op=op), SUM, OUTPUT]
        with contextlib.suppress(ValidationError):
            compiled = compile_loss(loss_of(*nodes, inputs=declared))
            compiled((-torch.rand(6)).requires_grad_(), inputs)


def test_an_uploaded_graph_cannot_change_its_inputs() -> None:
    for name in sorted(METHODS):
        policy, other = -torch.rand(4, 4), torch.rand(4, 4)
        before = policy.clone(), other.clone()
        node = method(name, P, {"ref": "other"})
        placeholder: Node = {"op": "placeholder", "name": "other", "target": "other"}
        declared = [("logprobs", 2), ("other", 2)]
        compiled = compile_loss(
            loss_of(PLACEHOLDER, placeholder, node, SUM, OUTPUT, inputs=declared)
        )
        try:
            compiled(policy, {"other": other})
        except ValidationError:
            continue  # not a method of two tensors
        assert torch.equal(policy, before[0]) and torch.equal(other, before[1]), name
