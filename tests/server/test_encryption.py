"""Exports that are encrypted for recipients, who alone can read them."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

if TYPE_CHECKING:
    from tests.support.in_process_server import Api

pyrage = pytest.importorskip("pyrage", reason="exports are encrypted with pyrage")

SSH_KEY = Ed25519PrivateKey.from_private_bytes(sha256(b"a key of a test").digest())
SSH_PUBLIC = SSH_KEY.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


async def export(api: Api, model: str, seq_id: int, recipients: list[str]) -> Any:
    body = {
        "model_id": model,
        "seq_id": seq_id,
        "path": f"n{seq_id}",
        "age_encryption_recipients": recipients,
    }
    return await api.post("/save_weights_external", body)


async def saved(api: Api, recipients: list[str]) -> str:
    response = await export(api, await api.model(), 1, recipients)
    assert response.status_code == 200, response.text
    return str((await api.result(response.json()["request_id"]))["path"])


async def files_of(api: Api, path: str) -> dict[str, bytes]:
    run, kind, name = path.removeprefix("tinker://").split("/")
    address = f"/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"
    urls = (await api.get(address)).json()["urls"]
    return {file: (await api.http.get(url)).content for file, url in urls.items()}


async def test_each_recipient_reads_every_file_and_nobody_else_does(api: Api) -> None:
    native, stranger = (pyrage.x25519.Identity.generate() for _ in range(2))
    private = SSH_KEY.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    path = await saved(api, [str(native.to_public()), f"{SSH_PUBLIC} somebody@somewhere"])
    files = await files_of(api, path)
    assert sorted(files) == ["adapter_config.json.age", "state.npz.age"]
    for identity in (native, pyrage.ssh.Identity.from_buffer(private)):
        plain = {name: pyrage.decrypt(data, [identity]) for name, data in files.items()}
        config = json.loads(plain["adapter_config.json.age"])
        assert config["lora"]["rank"] == 4
        assert sha256(plain["state.npz.age"]).hexdigest() == config["state_sha256"]
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(files["state.npz.age"], [stranger])


async def test_only_the_encrypted_files_are_kept(api: Api, tmp_path: Any) -> None:
    await saved(api, [str(pyrage.x25519.Identity.generate().to_public())])
    folders = [path for path in (tmp_path / "data" / "weights").iterdir() if path.is_dir()]
    assert [path.name for folder in folders for path in folder.glob("state.npz*")] == [
        "state.npz.age"
    ]


async def test_encrypted_weights_are_neither_loaded_nor_sampled_from(api: Api) -> None:
    path = await saved(api, [str(pyrage.x25519.Identity.generate().to_public())])
    session = await api.session()
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    sample = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    for address, body in (("/load_weights", load), ("/create_sampling_session", sample)):
        response = await api.post(address, body)
        assert response.status_code == 400
        assert f"{path} is encrypted" in response.json()["detail"]


@pytest.mark.parametrize(
    ("recipients", "detail"),
    [
        (["age1nonsense"], "age_encryption_recipients[0]: 'age1nonsense' is neither a key age1…"),
        ([SSH_PUBLIC, "ssh-rsa AAAA"], "age_encryption_recipients[1]: 'ssh-rsa AAAA' is neither"),
        ([SSH_PUBLIC] * 11, "age_encryption_recipients: at most 10, got 11"),
    ],
    ids=["age", "ssh", "many"],
)
async def test_recipients_that_cannot_be_read_are_refused_by_name(
    api: Api, recipients: list[str], detail: str
) -> None:
    response = await export(api, await api.model(), 1, recipients)
    assert response.status_code == 400
    assert detail in response.json()["detail"]
