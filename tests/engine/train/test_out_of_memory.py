"""When memory runs out in a pass, it is tried again in smaller parts; then it alone fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.engine.base import Failure, Pass
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.train import passes as training
from tinsmith.types import Datum, ForwardBackwardOutput, ModelInput

CONFIG = LocalEngineConfig(device="cpu", micro_batch_tokens=200)
EXACT = LocalEngineConfig(device="cpu", deterministic=True)


def datum(length: int, seed: int) -> Datum:
    tokens = np.random.default_rng(seed).integers(0, 97, length + 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)},
    )


class Memory:
    """Room for so many tokens of a micro-batch; what is larger runs out half-way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.max_tokens = 10**9
        self.failures_left = 10**9
        self.tried: list[int] = []
        real = training.run_batch

        def run_batch(items: Sequence[Any], *arguments: Any) -> Iterator[Any]:
            num_tokens = sum(item.length for item in items)
            self.tried.append(num_tokens)
            yield from real(items, *arguments)
            if num_tokens > self.max_tokens and self.failures_left:
                self.failures_left -= 1
                # After the real work: what it added to the gradient must not count.
                raise error

        monkeypatch.setattr(training, "run_batch", run_batch)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


def run(
    decoder: Decoder,
    passes: Sequence[Pass],
    adapters: dict[str, Adapter],
    config: LocalEngineConfig = CONFIG,
) -> dict[int, ForwardBackwardOutput | Failure]:
    results = training.run_passes(passes, adapters, decoder, config)
    return {p.index: p.result for p in results if p}


def passes_of(**data: list[Datum]) -> list[Pass]:
    return [Pass(adapter_id=k, data=v, loss_fn="cross_entropy") for k, v in data.items()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_batch_that_does_not_fit_is_split_and_gives_the_same_gradients(
    tiny_decoder: Decoder,
    new_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    memory = Memory(monkeypatch, error)
    passes = passes_of(a=[datum(20, n) for n in range(6)], b=[datum(30, n) for n in range(3)])
    expected = {name: new_adapter(tiny_decoder) for name in "ab"}
    run(tiny_decoder, passes, expected)
    memory.max_tokens = 45
    adapters = {name: new_adapter(tiny_decoder) for name in "ab"}
    results = run(tiny_decoder, passes, adapters)
    assert all(isinstance(r, ForwardBackwardOutput) for r in results.values()), results
    for name in "ab":
        torch.testing.assert_close(adapters[name].grad, expected[name].grad)


def test_a_pass_that_fits_nowhere_fails_alone(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    passes = passes_of(a=[datum(20, 1)], huge=[datum(10, 2), datum(90, 3)], b=[datum(20, 4)])
    expected = {name: new_adapter(tiny_decoder) for name in ("a", "huge", "b")}
    run(tiny_decoder, passes, expected)
    memory.max_tokens = 45
    adapters = {name: new_adapter(tiny_decoder) for name in ("a", "huge", "b")}
    results = run(tiny_decoder, passes, adapters)
    failure = results[1]
    assert isinstance(failure, Failure) and failure.category == "server"
    assert "out of memory" in failure.message
    assert adapters["huge"].grad is None
    for name in "ab":
        torch.testing.assert_close(adapters[name].grad, expected[name].grad)


def test_a_second_try_changes_no_bit_in_deterministic_mode(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    one, two = [datum(20, n) for n in range(3)], [datum(30, n) for n in range(3)]
    passes = [*passes_of(a=one), *passes_of(a=two), *passes_of(a=one)]
    expected = {"a": new_adapter(tiny_decoder)}
    run(tiny_decoder, passes, expected, EXACT)
    memory.max_tokens, memory.failures_left = 25, 1
    adapters = {"a": new_adapter(tiny_decoder)}
    results = run(tiny_decoder, passes, adapters, EXACT)
    assert all(isinstance(r, ForwardBackwardOutput) for r in results.values()), results
    assert memory.failures_left == 0
    assert adapters["a"].grad is not None and expected["a"].grad is not None
    assert torch.equal(adapters["a"].grad, expected["a"].grad)
