"""Micro-batches on the CPU: efficient for one owner alone, short while others may wait for them.

Counted in turns, which a loaded machine does not change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny_llama
from tinsmith.engine.base import Pass, SampleJob
from tinsmith.engine.local.boundary.company import REMEMBERED_BATCHES
from tinsmith.engine.local.boundary.core import PassResults
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.types import Datum, ForwardBackwardOutput, LoraConfig, ModelInput, SamplingParams

TOKENS = [10 + number % 80 for number in range(65)]
DATUM = Datum(
    model_input=ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": TOKENS[1:]}
)


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 17 MB: micro-batches of a smaller model are longer."""
    settings = {"vocab_size": 97, "num_hidden_layers": 4, "hidden_size": 256}
    folder = tmp_path_factory.mktemp("large")
    return tiny_llama.save(folder, seed=0, intermediate_size=1150, **settings)


@pytest.fixture
def core(large_folder: Path) -> EngineCore:
    core = EngineCore(LocalEngineConfig(models={"tiny": str(large_folder)}, device="cpu"))
    for name in ("ann", "bob"):
        assert core.create_adapter(name, "tiny", LoraConfig(rank=2, seed=1)) is None
    return core


def _pass(owner: str, num_data: int = 16) -> Pass:
    """A pass of 1,024 tokens, if nothing else is said."""
    return Pass(
        adapter_id=owner,
        data=[DATUM] * num_data,
        loss_fn="cross_entropy",
        forward_only=True,
        scope=owner,
    )


def _num_turns(results: PassResults) -> int:
    turns = list(results)
    assert all(isinstance(t.result, ForwardBackwardOutput) for t in turns if t is not None)
    return turns.count(None)


def test_one_owner_alone_has_few_long_turns(core: EngineCore) -> None:
    assert _num_turns(core.run_passes([_pass("ann")])) == 2
    assert _num_turns(core.run_passes([_pass("ann", 8), _pass("ann", 8)])) == 2


def test_turns_are_short_where_two_owners_have_a_part_in_a_call(core: EngineCore) -> None:
    assert _num_turns(core.run_passes([_pass("ann", 8), _pass("bob", 8)])) == 8


def test_turns_are_short_while_another_call_is_under_way(core: EngineCore) -> None:
    long = core.run_passes([_pass("ann", 32)])
    assert next(long) is None
    assert _num_turns(core.run_passes([_pass("bob")])) == 8
    assert _num_turns(long) == 12


def test_turns_are_short_until_the_others_have_been_away_for_a_while(core: EngineCore) -> None:
    """Whoever pauses between two requests finds no long turn begun meanwhile."""
    list(core.run_passes([_pass("bob", 1)]))
    for _ in range(REMEMBERED_BATCHES // 8):
        assert _num_turns(core.run_passes([_pass("ann")])) == 8
    assert _num_turns(core.run_passes([_pass("ann")])) == 2, "long ones again"
    list(core.run_passes([_pass("bob", 1)]))
    assert _num_turns(core.run_passes([_pass("ann")])) == 8


def test_a_call_that_was_given_up_is_no_company(core: EngineCore) -> None:
    left = core.run_passes([_pass("ann", 32)])
    next(left)
    left.close()
    assert _num_turns(core.run_passes([_pass("ann")])) == 2


def test_turns_are_short_while_somebody_samples(core: EngineCore) -> None:
    job = SampleJob(
        job_id="j",
        base_model="tiny",
        weights_id=None,
        prompt=ModelInput.from_ints([10, 11]),
        params=SamplingParams(max_tokens=8, seed=5, stop=[]),
        scope="bob",
    )
    assert core.submit_sample(job) is None
    assert _num_turns(core.run_passes([_pass("ann")])) == 8
    while core.is_sampling:
        core.sampling_turn()
    assert _num_turns(core.run_passes([_pass("ann")])) == 8, "he may sample again"


def test_turns_are_a_quarter_as_long_while_others_are_there_however_small_the_model(
    tiny_llama_folder: Path,
) -> None:
    core = EngineCore(LocalEngineConfig(models={"tiny": str(tiny_llama_folder)}, device="cpu"))
    for name in ("ann", "bob"):
        assert core.create_adapter(name, "tiny", LoraConfig(rank=2, seed=1)) is None
    assert _num_turns(core.run_passes([_pass("ann", 32)])) == 2
    assert _num_turns(core.run_passes([_pass("ann", 16), _pass("bob", 16)])) == 8
