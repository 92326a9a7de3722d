"""Router replay: the experts that a sampler chose are noted, and a training pass goes to them.

Tiny random models in float32. The reference is `transformers` itself, whose routers are made to
choose what was recorded, and autograd through that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.families.test_families import FAMILIES, gradients, load, tenants
from tests.engine.sample.sampling_reference import CPU, DETERMINISTIC, finish, job_of, tokens_of
from tests.engine.train.training_reference import (
    RELATIVE,
    Reference,
    assert_close,
    make_datum,
    run,
    succeed,
)
from tests.support.tiny_families import save_tiny
from tests.support.tiny_vision import (
    VISION_END,
    VISION_START,
    image_chunk,
    save_tiny_vision,
    with_images,
)
from tinsmith.engine.base import ExpertsChosen, Failure, Pass, SampleJob
from tinsmith.engine.expert_choices import are_known, dtype_for, unknown
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments
from tinsmith.engine.local.sample.cached_choices import places_of_rows
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.engine.local.sample.kvcache import CacheShape
from tinsmith.engine.local.train.adamw import adamw_step
from tinsmith.types import AdamParams, Datum, LoraConfig, ModelInput, SampleResponse

ROUTED = tuple(
    family
    for family in FAMILIES
    # Others' modules under another name; without experts.
    if family not in ("kimi_k2", "inkling_mm_model", "qwen3_5_text")
)
REPLAYED = "experts/replayed_tokens:sum"

NewAdapter = Callable[..., Adapter]
KEEPING = replace(CPU, router_replay=True)
KEEPING_ALONE = replace(DETERMINISTIC, router_replay=True)


@pytest.fixture(scope="module", params=ROUTED)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Decoder]:
    """The `transformers` model, and ours loaded from what it saved."""
    folder = tmp_path_factory.mktemp(request.param)
    reference, decoder = save_tiny(request.param, folder), load(folder)
    if decoder.config.routed is None:
        pytest.skip(f"routers of {request.param} have another form in this transformers")
    return reference, decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("one")
    save_tiny("qwen3_moe", folder)
    return load(folder)


class Listening:
    """Notes what routers choose, by layer, and changes nothing."""

    def __init__(self) -> None:
        self.heard: dict[int, Tensor] = {}

    def __call__(self, layer: int, choices: Tensor) -> Tensor:
        self.heard[layer] = choices
        return choices


def chosen_by_trainer(
    decoder: Decoder, tokens: Sequence[int], adapter: Adapter | None = None
) -> np.ndarray:
    """(T, L, k): where the forward pass of training sends a sequence by itself."""
    count, listening = len(tokens), Listening()
    with torch.no_grad():
        decoder.hidden(
            torch.tensor(tokens),
            torch.arange(count),
            PackedAttention(decoder.config, [count]),
            AdapterSegments.whole(count, adapter),
            steering=listening,
        )
    layers = [listening.heard[layer] for layer in sorted(listening.heard)]
    assert decoder.config.routed is not None
    return torch.stack(layers, dim=1).numpy().astype(dtype_for(decoder.config.routed.num_experts))


def sampled(
    generator: Generator, jobs: Sequence[tuple[SampleJob, Adapter | None]]
) -> dict[str, tuple[SampleResponse, list[np.ndarray]]]:
    """Each job's answer, and for each of its samples the experts of all tokens that were read."""
    for job, adapter in jobs:
        generator.submit(replace(job, reports_experts=True), adapter)
    found = {}
    for job_id, events in finish(generator).items():
        chosen, response = events
        assert isinstance(chosen, ExpertsChosen) and isinstance(response, SampleResponse)
        found[job_id] = (
            response,
            [np.concatenate([chosen.prompt, own]) for own in chosen.samples],
        )
    return found


def others(choices: np.ndarray, num_experts: int) -> np.ndarray:
    """Other experts for every token, in every layer: by hand, each moved on by one."""
    return ((choices.astype(np.int64) + 1) % num_experts).astype(choices.dtype)


@pytest.mark.parametrize("config", [KEEPING, KEEPING_ALONE], ids=["together", "deterministic"])
def test_a_sampler_reports_the_experts_that_the_trainer_chooses_on_the_same_weights(
    family: tuple[Any, Decoder], new_adapter: NewAdapter, config: LocalEngineConfig
) -> None:
    """For every token and layer, but the last token: nothing has read it."""
    _, decoder = family
    adapters = tenants(decoder, new_adapter)
    prompt = tokens_of(11)
    jobs = [
        (job_of(name, prompt, num_samples=count, max_tokens=14, seed=5), adapters[name])
        for name, count in (("a", 3), ("b", 1), ("c", 2))
    ]
    for name, (response, choices) in sampled(Generator(decoder, config), jobs).items():
        for sequence, own in zip(response.sequences, choices, strict=True):
            tokens = prompt + sequence.tokens[:-1]
            assert (own == chosen_by_trainer(decoder, tokens, adapters[name])).all()


