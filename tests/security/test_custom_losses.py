"""An uploaded loss cannot keep the engine busy for long, however many datums it is sent with.

What a graph cannot reach (attributes, files, builtins, other tensors) is tested beside the
interpreter, in tests/engine/train/test_hostile_graphs.py.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from tinsmith.engine.base import CustomLoss
from tinsmith.engine.local.train import custom_operations, custom_work
from tinsmith.engine.local.train.custom_loss import CompiledLoss, compile_loss
from tinsmith.engine.local.train.custom_work import MAX_PASS_WORK, NODE_WORK
from tinsmith.errors import ValidationError
from tinsmith.types import CustomLossGraph, CustomLossInput, CustomLossNode

EXPANDED = 1000
ADDITION = custom_operations.FUNCTIONS["operator.add"]


def _node(name: str, op: str, target: str, *args: Any) -> CustomLossNode:
    return CustomLossNode(op=op, name=name, target=target, args=list(args))  # type: ignore[arg-type]


def _loss(
    *nodes: CustomLossNode, max_seconds: float = math.inf, max_work: int = MAX_PASS_WORK
) -> CompiledLoss:
    output = {"tuple": [{"ref": "loss"}, {"dict": {}}]}
    graph = CustomLossGraph(
        nodes=[
            _node("logprobs", "placeholder", "logprobs"),
            *nodes,
            _node("loss", "call_method", "sum", {"ref": nodes[-1].name}),
            _node("output", "output", "output", output),
        ]
    )
    custom = CustomLoss(inputs=(CustomLossInput(name="logprobs", rank=1),), graph=graph)
    return compile_loss(custom, max_seconds, max_work)


EXPAND = _node("wide", "call_method", "expand", {"ref": "logprobs"}, EXPANDED)
MASK = _node("mask", "call_function", "operator.lt", {"ref": "logprobs"}, 1.0)
SELECT = _node("some", "call_function", "operator.getitem", {"ref": "logprobs"}, {"ref": "mask"})


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        pytest.param([EXPAND], 1, id="shapes that are known already"),
        pytest.param([MASK, SELECT], EXPANDED, id="shapes that depend on values"),
    ],
)
def test_the_work_of_a_pass_is_bounded(nodes: list[CustomLossNode], size: int) -> None:
    compiled = _loss(*nodes, max_work=2 * 20 * (NODE_WORK + EXPANDED))
    num_done = 0
    with pytest.raises(ValidationError, match="in one pass"):
        for _ in range(100):
            compiled(torch.zeros(size, requires_grad=True), {})
            num_done += 1
    assert 2 <= num_done < 20
    with pytest.raises(ValidationError, match="in one pass"):
        compiled(torch.zeros(size, requires_grad=True), {})


def test_an_ordinary_pass_is_far_from_the_bound() -> None:
    """A thousand datums of two thousand tokens, ten operations each, twenty times over."""
    assert 20 * 1000 * 2000 * 10 * ADDITION.cost <= MAX_PASS_WORK
    assert MAX_PASS_WORK >= 20 * 1000 * 10 * NODE_WORK


NUMBERS = _node("many", "call_function", "torch.arange", 2**24)
MANY = {"ref": "many"}
END = _node("end", "call_method", "clone", {"ref": "logprobs"})


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param([NUMBERS, _node("worst", "call_method", "argsort", MANY)], id="a large sort"),
        pytest.param(
            [
                _node("many", "call_function", "torch.arange", 2**16),
                *(_node(f"n{i}", "call_method", "sort", MANY) for i in range(1000)),
                _node("worst", "call_method", "float", MANY),
            ],
            id="many sorts",
        ),
        pytest.param(
            [
                _node("many", "call_method", "repeat", {"ref": "logprobs"}, 2**10),
                _node("worst", "call_method", "diff", MANY, 2**40),
            ],
            id="differences of differences",
        ),
        pytest.param(
            [
                _node("n0", "call_method", "unsqueeze", {"ref": "logprobs"}, 0),
                *(
                    _node(
                        f"n{i + 1}", "call_function", "torch.cat", {"tuple": [{"ref": f"n{i}"}] * 2}
                    )
                    for i in range(40)
                ),
                _node("worst", "call_method", "sum", {"ref": "n40"}),
            ],
            id="a tensor that doubles at every node",
        ),
    ],
)
def test_a_few_tokens_cannot_ask_for_seconds_of_work(attack: list[CustomLossNode]) -> None:
    compiled = _loss(*attack, END)
    start = time.perf_counter()
    with pytest.raises(ValidationError, match=r"\d+ units of work for one datum|\d+ elements"):
        compiled(torch.zeros(5, requires_grad=True), {})
    assert time.perf_counter() - start < 5


def test_the_work_that_is_allowed_takes_seconds_at_most() -> None:
    """The largest sort that a datum may ask for; half a second on an idle core."""
    size = custom_work.MAX_WORK // (custom_operations.METHODS["sort"].cost + 16)
    many = _node("many", "call_method", "expand", {"ref": "logprobs"}, size)
    compiled = _loss(many, _node("worst", "call_method", "argsort", MANY), END)
    start = time.perf_counter()
    compiled(torch.zeros(1, requires_grad=True), {})
    assert time.perf_counter() - start < 10


def test_a_loss_that_takes_too_long_fails_with_the_users_error() -> None:
    node = _node(
        "double", "call_function", "operator.add", {"ref": "logprobs"}, {"ref": "logprobs"}
    )
    hurried = _loss(node, max_seconds=0.0)
    with pytest.raises(ValidationError, match="more than 0 s in one pass"):
        hurried(torch.zeros(5, requires_grad=True), {})
    patient = _loss(node, max_seconds=60.0)
    patient(torch.zeros(5, requires_grad=True), {})


def test_the_time_of_a_loss_adds_up_over_the_datums_of_a_pass() -> None:
    compiled = _loss(
        _node("many", "call_method", "expand", {"ref": "logprobs"}, 2**18),
        _node("worst", "call_method", "exp", MANY),
        max_seconds=0.2,
    )
    with pytest.raises(ValidationError, match=r"more than 0\.2 s in one pass"):
        for _ in range(10_000):
            compiled(torch.zeros(1, requires_grad=True), {})


@pytest.mark.parametrize("name", sorted(custom_operations.METHODS))
def test_sorting_counts_for_more_than_adding(name: str) -> None:
    cost = custom_operations.METHODS[name].cost
    assert cost >= (64 if "sort" in name else ADDITION.cost)
