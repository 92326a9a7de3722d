"""Scoring a micro-batch: log-probabilities and losses, and the gradient for the hidden states.

The unembedding is visited a few rows at a time, where all three come out together and the logits
are forgotten. A GPU scores the next rows while the losses of the last ones are worked out on the
CPU. An uploaded loss is compiled and runs in a thread of low priority; whoever iterates
does something else meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.model.batch import Item
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.transfers import begin_copy, to_device
from tinsmith.engine.local.model.unembedding import TargetLogprobs
from tinsmith.engine.local.ranks.group import Ranks
from tinsmith.engine.local.train.batch_limits import BatchLimits
from tinsmith.engine.local.train.custom_loss import compile_loss
from tinsmith.engine.local.train.losses import LARGEST, datum_loss
from tinsmith.engine.local.train.pass_progress import PassProgress
from tinsmith.errors import ValidationError

_LOSS_THREADS = 4
"""Uploaded losses that run at a time, each of another call."""

_LOSS_NICENESS = 10

LOSS_TURN_SECONDS = 0.005
"""How long a turn waits for an uploaded loss, before others have theirs."""


def score(
    items: Sequence[Item],
    progress: Mapping[int, PassProgress],
    hidden: Tensor,
    decoder: Decoder,
    adapters: AdapterSegments,
    limits: BatchLimits,
) -> Generator[Future[list[Loss | None]], None, Tensor]:
    """Log-probabilities and losses of a micro-batch; the gradient for `hidden` (N, d)."""
    hidden_grad = torch.zeros_like(hidden)
    waiting: deque[_Group] = deque()
    start = 0
    for group_items, targets in _groups(items, progress, limits.group_rows(len(hidden))):
        stop = start + len(targets)
        while waiting and stop - waiting[0].start > limits.score_rows:
            yield from _finish(waiting.popleft(), progress, hidden_grad, decoder.ranks)
        # Grad mode belongs to the thread, so it must not stay switched across a `yield`.
        with torch.no_grad():
            scores = TargetLogprobs(
                decoder,
                hidden[start:stop],
                adapters.gather(np.arange(start, stop)),
                to_device(targets, decoder.device),
                max_rows=limits.logits_rows,
                max_kept_rows=limits.score_rows,
            )
        waiting.append(_Group(group_items, start, stop, scores, begin_copy(scores.values)))
        if len(waiting) > 1 or not limits.is_ahead:
            yield from _finish(waiting.popleft(), progress, hidden_grad, decoder.ranks)
        start = stop
    while waiting:
        yield from _finish(waiting.popleft(), progress, hidden_grad, decoder.ranks)
    return hidden_grad


class _Group(NamedTuple):
    """Items whose scores the device has been asked for; rows `start` to `stop`."""

    items: list[Item]
    start: int
    stop: int
    scores: TargetLogprobs
    fetch: Callable[[], Tensor]
    """Waits for the log-probabilities, on the host."""


def _finish(
    group: _Group, progress: Mapping[int, PassProgress], hidden_grad: Tensor, ranks: Ranks
) -> Generator[Future[list[Loss | None]], None, None]:
    """The losses of a group, and their gradient into its rows of `hidden_grad`."""
    # Losses are small and made of many steps: the CPU is the quicker place for them.
    parts = group.fetch().split([item.length for item in group.items])
    losses = yield from _losses(group.items, progress, parts, ranks)
    if not group.items[0].forward_only:
        with torch.no_grad():
            grads = _loss_gradients(group.items, progress, losses, parts)
            hidden_grad[group.start : group.stop] = group.scores.backward(grads)


def compiling(state: PassProgress, max_seconds: float, ranks: Ranks) -> Iterator[None]:
    """Make a pass's uploaded loss callable, in the thread for them, or fail the pass; yields while
    that takes."""
    if state.custom is not None:
        return
    running = _loss_threads().submit(_compile, state, max_seconds)
    while not ranks.first(running.done):  # the same number of turns on every rank
        futures.wait([running], timeout=LOSS_TURN_SECONDS)
        yield None
    running.result()


def _compile(state: PassProgress, max_seconds: float) -> None:
    custom = state.request.custom_loss
    assert custom is not None, "only passes with an uploaded loss come here"
    start = time.thread_time()
    try:
        state.custom = compile_loss(custom, math.inf if state.request.is_replay else max_seconds)
    except ValidationError as error:
        state.fail(str(error), "user")
    state.seconds += time.thread_time() - start


def _losses(
    items: Sequence[Item],
    progress: Mapping[int, PassProgress],
    parts: Sequence[Tensor],
    ranks: Ranks,
) -> Generator[Future[list[Loss | None]], None, list[Loss | None]]:
    """The loss of each item, in the thread for uploaded ones where it is one."""
    state = progress[items[0].pass_index]
    if state.custom is None:
        pairs = zip(items, parts, strict=True)
        return [_timed_loss(item, progress[item.pass_index], part) for item, part in pairs]
    running = _loss_threads().submit(_uploaded_losses, items, state, parts)
    try:
        # Each rank works out the loss; whether it takes too long is for the first to say.
        while not ranks.first(running.done):
            yield running
        if ranks.first(lambda: state.failure is not None):
            state.custom.give_up()
    except GeneratorExit:
        state.custom.give_up()
        raise
    losses = running.result()
    state.failure = ranks.first(lambda: state.failure)
    return losses if state.failure is None else [None] * len(items)


def _uploaded_losses(
    items: Sequence[Item], state: PassProgress, parts: Sequence[Tensor]
) -> list[Loss | None]:
    """The losses of one pass, which keeps apart from others; charged what the thread has used."""
    start = time.thread_time()
    losses = [_item_loss(item, state, part) for item, part in zip(items, parts, strict=True)]
    state.seconds += time.thread_time() - start
    return losses


@cache
def _loss_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_LOSS_THREADS, "losses", initializer=_yield_to_others)


def _yield_to_others() -> None:
    """Run the calling thread when nothing else has to."""
    with contextlib.suppress(OSError, AttributeError):  # not every system knows threads' priorities
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOSS_NICENESS)


def _groups(
    items: Sequence[Item], progress: Mapping[int, PassProgress], max_rows: int
) -> Iterator[tuple[list[Item], Tensor]]:
    """Neighbouring items with equally many targets a position, and their targets (M, K)."""
    group: list[Item] = []
    parts: list[Tensor] = []
    num_rows = 0
    for item in items:
        inputs = progress[item.pass_index].request.data[item.datum].loss_fn_inputs
        targets = inputs["target_tokens"].to_torch().reshape(item.length, -1)
        is_alike = not parts or parts[0].shape[1] == targets.shape[1]
        if group and not (is_alike and num_rows + item.length <= max_rows):
            yield group, torch.cat(parts)
            group, parts, num_rows = [], [], 0
        group.append(item)
        parts.append(targets)
        num_rows += item.length
    yield group, torch.cat(parts)


class Loss(NamedTuple):
    """One datum's loss, and the log-probabilities it is a function of."""

    value: Tensor
    logprobs: Tensor


