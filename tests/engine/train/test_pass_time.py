"""What passes are charged: their tokens' share of a micro-batch, and their own losses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tinsmith.engine.base import CustomLoss, Failure, FinishedPass, Pass
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.train import scoring
from tinsmith.engine.local.train.custom_loss import CompiledLoss, compile_loss
from tinsmith.engine.local.train.passes import run_passes
from tinsmith.types import (
    CustomLossGraph,
    CustomLossInput,
    CustomLossNode,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
)

CPU = LocalEngineConfig(device="cpu")


def datum(num_tokens: int) -> Datum:
    tokens = torch.arange(num_tokens) % 97
    return Datum(
        model_input=ModelInput.from_ints(tokens.tolist()),
        loss_fn_inputs={"target_tokens": tokens.numpy()},
    )


def timed(decoder: Decoder, adapter: Adapter, *passes: Pass) -> tuple[list[FinishedPass], float]:
    start = time.perf_counter()
    finished = [p for p in run_passes(passes, {"a": adapter}, decoder, CPU) if p]
    taken = time.perf_counter() - start
    assert all(isinstance(p.result, ForwardBackwardOutput) for p in finished), finished
    return sorted(finished, key=lambda p: p.index), taken


def sorting_loss(num_elements: int, num_sorts: int) -> CustomLoss:
    """Sorts `num_elements` numbers again and again; little to say, much to do."""

    def node(op: str, name: str, target: str, *args: object, **kwargs: object) -> CustomLossNode:
        return CustomLossNode(op=op, name=name, target=target, args=list(args), kwargs=kwargs)

    nodes = [
        node("placeholder", "logprobs", "logprobs"),
        node("call_method", "loss", "sum", {"ref": "logprobs"}),
        node("call_function", "many", "torch.arange", num_elements),
        *(
            node("call_method", f"sorted_{i}", "argsort", {"ref": "many"}, descending=True)
            for i in range(num_sorts)
        ),
        node("output", "output", "output", {"tuple": [{"ref": "loss"}, {"dict": {}}]}),
    ]
    return CustomLoss(
        inputs=(CustomLossInput(name="logprobs", rank=1),), graph=CustomLossGraph(nodes=nodes)
    )


def test_passes_of_one_micro_batch_share_its_time_by_tokens(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    passes = [
        Pass(adapter_id="a", data=[datum(n)], loss_fn="cross_entropy", forward_only=True)
        for n in (400, 100)
    ]
    (long, short), taken = timed(tiny_decoder, new_adapter(tiny_decoder), *passes)
    assert 0 < short.seconds < long.seconds
    assert long.seconds + short.seconds <= taken


def test_the_time_of_a_custom_loss_is_its_own_passes(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    passes = [
        Pass(adapter_id="a", data=[datum(100)], loss_fn="cross_entropy"),
        Pass(
            adapter_id="a",
            data=[datum(5)],
            loss_fn="custom",
            custom_loss=sorting_loss(2**18, 10),
        ),
    ]
    timed(tiny_decoder, new_adapter(tiny_decoder), *passes)  # the first one pays for first uses
    runs = [timed(tiny_decoder, new_adapter(tiny_decoder), *passes) for _ in range(5)]
    assert all(sum(each.seconds for each in finished) <= taken for finished, taken in runs)
    # The time of the plain pass is that of the clock, which a busy machine stretches.
    plain, custom = (min(finished[index].seconds for finished, _ in runs) for index in (0, 1))
    assert custom > plain


def test_others_have_their_turns_while_an_uploaded_loss_runs(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    """And find torch as it is between passes, though some of a pass runs without gradients."""
    costly = Pass(
        adapter_id="a", data=[datum(5)], loss_fn="custom", custom_loss=sorting_loss(2**20, 3)
    )
    plain = Pass(adapter_id="b", data=[datum(50)], loss_fn="cross_entropy")
    adapters = {"a": new_adapter(tiny_decoder), "b": new_adapter(tiny_decoder)}
    turns: list[int | None] = []
    for finished in run_passes([costly, plain], adapters, tiny_decoder, CPU):
        assert torch.is_grad_enabled()
        turns.append(finished and finished.index)
        assert finished is None or isinstance(finished.result, ForwardBackwardOutput)
    assert [turn for turn in turns if turn is not None] == [1, 0], "the other pass does not wait"
    assert turns[turns.index(1) + 1 : turns.index(0)].count(None) >= 4, "a turn takes 5 ms"


def test_others_are_done_before_many_uploaded_losses_have_been_checked(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To check a large graph takes as long as a pass, and a call may bring many."""
    checked: list[str] = []

    def slowly(custom: CustomLoss, max_seconds: float) -> CompiledLoss:
        checked.append(threading.current_thread().name)
        time.sleep(0.02)
        return compile_loss(custom, max_seconds)

    monkeypatch.setattr(scoring, "compile_loss", slowly)
    costly = Pass(
        adapter_id="a", data=[datum(5)] * 2, loss_fn="custom", custom_loss=sorting_loss(2**4, 1)
    )
    broken = replace(costly, custom_loss=replace(sorting_loss(2**4, 1), inputs=()))
    plain = Pass(adapter_id="b", data=[datum(50)], loss_fn="cross_entropy")
    adapters = {"a": new_adapter(tiny_decoder), "b": new_adapter(tiny_decoder)}
    results: dict[int, object] = {}
    num_checked_before = -1
    for finished in run_passes([costly, broken, costly, plain], adapters, tiny_decoder, CPU):
        if finished is not None:
            results[finished.index] = finished.result
            if finished.index == 3:
                num_checked_before = len(checked)
    assert num_checked_before == 0
    assert len(checked) == 3 and all(name.startswith("losses") for name in checked)
    assert isinstance(results[1], Failure) and results[1].category == "user"
    assert all(isinstance(results[index], ForwardBackwardOutput) for index in (0, 2, 3))


