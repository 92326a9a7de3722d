"""When memory runs out in a pass, it is tried again in smaller parts, and without keeping
activations; then it alone fails. What cannot fit into its share is not tried in full."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.conftest import build_reference
from tests.support.tiny_families import save_tiny
from tinsmith.engine.base import Failure, Pass
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments, GradientBuffer
from tinsmith.engine.local.model.recurrent import delta_mixer
from tinsmith.engine.local.model.recurrent.delta_rule import DeltaWeights
from tinsmith.engine.local.model.recurrent.recurrence import FreshStates
from tinsmith.engine.local.train import passes as training
from tinsmith.engine.local.train.batch_limits import MOST_KEPT, BatchLimits
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


LEFT_BY_A_PASS = (AdapterSegments, GradientBuffer)

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


def test_nothing_of_a_pass_waits_for_the_collector(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    """Who comes next needs the memory, and the collector does not know of a GPU's."""
    adapters = {name: new_adapter(tiny_decoder) for name in "ab"}
    gc.collect()
    gc.disable()
    try:
        results = run(tiny_decoder, passes_of(a=[datum(20, 1)], b=[datum(30, 2)]), adapters)
        left = [each for each in gc.get_objects() if isinstance(each, LEFT_BY_A_PASS)]
    finally:
        gc.enable()
    assert all(isinstance(r, ForwardBackwardOutput) for r in results.values()), results
    assert not left


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


