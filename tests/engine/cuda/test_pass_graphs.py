"""Micro-batches that are captured and replayed give what the same kernels give one by one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.train.training_reference import make_datum
from tests.support.tiny_families import save_tiny
from tinsmith.engine.base import Failure, Pass
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.engine.local.train.adamw import adamw_step
from tinsmith.engine.local.train.graph_memory import GraphMemory
from tinsmith.engine.local.train.passes import graphs_of, run_passes
from tinsmith.types import AdamParams, ForwardBackwardOutput

pytestmark = pytest.mark.gpu

CONFIG = LocalEngineConfig(device="cuda")
LENGTHS = ((17, 1, 30), (9, 30), (64,))
"""Of the datums of each tenant."""

HEADS_WITH_KERNELS = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
FAMILIES: dict[str, dict[str, int]] = {
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "qwen3_next": HEADS_WITH_KERNELS,
    "qwen3_5_text": HEADS_WITH_KERNELS,
    "qwen3_5_moe_text": HEADS_WITH_KERNELS,
}

Outputs = list[tuple[torch.Tensor, torch.Tensor | None]]


class Tenants:
    """Adapters on one decoder, and passes of all of them in one call."""

    def __init__(self, decoder: Decoder, new_adapter: Callable[..., Adapter]) -> None:
        pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
        self.decoder = decoder
        self.adapters = {
            str(n): new_adapter(decoder, pool=pool, rank=16, fill_seed=n)
            for n in range(len(LENGTHS))
        }
        self.graphs = graphs_of(decoder)
        assert self.graphs is not None

    def run(
        self, lengths: Sequence[Sequence[int]], seed: int, *, captured: bool, **options: bool
    ) -> Outputs:
        """Log-probabilities and gradient of each."""
        passes = [
            Pass(
                adapter_id=name,
                data=[make_datum(length, seed + i) for i, length in enumerate(own)],
                loss_fn="cross_entropy",
                **options,
            )
            for name, own in zip(self.adapters, lengths, strict=False)
        ]
        graphs = self.graphs if captured else None
        found = {
            each.index: each.result
            for each in run_passes(passes, self.adapters, self.decoder, CONFIG, graphs=graphs)
            if each is not None
        }
        outputs: Outputs = []
        for index, item in enumerate(passes):
            result, adapter = found[index], self.adapters[item.adapter_id]
            assert isinstance(result, ForwardBackwardOutput), result
            parts = [out["logprobs"].to_torch() for out in result.loss_fn_outputs]
            outputs.append((torch.cat(parts), adapter.grad))
            adapter.drop_gradient()
        return outputs


@pytest.fixture
def tenants(
    cuda: torch.device, tiny_llama_folder: Path, new_adapter: Callable[..., Adapter]
) -> Tenants:
    return Tenants(Decoder.load(tiny_llama_folder, cuda, torch.bfloat16), new_adapter)


@pytest.fixture(params=FAMILIES)
def tenants_of_a_family(
    request: pytest.FixtureRequest,
    cuda: torch.device,
    tmp_path: Path,
    new_adapter: Callable[..., Adapter],
) -> Tenants:
    save_tiny(request.param, tmp_path, **FAMILIES[request.param])
    return Tenants(Decoder.load(tmp_path, cuda, torch.bfloat16), new_adapter)


def check_alike(found: Outputs, expected: Outputs) -> None:
    """As far apart as sums of bfloat16 numbers in another order are."""
    for (logprobs, grad), (other, other_grad) in zip(found, expected, strict=True):
        torch.testing.assert_close(logprobs, other, atol=0.02, rtol=0.0)
        assert (grad is None) == (other_grad is None)
        if grad is not None and other_grad is not None:
            assert (grad - other_grad).norm() <= 0.02 * other_grad.norm()
            assert other_grad.norm() > 0


def test_replayed_passes_equal_those_that_are_not_captured(tenants: Tenants) -> None:
    """The first is not captured, the second is, the rest are replayed with other tokens."""
    for seed in range(4):
        expected = tenants.run(LENGTHS, seed, captured=False)
        check_alike(tenants.run(LENGTHS, seed, captured=True), expected)
    assert tenants.graphs is not None and len(tenants.graphs) == 1


def test_experts_and_recurrent_layers_are_captured_too(tenants_of_a_family: Tenants) -> None:
    tenants = tenants_of_a_family
    for seed, lengths in enumerate([LENGTHS, LENGTHS, LENGTHS, ((2,), (70, 1, 9), (20,))]):
        expected = tenants.run(lengths, seed, captured=False)
        check_alike(tenants.run(lengths, seed, captured=True), expected)
    assert tenants.graphs is not None and len(tenants.graphs) == 1


def test_other_lengths_and_fewer_tenants_replay_the_same_graph(tenants: Tenants) -> None:
    """Sums of lengths up to the same multiple are one shape, whatever they are made of."""
    for seed, lengths in enumerate([LENGTHS, LENGTHS, ((64, 64),), ((2,), (100, 1, 1), (40,))]):
        expected = tenants.run(lengths, seed, captured=False)
        check_alike(tenants.run(lengths, seed, captured=True), expected)
    assert tenants.graphs is not None and len(tenants.graphs) == 1


def test_a_replayed_pass_reads_the_weights_of_the_last_step(tenants: Tenants) -> None:
    for seed in range(3):
        tenants.run(LENGTHS, seed, captured=True)
    before = tenants.run(LENGTHS, 9, captured=True)
    for adapter in tenants.adapters.values():
        adapter.grad = torch.ones_like(adapter.flat)
        adamw_step(adapter, AdamParams(learning_rate=0.05))
    after = tenants.run(LENGTHS, 9, captured=True)
    assert (before[0][0] - after[0][0]).abs().max() > 0.1
    check_alike(after, tenants.run(LENGTHS, 9, captured=False))


def test_gradients_of_two_passes_of_one_adapter_add_up(tenants: Tenants) -> None:
    for seed in range(3):
        (_, once), *_ = tenants.run(LENGTHS[:1], seed, captured=True)
    passes = [
        Pass(
            adapter_id="0",
            data=[make_datum(n, 2 + i) for i, n in enumerate(LENGTHS[0])],
            loss_fn="cross_entropy",
        )
    ] * 2
    for _ in range(3):
        tenants.adapters["0"].drop_gradient()
        list(run_passes(passes, tenants.adapters, tenants.decoder, CONFIG, graphs=tenants.graphs))
    twice = tenants.adapters["0"].grad
    assert once is not None and twice is not None
    assert (twice - 2 * once).norm() <= 0.02 * twice.norm()


def test_passes_without_gradients_are_captured_apart(tenants: Tenants) -> None:
    for seed in range(3):
        expected = tenants.run(LENGTHS, seed, captured=False, forward_only=True)
        found = tenants.run(LENGTHS, seed, captured=True, forward_only=True)
        check_alike(found, expected)
        assert all(grad is None for _, grad in found)
        check_alike(
            tenants.run(LENGTHS, seed, captured=True), tenants.run(LENGTHS, seed, captured=False)
        )
    assert tenants.graphs is not None and len(tenants.graphs) == 2


def test_a_broken_tenant_fails_alone_in_a_captured_pass(tenants: Tenants) -> None:
    for seed in range(3):
        tenants.run(LENGTHS, seed, captured=True)
    expected = tenants.run(LENGTHS, 5, captured=True)
    tenants.adapters["1"].flat.fill_(float("nan"))
    passes = [
        Pass(
            adapter_id=name,
            data=[make_datum(length, 5 + i) for i, length in enumerate(own)],
            loss_fn="cross_entropy",
        )
        for name, own in zip(tenants.adapters, LENGTHS, strict=True)
    ]
    finished = {
        each.index: each.result
        for each in run_passes(
            passes, tenants.adapters, tenants.decoder, CONFIG, graphs=tenants.graphs
        )
        if each is not None
    }
    assert isinstance(finished[1], Failure) and tenants.adapters["1"].grad is None
    for index in (0, 2):
        grad, other = tenants.adapters[str(index)].grad, expected[index][1]
        assert grad is not None and other is not None
        assert (grad - other).norm() <= 0.02 * other.norm()


def test_many_shapes_share_memory_and_stay_right(tenants: Tenants) -> None:
    """Graphs captured later leave those captured before as they were."""
    shapes = [((n,),) for n in (60, 200, 500, 130, 1000)]
    for seed in range(3):
        for lengths in shapes:
            expected = tenants.run(lengths, seed, captured=False)
            check_alike(tenants.run(lengths, seed, captured=True), expected)
    assert tenants.graphs is not None and len(tenants.graphs) == len(shapes)
    tenants.graphs.drop()
    check_alike(tenants.run(shapes[0], 7, captured=True), tenants.run(shapes[0], 7, captured=False))


def test_base_models_take_turns_in_one_place(
    tenants: Tenants,
    cuda: torch.device,
    tiny_llama_folder: Path,
    new_adapter: Callable[..., Adapter],
) -> None:
    """What one gives back the other does too, and it is there again for the one that is left."""
    memory = GraphMemory()
    other = Tenants(Decoder.load(tiny_llama_folder, cuda, torch.bfloat16), new_adapter)
    both = (tenants, other)
    for each in both:
        each.graphs = graphs_of(each.decoder, memory=memory)
    for seed in range(4):
        for each in both:
            expected = each.run(LENGTHS, seed, captured=False)
            check_alike(each.run(LENGTHS, seed, captured=True), expected)
    assert tenants.graphs is not None and other.graphs is not None
    assert len(tenants.graphs) == len(other.graphs) == 1
    tenants.graphs.drop()
    assert len(tenants.graphs) == len(other.graphs) == 0
    tenants.run(LENGTHS, 0, captured=True)
    tenants.run(LENGTHS, 1, captured=True)
    tenants.graphs = None
    gc.collect()
    for seed in range(4):
        expected = other.run(LENGTHS, seed, captured=False)
        check_alike(other.run(LENGTHS, seed, captured=True), expected)
    assert len(other.graphs) == 1


def test_what_torch_keeps_of_other_work_is_there_to_capture_into(
    tenants: Tenants, cuda: torch.device
) -> None:
    """It cannot use that while it captures, and has to give it back before."""
    tenants.run(LENGTHS, 0, captured=True)
    torch.cuda.empty_cache()
    whole = torch.cuda.mem_get_info(cuda)[1]
    kept = torch.empty(2**30, dtype=torch.uint8, device=cuda)
    most = torch.cuda.memory_reserved(cuda) + 2**22
    del kept
    torch.cuda.set_per_process_memory_fraction(most / whole, cuda)
    try:
        for seed in range(1, 5):
            expected = tenants.run(LENGTHS, seed, captured=False)
            check_alike(tenants.run(LENGTHS, seed, captured=True), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert tenants.graphs is not None and len(tenants.graphs) == 1


def test_what_cannot_be_captured_is_computed_as_before(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tinsmith.engine.local.train import pass_graphs

    def fail(*arguments: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(pass_graphs.CapturedPass, "capture", fail)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            expected = tenants.run(LENGTHS, seed, captured=False)
            check_alike(tenants.run(LENGTHS, seed, captured=True), expected)
    assert caplog.text.count("are not captured") == 1


def test_after_a_capture_that_failed_torch_gives_back_what_it_keeps_as_before(
    tenants: Tenants, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture in which the host waits is not ended by torch."""
    plain = Decoder.hidden

    def wait(decoder: Decoder, tokens: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            tokens.sum().item()
        return plain(decoder, tokens, *arguments, **options)

    monkeypatch.setattr(Decoder, "hidden", wait)
    for seed in range(3):
        expected = tenants.run(LENGTHS, seed, captured=False)
        check_alike(tenants.run(LENGTHS, seed, captured=True), expected)
    assert tenants.graphs is not None and len(tenants.graphs) == 0
    torch.cuda.empty_cache()
    whole = torch.cuda.mem_get_info(cuda)[1]
    kept = torch.empty(2**30, dtype=torch.uint8, device=cuda)
    most = torch.cuda.memory_reserved(cuda) + 2**20
    del kept
    torch.cuda.set_per_process_memory_fraction(most / whole, cuda)
    try:
        torch.empty(2**30 + 2**19, dtype=torch.uint8, device=cuda)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
