"""`tinsmith.auth`: what can be said about credentials without a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_server import Answer
from tinsmith import auth
from tinsmith.errors import APIConnectionError, AuthenticationError, BillingError, TinkerError
from tinsmith.transport.credentials import CredentialsFile, StoredKey


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials.json"
    monkeypatch.setenv("TINSMITH_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return file


def test_no_credentials() -> None:
    assert auth.get_tinker_token() is None
    assert not auth.tinker_has_credentials()
    with pytest.raises(TinkerError, match="no API key"):
        auth.raise_if_tinker_not_accessible()


def test_keys_from_the_environment_and_the_file(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = StoredKey(key="tml-stored", key_id="1", name="n")
    CredentialsFile(clean).add("http://10.0.0.7:8000", key)
    assert auth.get_tinker_token() == "tml-stored" and auth.tinker_has_credentials()
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    assert auth.get_tinker_token() == "tml-env"
    monkeypatch.setenv("TINKER_API_KEY", "malformed")
    assert auth.get_tinker_token() is None and not auth.tinker_has_credentials()


def test_a_client_warns_before_its_first_request_that_a_key_goes_elsewhere(
    stub: Any, clean: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = StoredKey(key="tml-private", key_id="1", name="n")
    CredentialsFile(clean).add("http://10.0.0.7:8000", key)
    monkeypatch.setenv("TINKER_API_KEY", "tml-private")
    monkeypatch.setenv("TINKER_BASE_URL", stub.url)
    monkeypatch.setattr(
        caplog.handler,
        "emit",
        lambda record: told.append((len(stub.requests), record.getMessage())),
    )
    told: list[tuple[int, str]] = []
    stub.on("/api/v1/get_server_capabilities", Answer(200, {"supported_models": []}))
    auth.raise_if_tinker_not_accessible()
    assert [num for num, text in told if "stored for http://10.0.0.7:8000" in text] == [0]


def test_a_command_counts_and_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"touch {tmp_path / 'ran'}")
    assert auth.tinker_has_credentials()
    assert auth.get_tinker_token() is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(200, {"supported_models": []}), None),
        (Answer(401, {"detail": "bad"}), AuthenticationError),
        (Answer(402, {"detail": "pay"}), BillingError),
        (Answer(fault="reset"), APIConnectionError),
    ],
)
def test_access_is_checked_with_a_single_request(
    stub: Any, monkeypatch: pytest.MonkeyPatch, answer: Answer, error: type[Exception] | None
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    monkeypatch.setenv("TINKER_BASE_URL", stub.url)
    stub.on("/api/v1/get_server_capabilities", answer)
    if error is None:
        auth.raise_if_tinker_not_accessible()
    else:
        with pytest.raises(error):
            auth.raise_if_tinker_not_accessible()
    assert stub.count("/get_server_capabilities") == 1
