"""`tinsmith auth` and `tinsmith key`: keys on both ends."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.cli.conftest import Official, Run
    from tests.support.server_process import ServerProcess


def test_a_key_is_stored_used_and_forgotten(
    run: Run, server: ServerProcess, tmp_path: Path
) -> None:
    file = {"TINSMITH_CREDENTIALS_FILE": str(tmp_path / "keys.json"), "TINKER_API_KEY": ""}
    nothing = run("auth", "status", env=file)
    assert nothing.exit_code == 1
    assert nothing.stdout == "Credentials available: no\n"
    assert run("auth", "logout", env=file).exit_code == 1
    wrong = run("auth", "login", env=file, stdin="tml-wrong\n")
    assert wrong.exit_code == 1
    assert "Error: Could not validate the API key" in wrong.stderr
    done = run("auth", "login", env=file, stdin=f"{server.key}\n")
    assert done.exit_code == 0, done.output
    assert "Stored API key" in done.stdout
    assert server.key not in done.output
    assert (tmp_path / "keys.json").stat().st_mode & 0o077 == 0
    assert "Already logged in" in run("auth", "login", env=file).stderr
    assert run("auth", "status", env=file).stdout.endswith("Tinker accessible: yes\n")
    assert run("run", "list", env=file).exit_code == 0
    assert "still active" in run("auth", "logout", env=file).stdout
    assert run("auth", "status", env=file).exit_code == 1


def test_status_says_when_the_service_refuses(run: Run, official: Official) -> None:
    refused = run("auth", "status", env={"TINKER_API_KEY": "tml-wrong"})
    assert refused.exit_code == 1
    assert refused.stdout == "Credentials available: yes\nTinker accessible: no\n"
    assert run("auth", "status").stdout == official("auth", "status").out


def test_whoami_works_with_a_plain_key(run_json: Any) -> None:
    """The official command refuses: there it is read from tokens alone."""
    assert run_json("auth", "whoami")["org_urn"].startswith("tml:organization:")


def test_the_address_of_a_login_is_remembered(
    run: Run, server: ServerProcess, tmp_path: Path
) -> None:
    nowhere = {
        "TINSMITH_CREDENTIALS_FILE": str(tmp_path / "keys.json"),
        "TINKER_API_KEY": "",
        "TINKER_BASE_URL": "",
    }
    done = run("auth", "login", env=nowhere, stdin=f"{server.url}\n{server.key}\n")
    assert done.exit_code == 0, done.output
    assert f"Logged in to {server.url}" in done.stdout
    listed = run("run", "list", env=nowhere)
    assert listed.exit_code == 0, listed.output
    assert f"Server: {server.url}" in run("auth", "status", env=nowhere).stderr
    other = run("auth", "login", "http://127.0.0.1:1", env=nowhere, stdin="tml-x\n")
    assert other.exit_code == 1 and "http://127.0.0.1:1" in other.stderr
    assert "No key is stored" in run("auth", "logout", "http://127.0.0.1:1", env=nowhere).stderr
    assert run("auth", "logout", env=nowhere).exit_code == 0
    assert json.loads((tmp_path / "keys.json").read_text())["keys"] == {}


def test_a_second_login_to_a_known_server_makes_it_the_one_in_use(
    run: Run, server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    env = {"TINSMITH_CREDENTIALS_FILE": str(file), "TINKER_API_KEY": "", "TINKER_BASE_URL": ""}
    assert run("auth", "login", server.url, env=env, stdin=f"{server.key}\n").exit_code == 0
    known = json.loads(file.read_text())
    known["default"] = "http://10.0.0.7:8000"
    file.write_text(json.dumps(known))
    again = run("auth", "login", server.url, env=env)
    assert again.exit_code == 0, again.output
    assert json.loads(file.read_text())["default"] == server.url


def test_keys_are_created_listed_and_revoked_beside_a_running_server(
    run: Run, run_json: Any, server: ServerProcess
) -> None:
    where = ("--data-dir", str(server.data_dir))
    made = run("key", "create", "laptop", "--owner", "anna", *where)
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key.startswith("tml-")
    assert run("run", "list", env={"TINKER_API_KEY": key}).exit_code == 0
    assert run_json("run", "list", env={"TINKER_API_KEY": key}) == {"runs": []}
    listed = {each["name"]: each for each in run_json("key", "list", *where)["keys"]}
    assert listed["laptop"]["owner"] == "anna"
    assert key not in json.dumps(listed)
    assert "laptop" in run("key", "list", *where).stdout
    key_id = str(listed["laptop"]["key_id"])
    assert run("key", "revoke", key_id, *where).stdout == f"Revoked key {key_id}.\n"
    again = run("key", "revoke", key_id, *where)
    assert again.exit_code == 1
    assert "There is no active key" in again.stderr
    as_json = run_json("key", "create", "ci", *where)
    assert as_json["key"].startswith("tml-")
    assert run_json("key", "revoke", str(as_json["key_id"]), *where) == {
        "revoked": as_json["key_id"]
    }


def test_a_key_may_expire(run: Run, run_json: Any, server: ServerProcess) -> None:
    where = ("--data-dir", str(server.data_dir))
    key = run_json("key", "create", "visitor", "--ttl", "3600", *where)["key"]
    assert run("run", "list", env={"TINKER_API_KEY": key}).exit_code == 0
    key = run_json("key", "create", "guest", "--ttl", "1", *where)["key"]
    time.sleep(1.1)
    assert run("run", "list", env={"TINKER_API_KEY": key}).exit_code == 1
    (guest,) = [line for line in run("key", "list", *where).stdout.splitlines() if "guest" in line]
    assert "Expired" in guest
    assert run("key", "create", "guest", "--ttl", "0", *where).exit_code == 2


def test_a_folder_that_is_not_there_is_not_made(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    result = run("key", "list", "--data-dir", str(missing))
    assert result.exit_code == 1
    assert not missing.exists()
