"""Settings: where they come from, and which are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tinsmith.errors import ValidationError
from tinsmith.server.config import ServerConfig
from tinsmith.server.config_sources import build_config, load_config
from tinsmith.transport.config import CLIENT_VARIABLES

if TYPE_CHECKING:
    from pathlib import Path


def test_an_unknown_setting_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ValidationError, match="did you mean 'hold_seconds'"):
        build_config({"hold_second": 1})


def test_settings_come_from_file_environment_and_command_line_in_that_order(
    tmp_path: Path,
) -> None:
    file = tmp_path / "t.toml"
    file.write_text('port = 1\nhold_seconds = 2.5\nhost = "127.0.0.1"\n[models]\na = "b"\n')
    environ = {"TINSMITH_PORT": "2", "TINSMITH_AUTH": "false", "OTHER": "x"}
    config = load_config(file, {"port": 3, "device": None}, environ)
    assert (config.port, config.hold_seconds, config.auth) == (3, 2.5, False)
    assert config.models == {"a": "b"}


def test_variables_of_the_client_are_no_settings_of_the_server() -> None:
    """A stored key's place, once set, kept `tinsmith serve` from starting."""
    environ = dict.fromkeys(CLIENT_VARIABLES, "1")
    assert load_config(None, {}, environ) == ServerConfig()
    with pytest.raises(ValidationError, match="did you mean 'port'"):
        load_config(None, {}, environ | {"TINSMITH_PROT": "1"})


def test_a_server_without_authentication_listens_on_loopback_only() -> None:
    with pytest.raises(ValidationError, match="loopback"):
        build_config({"auth": False, "host": "0.0.0.0"})