def _timed_loss(item: Item, state: PassProgress, logprobs: Tensor) -> Loss | None:
    start = time.perf_counter()
    loss = _item_loss(item, state, logprobs)
    state.loss_seconds += time.perf_counter() - start
    return loss


def _item_loss(item: Item, state: PassProgress, logprobs: Tensor) -> Loss | None:
    """Record the outputs of one datum; its loss, where that has a gradient for `logprobs`.

    A loss that fails fails the pass, and its rows have no gradient, so that the passes that
    share the micro-batch go on undisturbed.
    """
    request = state.request
    if not logprobs.isfinite().all():
        state.fail(f"data[{item.datum}]: a log-probability is not finite", "user")
        return None
    inputs = {
        name: data.to_torch() for name, data in request.data[item.datum].loss_fn_inputs.items()
    }
    leaf = logprobs.reshape(inputs["target_tokens"].shape).clone()
    state.logprobs[item.datum] = leaf.numpy()
    leaf = leaf.detach().requires_grad_(not item.forward_only)
    try:
        with torch.enable_grad():
            loss, stats = datum_loss(
                request.loss_fn, leaf, inputs, request.loss_fn_config, state.custom
            )
    except ValidationError as error:
        state.fail(str(error.under(f"data[{item.datum}]")), "user")
        return None
    state.stats[item.datum] = stats
    return Loss(loss, leaf) if loss.requires_grad else None


def _loss_gradients(
    items: Sequence[Item],
    progress: Mapping[int, PassProgress],
    losses: Sequence[Loss | None],
    parts: Sequence[Tensor],
) -> Tensor:
    """The gradient of each item's loss for its log-probabilities, one below another: (M, K)."""
    found = [loss for loss in losses if loss is not None]
    # One call for all: the losses have nothing in common, and each call has its price.
    computed = iter(
        torch.autograd.grad(
            [loss.value for loss in found], [loss.logprobs for loss in found], allow_unused=True
        )
        if found
        else ()
    )
    grads = []
    for item, loss, logprobs in zip(items, losses, parts, strict=True):
        grad = next(computed) if loss is not None else None
        if grad is not None and not grad.isfinite().all():
            position = int((~grad.isfinite()).flatten().int().argmax())
            progress[item.pass_index].fail(
                f"data[{item.datum}].loss_fn_inputs: the gradient of the loss at token {position} "
                f"must be within ±{LARGEST:.2g}",
                "user",
            )
            grad = None
        if grad is None:
            grad = torch.zeros_like(logprobs)
        grads.append(grad.reshape(logprobs.shape))
    return torch.cat(grads)
