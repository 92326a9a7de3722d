"""`tinsmith checkpoint import`: PEFT adapters become checkpoints that do what `peft` does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support import server_process
from tests.support.server_process import ServerProcess
from tinsmith.client.service import ServiceClient
from tinsmith.types import Datum, ModelInput

if TYPE_CHECKING:
    from tests.cli.conftest import Run, Trained

TOKENS = list(range(3, 20))


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """An adapter that `peft` made, and its log-probabilities of some tokens after the first."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model),
        LoraConfig(
            r=4,
            lora_alpha=6,
            use_rslora=True,
            rank_pattern={"v_proj": 2},
            alpha_pattern={"mlp.up_proj": 11},
            target_modules=["q_proj", "v_proj", "up_proj"],
            task_type="CAUSAL_LM",
        ),
    ).eval()
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder, logprobs[:-1].gather(1, tokens[1:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def service(trained: Trained) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=trained.server.url, api_key=trained.server.key) as service:
        yield service


def imported(run: Run, server: ServerProcess, *arguments: str) -> Any:
    command = ("--format", "json", "checkpoint", "import", *arguments)
    result = run(*command, env=server.environment)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_an_imported_adapter_samples_and_trains_as_peft_computes(
    adapter: tuple[Path, list[float]], run: Run, trained: Trained, service: ServiceClient
) -> None:
    folder, expected = adapter
    options = (str(folder), "--base", "test/tiny", "--name", "start")
    sampled = imported(run, trained.server, *options, "--as", "sampler")
    assert sampled["checkpoint_path"].endswith("/sampler_weights/start")
    assert sampled["lora_rank"] == 4
    sampler = service.create_sampling_client(model_path=sampled["checkpoint_path"])
    scores = sampler.compute_logprobs(ModelInput.from_ints(TOKENS)).result()[1:]
    assert scores == pytest.approx(expected, abs=1e-5)

    start = imported(run, trained.server, *options)["checkpoint_path"]
    datum = Datum(
        model_input=ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * len(expected)},
    )
    for client in (
        service.create_training_client_from_state(start),
        service.create_training_client_from_state_with_optimizer(start),
    ):
        output = client.forward([datum], "cross_entropy").result()
        found = output.loss_fn_outputs[0]["logprobs"].tolist()
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_command_in_both_forms(
    adapter: tuple[Path, list[float]], run: Run, trained: Trained
) -> None:
    options = (str(adapter[0]), "--base", "test/tiny")
    answer = imported(run, trained.server, *options)
    assert answer.keys() == {"checkpoint_path", "base_model", "lora_rank", "kind"}
    table = run("checkpoint", "import", *options, env=trained.server.environment)
    assert table.exit_code == 0, table.output
    assert "Checkpoint Path  tinker://import-" in table.stdout
    assert "it is imported for test/tiny" in table.stderr


def test_what_cannot_be_held_is_refused_with_the_reason(
    adapter: tuple[Path, list[float]], run: Run, trained: Trained, tmp_path: Path
) -> None:
    folder, _ = adapter
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "adapter_config.json"
    settings = json.loads(config.read_text()) | {"use_dora": True}
    config.write_text(json.dumps(settings))
    command = ("checkpoint", "import", str(tmp_path), "--base", "test/tiny")
    result = run(*command, env=trained.server.environment)
    assert result.exit_code == 1
    assert "adapter_config.json.use_dora: this variant of LoRA is not supported" in result.stderr
    uploads = trained.server.data_dir / "uploads"
    assert [path for path in uploads.rglob("*") if path.is_file()] == []


def test_mistakes_are_found_before_anything_is_sent(
    adapter: tuple[Path, list[float]], run: Run, trained: Trained, tmp_path: Path
) -> None:
    result = run("checkpoint", "import", str(tmp_path), env=trained.server.environment)
    assert result.exit_code == 1
    assert f"There is no adapter_config.json in {tmp_path}" in result.stderr
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    result = run("checkpoint", "import", str(tmp_path), env=trained.server.environment)
    assert "There is no adapter_model.safetensors" in result.stderr
    assert "safe_serialization=True" in result.stderr
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    result = run("checkpoint", "import", str(tmp_path), env=trained.server.environment)
    assert "does not say which base model it is for" in result.stderr
    (tmp_path / "adapter_config.json").write_text("[]")
    result = run("checkpoint", "import", str(tmp_path), env=trained.server.environment)
    assert "is not a JSON object" in result.stderr


def test_of_an_upload_to_a_server_that_was_killed_nothing_is_left(tmp_path: Path) -> None:
    with server_process.serving(tmp_path) as server:
        piece = f"{server.url}/api/v1/uploads/{'0' * 32}/adapter_model.safetensors/0"
        sent = httpx.put(piece, content=b"half", headers={"x-api-key": server.key}, timeout=60)
        assert sent.status_code == 204
        uploads = server.data_dir / "uploads"
        assert [path for path in uploads.rglob("*") if path.is_file()]
        server.kill()
        server.port = 0
        server.start()
        assert [path for path in uploads.rglob("*") if path.is_file()] == []
