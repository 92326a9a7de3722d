"""What is kept of images: once for each owner, within bounds, and found by content alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.sample.sampling_reference import CPU, answer, answers, finish, tokens_of
from tests.engine.train.training_reference import run, succeed
from tests.engine.vision.test_models import datum_of, job_of, load
from tests.support.tiny_vision import IMAGE_TOKEN, image_chunk, save_tiny_vision, with_images
from tinsmith.engine.base import Failure, Pass
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.images.vision import Picture, Vision
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import ForwardBackwardOutput, ImageChunk, SampleResponse, TensorData

NewAdapter = Callable[..., Adapter]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    save_tiny_vision("qwen3_vl", folder)
    return folder


@pytest.fixture
def decoder(folder: Path) -> Decoder:
    return load(folder)


def vision_of(decoder: Decoder) -> Vision:
    assert decoder.vision is not None
    return decoder.vision


def broken() -> ImageChunk:
    """Its header is sound, and its pixels end too early."""
    whole = image_chunk(4, 4)
    data = whole.data[: len(whole.data) // 2]
    return ImageChunk(data=data, format="png", expected_tokens=16)


def looks_of(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The images at which the tower looks from here on, by their rows and columns."""
    looks: list[tuple[int, int]] = []
    look = vision.look

    def counted(patches: Tensor, grid: tuple[int, int]) -> Picture:
        looks.append(grid)
        return look(patches, grid)

    monkeypatch.setattr(vision, "look", counted)
    return looks


def test_an_image_is_looked_at_once_for_each_owner(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether another has sent the same can then not be told by the time it takes."""
    vision = vision_of(decoder)
    looks = looks_of(vision, monkeypatch)
    for owner in ("a", "b", "a", "b"):
        vision.see(image_chunk(2, 2), owner)
    assert len(looks) == 2
    assert vision.see(image_chunk(2, 2), "a") is not vision.see(image_chunk(2, 2), "b")


def test_trainer_and_sampler_look_at_an_image_once(
    decoder: Decoder, new_adapter: NewAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling first: what it keeps has to serve a backward pass, too."""
    prompt = with_images(tokens_of(3), image_chunk(2, 3), tokens_of(2))
    looks = looks_of(vision_of(decoder), monkeypatch)
    answer(Generator(decoder, CPU, prefill_tokens=3), job_of("a", prompt))
    succeed(decoder, [datum_of(prompt, 1)] * 2, new_adapter(decoder))
    assert len(looks) == 1


def test_the_owner_with_the_most_gives_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = vision_of(load(folder)).see(image_chunk(2, 2), "").nbytes
    vision = vision_of(load(folder, image_cache_bytes=3 * size))
    vision.see(image_chunk(2, 2, seed=50), "small")
    for seed in range(10):
        vision.see(image_chunk(2, 2, seed), "greedy")
        assert vision.nbytes <= 3 * size
    looks = looks_of(vision, monkeypatch)
    vision.see(image_chunk(2, 2, seed=50), "small")
    vision.see(image_chunk(2, 2, seed=9), "greedy")
    assert looks == []


def test_an_image_larger_than_all_room_is_kept_while_it_is_the_newest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = vision_of(load(folder, image_cache_bytes=1))
    looks = looks_of(vision, monkeypatch)
    first = vision.see(image_chunk(3, 3), "a")
    assert vision.see(image_chunk(3, 3), "a") is first
    vision.see(image_chunk(2, 2), "b")
    assert len(looks) == 2
    assert vision.nbytes == vision.see(image_chunk(2, 2), "b").nbytes


class Largest(TorchDispatchMode):  # type: ignore[misc]  # torch is unannotated here
    """Hears of how many numbers the largest tensor is that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return made


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_an_image_takes_memory_by_its_size_and_not_by_the_square(
    model_type: str, tmp_path: Path
) -> None:
    """On both paths: a file of 100 kilobytes may be an image of 65,536 patches."""
    save_tiny_vision(model_type, tmp_path)
    vision = vision_of(load(tmp_path))
    grid, patch = (32, 32), 3 * 2 * 4 * 4
    num_patches = 4 * 32 * 32
    with Largest() as largest:
        vision.look(torch.zeros(num_patches, patch), grid)
    assert num_patches * patch <= largest.numel < num_patches**2 // 8


def test_a_prompt_is_found_again_only_with_the_same_image(decoder: Decoder) -> None:
    generator = Generator(decoder, CPU)

    def ask(name: str, seed: int, scope: str = "") -> SampleResponse:
        chunks = ([1, 2, 3] * 6, image_chunk(3, 3, seed), [4, 5] * 4)
        return answer(generator, job_of(name, with_images(*chunks), scope=scope))

    first, same, other = ask("first", 1), ask("same", 1), ask("other", 2)
    assert first.prompt_cache_hit_tokens == 0
    assert same.prompt_cache_hit_tokens == 32, "two full blocks of 35 tokens"
    assert same.sequences[0].tokens == first.sequences[0].tokens
    assert other.prompt_cache_hit_tokens == 16, "of the text before the image"
    assert ask("stranger", 1, scope="b").prompt_cache_hit_tokens == 0


def test_a_prompt_is_scored_everywhere_and_at_an_image_by_the_token_that_stands_for_it(
    decoder: Decoder,
) -> None:
    """The cookbook's evaluation multiplies all log-probabilities by weights."""
    prompt = with_images([1, 2], image_chunk(2, 2), [4, 5])
    tokens = [1, 2, *[IMAGE_TOKEN] * 4, 4, 5]
    asked = TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)[:, None])
    job = job_of("a", prompt, prompt_logprobs=True, target_prompt_logprobs=asked)
    response = answer(Generator(decoder, CPU), job)
    assert response.prompt_logprobs is not None and response.target_prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    assert response.prompt_logprobs[1:] == response.target_prompt_logprobs.to_numpy()[:, 0].tolist()