def test_a_sequence_that_does_not_fit_is_tried_without_keeping_activations(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = passes_of(a=[datum(90, 1)])
    expected, adapter = new_adapter(tiny_decoder), new_adapter(tiny_decoder)
    run(tiny_decoder, passes, {"a": expected}, EXACT)
    kept = watch_layers(monkeypatch, error=torch.OutOfMemoryError("CUDA out of memory"))
    (result,) = run(tiny_decoder, passes, {"a": adapter}, EXACT).values()
    assert isinstance(result, ForwardBackwardOutput), result
    assert kept == [None, 0]
    assert adapter.grad is not None and expected.grad is not None
    assert torch.equal(adapter.grad, expected.grad)


def test_a_sequence_beyond_the_memory_for_passes_does_not_keep_activations(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny_decoder.kept_bytes_a_token is not None
    room = int(50 * tiny_decoder.kept_bytes_a_token / MOST_KEPT) + 1
    kept = watch_layers(monkeypatch)
    passes = passes_of(a=[datum(50, 1), datum(51, 2)])
    limits = BatchLimits.of(EXACT, tiny_decoder, room)
    results = training.run_passes(
        passes, {"a": new_adapter(tiny_decoder)}, tiny_decoder, EXACT, limits
    )
    assert [type(p.result) for p in results if p] == [ForwardBackwardOutput]
    assert kept == [None, 0]


def test_what_fits_nowhere_is_refused_with_the_numbers(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    memory.max_tokens = 45
    results = training.run_passes(
        passes_of(a=[datum(90, 1)]),
        {"a": new_adapter(tiny_decoder)},
        tiny_decoder,
        CONFIG,
        BatchLimits.of(CONFIG, tiny_decoder, 3 * 2**30),
    )
    (failure,) = [p.result for p in results if p]
    assert isinstance(failure, Failure)
    assert "a sequence of 90 tokens does not fit" in failure.message
    assert "3.0 GiB" in failure.message


def watch_layers(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> list[int | None]:
    """How many layers each forward pass kept; one that keeps all ends in `error`."""
    kept: list[int | None] = []
    real = Decoder.hidden

    def hidden(self: Decoder, *arguments: Any, kept_layers: int | None, **options: Any) -> Any:
        kept.append(kept_layers)
        if error is not None and kept_layers is None:
            raise error
        return real(self, *arguments, kept_layers=kept_layers, **options)

    monkeypatch.setattr(Decoder, "hidden", hidden)
    return kept


@pytest.fixture(scope="module")
def deep_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Of eight layers."""
    folder = tmp_path_factory.mktemp("deep")
    build_reference("qwen3", num_hidden_layers=8).save_pretrained(folder)
    return Decoder.load(folder)


@pytest.mark.parametrize("part", [0.95, 0.8, 0.5, 0.3, 0.05])
def test_as_many_layers_are_kept_as_there_is_memory_for(
    part: float, deep_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    """`part` of what all layers of a sequence would keep is the memory for passes."""
    num_tokens = 64
    assert deep_decoder.kept_bytes_a_token is not None
    of_all = num_tokens * deep_decoder.kept_bytes_a_token
    limits = BatchLimits.of(EXACT, deep_decoder, int(part * of_all / MOST_KEPT) + 1)
    kept_layers = limits.kept_layers(num_tokens)
    assert kept_layers is not None
    num_bytes = kept_bytes(deep_decoder, new_adapter, num_tokens, kept_layers)
    of_one = of_all / 8
    # One more would leave no room for the layer that is computed again.
    if kept_layers:
        assert num_bytes + of_one <= 1.15 * part * of_all
    assert num_bytes + 3 * of_one >= 0.85 * part * of_all
    assert BatchLimits.of(EXACT, deep_decoder, int(of_all / MOST_KEPT) + 1).kept_layers(64) is None


@pytest.mark.parametrize("kept_layers", [None, 0, 1, 5, 8])
def test_however_many_layers_are_kept_the_gradient_is_the_same(
    kept_layers: int | None,
    deep_decoder: Decoder,
    new_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = passes_of(a=[datum(90, 1)])
    expected, adapter = new_adapter(deep_decoder), new_adapter(deep_decoder)
    run(deep_decoder, passes, {"a": expected}, EXACT)
    monkeypatch.setattr(BatchLimits, "kept_layers", lambda self, num_tokens: kept_layers)
    run(deep_decoder, passes, {"a": adapter}, EXACT)
    assert adapter.grad is not None and expected.grad is not None
    assert torch.equal(adapter.grad, expected.grad)


def test_the_estimate_of_what_is_kept_is_about_right(
    variant: str, model_folder: Callable[[str], Path], new_adapter: Callable[..., Adapter]
) -> None:
    check_estimate(Decoder.load(model_folder(variant)), new_adapter)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next"])
def test_so_is_that_of_recurrent_layers_and_gated_attention(
    model_type: str,
    tmp_path: Path,
    new_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mix(mixed: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, *_: Any) -> Tensor:
        num_heads, size = len(weights.a_log), weights.value_dim
        return mixed[:, -num_heads * size :].view(-1, num_heads, size) * 2.0

    monkeypatch.setattr(delta_mixer, "mix", mix)
    save_tiny(model_type, tmp_path)
    check_estimate(Decoder.load(tmp_path), new_adapter)


class PlainAttention:
    """Keeps what the kernels keep on a GPU, its inputs and its output, and nothing between."""

    def __init__(self, num_tokens: int) -> None:
        self.sequences = FreshStates([num_tokens])

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        return q * 2.0


def check_estimate(decoder: Decoder, new_adapter: Callable[..., Adapter]) -> None:
    num_bytes = kept_bytes(decoder, new_adapter, num_tokens=64)
    assert decoder.kept_bytes_a_token == pytest.approx(num_bytes / 64, rel=0.15)


def kept_bytes(
    decoder: Decoder,
    new_adapter: Callable[..., Adapter],
    num_tokens: int,
    kept_layers: int | None = None,
) -> int:
    """What a forward pass leaves in memory for the backward pass."""
    adapter = new_adapter(decoder, rank=1)  # what is of adapters does not count
    buffer = GradientBuffer(adapter.layout, adapter.new_gradient())
    segments = AdapterSegments([(0, num_tokens, adapter)], [buffer])
    places = torch.arange(num_tokens)
    before = storages()
    attention = PlainAttention(num_tokens)
    hidden = decoder.hidden(places, places, attention, segments, kept_layers=kept_layers)
    kept = storages()
    num_bytes = sum(size for place, size in kept.items() if place not in before)
    # Beside blocks there are the stream's end and the norm of it.
    return num_bytes - 2 * hidden.nbytes


def storages() -> dict[int, int]:
    """The memory of all tensors that there are: where it is, and how much."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    memory = [each.untyped_storage() for each in tensors]
    return {each.data_ptr(): each.nbytes() for each in memory}
