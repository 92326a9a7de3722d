"""Models that read images: exact, packed, shared and sampled.

Tiny random models of each type in float32. The reference is `transformers` itself, from the file of
an image on: its processor, its vision tower, its positions, and autograd through merged weights.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.sample.sampling_reference import CPU, DETERMINISTIC, answer, answers, tokens_of
from tests.engine.train.training_reference import (
    RELATIVE,
    Reference,
    assert_close,
    assert_saved_adapter_continues,
    run,
    succeed,
)
from tests.support.tiny_vision import (
    IMAGE_TOKEN,
    PROCESSOR,
    TINY_TEXT_PARTS,
    VISION_END,
    VISION_START,
    image_chunk,
    save_tiny_vision,
    with_images,
)
from tinsmith.engine.base import Pass, SampleJob
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import (
    Datum,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

NewAdapter = Callable[..., Adapter]


@pytest.fixture(scope="module", params=list(TINY_TEXT_PARTS))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Decoder]:
    """The `transformers` model, and ours loaded from what it saved."""
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny_vision(request.param, folder), load(folder)


def load(folder: Path, **options: Any) -> Decoder:
    config = LocalEngineConfig(device="cpu", models={"tiny": str(folder)}, **options)
    return BaseModels(config).get("tiny")


def image(columns: int, rows: int, seed: int) -> tuple[list[int], ImageChunk, list[int]]:
    """As models are told of one."""
    return [VISION_START], image_chunk(columns, rows, seed), [VISION_END]


INPUTS = [
    with_images(tokens_of(4, 1), *image(3, 2, 1), tokens_of(5, 2)),
    with_images(*image(2, 4, 2), tokens_of(3, 3), *image(4, 3, 3), tokens_of(6, 4)),
    with_images(tokens_of(7, 5)),
    with_images(tokens_of(2, 6), *image(2, 2, 1), tokens_of(1, 7)),
]


def tokens_in(model_input: ModelInput) -> list[int]:
    """With the image's token for every part of one."""
    return [
        token
        for chunk in model_input.chunks
        for token in (
            chunk.tokens if isinstance(chunk, EncodedTextChunk) else [IMAGE_TOKEN] * chunk.length
        )
    ]