def test_a_prompt_whose_image_cannot_be_decoded_fails_alone(decoder: Decoder) -> None:
    generator = Generator(decoder, CPU)
    good = with_images(tokens_of(3), image_chunk(2, 2), tokens_of(2))
    alone = answer(Generator(decoder, CPU), job_of("good", good))
    generator.submit(job_of("bad", with_images([1], broken(), [2])), None)
    generator.submit(job_of("good", good), None)
    events = finish(generator)
    (failure,), (beside,) = events["bad"], events["good"]
    assert isinstance(failure, Failure) and failure.category == "user"
    assert failure.message.startswith("prompt.chunks[1].data: the image cannot be decoded: ")
    assert isinstance(beside, SampleResponse)
    assert beside.sequences[0].tokens == alone.sequences[0].tokens


def test_a_pass_whose_image_cannot_be_decoded_fails_alone(
    decoder: Decoder, new_adapter: NewAdapter
) -> None:
    good = datum_of(with_images(tokens_of(3), image_chunk(2, 2), tokens_of(2)), 1)
    bad = datum_of(with_images([1], broken(), [2]), 2)
    adapters = {name: new_adapter(decoder) for name in ("bad", "good")}
    passes = [
        Pass(adapter_id="bad", data=[good, bad], loss_fn="cross_entropy"),
        Pass(adapter_id="good", data=[good], loss_fn="cross_entropy"),
    ]
    failure, output = run(decoder, passes, adapters)
    assert isinstance(failure, Failure) and failure.category == "user"
    assert failure.message.startswith("data[1].model_input.chunks[1].data: the image cannot be")
    assert adapters["bad"].grad is None
    assert isinstance(output, ForwardBackwardOutput) and adapters["good"].grad is not None


def test_a_recurrent_model_refuses_a_prompt_that_ends_with_an_image(tmp_path: Path) -> None:
    save_tiny_vision("qwen3_5", tmp_path)
    generator = Generator(load(tmp_path), CPU)
    generator.submit(job_of("a", with_images([1], image_chunk(2, 2))), None)
    ((failure,),) = finish(generator).values()
    assert failure == Failure("prompt: this model needs text behind the last image", "user")


def test_a_folder_without_a_processors_file_is_served_for_text(tmp_path: Path) -> None:
    save_tiny_vision("qwen3_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    decoder = load(tmp_path)
    assert decoder.config.images is None and decoder.vision is None
    answers(Generator(decoder, CPU), [(job_of("a", with_images([1, 2])), None)])
