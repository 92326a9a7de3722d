"""Our own client against our server, over the wire, as a user's process would."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tinsmith
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams
from tinsmith.wire import endpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server_process import ServerProcess


@pytest.fixture
def service(server: ServerProcess) -> Iterator[tinsmith.ServiceClient]:
    client = tinsmith.ServiceClient(base_url=server.url, api_key=server.key)
    yield client
    client.close("success").result(10)


@pytest.fixture
def rest(service: tinsmith.ServiceClient) -> tinsmith.RestClient:
    config = service.holder.config
    return tinsmith.RestClient(base_url=config.base_url, api_key=config.api_key)


@pytest.fixture
def model(service: tinsmith.ServiceClient) -> str:
    name = service.get_server_capabilities().supported_models[0].model_name
    assert name is not None
    return name


def datum(tokens: list[int]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def test_training_lowers_the_loss_and_a_checkpoint_resumes(
    service: tinsmith.ServiceClient, model: str
) -> None:
    training = service.create_lora_training_client(model, rank=4)
    data = [datum([1, 2, 3, 4, 5])] * 4
    losses = []
    for _ in range(5):
        output = training.forward_backward(data, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=0.01)).result(20)
        losses.append(output.result(20).metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True)
    path = training.save_state("here").result(20).path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    both = [
        client.forward(data, "cross_entropy").result(20).metrics["loss:sum"]
        for client in (training, resumed)
    ]
    assert both[0] == both[1]


def test_a_stream_gives_the_tokens_of_the_sample(
    service: tinsmith.ServiceClient, model: str
) -> None:
    """S92: token by token, the same tokens as the whole sample."""
    sampler = service.create_sampling_client(base_model=model)
    prompt = ModelInput.from_ints([1, 2, 3])
    params = SamplingParams(max_tokens=12, seed=7, stop=[])
    whole = sampler.sample(prompt, 1, params).result(20).sequences[0]
    pieces = list(sampler.stream(prompt, params))
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert pieces[-1].stop_reason == whole.stop_reason
    assert len(pieces) > 1


def test_a_stream_that_is_left_frees_its_place(service: tinsmith.ServiceClient, model: str) -> None:
    """S43"""
    sampler = service.create_sampling_client(base_model=model)
    prompt, params = ModelInput.from_ints([1]), SamplingParams(max_tokens=100, stop=[])
    for _ in range(3):
        for _piece in sampler.stream(prompt, params):
            break
    assert sampler.sample(prompt, 1, SamplingParams(max_tokens=2, stop=[])).result(20)


def test_a_mistake_is_a_prompt_error_of_ours(service: tinsmith.ServiceClient) -> None:
    with pytest.raises(tinsmith.TinkerError, match="no-such-model"):
        service.create_lora_training_client("no-such-model")


def test_a_loop_goes_on_after_its_session_was_ended(
    service: tinsmith.ServiceClient, model: str
) -> None:
    """As after a night in which nobody heard from it; the losses are those of an unbroken run."""
    data = [datum([1, 2, 3, 4, 5])]

    def losses(end_at: int | None) -> list[float]:
        recovery = tinsmith.Recovery(
            service,
            start=lambda: service.create_lora_training_client(model, rank=4, seed=1),
            sleep=lambda seconds: None,
        )
        found: dict[int, float] = {}
        for attempt in recovery.attempts():
            with attempt as (training, first_step):
                for step in range(first_step, 6):
                    if step == end_at:
                        end_at = None
                        session = service.holder.get_session_id()
                        service.holder.submit(
                            service.holder.api.send,
                            endpoints.FINISH_SESSION.at(session_id=session),
                            b'{"reason": {"type": "interrupted"}}',
                        ).result(10)
                    passed = training.forward_backward(data, "cross_entropy")
                    training.optim_step(AdamParams(learning_rate=0.1)).result(20)
                    found[step] = passed.result(20).metrics["loss:sum"]
                    if step == 2:
                        saved = training.save_state("three", overwrite=True).result(20)
                        recovery.saved(saved, step + 1)
        return list(found.values())

    first = service.holder.get_session_id()
    assert losses(4) == losses(None)
    assert service.holder.get_session_id() != first, "another session took over"


def test_any_checkpoint_can_be_downloaded(
    service: tinsmith.ServiceClient, model: str, tmp_path: Path
) -> None:
    """External weights come file by file, a training state as an archive."""
    training = service.create_lora_training_client(model, rank=4)
    rest = tinsmith.RestClient(base_url=service.config.base_url, api_key=service.config.api_key)
    state = training.save_state("here").result(20).path
    external = training.save_weights_external("there").result(20).path
    for path in (state, external):
        files = rest.download_checkpoint(path, tmp_path / path.rpartition("/")[2]).result(20)
        assert "adapter_config.json" in {file.name for file in files}
        assert all(file.stat().st_size for file in files)
    assert not list(tmp_path.glob("*.tar*"))


@pytest.mark.slow
def test_every_client_finds_the_tokenizer_of_a_served_folder(start_local_server: Any) -> None:
    """S85: the server says where it is; the model's name alone leads nowhere."""
    server = start_local_server()
    with tinsmith.ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client("tiny", rank=4)
        for client in (
            training,
            service.create_sampling_client(base_model="tiny"),
            training.save_weights_and_get_sampling_client(),
        ):
            tokenizer = client.get_tokenizer()
            assert tokenizer.decode(tokenizer.encode("tin", add_special_tokens=False)) == "tin"


class BrokenOff(Exception):
    pass


def break_off(progress: Any) -> None:
    raise BrokenOff


@pytest.mark.parametrize("kind", ["save_state", "save_weights_external"])
def test_a_download_continued_after_an_overwrite_has_only_the_new_checkpoint(
    service: tinsmith.ServiceClient,
    rest: tinsmith.RestClient,
    model: str,
    tmp_path: Path,
    kind: str,
) -> None:
    """Half of each file is of the old checkpoint when the download is continued."""
    training = service.create_lora_training_client(model, rank=4)

    def save() -> str:
        training.forward_backward([datum([1, 2, 3, 4, 5])], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=0.1)).result(20)
        path: str = getattr(training, kind)("x").result(20).path
        return path

    path = save()
    before = contents(rest.download_checkpoint(path, tmp_path / "before").result(20))
    with pytest.raises(BrokenOff):
        rest.download_checkpoint(path, tmp_path / "x", break_off).result(20)
    parts = list(tmp_path.rglob("*.part"))
    assert parts
    for part in parts:
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    rest.delete_checkpoint_from_tinker_path(path).result(20)
    assert save() == path
    found = contents(rest.download_checkpoint(path, tmp_path / "x").result(20))
    assert found == contents(rest.download_checkpoint(path, tmp_path / "after").result(20))
    assert found != before


@pytest.mark.parametrize("kind", ["save_state", "save_weights_external"])
def test_a_download_that_broke_off_is_continued_where_it_was(
    service: tinsmith.ServiceClient,
    rest: tinsmith.RestClient,
    model: str,
    tmp_path: Path,
    kind: str,
) -> None:
    training = service.create_lora_training_client(model, rank=4)
    path = getattr(training, kind)("x").result(20).path
    with pytest.raises(BrokenOff):
        rest.download_checkpoint(path, tmp_path / "x", break_off).result(20)
    (part,) = tmp_path.rglob("*.part")
    half = part.stat().st_size // 2
    part.write_bytes(part.read_bytes()[:half])
    found = contents(rest.download_checkpoint(path, tmp_path / "x").result(20))
    assert found == contents(rest.download_checkpoint(path, tmp_path / "whole").result(20))


def contents(paths: list[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths}