def images_in(
    model_input: ModelInput, settings: Mapping[str, Any] = PROCESSOR
) -> dict[str, Tensor]:
    """What the model's own processor gives a `transformers` model beside the tokens."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    files = [chunk.data for chunk in model_input.chunks if isinstance(chunk, ImageChunk)]
    tokens = torch.tensor([tokens_in(model_input)])
    if not files:
        return {"input_ids": tokens}
    given = {k: v for k, v in settings.items() if k != "image_processor_type"}
    processor = Qwen2VLImageProcessorPil(**given)
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    found = processor(images=pictures, return_tensors="pt")
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).int(),
        "pixel_values": found["pixel_values"],
        "image_grid_thw": found["image_grid_thw"],
    }


class VisionReference(Reference):
    """With images, which the plain one has no place for."""

    given: dict[int, dict[str, Tensor]]

    def add_images(self, inputs: list[ModelInput]) -> None:
        self.given = {each.length: images_in(each) for each in inputs}
        assert len(self.given) == len(inputs), "told apart by their lengths"

    def tokens(self, model_input: ModelInput) -> Tensor:
        return torch.tensor(tokens_in(model_input))

    def call(self, weights: dict[str, Tensor], tokens: Tensor) -> Any:
        options = {**self.given[len(tokens)], "use_cache": False}
        return torch.func.functional_call(self.model, weights, (), options, tie_weights=False)


def datum_of(model_input: ModelInput, seed: int) -> Datum:
    generator = np.random.default_rng(seed)
    length = model_input.length
    return Datum(
        model_input,
        {
            "target_tokens": generator.integers(0, 90, length),
            "weights": generator.normal(size=length).astype(np.float32),
        },
    )


DATA = [datum_of(each, seed) for seed, each in enumerate(INPUTS)]


def test_losses_and_gradients_are_those_of_transformers(
    family: tuple[Any, Decoder], new_adapter: NewAdapter
) -> None:
    """Of several sequences packed together; adapters lie on the language part alone."""
    model, decoder = family
    adapter = new_adapter(decoder)
    reference = VisionReference(model, adapter)
    reference.add_images(INPUTS)
    loss, logprobs, expected = reference.run(DATA)
    output = succeed(decoder, DATA, adapter)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
    for found, wanted in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert_close(found["logprobs"].to_torch(), wanted)
    assert adapter.grad is not None
    wanted_views, found_views = adapter.layout.views(expected), adapter.layout.views(adapter.grad)
    for key, factors in wanted_views.items():
        assert_close(found_views[key].a, factors.a, 3 * RELATIVE)
        for found_b, b in zip(found_views[key].b, factors.b, strict=True):
            assert_close(found_b, b, 3 * RELATIVE)
    assert not any("visual" in name for name, _ in adapter.named_tensors())


@pytest.mark.parametrize("of_text", [{"tie_word_embeddings": False}, {}], ids=["untied", "silent"])
def test_an_unembedding_is_tied_where_the_settings_of_the_whole_model_say_so(
    of_text: dict[str, bool], tmp_path: Path
) -> None:
    """Whatever those of its language part say: the files have no other matrix."""
    save_tiny_vision("qwen3_5", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "lm_head" not in name}
    save_file(tensors, file, {"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["tie_word_embeddings"] = True
    del settings["text_config"]["tie_word_embeddings"]
    settings["text_config"] |= of_text
    (tmp_path / "config.json").write_text(json.dumps(settings))
    decoder = load(tmp_path, cache_folder=tmp_path / "cache")
    assert decoder.head.weight is decoder.embedding


def test_a_model_without_recurrent_layers_reads_images_as_well(tmp_path: Path) -> None:
    save_tiny_vision("qwen3_5", tmp_path, layer_types=["full_attention"] * 4)
    assert load(tmp_path).vision is not None


def test_an_image_changes_what_is_said_of_it(
    family: tuple[Any, Decoder], new_adapter: NewAdapter
) -> None:
    _, decoder = family
    adapter = new_adapter(decoder)
    found = []
    for seed in (1, 2):
        model_input = with_images(tokens_of(3), *image(2, 2, seed), tokens_of(4))
        data = [datum_of(model_input, 0)]
        output = succeed(decoder, data, adapter, forward_only=True)
        found.append(output.loss_fn_outputs[0]["logprobs"].to_torch())
    assert_close(found[0][:3], found[1][:3])
    assert (found[0][-4:] - found[1][-4:]).norm() > 1e-3 * found[0][-4:].norm()


@pytest.mark.parametrize("config", [CPU, DETERMINISTIC], ids=["packed", "deterministic"])
def test_tenants_of_one_batch_have_the_gradients_that_each_has_alone(
    family: tuple[Any, Decoder], new_adapter: NewAdapter, config: LocalEngineConfig
) -> None:
    """Bit for bit in deterministic mode; the same image among them belongs to both."""
    _, decoder = family
    data = {"a": DATA[:2], "b": [DATA[3], DATA[2], DATA[0]]}
    adapters = {name: new_adapter(decoder, fill_seed=seed) for seed, name in enumerate(data)}
    passes = [
        Pass(adapter_id=name, data=data[name], loss_fn="cross_entropy", scope=name) for name in data
    ]
    run(decoder, passes, adapters, config)
    for name, adapter in adapters.items():
        together, adapter.grad = adapter.grad, None
        succeed(decoder, data[name], adapter, config)
        assert together is not None and adapter.grad is not None
        if config.deterministic:
            assert torch.equal(adapter.grad, together)
        else:
            assert_close(adapter.grad, together)


def job_of(job_id: str, prompt: ModelInput, **fields: Any) -> SampleJob:
    params = SamplingParams(stop=[], max_tokens=9, seed=5)
    return SampleJob(
        job_id=job_id, base_model="tiny", weights_id=None, prompt=prompt, params=params, **fields
    )


def continued(prompt: ModelInput, tokens: list[int]) -> Datum:
    """A prompt and what was said to it, as data to train on."""
    whole = ModelInput(chunks=[*prompt.chunks, EncodedTextChunk(tokens=tokens[:-1])])
    return Datum(whole, {"target_tokens": [*tokens_in(prompt)[1:], *tokens]})


def assert_trainer_agrees(
    decoder: Decoder, prompt: ModelInput, response: SampleResponse, adapter: Adapter
) -> None:
    for sequence in response.sequences:
        data = [continued(prompt, sequence.tokens)]
        output = succeed(decoder, data, adapter, forward_only=True)
        wanted = output.loss_fn_outputs[0]["logprobs"].to_numpy()[prompt.length - 1 :]
        assert np.abs(wanted - sequence.logprobs_np).mean() <= 1e-5


def test_sampled_tokens_have_the_logprobs_of_the_trainer(
    family: tuple[Any, Decoder], new_adapter: NewAdapter
) -> None:
    """In one batch, also as samples of one prompt, and where prompts are read in small parts."""
    _, decoder = family
    adapters = {name: new_adapter(decoder, fill_seed=n) for n, name in enumerate(("a", "b", "c"))}
    prompts = dict(zip(adapters, INPUTS[:3], strict=True))
    jobs = [
        (job_of(name, prompts[name], num_samples=count, scope=name), adapters[name])
        for name, count in (("a", 3), ("b", 1), ("c", 2))
    ]
    for prefill_tokens in (None, 4):
        generator = Generator(decoder, CPU, prefill_tokens=prefill_tokens)
        for name, response in answers(generator, jobs).items():
            assert_trainer_agrees(decoder, prompts[name], response, adapters[name])


def test_tenants_sample_what_each_samples_alone(
    family: tuple[Any, Decoder], new_adapter: NewAdapter
) -> None:
    """In deterministic mode: the same tokens, and log-probabilities to the last bit."""
    _, decoder = family
    jobs = [
        (job_of(str(n), each, scope=str(n)), new_adapter(decoder, fill_seed=n))
        for n, each in enumerate(INPUTS[:2])
    ]
    together = answers(Generator(decoder, DETERMINISTIC), jobs)
    for job, adapter in jobs:
        (alone,) = answer(Generator(decoder, DETERMINISTIC), job, adapter).sequences
        (beside,) = together[job.job_id].sequences
        assert alone.tokens == beside.tokens
        assert (alone.logprobs_np == beside.logprobs_np).all()


def test_a_saved_adapter_continues_bit_for_bit(
    family: tuple[Any, Decoder], new_adapter: NewAdapter, tmp_path: Path
) -> None:
    _, decoder = family
    adapter, restored = new_adapter(decoder), new_adapter(decoder, fill_seed=None)
    assert_saved_adapter_continues(decoder, DATA, adapter, restored, tmp_path / "one")
