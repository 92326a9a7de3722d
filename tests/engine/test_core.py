"""The engine's core: several base models, memory, and what stays whole when something goes wrong.

What every engine promises is in `tests/contract/test_engine_*.py`.
"""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.engine.base import (
    Failure,
    FinishedPass,
    Pass,
    SampleEvent,
    SampleJob,
    SavedKind,
    Step,
)
from tinsmith.engine.local import core as core_module
from tinsmith.engine.local.boundary.messages import Item, Reply, Request
from tinsmith.engine.local.boundary.worker import Incoming, Worker
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.device import arithmetic_of
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.errors import EngineError
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

LORA = LoraConfig(rank=4, seed=1)
SENTENCE = [10, 40, 20, 60, 30, 50, 12, 44]


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    """A core sets torch's thread count, which in these tests is this process's own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def new_core(model_folder: Callable[[str], Path]) -> Callable[..., EngineCore]:
    """A core that serves two base models, `llama` and `qwen3`, by default deterministically."""

    def build(**settings: Any) -> EngineCore:
        folders = {name: str(model_folder(name)) for name in ("llama", "qwen3")}
        return EngineCore(
            LocalEngineConfig(
                **{"models": folders, "device": "cpu", "deterministic": True, **settings}
            )
        )

    return build


def datum(tokens: list[int] = SENTENCE) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )


def passes(*adapter_ids: str, num_data: int = 1, **fields: Any) -> list[Pass]:
    return [
        Pass(adapter_id=name, data=[datum()] * num_data, loss_fn="cross_entropy", **fields)
        for name in adapter_ids
    ]


def run(core: EngineCore, requests: list[Pass]) -> list[ForwardBackwardOutput]:
    results = {p.index: p.result for p in core.run_passes(requests) if p}
    ordered = [results[index] for index in range(len(requests))]
    assert all(isinstance(result, ForwardBackwardOutput) for result in ordered), ordered
    return ordered  # type: ignore[return-value]  # just asserted


def logprobs(core: EngineCore, adapter_id: str) -> np.ndarray:
    (output,) = run(core, passes(adapter_id, forward_only=True))
    return output.loss_fn_outputs[0]["logprobs"].numpy


def step(core: EngineCore, adapter_id: str) -> None:
    (result,) = core.step([Step(adapter_id=adapter_id, params=AdamParams(learning_rate=0.01))])
    assert isinstance(result, dict), result


def train(core: EngineCore, adapter_id: str) -> None:
    run(core, passes(adapter_id))
    step(core, adapter_id)


def job(job_id: str = "j", base_model: str = "llama", **fields: Any) -> SampleJob:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 8), seed=3, stop=[])
    return SampleJob(
        **{
            "job_id": job_id,
            "base_model": base_model,
            "weights_id": None,
            "prompt": ModelInput.from_ints(SENTENCE[:3]),
            "params": params,
            **fields,
        }
    )


def sample(core: EngineCore, *jobs: SampleJob) -> dict[str, SampleEvent]:
    """Let jobs run to their end; the last event of each."""
    for item in jobs:
        assert core.submit_sample(item) is None
    return finish(core)


def finish(core: EngineCore) -> dict[str, SampleEvent]:
    last: dict[str, SampleEvent] = {}
    while core.is_sampling:
        last.update(core.sampling_turn())
    return last


def tokens(event: SampleEvent) -> list[int]:
    assert isinstance(event, SampleResponse), event
    return event.sequences[0].tokens


def test_one_call_may_hold_passes_on_several_base_models(new_core: Any) -> None:
    core = new_core()
    for name, base_model in (("a", "llama"), ("b", "qwen3"), ("c", "llama")):
        assert core.create_adapter(name, base_model, LORA) is None
    a, b, c = run(core, passes("a", "b", "c"))
    assert a.loss_fn_outputs == c.loss_fn_outputs
    assert a.loss_fn_outputs != b.loss_fn_outputs
    results = {p.index: p.result for p in core.run_passes(passes("b", "unknown", "a")) if p}
    assert results[0].loss_fn_outputs == b.loss_fn_outputs
    assert isinstance(results[1], Failure)
    assert results[2].loss_fn_outputs == a.loss_fn_outputs


def test_several_base_models_are_sampled_side_by_side(new_core: Any) -> None:
    core = new_core()
    both = sample(core, job("l", "llama"), job("q", "qwen3"))
    assert tokens(both["l"]) == tokens(sample(core, job("l", "llama"))["l"])
    assert tokens(both["q"]) == tokens(sample(core, job("q", "qwen3"))["q"])
    assert tokens(both["l"]) != tokens(both["q"])


def test_adapters_outlive_their_base_models_stay_in_memory(
    new_core: Any, model_folder: Callable[[str], Path]
) -> None:
    budget = one_model_bytes(model_folder) * 3 // 2
    roomy, tight = new_core(), new_core(memory_budget_bytes=budget)
    for core in (roomy, tight):
        assert core.create_adapter("a", "llama", LORA) is None
        assert core.create_adapter("b", "qwen3", LORA) is None
        for name in ("a", "b", "a", "b"):
            train(core, name)
        assert core.freeze("a", "s") is None
        for base_model, sampler in (("qwen3", None), ("llama", "s"), ("qwen3", None)):
            sample(core, job("j", base_model, weights_id=sampler))
    for name in ("a", "b"):
        np.testing.assert_array_equal(logprobs(tight, name), logprobs(roomy, name))
    asked = job("j", "llama", weights_id="s")
    assert tokens(sample(tight, asked)["j"]) == tokens(sample(roomy, asked)["j"])


def test_a_base_model_that_is_being_sampled_is_not_dropped(
    new_core: Any, model_folder: Callable[[str], Path]
) -> None:
    core = new_core(memory_budget_bytes=one_model_bytes(model_folder) * 3 // 2)
    expected = tokens(sample(core, job("j", "llama"))["j"])
    assert core.submit_sample(job("j", "llama")) is None
    core.sampling_turn()
    refused = core.create_adapter("b", "qwen3", LORA)
    assert isinstance(refused, Failure)
    assert refused.category == "server"
    assert "memory_budget_bytes" in refused.message
    assert tokens(finish(core)["j"]) == expected
    assert core.create_adapter("b", "qwen3", LORA) is None


def test_owners_of_base_models_that_do_not_fit_together_get_what_each_gets_alone(
    new_core: Any, model_folder: Callable[[str], Path]
) -> None:
    """One samples all the time; the other's requests, one of them wrong, wait and are answered."""
    alone = new_core()
    expected = tokens(sample(alone, job("j", "llama"))["j"])
    alone.create_adapter("b", "qwen3", LORA)
    (passed,) = run(alone, passes("b"))

    core = new_core(memory_budget_bytes=one_model_bytes(model_folder) * 3 // 2)
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    found: dict[int, Any] = {}
    numbers = iter(range(10, 20))

    def sample_on() -> None:
        if (number := next(numbers, None)) is not None:
            inbox.put(Request(number, "sample", (job(f"{number}", "llama"),)))

    def send(replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Item) and isinstance(reply.value, FinishedPass):
                found[reply.value.index] = reply.value.result
            elif isinstance(reply, Item):
                found[reply.number] = reply.value
                sample_on()
        if len(found) == 12:
            inbox.put(None)

    sample_on()
    sample_on()
    inbox.put(Request(1, "create_adapter", ("b", "qwen3", LORA)))
    inbox.put(Request(2, "run_passes", (passes("unknown", "b"),)))
    Worker(core, inbox, send).run()
    assert isinstance(found.pop(0), Failure)
    assert found.pop(1) == passed
    assert [tokens(event) for event in found.values()] == [expected] * 10


def one_model_bytes(model_folder: Callable[[str], Path]) -> int:
    folders = {"llama": str(model_folder("llama"))}
    models = BaseModels(LocalEngineConfig(models=folders, device="cpu"))
    return models.get("llama").nbytes


def test_a_sampler_unloaded_during_a_job_lasts_until_its_end(new_core: Any) -> None:
    core = new_core()
    core.create_adapter("a", "llama", LORA)
    train(core, "a")
    core.freeze("a", "s")
    core.freeze("a", "t")
    expected = tokens(sample(core, job(weights_id="t"))["j"])
    assert core.submit_sample(job("j", weights_id="s")) is None
    assert core.submit_sample(job("k", weights_id="t")) is None
    core.sampling_turn()
    core.unload_sampler("s")
    # Its memory may be used again only now, and not by these.
    for number in range(3):
        core.create_adapter(f"x{number}", "llama", LORA)
    last = finish(core)
    assert tokens(last["j"]) == tokens(last["k"]) == expected
    assert core.health().num_samplers == 1


def test_a_cancelled_job_leaves_nothing_behind(new_core: Any) -> None:
    core = new_core()
    core.create_adapter("a", "llama", LORA)
    core.freeze("a", "s")
    core.submit_sample(job("j", weights_id="s", num_samples=4, max_tokens=50))
    core.sampling_turn()
    core.cancel("j")
    core.cancel("j")
    assert not core.is_sampling
    health = core.health()
    assert health.running_samples == health.waiting_samples == 0
    assert core.submit_sample(job("j", weights_id="s")) is None
    assert "j" in finish(core)


def test_two_jobs_of_one_name_are_not_mixed_up(new_core: Any) -> None:
    core = new_core()
    expected = tokens(sample(core, job("j"))["j"])
    assert core.submit_sample(job("j")) is None
    failure = core.submit_sample(job("j", prompt=ModelInput.from_ints([5, 6])))
    assert failure == Failure("a sampling job called 'j' is already under way", "user")
    assert tokens(finish(core)["j"]) == expected


def test_sampling_between_the_parts_of_a_pass_changes_neither(new_core: Any) -> None:
    alone, mixed = new_core(), new_core()
    for core in (alone, mixed):
        core.create_adapter("a", "llama", LORA)
        core.create_adapter("b", "llama", LORA)
    expected = tokens(sample(alone, job("j", num_samples=2))["j"])
    run(alone, passes("a", "b", num_data=3))
    mixed.submit_sample(job("j", num_samples=2))
    last: dict[str, SampleEvent] = {}
    for _ in mixed.run_passes(passes("a", "b", num_data=3)):
        last.update(mixed.sampling_turn())
    last.update(finish(mixed))
    assert tokens(last["j"]) == expected
    for name in ("a", "b"):
        step(alone, name)
        step(mixed, name)
        np.testing.assert_array_equal(logprobs(mixed, name), logprobs(alone, name))


def test_a_pass_of_several_micro_batches_pauses_between_them(new_core: Any) -> None:
    core = new_core()
    core.create_adapter("a", "llama", LORA)
    turns = list(core.run_passes(passes("a", num_data=4)))
    assert turns.count(None) >= 3


def test_passes_given_up_half_way_have_no_effect(new_core: Any) -> None:
    core = new_core()
    for name in ("a", "b"):
        core.create_adapter(name, "llama", LORA)
    results = core.run_passes(passes("b", "a", "a", num_data=2))
    done = next(filter(None, results))
    assert done.index == 0
    results.close()
    train(core, "a")
    step(core, "b")
    core.create_adapter("once", "llama", LORA)
    train(core, "once")
    np.testing.assert_array_equal(logprobs(core, "a"), logprobs(core, "once"))


def test_a_pass_that_cannot_even_be_checked_fails_alone(
    new_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = new_core()
    for name in "ab":
        core.create_adapter(name, "llama", LORA)
    (expected,) = run(core, passes("b", forward_only=True))
    check = core_module.checks.check_pass

    def broken(item: Pass, **facts: Any) -> Pass:
        if item.adapter_id == "a":
            raise OverflowError("it broke")
        return check(item, **facts)

    monkeypatch.setattr(core_module.checks, "check_pass", broken)
    found = {p.index: p.result for p in core.run_passes(passes("a", "b", forward_only=True)) if p}
    assert isinstance(found[0], Failure) and "it broke" in found[0].message
    assert found[1] == expected


def test_an_adapter_in_doubt_is_refused_until_it_is_restored(
    new_core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = new_core()
    for name in ("a", "b"):
        core.create_adapter(name, "llama", LORA)
        train(core, name)
    core.save("a", tmp_path / "s", "training").finish()
    run(core, passes("a", "b"))

    def break_down(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(core_module, "adamw_step", break_down)
        (failure,) = core.step([Step(adapter_id="a", params=AdamParams())])
    assert isinstance(failure, Failure)
    assert failure.category == "server"
    passed = next(core.run_passes(passes("a"))).result
    for refused in (passed, core.freeze("a", "s"), core.save("a", tmp_path / "t", "exact")):
        assert isinstance(refused, Failure)
        assert refused.category == "server"
        assert "in doubt" in refused.message
        assert "illegal memory access" in refused.message
    step(core, "b")
    assert not isinstance(core.restore("a", tmp_path / "s", "training"), Failure)
    train(core, "a")
    np.testing.assert_array_equal(logprobs(core, "a"), logprobs(core, "b"))


@pytest.mark.parametrize("kind", ["sampler", "training", "exact"])
def test_a_save_that_is_written_later_holds_the_adapter_as_it_was(
    new_core: Any, tmp_path: Path, kind: SavedKind
) -> None:
    core = new_core()
    core.create_adapter("a", "llama", LORA)
    train(core, "a")
    run(core, passes("a"))
    at_once, later = (core.save("a", tmp_path / name, kind) for name in ("now", "later"))
    info = at_once.finish()
    train(core, "a")
    core.unload_adapter("a")
    assert later.finish() == info
    for name in info.files:
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "now" / name).read_bytes()


def test_a_base_model_without_files_does_not_hide_the_others(
    new_core: Any, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    models = {"llama": str(model_folder("llama")), "lost": str(tmp_path / "lost")}
    core = new_core(models=models)
    assert [model.name for model in core.capabilities().models] == ["llama"]
    for failure in (
        core.create_adapter("a", "lost", LORA),
        core.submit_sample(job(base_model="lost")),
    ):
        assert isinstance(failure, Failure)
        assert failure.category == "server"
        assert "lost" in failure.message


@pytest.mark.parametrize("value", [None, "x", [], {"rope_type": None, "rope_theta": None}])
@pytest.mark.parametrize("name", ["rope_parameters", "hidden_size", "torch_dtype", "model_type"])
def test_whatever_is_in_one_models_settings_the_others_are_served(
    model_folder: Callable[[str], Path], tmp_path: Path, name: str, value: object
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(model_folder("llama"), folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), name: value}))
    models = {"odd": str(folder), "good": str(model_folder("qwen3"))}
    core = EngineCore(LocalEngineConfig(models=models, device="cpu", verify_models=False))
    capabilities = core.capabilities()
    served = [model.name for model in capabilities.models]
    refused = [model.name for model in capabilities.refused]
    assert "good" in served and sorted(served + refused) == ["good", "odd"]


def test_what_no_reader_of_settings_expects_is_that_models_trouble(
    new_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = BaseModels.info

    def odd(models: BaseModels, name: str) -> Any:
        if name == "llama":
            raise TypeError("unsupported operand")
        return info(models, name)

    monkeypatch.setattr(BaseModels, "info", odd)
    capabilities = new_core().capabilities()
    assert [model.name for model in capabilities.models] == ["qwen3"]
    ((name, reason),) = [(model.name, model.reason) for model in capabilities.refused]
    assert name == "llama" and "unsupported operand" in reason


def test_an_engine_says_what_its_last_bits_depend_on(
    new_core: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a deterministic server sees which machines are of one kind."""
    said = new_core().capabilities().arithmetic
    assert said == arithmetic_of(torch.device("cpu"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    assert arithmetic_of(torch.device("cpu")) != said
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    on_cuda = arithmetic_of(torch.device("cuda"))
    assert on_cuda.startswith("NVIDIA H200, CUDA ")
    assert on_cuda.endswith(f", torch {torch.__version__}")


def test_stop_strings_need_a_tokenizer(
    new_core: Any, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(model_folder("llama"), tmp_path / "bare")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    core = new_core(models={"llama": str(tmp_path / "bare")})
    last = sample(
        core, job("with", params=SamplingParams(max_tokens=2, stop=["x"])), job("without")
    )
    assert isinstance(last["with"], Failure)
    assert last["with"].category == "user"
    assert "tokenizer" in last["with"].message
    assert isinstance(last["without"], SampleResponse)


def test_the_number_of_threads_is_fixed_in_deterministic_mode(new_core: Any) -> None:
    torch.set_num_threads(2)
    new_core(deterministic=False)
    assert torch.get_num_threads() == 2
    new_core(deterministic=False, on_policy="exact")
    assert torch.get_num_threads() == 2
    new_core(deterministic=True)
    assert torch.get_num_threads() == 1
    new_core(deterministic=True, num_threads=2)
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error(new_core: Any) -> None:
    with pytest.raises(EngineError, match="cuda"):
        new_core(device="cuda")


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_passes_that_are_not_to_keep_activations_are_not_captured(
    checkpoint_layers: bool,
    new_core: Callable[..., EngineCore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is captured keeps them all."""
    core = new_core(checkpoint_layers=checkpoint_layers)
    asked = []
    monkeypatch.setattr(core_module, "graphs_of", lambda *arguments: asked.append(arguments))
    assert core.create_adapter("a", "llama", LORA) is None
    run(core, passes("a"))
    assert len(asked) == (0 if checkpoint_layers else 1)
