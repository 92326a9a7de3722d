"""Training passes: from datums to log-probabilities, losses and pending gradients.

The datums of many passes, of many adapters on one base model, share micro-batches, as large as
`batch_limits` says. For each micro-batch the decoder runs once; then `scoring` works out
log-probabilities, losses and the gradient for the hidden states; then one backward pass through the
decoder. A log-probability is reported for every target, whatever its weight; the backward pass
skips rows without gradient.

A pass takes effect as a whole or not at all, when its last datum is done (`pass_progress`).
`checks` has made sure that inputs are well formed; what cannot be known before (a loss that is not
finite) fails the pass here. When memory runs out, or anything else goes wrong in a micro-batch of
several passes, they begin again, each by itself and in smaller micro-batches; one that fails even
so fails alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinsmith.engine.base import FinishedPass, Pass
from tinsmith.engine.local import kernels
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.batch import Item, PackedAttention, plan
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts.steering import GivenChoices
from tinsmith.engine.local.model.inputs import Input, Seen
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments, GradientBuffer, Run
from tinsmith.engine.local.model.transfers import to_device
from tinsmith.engine.local.train.batch_limits import BatchLimits
from tinsmith.engine.local.train.graph_memory import GraphMemory
from tinsmith.engine.local.train.pass_progress import PassProgress
from tinsmith.engine.local.train.scoring import LOSS_TURN_SECONDS, Loss, compiling, score
from tinsmith.errors import ValidationError

if TYPE_CHECKING:
    from tinsmith.engine.local.train.pass_graphs import PassGraphs

logger = logging.getLogger(__name__)


def run_passes(
    passes: Sequence[Pass],
    adapters: Mapping[str, Adapter],
    decoder: Decoder,
    config: LocalEngineConfig,
    limits: BatchLimits | None = None,
    *,
    is_shared: Callable[[], bool] = lambda: False,
    graphs: PassGraphs | None = None,
) -> Iterator[FinishedPass | None]:
    """Run passes of adapters on `decoder`; yield each as it is finished.

    Yields None after each micro-batch as well, and while an uploaded loss runs, where the caller
    may do something else. A pass that is given up there, by closing the iterator, has no effect.

    Gradients of a pass are in its adapter's `grad` when its result comes out. In deterministic
    mode they are added datum by datum, so that cutting a pass into several changes no bit.
    Without `limits` they are as if no memory were planned. `is_shared` says whether others may wait
    for the end of a micro-batch, which is short then. `graphs` are for those of few tokens.
    """
    limits = limits or BatchLimits.of(config, decoder)
    progress = {index: PassProgress(p, adapters[p.adapter_id]) for index, p in enumerate(passes)}
    yield from _finished(progress, adapters, decoder, config, limits)
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

    def batch_tokens() -> int:
        return limits.shared_tokens if is_shared() else limits.batch_tokens

    for batch in plan(items, max_tokens=batch_tokens, one_by_one=config.deterministic):
        wanted = [item for item in batch if item.pass_index in progress]
        if not wanted:
            continue
        involved = [progress[index] for index in dict.fromkeys(i.pass_index for i in wanted)]
        if wanted[0].keeps_apart:
            yield from compiling(involved[0], config.custom_loss_seconds, decoder.ranks)
            if involved[0].is_done:
                yield from _finished(progress, adapters, decoder, config, limits)
                continue
        is_to_split = False
        seconds, start = 0.0, time.perf_counter()
        try:
            for state in involved:
                state.prepare(add_in_order=config.deterministic)
                state.had_company |= len(involved) > 1
            for losses in run_batch(wanted, progress, decoder, limits, graphs):
                seconds += time.perf_counter() - start
                futures.wait([losses], timeout=LOSS_TURN_SECONDS)
                yield None
                start = time.perf_counter()
        except Exception as error:  # whatever it is, passes in other micro-batches go on
            may_split = not limits.are_reduced or len(wanted) > 1
            is_to_split = len(involved) > 1 or (may_split and _is_out_of_memory(error))
            is_unreadable = isinstance(error, ValidationError)
            if not is_unreadable:
                if graphs is not None:
                    graphs.drop()
                decoder.ranks.give_up(error)
                logger.warning("a micro-batch of %d sequences failed", len(wanted), exc_info=error)
            if not is_to_split:
                for state in involved:
                    if is_unreadable:  # an image, as its own sequence says
                        state.fail(str(error), "user")
                    elif _is_out_of_memory(error):
                        state.fail(_does_not_fit(wanted, limits.pass_bytes, error), "server")
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
            smaller = max(1, num_tokens // 2)
            yield from _one_by_one(again, adapters, decoder, config, smaller, limits.pass_bytes)
            continue
        yield from _finished(progress, adapters, decoder, config, limits)
        yield None


def graphs_of(
    decoder: Decoder, pass_bytes: int | None = None, memory: GraphMemory | None = None
) -> PassGraphs | None:
    """What captures passes of a base model; None where there are no kernels."""
    if decoder.device.type != "cuda" or not kernels.are_usable(decoder.head.weight):
        return None
    from tinsmith.engine.local.train.pass_graphs import PassGraphs

    return PassGraphs(decoder, pass_bytes, memory)


def _one_by_one(
    states: Mapping[int, PassProgress],
    adapters: Mapping[str, Adapter],
    decoder: Decoder,
    config: LocalEngineConfig,
    max_tokens: int,
    pass_bytes: int | None,
) -> Iterator[FinishedPass | None]:
    """Run passes from the start, in order; what they had done so far took no effect.

    Now activations are computed again and not kept: a sequence cannot be divided.
    """
    config = replace(config, checkpoint_layers=True)
    for state in states.values():
        state.gradient = None
    for index in sorted(states):
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        state = states[index]
        limits = BatchLimits.of(config, decoder, pass_bytes, max_tokens)
        for finished in run_passes([state.request], adapters, decoder, config, limits):
            yield finished and FinishedPass(
                index, finished.result, state.seconds + finished.seconds
            )


def _share_time(
    seconds: float, items: Sequence[Item], progress: Mapping[int, PassProgress]
) -> None:
    """Charge the passes of a micro-batch: each its own losses, and the rest by tokens."""
    involved = {item.pass_index: progress[item.pass_index] for item in items}
    shared = seconds - sum(state.loss_seconds for state in involved.values())
    num_tokens = sum(item.length for item in items)
    for item in items:
        involved[item.pass_index].seconds += shared * item.length / num_tokens
    for state in involved.values():
        state.seconds += state.loss_seconds
        state.loss_seconds = 0.0


def _does_not_fit(items: Sequence[Item], pass_bytes: int | None, error: Exception) -> str:
    longest = max(item.length for item in items)
    share = "" if pass_bytes is None else f" of {pass_bytes / 2**30:.1f} GiB"
    return (
        f"a sequence of {longest:,} tokens does not fit into the memory for passes{share}, "
        f"although activations were not kept: {error}"
    )


def _is_out_of_memory(error: Exception) -> bool:
    # Except on CUDA torch raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "MPS backend out of memory")
    )


def _finished(
    progress: dict[int, PassProgress],
    adapters: Mapping[str, Adapter],
    decoder: Decoder,
    config: LocalEngineConfig,
    limits: BatchLimits,
) -> Iterator[FinishedPass]:
    """Take out the passes that are done."""
    for index in [index for index, state in progress.items() if state.is_done]:
        state = progress.pop(index)
        result = state.finish(decoder.ranks, counts_replayed=config.router_replay)
        seconds = state.seconds
        if state.is_gradient_broken and state.had_company:
            # Passes that share products share an overflow, too; alone it shows whose it was.
            alone = run_passes([state.request], adapters, decoder, config, limits)
            (again,) = filter(None, alone)
            result, seconds = again.result, seconds + again.seconds
        yield FinishedPass(index, result, seconds)


def run_batch(
    items: Sequence[Item],
    progress: Mapping[int, PassProgress],
    decoder: Decoder,
    limits: BatchLimits,
    graphs: PassGraphs | None = None,
) -> Iterator[Future[list[Loss | None]]]:
    """One micro-batch through the decoder and back; fills in the passes' outputs.

    While an uploaded loss is being computed, yields its future, again and again until it is done.
    Such a batch is never one of `graphs`, which others may use meanwhile.
    """
    needs_gradient = not items[0].forward_only
    lengths = [item.length for item in items]
    rules = decoder.config.images
    data = [progress[item.pass_index].request.data[item.datum] for item in items]
    inputs = [Input(datum.model_input, rules) for datum in data]
    tokens = np.concatenate([each.tokens for each in inputs])
    positions = np.concatenate([each.positions(0, len(each.tokens)) for each in inputs])
    seen = _seen(items, inputs, progress, decoder)
    adapters = _segments(items, progress)
    steering = _steering(items, progress, decoder)
    captured = None
    if graphs is not None and not items[0].keeps_apart and seen is None and steering is None:
        captured = graphs.begin(decoder, tokens, positions, lengths, adapters)
    if captured is not None:
        hidden = captured.forward(len(tokens))
        hidden_grad = yield from score(items, progress, hidden, decoder, adapters, limits)
        if needs_gradient:
            captured.backward(hidden_grad)
        return
    if graphs is not None and not limits.has_room_beside_graphs(len(tokens)):
        graphs.drop()
    with torch.set_grad_enabled(needs_gradient):
        hidden = decoder.hidden(
            to_device(torch.from_numpy(tokens.astype(np.int64)), decoder.device),
            to_device(torch.from_numpy(positions), decoder.device),
            PackedAttention(decoder.config, lengths, is_invariant=decoder.is_invariant),
            adapters,
            kept_layers=limits.kept_layers(sum(lengths)),
            seen=seen,
            steering=steering,
        )
    hidden_grad = yield from score(items, progress, hidden.detach(), decoder, adapters, limits)
    if hidden.requires_grad:
        hidden.backward(hidden_grad)


def _seen(
    items: Sequence[Item],
    inputs: Sequence[Input],
    progress: Mapping[int, PassProgress],
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
    items: Sequence[Item], progress: Mapping[int, PassProgress], decoder: Decoder
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


def _segments(items: Sequence[Item], progress: Mapping[int, PassProgress]) -> AdapterSegments:
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