def test_tokens_that_were_read_for_an_earlier_prompt_are_reported_too(
    family: tuple[Any, Decoder],
) -> None:
    """The second prompt begins as the first, and the cache knows it: its full blocks, or with
    recurrent layers all of it, so that the last block is copied."""
    _, decoder = family
    generator = Generator(decoder, KEEPING)
    prompt = tokens_of(40)
    sampled(generator, [(job_of("first", prompt, seed=1), None)])
    found = sampled(generator, [(job_of("second", [*prompt, 5, 6], max_tokens=3, seed=2), None)])
    response, (choices,) = found["second"]
    assert response.prompt_cache_hit_tokens > 0
    tokens = [*prompt, 5, 6, *response.sequences[0].tokens[:-1]]
    assert (choices == chosen_by_trainer(decoder, tokens)).all()


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_a_model_that_reads_images_replays_its_text(
    model_type: str, tmp_path: Path, new_adapter: NewAdapter
) -> None:
    """Among prompts with images, whose places the sampler reports too: one for each row."""
    reference = save_tiny_vision(model_type, tmp_path)
    decoder = load(tmp_path)
    adapter, prompt = new_adapter(decoder), tokens_of(11)
    seen = with_images(tokens_of(4), [VISION_START], image_chunk(3, 2, 1), [VISION_END, 5])
    jobs = [
        (job_of("text", prompt, num_samples=2, max_tokens=9, seed=5), adapter),
        (replace(job_of("seen", [3], max_tokens=6, seed=5), prompt=seen), adapter),
    ]
    found = sampled(Generator(decoder, KEEPING), jobs)
    response, (own,) = found["seen"]
    assert len(own) == seen.length + len(response.sequences[0].tokens) - 1
    assert are_known(own).all()
    response, choices = found["text"]
    for sequence, own in zip(response.sequences, choices, strict=True):
        tokens = prompt + sequence.tokens[:-1]
        assert (own == chosen_by_trainer(decoder, tokens, adapter)).all()
        assert decoder.config.routed is not None
        changed = others(own, decoder.config.routed.num_experts)
        datum = Datum(ModelInput.from_ints(tokens), {"target_tokens": [*tokens[1:], 5]})
        with forced(reference, [changed]):
            loss, _, expected = Reference(reference, adapter).run([datum])
        adapter.grad = None
        output = succeed(decoder, [datum], adapter, KEEPING, choices=[changed])
        assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
        assert output.metrics[REPLAYED] == len(tokens)
        assert adapter.grad is not None
        assert_close(adapter.grad, expected)


def test_sequences_that_gave_way_report_all_their_tokens(decoder: Decoder) -> None:
    shape = CacheShape.of(decoder.config, decoder.device, decoder.dtype, keeps_choices=True)
    config = replace(KEEPING, kv_cache_bytes=6 * shape.block_bytes)
    jobs = [
        (job_of(str(seed), tokens_of(20, seed), num_samples=2, max_tokens=40, seed=seed), None)
        for seed in range(3)
    ]
    found = sampled(Generator(decoder, config), jobs)
    for seed in range(3):
        response, choices = found[str(seed)]
        for sequence, own in zip(response.sequences, choices, strict=True):
            tokens = tokens_of(20, seed) + sequence.tokens[:-1]
            assert (own == chosen_by_trainer(decoder, tokens)).all()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_sample_of_no_token_or_one_reports_its_prompt(decoder: Decoder, max_tokens: int) -> None:
    prompt = tokens_of(9)
    job = job_of("a", prompt, max_tokens=max_tokens, seed=1)
    _, (choices,) = sampled(Generator(decoder, KEEPING), [(job, None)])["a"]
    assert (choices == chosen_by_trainer(decoder, prompt)).all()


def test_nothing_is_reported_unless_it_is_asked_for(decoder: Decoder) -> None:
    for config, asks in ((KEEPING, False), (CPU, True)):
        generator = Generator(decoder, config)
        generator.submit(job_of("a", tokens_of(5), seed=1, reports_experts=asks), None)
        (event,) = finish(generator)["a"]
        assert isinstance(event, SampleResponse)


