"""`push-hf`, and `import` from a hub, with the real client library, against a hub on loopback."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.numpy import load

from tests.support import local_hub
from tests.support.local_hub import Hub
from tinsmith.client.service import ServiceClient
from tinsmith.types import ModelInput

if TYPE_CHECKING:
    from tests.cli.conftest import Run, Trained

Push = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with local_hub.running() as running:
        yield running


@pytest.fixture
def command(hub: Hub, trained: Trained, tmp_path: Path) -> Push:
    """In a process of its own: the library reads its endpoint when it is imported."""

    def command(*arguments: str, token: str = local_hub.TOKEN) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tinsmith.cli", "checkpoint", *arguments],
            capture_output=True,
            text=True,
            env=trained.server.environment
            | {
                "HF_ENDPOINT": hub.url,
                "HF_TOKEN": token,
                "HF_HOME": str(tmp_path / "hf"),
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
            },
            check=False,
        )

    return command


@pytest.fixture
def push(command: Push) -> Push:
    return functools.partial(command, "push-hf")


@pytest.fixture
def pull(command: Push) -> Push:
    return functools.partial(command, "import")


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_checkpoint_is_pushed_with_a_card(
    form: str, push: Push, hub: Hub, run: Run, trained: Trained, tmp_path: Path
) -> None:
    path = trained.external
    options = ("--json",) if form == "json" else ()
    done = push(path, "--repo", "anna/pirate", "--commit-message", "Arr", *options)
    assert done.returncode == 0, done.stderr
    if form == "json":
        wanted = {"checkpoint_path": path, "repo_id": "anna/pirate", "public": False}
        assert json.loads(done.stdout) == wanted
    else:
        assert "Repo ID          anna/pirate" in done.stdout
    repository = hub.repositories["anna/pirate"]
    assert repository.is_private
    assert repository.messages == ["Arr"]
    files = dict(repository.branches["main"])
    card = files.pop("README.md").decode()
    assert card.startswith("---\nbase_model: test/tiny\nlibrary_name: peft\n")
    assert f"tinker_path: {path}\n" in card
    assert "- Rank: 4" in card
    assert '.from_pretrained("anna/pirate")' in card
    # The numbers of a download, bit for bit, under the names that peft looks for.
    downloaded = run(
        *("checkpoint", "download", path, "-o", str(tmp_path)), env=trained.server.environment
    )
    assert downloaded.exit_code == 0, downloaded.output
    (folder,) = (each for each in tmp_path.iterdir() if each.name.endswith("_final"))
    settings = json.loads(files.pop("adapter_config.json"))
    assert settings["base_model_name_or_path"] == "test/tiny"
    assert settings["r"] == 4
    pushed = load(files.pop("adapter_model.safetensors"))
    on_disk = load((folder / "adapter_model.safetensors").read_bytes())
    renamed = {n.replace("model.unembed_tokens", "lm_head"): t for n, t in on_disk.items()}
    assert pushed.keys() == renamed.keys()
    assert all((pushed[name] == renamed[name]).all() for name in pushed)
    assert not files


def test_without_a_name_the_repository_is_named_after_the_run(
    push: Push, hub: Hub, trained: Trained
) -> None:
    """In a branch named after the checkpoint, in the repository of whoever is logged in."""
    done = push(trained.external, "--json")
    assert done.returncode == 0, done.stderr
    name = "tinker-tiny-" + trained.run_id.replace(":", "-")
    assert json.loads(done.stdout)["repo_id"] == f"{local_hub.USER}/{name}"
    branches = hub.repositories[f"{local_hub.USER}/{name}"].branches
    assert branches["main"] == {}
    assert "adapter_model.safetensors" in branches["external_weights-final"]
    again = push(trained.external, "--json")
    assert again.returncode == 0, again.stderr


def test_patterns_and_no_card(push: Push, hub: Hub, trained: Trained) -> None:
    done = push(
        *(trained.external, "-r", "anna/some", "--public", "--no-model-card"),
        *("--allow-pattern", "adapter_c*"),
    )
    assert done.returncode == 0, done.stderr
    repository = hub.repositories["anna/some"]
    assert not repository.is_private
    assert list(repository.branches["main"]) == ["adapter_config.json"]


def test_a_pull_request(push: Push, hub: Hub, trained: Trained) -> None:
    done = push(trained.external, "-r", "anna/shared", "--create-pr")
    assert done.returncode == 0, done.stderr
    branches = hub.repositories["anna/shared"].branches
    assert branches["main"] == {}
    assert "README.md" in branches["refs/pr/1"]
    both = push(trained.external, "-r", "anna/shared", "--create-pr", "--revision", "next")
    assert both.returncode == 1
    assert both.stderr == "Error: Cannot specify both --create-pr and --revision\n"


def test_a_repository_with_another_checkpoint_is_left_alone(
    push: Push, hub: Hub, trained: Trained
) -> None:
    assert push(trained.external, "-r", "anna/pirate").returncode == 0
    files = hub.repositories["anna/pirate"].branches["main"]
    files["README.md"] = b"from tinker://other/weights/final"
    before = dict(files)
    done = push(trained.external, "-r", "anna/pirate")
    assert done.returncode == 1
    assert "contain a different Tinker checkpoint" in done.stderr
    assert files == before


@pytest.mark.parametrize(
    ("repo", "token", "complaint"),
    [
        ("anna/pirate", "hf_wrong", "Error: Not logged in\nRun: hf auth login"),
        ("an na//pirate", local_hub.TOKEN, "Error: Failed to upload to the hub: "),
    ],
)
def test_what_the_hub_refuses_is_one_error(
    repo: str, token: str, complaint: str, push: Push, trained: Trained
) -> None:
    done = push(trained.external, "-r", repo, token=token)
    assert done.returncode == 1
    assert done.stderr.startswith(complaint)
    assert "Traceback" not in done.stderr


def test_what_was_pushed_is_imported_again(
    push: Push, pull: Push, hub: Hub, trained: Trained
) -> None:
    """By its name on the hub, without a base model: the adapter names the one it was trained on."""
    assert push(trained.external, "--repo", "anna/pirate").returncode == 0
    done = pull("hf:anna/pirate@main", "--as", "sampler", "--json")
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout)["checkpoint_path"]
    with ServiceClient(base_url=trained.server.url, api_key=trained.server.key) as service:
        sampler = service.create_sampling_client(model_path=path)
        scores = sampler.compute_logprobs(ModelInput.from_ints(trained.tokens)).result()[1:]
    assert scores == pytest.approx(trained.scores, abs=1e-6)
    missing = pull("hf:anna/nothing")
    assert missing.returncode == 1
    assert missing.stderr.startswith("Error: hf:anna/nothing could not be fetched: ")
