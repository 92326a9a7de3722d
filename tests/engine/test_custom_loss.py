"""Uploaded losses: graphs traced by the official client give what the plain function gives, and
graphs that reach for more than tensors are refused.

Values and gradients are compared with the Python function that was traced, run by torch itself;
both execute the same operations, so the tolerance is 1e-6.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from torch import Tensor

from tinsmith.engine.base import CustomLoss
from tinsmith.engine.local.custom_graph import MAX_ARGUMENTS, MAX_NODES, MAX_TEXT
from tinsmith.engine.local.custom_loss import CompiledLoss, compile_loss
from tinsmith.engine.local.custom_operations import FUNCTIONS, METHODS
from tinsmith.engine.local.losses import combine_metrics, datum_loss
from tinsmith.errors import ValidationError
from tinsmith.types import CustomLossGraph, CustomLossInput, CustomLossNode

LossFunction = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


def traced(function: LossFunction, **ranks: int) -> CustomLoss:
    """What the official client would upload for `function`, read back by our types."""
    handle = trace_loss(function, ranks, session_id="session")
    graph = encode_graph(handle).model_dump(mode="json")
    return CustomLoss(
        inputs=tuple(CustomLossInput(name=i.name, rank=i.rank) for i in handle.inputs),
        graph=CustomLossGraph.model_validate(graph),
    )


def ppo_like(logprobs, sampled, advantages):
    ratio = torch.exp(logprobs - sampled)
    clipped = torch.clamp(ratio, 1 - 0.2, max=1.2)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    fraction = (ratio != clipped).float().mean()
    return -objective.sum(), {"custom/clip_fraction:mean": fraction}


def dpo_like(logprobs, mask, rejected_logprob, reference_margin):
    chosen = (logprobs * mask).sum()
    margin = 0.1 * (chosen - rejected_logprob - reference_margin)
    return -F.logsigmoid(margin), {
        "custom/margin:mean": margin.detach(),
        "custom/accuracy:mean": (margin > 0).float(),
    }


def entropy_like(logprobs, weights):
    probabilities = torch.softmax(logprobs, dim=-1)
    entropy = -(probabilities * F.log_softmax(logprobs, dim=-1)).sum(dim=-1)
    best = torch.max(logprobs, dim=1).values
    loss = -(logprobs * weights).sum() - 0.01 * entropy.sum() + torch.logsumexp(logprobs, 1).mean()
    return loss, {"custom/entropy:mean": entropy.mean(), "custom/best:sum": best.sum()}


def masked_by_index(logprobs, mask, advantages):
    chosen = logprobs[mask > 0]
    tail = logprobs[1:] - logprobs[:-1]
    loss = -(chosen * advantages[mask > 0]).sum() / logprobs.shape[0] + tail.abs().mean()
    return loss, {}


def reshaping(logprobs, targets):
    n = logprobs.shape[0]
    first, second = logprobs.chunk(2)
    positions = torch.arange(n, device=logprobs.device, dtype=torch.float32)
    stacked = torch.stack([logprobs, positions / (n + 1)], dim=1)
    best = logprobs[logprobs.argmax()]
    picked = torch.gather(stacked, 1, (targets % 2.0).long().unsqueeze(-1)).squeeze(1)
    gap = first.mean() - second.mean()
    return (
        -stacked.cumsum(0)[..., 0].sum() * 0.01 + gap**2 + best + picked.sum() * 0.1,
        {"custom/n:sum": torch.ones_like(logprobs).sum()},
    )


def many_operators(logprobs, advantages, scale):
    both = (advantages > 0) & ~(logprobs < -3) | (advantages == 0)
    weight = torch.where(both, 1.0, torch.full_like(logprobs, 0.5))
    bounded = torch.nan_to_num(logprobs.clamp(min=-float("inf"), max=0.0), neginf=-9.0)
    surprise = F.softplus(-bounded) + torch.special.expm1(bounded) + abs(bounded) / 2 - 1
    stable = torch.nn.functional.huber_loss(logprobs, advantages, reduction="none", delta=0.5)
    pairs = (logprobs[:, None] - logprobs[None, :]).sigmoid().tril(-1)
    total = (weight * surprise * scale + stable).sum(dtype=torch.float64) + pairs.mean()
    return total.to(torch.float32), {"custom/w/x.y-z:sum": weight.norm(p=2)}


def with_stopped_gradient(logprobs, sampled):
    ratio = (logprobs.detach() - sampled).exp().clamp(0.8, 1.2)
    return -(ratio * logprobs).mean(), {"custom/shape:sum": logprobs.shape[0]}


N = 12
CASES: list[tuple[LossFunction, dict[str, int]]] = [
    (ppo_like, {"logprobs": 1, "sampled": 1, "advantages": 1}),
    (dpo_like, {"logprobs": 1, "mask": 1, "rejected_logprob": 0, "reference_margin": 0}),
    (entropy_like, {"logprobs": 2, "weights": 2}),
    (masked_by_index, {"logprobs": 1, "mask": 1, "advantages": 1}),
    (reshaping, {"logprobs": 1, "targets": 1}),
    (many_operators, {"logprobs": 1, "advantages": 1, "scale": 0}),
]


def values_for(ranks: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {0: (), 1: (N,), 2: (N, 4)}
    values = {k: torch.randn(shapes[r], generator=generator) for k, r in ranks.items()}
    values["logprobs"] = -values["logprobs"].abs()
    return values


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("function", "ranks"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_graph_traced_by_the_official_client_gives_what_the_function_gives(
    function: LossFunction, ranks: dict[str, int], seed: int
) -> None:
    compiled = compile_loss(traced(function, **ranks))
    values = values_for(ranks, seed)
    for _ in range(2):  # the second time its sizes are known
        ours = values["logprobs"].clone().requires_grad_()
        loss, metrics = compiled(ours, {k: v for k, v in values.items() if k != "logprobs"})
        loss.backward()

        theirs = values["logprobs"].clone().requires_grad_()
        expected, expected_metrics = function(theirs, *(values[k] for k in list(ranks)[1:]))
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7)
        assert metrics.keys() == expected_metrics.keys()
        for key, value in expected_metrics.items():
            assert metrics[key].item() == pytest.approx(
                float(torch.as_tensor(value).detach()), rel=1e-6
            )
            assert not metrics[key].requires_grad


def test_a_metric_may_be_a_number_and_a_gradient_may_be_stopped() -> None:
    compiled = compile_loss(traced(with_stopped_gradient, logprobs=1, sampled=1))
    policy = torch.tensor([-1.0, -2.0]).requires_grad_()
    loss, metrics = compiled(policy, {"sampled": torch.tensor([-1.0, -9.0])})
    loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-0.5, -0.6])
    assert metrics["custom/shape:sum"].item() == 2


def test_a_custom_loss_runs_through_the_same_door_as_the_built_in_ones() -> None:
    compiled = compile_loss(traced(ppo_like, logprobs=1, sampled=1, advantages=1))
    stats = []
    for n in (2, 6):
        policy = torch.full((n,), -1.0)
        inputs = {
            "target_tokens": torch.zeros(n, dtype=torch.int64),
            "sampled": policy - math.log(2) * (torch.arange(n) == 0),
            "advantages": torch.ones(n),
        }
        loss, datum_stats = datum_loss("custom", policy, inputs, {"loss_id": "l"}, compiled)
        assert loss.item() == pytest.approx(-(n - 1) - 1.2)
        stats.append(datum_stats)
    metrics = combine_metrics(stats)
    assert metrics["loss:sum"] == pytest.approx(-6 - 2.4)
    assert metrics["tokens:sum"] == 8
    assert metrics["custom/clip_fraction:mean"] == pytest.approx((1 / 2 + 1 / 6) / 2)


def test_a_custom_loss_without_its_graph_is_refused() -> None:
    with pytest.raises(ValidationError, match="without its graph"):
        datum_loss("custom", torch.zeros(1), {}, {"loss_id": "l"}, None)


# Graphs that no client of ours would trace.

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
        "computes more than",
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
    nodes = [method("expand", P, 2**25, name=f"n{i}") for i in range(9)]
    run(*nodes[:7], SUM, size=1)
    with pytest.raises(ValidationError, match=r"node 'n8'.*computes more than"):
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


@pytest.mark.gpu
def test_a_graph_gives_the_same_for_a_model_on_cuda() -> None:
    compiled = compile_loss(traced(ppo_like, logprobs=1, sampled=1, advantages=1))
    values = values_for({"logprobs": 1, "sampled": 1, "advantages": 1}, seed=0)
    gradients = []
    for device in ("cpu", "cuda"):
        policy = values["logprobs"].detach().to(device).requires_grad_()
        inputs = {k: v.to(device) for k, v in values.items() if k != "logprobs"}
        loss, metrics = compiled(policy, inputs)
        assert loss.device == policy.device == metrics["custom/clip_fraction:mean"].device
        loss.backward()
        assert policy.grad is not None
        gradients.append(policy.grad.cpu())
    assert torch.equal(*gradients)
