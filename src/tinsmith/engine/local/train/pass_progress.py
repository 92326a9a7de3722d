"""How far a training pass has come: its gradient so far, its outputs, its time, and its end.

The gradient grows in a buffer of its own and joins the adapter's when the pass is finished.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import Failure, Pass
from tinsmith.engine.expert_choices import are_known
from tinsmith.engine.local.model.lora import Adapter, GradientBuffer
from tinsmith.engine.local.ranks.group import Ranks
from tinsmith.engine.local.train.custom_loss import CompiledLoss
from tinsmith.engine.local.train.losses import combine_metrics
from tinsmith.types import ForwardBackwardOutput, TensorData

logger = logging.getLogger(__name__)

REPLAYED = "experts/replayed_tokens:sum"
"""The metric that says how many tokens went to experts that were given, not chosen anew."""


@dataclass(slots=True)
class PassProgress:
    """How far one pass has come."""

    request: Pass
    adapter: Adapter
    custom: CompiledLoss | None = None
    gradient: GradientBuffer | None = None
    gradient_includes_pending: bool = False
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    stats: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    failure: Failure | None = None
    had_company: bool = False
    """Whether a micro-batch held other passes as well."""

    is_gradient_broken: bool = False
    seconds: float = 0.0
    """Its share of the micro-batches so far."""

    loss_seconds: float = 0.0
    """What its losses took in the micro-batch under way."""

    @property
    def is_done(self) -> bool:
        return self.failure is not None or len(self.stats) == len(self.request.data)

    def prepare(self, *, add_in_order: bool) -> None:
        """Make the buffer for the gradient, where there is to be one and it is not there yet.

        To add in order, the buffer starts as a copy of what is pending; otherwise from zero.
        """
        if self.request.forward_only or self.gradient is not None:
            return
        pending = self.adapter.grad
        self.gradient_includes_pending = add_in_order and pending is not None
        if self.gradient_includes_pending and pending is not None:
            flat = pending.clone()
        else:
            flat = self.adapter.new_gradient()
        self.gradient = GradientBuffer(self.adapter.layout, flat)

    def fail(self, message: str, category: str) -> None:
        if self.failure is None:
            self.failure = Failure(message, "user" if category == "user" else "server")
        self.gradient = None

    def finish(
        self, ranks: Ranks, *, counts_replayed: bool = False
    ) -> ForwardBackwardOutput | Failure:
        """Put the result together and let the gradient take effect. What goes wrong is this pass's
        alone, which then has no effect."""
        if self.failure is not None:
            return self.failure
        try:
            output = self._output(counts_replayed=counts_replayed)
            if self.gradient is not None:
                self._commit(self.gradient.flat, ranks)
        except Exception as error:
            ranks.give_up(error)
            logger.warning("the end of a pass failed", exc_info=error)
            self.fail(f"the engine failed at the end of the pass: {error}", "server")
        return self.failure or output

    def _output(self, *, counts_replayed: bool) -> ForwardBackwardOutput:
        order = range(len(self.request.data))
        metrics = combine_metrics([self.stats[i] for i in order])
        if counts_replayed:
            given = [each for each in self.request.choices if each is not None]
            metrics[REPLAYED] = float(sum(are_known(each).sum() for each in given))
        return ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[{"logprobs": _tensor_data(self.logprobs[i])} for i in order],
            metrics=metrics,
        )

    def _commit(self, flat: Tensor, ranks: Ranks) -> None:
        smallest, largest = torch.aminmax(flat)
        if not all(ranks.everywhere([bool(smallest.isfinite() and largest.isfinite())])):
            self.is_gradient_broken = True
            self.fail("the gradient of the pass is not finite; nothing was accumulated", "user")
        elif self.adapter.grad is None or self.gradient_includes_pending:
            self.adapter.grad = flat
        else:
            self.adapter.grad += flat


def _tensor_data(values: np.ndarray) -> TensorData:
    return TensorData(data=values, dtype="float32", shape=values.shape)
