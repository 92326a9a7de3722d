"""Training passes: from datums to log-probabilities, losses and pending gradients.

The datums of many passes, of many adapters on one base model, share micro-batches. For each
micro-batch the decoder runs once; then the unembedding is visited a few rows at a time, where
log-probabilities, losses and the gradient for the hidden states come out together and the
logits are forgotten; then one backward pass through the decoder. A log-probability is
reported for every target, whatever its weight; the backward pass skips rows without gradient.
An uploaded loss runs in a thread of low priority, and the caller does something else meanwhile.

A pass takes effect as a whole or not at all: its gradient grows in a buffer of its own and joins
the adapter's when the last datum is done. `checks` has made sure that inputs are well formed; what
cannot be known before (a loss that is not finite) fails the pass here. When memory runs out, or
anything else goes wrong in a micro-batch of several passes, they begin again, each by itself and in
smaller micro-batches; one that fails even so fails alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import Failure, FinishedPass, Pass
from tinsmith.engine.expert_choices import are_known
from tinsmith.engine.local import device_memory
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.adapted_linear import finish_gradients
from tinsmith.engine.local.model.batch import Item, PackedAttention, plan
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts.steering import GivenChoices
from tinsmith.engine.local.model.inputs import Input, Seen
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments, GradientBuffer, Run
from tinsmith.engine.local.model.unembedding import TargetLogprobs
from tinsmith.engine.local.ranks.group import Ranks
from tinsmith.engine.local.train.custom_loss import CompiledLoss, compile_loss
from tinsmith.engine.local.train.losses import LARGEST, combine_metrics, datum_loss
from tinsmith.errors import ValidationError
from tinsmith.types import Datum, ForwardBackwardOutput, TensorData

logger = logging.getLogger(__name__)

CPU_WORK = 2**33
"""Tokens times bytes of weights that make a micro-batch on the CPU..."""

FEWEST_TOKENS = 512
"""... and how many it has at least: with two threads 256 take a tenth longer than 2,048, token by
token, and 512 as long."""

REPLAYED = "experts/replayed_tokens:sum"
"""The metric that says how many tokens went to experts that were given, not chosen anew."""

_LOSS_THREADS = 4
"""Uploaded losses that run at a time, each of another call."""

_LOSS_NICENESS = 10

_LOSS_TURN_SECONDS = 0.005
"""How long a turn waits for an uploaded loss, before others have theirs."""


def run_passes(
    passes: Sequence[Pass],
    adapters: Mapping[str, Adapter],
    decoder: Decoder,
    config: LocalEngineConfig,
    max_tokens: int | None = None,
    *,
    is_shared: Callable[[], bool] = lambda: False,
) -> Iterator[FinishedPass | None]:
    """Run passes of adapters on `decoder`; yield each as it is finished.

    Yields None after each micro-batch as well, and while an uploaded loss runs, where the caller
    may do something else. A pass that is given up there, by closing the iterator, has no effect.

    Gradients of a pass are in its adapter's `grad` when its result comes out. In deterministic
    mode they are added datum by datum, so that cutting a pass into several changes no bit.
    `max_tokens` is given when memory ran out before: a micro-batch then holds no more than that.
    `is_shared` says whether others may wait for the end of a micro-batch, which is short then.
    """
    progress = {index: _Progress(p, adapters[p.adapter_id]) for index, p in enumerate(passes)}
    yield from _finished(progress, adapters, decoder, config)
    items = [
        Item(
            index,
            number,
            datum.model_input.length,
            p.adapter_id,
            p.forward_only,
            keeps_apart=p.custom_loss is not None,
        )
        for index, p in enumerate(passes)
        for number, datum in enumerate(p.data)
    ]
    limits = _Limits.of(config, decoder)

    def batch_tokens() -> int:
        return max_tokens or (limits.shared_tokens if is_shared() else limits.batch_tokens)

    for batch in plan(items, max_tokens=batch_tokens, one_by_one=config.deterministic):
        wanted = [item for item in batch if item.pass_index in progress]
        if not wanted:
            continue
        involved = [progress[index] for index in dict.fromkeys(i.pass_index for i in wanted)]
        if wanted[0].keeps_apart:
            yield from _compiling(involved[0], config.custom_loss_seconds, decoder.ranks)
            if involved[0].is_done:
                yield from _finished(progress, adapters, decoder, config)
                continue
        is_to_split = False
        seconds, start = 0.0, time.perf_counter()
        try:
            for state in involved:
                state.prepare(add_in_order=config.deterministic)
                state.had_company |= len(involved) > 1
            for losses in run_batch(wanted, progress, decoder, limits):
                seconds += time.perf_counter() - start
                futures.wait([losses], timeout=_LOSS_TURN_SECONDS)
                yield None
                start = time.perf_counter()
        except Exception as error:  # whatever it is, passes in other micro-batches go on
            may_split = max_tokens is None or len(wanted) > 1
            is_to_split = len(involved) > 1 or (may_split and _is_out_of_memory(error))
            is_unreadable = isinstance(error, ValidationError)
            if not is_unreadable:
                decoder.ranks.give_up(error)
                logger.warning("a micro-batch of %d sequences failed", len(wanted), exc_info=error)
            if not is_to_split:
                for state in involved:
                    if is_unreadable:  # an image, as its own sequence says
                        state.fail(str(error), "user")
                    else:
                        state.fail(f"the engine failed during the pass: {error}", "server")
        if decoder.device.type == "cuda" and any(state.is_done for state in involved):
            # Finishing waits for the device in any case; here the wait is everybody's.
            torch.cuda.synchronize(decoder.device)
        _share_time(seconds + time.perf_counter() - start, wanted, progress)
        if is_to_split:
            # Outside the handler, which holds on to all that the failed micro-batch had made.
            again = {index: progress.pop(index) for index in {i.pass_index for i in wanted}}
            num_tokens = sum(item.length for item in wanted)
            yield from _one_by_one(again, adapters, decoder, config, max(1, num_tokens // 2))
            continue
        yield from _finished(progress, adapters, decoder, config)
        yield None


def _one_by_one(
    states: Mapping[int, _Progress],
    adapters: Mapping[str, Adapter],
    decoder: Decoder,
    config: LocalEngineConfig,
    max_tokens: int,
) -> Iterator[FinishedPass | None]:
    """Run passes from the start, in order; what they had done so far took no effect."""
    for state in states.values():
        state.gradient = None
    for index in sorted(states):
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        state = states[index]
        for finished in run_passes([state.request], adapters, decoder, config, max_tokens):
            yield finished and FinishedPass(
                index, finished.result, state.seconds + finished.seconds
            )


def _share_time(seconds: float, items: Sequence[Item], progress: Mapping[int, _Progress]) -> None:
    """Charge the passes of a micro-batch: each its own losses, and the rest by tokens."""
    involved = {item.pass_index: progress[item.pass_index] for item in items}
    shared = seconds - sum(state.loss_seconds for state in involved.values())
    num_tokens = sum(item.length for item in items)
    for item in items:
        involved[item.pass_index].seconds += shared * item.length / num_tokens
    for state in involved.values():
        state.seconds += state.loss_seconds
        state.loss_seconds = 0.0


def _is_out_of_memory(error: Exception) -> bool:
    # Except on CUDA torch raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "MPS backend out of memory")
    )


def _finished(
    progress: dict[int, _Progress],
    adapters: Mapping[str, Adapter],
    decoder: Decoder,
    config: LocalEngineConfig,
) -> Iterator[FinishedPass]:
    """Take out the passes that are done."""
    for index in [index for index, state in progress.items() if state.is_done]:
        state = progress.pop(index)
        result = state.finish(decoder.ranks, counts_replayed=config.router_replay)
        seconds = state.seconds
        if state.is_gradient_broken and state.had_company:
            # Passes that share products share an overflow, too; alone it shows whose it was.
            (again,) = filter(None, run_passes([state.request], adapters, decoder, config))
            result, seconds = again.result, seconds + again.seconds
        yield FinishedPass(index, result, seconds)


@dataclass(frozen=True, slots=True)
class _Limits:
    batch_tokens: int
    shared_tokens: int
    """Of a micro-batch whose end others may wait for."""

    logits_rows: int
    """Most rows that are unembedded at a time."""

    score_rows: int
    """Most rows whose log-probabilities and losses are worked out together, logits kept."""

    checkpoint_layers: bool

    @classmethod
    def of(cls, config: LocalEngineConfig, decoder: Decoder) -> _Limits:
        is_cuda = decoder.device.type == "cuda"
        logits_bytes = config.logits_bytes or (2**31 if is_cuda else 2**28)
        logits_rows = max(1, logits_bytes // (4 * decoder.config.vocab_size))
        score_rows = logits_rows
        if is_cuda and config.logits_bytes is None:
            # Losses are worked out on the CPU: the fewer times the device waits for it, the better.
            unused = int(min(decoder.ranks.numbers(device_memory.unused(decoder.device))))
            row_bytes = decoder.dtype.itemsize * decoder.config.vocab_size
            score_rows = max(logits_rows, min(4 * logits_bytes, unused // 4) // row_bytes)
        fixed = config.micro_batch_tokens or (16_384 if is_cuda else None)
        return cls(
            batch_tokens=fixed or _cpu_tokens(decoder),
            shared_tokens=fixed or _cpu_tokens(decoder) // 2,
            logits_rows=logits_rows,
            score_rows=score_rows,
            checkpoint_layers=config.checkpoint_layers,
        )


def _cpu_tokens(decoder: Decoder) -> int:
    """Tokens of a micro-batch on the CPU: not many, since whoever comes waits for its end. It goes
    by the model's size and not by measured time, so that one owner alone gets the same bits."""
    return min(max(CPU_WORK // decoder.nbytes, FEWEST_TOKENS), 1024)


@dataclass(slots=True)
class _Progress:
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
        """Let the gradient take effect and put the result together."""
        if self.failure is None and self.gradient is not None:
            self._commit(self.gradient.flat, ranks)
        if self.failure is not None:
            return self.failure
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


def run_batch(
    items: Sequence[Item], progress: Mapping[int, _Progress], decoder: Decoder, limits: _Limits
) -> Iterator[Future[list[_Loss | None]]]:
    """One micro-batch through the decoder and back; fills in the passes' outputs.

    While an uploaded loss is being computed, yields its future, again and again until it is done.
    """
    needs_gradient = not items[0].forward_only
    lengths = [item.length for item in items]
    rules = decoder.config.images
    inputs = [Input(_datum(item, progress).model_input, rules) for item in items]
    tokens = np.concatenate([each.tokens for each in inputs])
    positions = np.concatenate([each.positions(0, len(each.tokens)) for each in inputs])
    seen = _seen(items, inputs, progress, decoder)
    attention = PackedAttention(decoder.config, lengths, is_invariant=decoder.is_invariant)
    adapters = _segments(items, progress)
    steering = _steering(items, progress, decoder)
    with torch.set_grad_enabled(needs_gradient):
        hidden = decoder.hidden(
            torch.from_numpy(tokens.astype(np.int64)).to(decoder.device),
            torch.from_numpy(positions).to(decoder.device),
            attention,
            adapters,
            checkpoint_layers=limits.checkpoint_layers,
            seen=seen,
            steering=steering,
        )
    hidden_grad = yield from _score(items, progress, hidden.detach(), decoder, adapters, limits)
    if hidden.requires_grad:
        hidden.backward(hidden_grad)
        finish_gradients(adapters)


def _seen(
    items: Sequence[Item],
    inputs: Sequence[Input],
    progress: Mapping[int, _Progress],
    decoder: Decoder,
) -> Seen | None:
    """The images of a micro-batch; one that cannot be decoded is a `ValidationError`."""
    parts = []
    row = 0
    for item, each in zip(items, inputs, strict=True):
        scope = progress[item.pass_index].request.scope
        try:
            parts.append((row, each.seen(0, item.length, decoder.vision, scope)))
        except ValidationError as error:
            raise error.under(f"data[{item.datum}].model_input") from None
        row += item.length
    return Seen.joined(parts)


def _steering(
    items: Sequence[Item], progress: Mapping[int, _Progress], decoder: Decoder
) -> GivenChoices | None:
    """The experts that the tokens of a micro-batch were given; None where there are none."""
    given: list[tuple[int, np.ndarray | None]] = []
    for item in items:
        choices = progress[item.pass_index].request.choices
        given.append((item.length, choices[item.datum] if choices else None))
    if all(choices is None for _, choices in given):
        return None
    routed = decoder.config.routed
    assert routed is not None, "checked before"
    return GivenChoices(given, routed, decoder.device)


def _datum(item: Item, progress: Mapping[int, _Progress]) -> Datum:
    return progress[item.pass_index].request.data[item.datum]


def _segments(items: Sequence[Item], progress: Mapping[int, _Progress]) -> AdapterSegments:
    """Neighbouring items of one pass make one run."""
    runs: list[Run] = []
    gradients: list[GradientBuffer | None] = []
    previous = None
    row = 0
    for item in items:
        state = progress[item.pass_index]
        if item.pass_index == previous:
            start = runs.pop()[0]
            gradients.pop()
        else:
            start = row
        row += item.length
        runs.append((start, row, state.adapter))
        gradients.append(state.gradient)
        previous = item.pass_index
    return AdapterSegments(runs, gradients)


def _score(
    items: Sequence[Item],
    progress: Mapping[int, _Progress],
    hidden: Tensor,
    decoder: Decoder,
    adapters: AdapterSegments,
    limits: _Limits,
) -> Generator[Future[list[_Loss | None]], None, Tensor]:
    """Log-probabilities and losses of a micro-batch; the gradient for `hidden` (N, d)."""
    hidden_grad = torch.zeros_like(hidden)
    start = 0
    for group, targets in _groups(items, progress, limits.score_rows):
        stop = start + len(targets)
        # Grad mode belongs to the thread, so it must not stay switched across a `yield`.
        with torch.no_grad():
            scores = TargetLogprobs(
                decoder,
                hidden[start:stop],
                adapters.gather(np.arange(start, stop)),
                targets.to(decoder.device),
                max_rows=limits.logits_rows,
                max_kept_rows=limits.score_rows,
            )
        # Losses are small and made of many steps: the CPU is the quicker place for them.
        parts = scores.values.cpu().split([item.length for item in group])
        losses = yield from _losses(group, progress, parts, decoder.ranks)
        if not items[0].forward_only:
            with torch.no_grad():
                grads = _loss_gradients(group, progress, losses, parts)
                hidden_grad[start:stop] = scores.backward(grads)
        start = stop
    return hidden_grad


def _compiling(state: _Progress, max_seconds: float, ranks: Ranks) -> Iterator[None]:
    """Make a pass's uploaded loss callable, in the thread for them, or fail the pass; yields while
    that takes."""
    if state.custom is not None:
        return
    running = _loss_threads().submit(_compile, state, max_seconds)
    while not ranks.first(running.done):  # the same number of turns on every rank
        futures.wait([running], timeout=_LOSS_TURN_SECONDS)
        yield None
    running.result()


def _compile(state: _Progress, max_seconds: float) -> None:
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
    progress: Mapping[int, _Progress],
    parts: Sequence[Tensor],
    ranks: Ranks,
) -> Generator[Future[list[_Loss | None]], None, list[_Loss | None]]:
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
    items: Sequence[Item], state: _Progress, parts: Sequence[Tensor]
) -> list[_Loss | None]:
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
    items: Sequence[Item], progress: Mapping[int, _Progress], max_rows: int
) -> Iterator[tuple[list[Item], Tensor]]:
    """Neighbouring items with equally many targets a position, and their targets (M, K)."""
    group: list[Item] = []
    parts: list[Tensor] = []
    num_rows = 0
    for item in items:
        targets = _datum(item, progress).loss_fn_inputs["target_tokens"].to_torch()
        targets = targets.reshape(item.length, -1)
        is_alike = not parts or parts[0].shape[1] == targets.shape[1]
        if group and not (is_alike and num_rows + item.length <= max_rows):
            yield group, torch.cat(parts)
            group, parts, num_rows = [], [], 0
        group.append(item)
        parts.append(targets)
        num_rows += item.length
    yield group, torch.cat(parts)


class _Loss(NamedTuple):
    """One datum's loss, and the log-probabilities it is a function of."""

    value: Tensor
    logprobs: Tensor


def _timed_loss(item: Item, state: _Progress, logprobs: Tensor) -> _Loss | None:
    start = time.perf_counter()
    loss = _item_loss(item, state, logprobs)
    state.loss_seconds += time.perf_counter() - start
    return loss


def _item_loss(item: Item, state: _Progress, logprobs: Tensor) -> _Loss | None:
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
    return _Loss(loss, leaf) if loss.requires_grad else None


def _loss_gradients(
    items: Sequence[Item],
    progress: Mapping[int, _Progress],
    losses: Sequence[_Loss | None],
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
