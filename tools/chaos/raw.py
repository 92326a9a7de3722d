"""A client without turns: numbers arrive in any order, and some never.

The programs of `client.py` send an operation when the one before it has arrived, as both packages
do. Here they are sent by hand, so that the server has to put them in order.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

_RETRIED = (408, 425, 429)


class RawModel:
    """The operations of one model, by their numbers."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id

    def submit(self, kind: str, seq_id: int, body: Mapping[str, Any]) -> str:
        """Send an operation until it is recorded; its request id."""
        request = {"model_id": self._model_id, "seq_id": seq_id, **body}
        return str(post(kind, request)["request_id"])

    def forward_backward(self, seq_id: int, tokens: list[int]) -> str:
        return self._pass("forward_backward", seq_id, tokens)

    def forward(self, seq_id: int, tokens: list[int]) -> str:
        return self._pass("forward", seq_id, tokens)

    def optim_step(self, seq_id: int, rate: float) -> str:
        return self.submit("optim_step", seq_id, {"adam_params": {"learning_rate": rate}})

    def save(self, seq_id: int, name: str) -> str:
        return self.submit("save_weights", seq_id, {"path": name})

    def _pass(self, kind: str, seq_id: int, tokens: list[int]) -> str:
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": tokens[1:], "dtype": "int64"},
                "weights": {"data": [1.0] * (len(tokens) - 1), "dtype": "float32"},
            },
        }
        field = "forward_input" if kind == "forward" else "forward_backward_input"
        return self.submit(kind, seq_id, {field: {"loss_fn": "cross_entropy", "data": [datum]}})


def result(request_id: str) -> dict[str, Any]:
    """How an operation ended: its result, or its error."""
    while True:
        found = post("retrieve_future", {"request_id": request_id})
        if found.get("type") != "try_again":
            return found


def post(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{os.environ['TINKER_BASE_URL']}/api/v1/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-API-Key": os.environ["TINKER_API_KEY"]},
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            with error:
                if error.code < 500 and error.code not in _RETRIED:
                    return {"status": error.code, **json.load(error)}
        except (OSError, ValueError):
            pass  # refused, cut in the middle, or too late: what was sent is sent again
        time.sleep(0.2)
