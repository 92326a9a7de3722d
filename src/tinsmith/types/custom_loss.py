"""Custom losses as data: the traced graph that a client uploads."""

from __future__ import annotations

from typing import Any, Literal

from tinsmith.types.model import Request, Response

CustomLossInputRank = Literal[0, 1, 2]
"""0 a scalar, 1 one value per token, 2 one row per token."""

CustomLossNodeOp = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]


class CustomLossInput(Request):
    """One thing the loss reads: `logprobs`, or a key of `loss_fn_inputs`."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Request):
    """One operation of the graph.

    Arguments are JSON: scalars, strings and lists stand for themselves, anything else is an
    object with one key that says what it is (`ref`, `tuple`, `dict`, `slice`, `dtype`, …).
    """

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class CustomLossGraph(Request):
    """The operations in the order in which they run. Data, not code: the engine interprets it."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(Request):
    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Response):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