def test_a_pass_given_up_while_its_uploaded_loss_runs_has_no_effect(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    custom = sorting_loss(2**20, 3)
    item = Pass(adapter_id="a", data=[datum(5)] * 50, loss_fn="custom", custom_loss=custom)
    adapter = new_adapter(tiny_decoder)
    running = run_passes([item], {"a": adapter}, tiny_decoder, CPU)
    assert next(running) is None
    running.close()  # type: ignore[attr-defined]  # it is a generator
    assert adapter.grad is None
    short = replace(item, data=[datum(5)], custom_loss=sorting_loss(2**4, 1))
    (finished,) = filter(None, run_passes([short], {"a": adapter}, tiny_decoder, CPU))
    assert isinstance(finished.result, ForwardBackwardOutput), "the next one is not given up"


def test_a_loss_that_takes_too_long_fails_its_pass_alone_unless_it_is_replayed(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    """What was done once must be done again, on a slower machine too."""
    config = LocalEngineConfig(device="cpu", custom_loss_seconds=1e-6)
    slow = Pass(
        adapter_id="a", data=[datum(5)], loss_fn="custom", custom_loss=sorting_loss(2**10, 1)
    )
    passes = [
        Pass(adapter_id="a", data=[datum(100)], loss_fn="cross_entropy"),
        slow,
        replace(slow, is_replay=True),
    ]
    adapters = {"a": new_adapter(tiny_decoder)}
    results = {p.index: p.result for p in run_passes(passes, adapters, tiny_decoder, config) if p}
    assert isinstance(results[0], ForwardBackwardOutput)
    assert results[1] == Failure(
        "data[0].graph: the loss has taken more than 1e-06 s in one pass; send fewer datums at a "
        "time, or make it smaller",
        "user",
    )
    assert isinstance(results[2], ForwardBackwardOutput)