def beside_shared(module: Any, x: Tensor, choices: Tensor) -> tuple[Tensor, ...]:
    """Inkling's shares: each expert's sigmoid, of the sum over the chosen and the shared ones."""
    logits = x.flatten(0, -2) @ module.weight.t()
    routed, shared = logits[:, : module.num_experts], logits[:, module.num_experts :]
    scores = torch.cat([routed.gather(1, choices), shared], dim=1).sigmoid()
    shares = scores / scores.sum(dim=1, keepdim=True) * module.route_scale * module.global_scale
    return routed, shares[:, : module.top_k], choices, shares[:, module.top_k :]


@contextmanager
def forced(reference: Any, data: Sequence[np.ndarray]) -> Iterator[None]:
    """The reference's routers choose what `data` says, sequence after sequence."""
    routers = [
        module
        for name, module in reference.named_modules()
        if name.endswith((".gate", ".router")) and hasattr(module, "top_k")
    ]

    def replaced(number: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        left = iter(data)

        def hook(module: Any, inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            choices = torch.from_numpy(next(left)[:, number].astype(np.int64))
            if type(module).__name__ == "InklingTopkRouter":
                return beside_shared(module, inputs[0], choices)
            is_single = hasattr(module, "e_score_correction_bias")
            scores = output[0].sigmoid() if is_single else output[0].softmax(dim=-1)
            shares = scores.gather(1, choices)
            if getattr(module, "norm_topk_prob", True):
                shares = shares / shares.sum(dim=-1, keepdim=True)
            return output[0], shares * getattr(module, "routed_scaling_factor", 1.0), choices

        return hook

    hooks = [
        router.register_forward_hook(replaced(number)) for number, router in enumerate(routers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_a_pass_follows_the_record_with_the_gradients_of_a_forced_reference(
    family: tuple[Any, Decoder], new_adapter: NewAdapter
) -> None:
    """The record was changed by hand, so that no router would choose it."""
    reference, decoder = family
    adapter = new_adapter(decoder)
    assert decoder.config.routed is not None
    data = [make_datum(length, length) for length in (17, 1, 30)]
    choices = [
        others(
            chosen_by_trainer(decoder, datum.model_input.to_ints(), adapter),
            decoder.config.routed.num_experts,
        )
        for datum in data
    ]
    with forced(reference, choices):
        loss, _, expected = Reference(reference, adapter).run(data)
    output = succeed(decoder, data, adapter, KEEPING, choices=choices)
    # Weights have signs: what adds up to some hundreds may come to two.
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE, abs=1e-4)
    assert output.metrics[REPLAYED] == 48
    assert adapter.grad is not None
    assert_close(adapter.grad, expected, 3 * RELATIVE)
    again = new_adapter(decoder)
    succeed(decoder, data, again, replace(KEEPING, checkpoint_layers=True), choices=choices)
    assert again.grad is not None and torch.equal(again.grad, adapter.grad)
    free = new_adapter(decoder)
    assert succeed(decoder, data, free, KEEPING).metrics[REPLAYED] == 0
    assert free.grad is not None
    assert (free.grad - adapter.grad).norm() > 0.01 * adapter.grad.norm()


def test_after_a_step_a_pass_still_goes_where_the_sampler_went(
    decoder: Decoder, new_adapter: NewAdapter
) -> None:
    """The weights have moved so far that the router by itself would choose otherwise."""
    adapter, data = new_adapter(decoder), [make_datum(30, 3)]
    before = chosen_by_trainer(decoder, data[0].model_input.to_ints(), adapter)
    succeed(decoder, data, adapter, KEEPING)
    adamw_step(adapter, AdamParams(learning_rate=0.05))
    after = chosen_by_trainer(decoder, data[0].model_input.to_ints(), adapter)
    assert (before != after).any()
    own = succeed(decoder, data, adapter, KEEPING, forward_only=True)
    as_now = succeed(decoder, data, adapter, KEEPING, forward_only=True, choices=[after])
    as_then = succeed(decoder, data, adapter, KEEPING, forward_only=True, choices=[before])
    assert own.metrics["loss:sum"] == as_now.metrics["loss:sum"] != as_then.metrics["loss:sum"]


def test_tokens_of_which_nothing_is_known_go_where_the_router_sends_them(
    decoder: Decoder, new_adapter: NewAdapter
) -> None:
    adapter, data = new_adapter(decoder), [make_datum(12, 3), make_datum(7, 4)]
    own = chosen_by_trainer(decoder, data[0].model_input.to_ints(), adapter)
    partly = np.concatenate([own[:5], unknown(7, own)])
    assert are_known(partly).tolist() == [True] * 5 + [False] * 7
    expected = succeed(decoder, data, adapter, KEEPING, forward_only=True)
    found = succeed(decoder, data, adapter, KEEPING, forward_only=True, choices=[partly, None])
    assert found.metrics.pop(REPLAYED) == 5 and expected.metrics.pop(REPLAYED) == 0
    assert found.metrics == expected.metrics


@pytest.mark.parametrize("config", [KEEPING, KEEPING_ALONE], ids=["packed", "deterministic"])
def test_a_tenant_with_a_record_changes_nothing_for_others(
    decoder: Decoder, new_adapter: NewAdapter, config: LocalEngineConfig
) -> None:
    """And has beside them what it has alone: bit for bit in deterministic mode."""
    assert decoder.config.routed is not None
    adapters = tenants(decoder, new_adapter)
    plain = gradients(decoder, adapters, config)
    data = [make_datum(12, 0), make_datum(5, 9)]
    choices = [others(chosen_by_trainer(decoder, datum.model_input.to_ints()), 6) for datum in data]
    succeed(decoder, data, adapters["a"], config, choices=choices)
    alone, adapters["a"].grad = adapters["a"].grad, None
    passes = [
        Pass(
            adapter_id=name,
            data=[make_datum(12 + n, n), make_datum(5, 9)],
            loss_fn="cross_entropy",
            choices=choices if name == "a" else (),
        )
        for n, name in enumerate(adapters)
    ]
    run(decoder, passes, adapters, config)
    assert alone is not None
    for name, expected in {**plain, "a": alone}.items():
        grad = adapters[name].grad
        assert grad is not None
        if config.deterministic:
            assert torch.equal(grad, expected)
        else:
            assert_close(grad, expected)


def new_core(**models: Path) -> EngineCore:
    threads = torch.get_num_threads()
    sources = {name: str(folder) for name, folder in models.items()}
    config = LocalEngineConfig(
        models=sources, device="cpu", router_replay=True, verify_models=False
    )
    core = EngineCore(config)
    torch.set_num_threads(threads)
    return core


@pytest.mark.parametrize(
    ("model_type", "shape", "expert", "problem"),
    [
        ("qwen3_moe", (2, 3, 2), 0, "experts of shape (2, 3, 2), expected (2, 2, 2)"),
        ("qwen3_moe", (2, 2, 2), 6, "expert 6, and the model has 6"),
        ("qwen3_5_text", (2, 2, 2), 0, "experts, and the model has none that can be chosen for it"),
    ],
)
def test_experts_of_another_model_are_refused(
    tmp_path: Path, model_type: str, shape: tuple[int, ...], expert: int, problem: str
) -> None:
    save_tiny(model_type, tmp_path)
    core = new_core(tiny=tmp_path)
    assert core.create_adapter("a", "tiny", LoraConfig(rank=2)) is None
    datum = Datum(ModelInput.from_ints([3, 4]), {"target_tokens": [4, 5]})
    choices = [np.full(shape, expert, np.uint8)]
    request = Pass(adapter_id="a", data=[datum], loss_fn="cross_entropy", choices=choices)
    (finished,) = filter(None, core.run_passes([request]))
    assert isinstance(finished.result, Failure)
    assert finished.result.message == f"data[0]: came with {problem}"


def test_a_model_whose_router_has_another_form_says_that_it_routes_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By name when the server starts; its samples report no experts. MiniMax's router asks for more
    than hidden states."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if "minimax_m2" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no minimax_m2")
    settings = CONFIG_MAPPING["minimax_m2"](
        vocab_size=97,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    new_core(tiny=tmp_path).capabilities()
    assert "'tiny' routes by itself" in caplog.text
    generator = Generator(load(tmp_path), KEEPING)
    generator.submit(job_of("a", tokens_of(5), seed=1, reports_experts=True), None)
    (event,) = finish(generator)["a"]
    assert isinstance(event, SampleResponse)


def test_rows_of_a_step_on_a_gpu_find_their_places_and_padding_has_its_own() -> None:
    """Three rows, the last of them padding, of blocks of 4 tokens; block 7 of 8 is for padding."""
    cached = torch.zeros(2, 8, 4, 2, dtype=torch.uint8)
    blocks = torch.tensor([3, 0, 5, 6], dtype=torch.int32)
    places = places_of_rows(torch.tensor([3, 6, 0]), torch.tensor([0, 2, 0]), blocks, cached)
    assert places.tolist() == [3 * 4 + 2, 6 * 4 + 1, 7 * 4]
