"""Deterministic mode to the last bit: where an adapter lies in memory, and how it came there.

Products of odd sizes take other roads through a kernel when their first number lies elsewhere, so
vocabularies here are odd and ranks are 1, 2, 3 and 6.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import build_reference
from tinsmith.engine.base import Pass
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.engine.local.train.adamw import adamw_step
from tinsmith.engine.local.train.passes import run_passes
from tinsmith.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, ModelInput

DETERMINISTIC = LocalEngineConfig(device="cpu", deterministic=True)
DATA = [
    Datum(
        model_input=ModelInput.from_ints([(7 * i + n) % 50 for i in range(length)]),
        loss_fn_inputs={"target_tokens": [(5 * i + n) % 50 for i in range(length)]},
    )
    for n, length in enumerate((5, 17, 11))
]


@pytest.fixture(scope="module", params=[51, 97])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("odd")
    build_reference("llama", vocab_size=request.param, intermediate_size=47).save_pretrained(folder)
    return Decoder.load(folder)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(decoder: Decoder, adapter: Adapter, num_steps: int = 3) -> list[float]:
    losses = []
    for _ in range(num_steps):
        passes = [Pass(adapter_id="a", data=DATA, loss_fn="cross_entropy")]
        (done,) = filter(None, run_passes(passes, {"a": adapter}, decoder, DETERMINISTIC))
        assert isinstance(done.result, ForwardBackwardOutput)
        losses.append(done.result.metrics["loss:sum"])
        adamw_step(adapter, AdamParams(learning_rate=1e-2))
    return losses


@pytest.mark.parametrize("rank", [1, 2, 3, 6])
def test_what_an_adapter_learns_does_not_depend_on_the_adapters_made_before_it(
    decoder: Decoder, rank: int
) -> None:
    lora = LoraConfig(rank=rank, seed=5)
    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
    # Every adapter is made before any trains, so that they lie in different places.
    adapters = [pool.create("tiny", lora) for _ in range(6)]
    first, *others = [(train(decoder, adapter), adapter.flat) for adapter in adapters]
    for losses, flat in others:
        assert losses == first[0]
        assert torch.equal(flat, first[1])


@pytest.mark.parametrize("rank", [1, 2, 3, 6])
def test_an_adapter_restored_beside_others_learns_what_it_would_have_learnt(
    decoder: Decoder, rank: int, tmp_path: Path
) -> None:
    """As after `kill -9`: another process, another place, the same bits."""
    lora = LoraConfig(rank=rank, seed=5)
    undisturbed = AdapterPool(decoder.config, decoder.device, decoder.dtype).create("tiny", lora)
    train(decoder, undisturbed)
    checkpoints.save(undisturbed, tmp_path / "saved", "exact")
    expected = train(decoder, undisturbed)
    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
    for number in range(4):
        restored = pool.create_empty("tiny", lora)
        checkpoints.load(restored, tmp_path / "saved", "exact")
        assert train(decoder, restored) == expected, f"restored as number {number}"
        assert torch.equal(restored.flat, undisturbed.flat)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("part", ["attn", "unembed"])
def test_the_first_weights_are_a_function_of_seed_and_shapes_alone(
    decoder: Decoder, rank: int, part: str
) -> None:
    lora = LoraConfig(rank=rank, seed=5, train_attn=part == "attn", train_mlp=False)
    lora = LoraConfig(**{**lora.model_dump(), "train_unembed": part == "unembed"})
    drawn = set()
    for num_threads, num_before in itertools.product((1, 2), (0, 1, 3)):
        torch.set_num_threads(num_threads)
        torch.manual_seed(num_before)  # the process's own generator is not asked
        pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
        before = [pool.create("tiny", LoraConfig(rank=rank, seed=n)) for n in range(num_before)]
        adapter = pool.create("tiny", lora)
        assert len(before) == num_before
        drawn.add(hashlib.sha256(adapter.flat.numpy().tobytes()).hexdigest())
    assert len(drawn) == 1


def test_a_seed_draws_what_it_drew_in_the_first_release(decoder: Decoder) -> None:
    """A run's recorded seed must give its weights again in every later version."""
    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype)
    adapter = pool.create("tiny", LoraConfig(rank=2, seed=5, train_mlp=False, train_unembed=False))
    digest = hashlib.sha256(adapter.flat.numpy().tobytes()).hexdigest()
    assert digest.startswith("f508ad8f3b794052")
