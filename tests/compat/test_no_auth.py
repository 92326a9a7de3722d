"""The official client and curl use a server without authentication as before; pages do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith.client.service import ServiceClient


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("no-auth")
    command = [sys.executable, "-m", "tinsmith.cli", "serve", "--engine", "fake", "--no-auth"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))}
    with subprocess.Popen(
        [*command, "--port", "0", "--data-dir", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=kept,
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
        process.terminate()


PROGRAM = """
import sys, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-anything")
(model,) = service.get_server_capabilities().supported_models
training = service.create_lora_training_client(base_model=model.model_name, rank=4)
assert training.get_info().model_data.model_name == model.model_name
print("served")
"""


def test_the_official_client_is_served(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url], capture_output=True, text=True, check=False
    )
    assert done.stdout == "served\n", done.stderr[-2000:]


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_plain_request_is_answered(url: str, name: str) -> None:
    with urllib.request.urlopen(f"{url.replace('127.0.0.1', name)}/api/v1/sessions") as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}],
    ids=str,
)
def test_what_a_web_page_sends_is_refused(url: str, headers: dict[str, str]) -> None:
    request = urllib.request.Request(f"{url}/api/v1/sessions", headers=headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 403
    refused.value.close()


def test_our_client_needs_no_key(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_CREDENTIALS_FILE", str(tmp_path / "none.json"))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with ServiceClient(base_url=url) as service:
        assert service.get_server_capabilities().supported_models
