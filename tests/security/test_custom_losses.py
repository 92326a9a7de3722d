"""An uploaded loss cannot keep the engine busy for long, however many datums it is sent with.

What a graph cannot reach (attributes, files, builtins, other tensors) is tested beside the
interpreter, in tests/engine/test_hostile_graphs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tinsmith.engine.base import CustomLoss
from tinsmith.engine.local.train import custom_loss
from tinsmith.engine.local.train.custom_loss import CompiledLoss, compile_loss
from tinsmith.errors import ValidationError
from tinsmith.types import CustomLossGraph, CustomLossInput, CustomLossNode

EXPANDED = 1000


def _node(name: str, op: str, target: str, *args: Any) -> CustomLossNode:
    return CustomLossNode(op=op, name=name, target=target, args=list(args))  # type: ignore[arg-type]


def _loss(*nodes: CustomLossNode) -> CompiledLoss:
    output = {"tuple": [{"ref": "loss"}, {"dict": {}}]}
    graph = CustomLossGraph(
        nodes=[
            _node("logprobs", "placeholder", "logprobs"),
            *nodes,
            _node("loss", "call_method", "sum", {"ref": nodes[-1].name}),
            _node("output", "output", "output", output),
        ]
    )
    return compile_loss(CustomLoss(inputs=(CustomLossInput(name="logprobs", rank=1),), graph=graph))


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
def test_the_work_of_a_pass_is_bounded(
    monkeypatch: pytest.MonkeyPatch, nodes: list[CustomLossNode], size: int
) -> None:
    monkeypatch.setattr(custom_loss, "MAX_PASS_WORK", 20 * EXPANDED)
    compiled = _loss(*nodes)
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
    assert custom_loss.MAX_PASS_WORK >= 20 * 1000 * 2000 * 10
