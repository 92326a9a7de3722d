"""The systemd unit, as systemd reads it."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from tinsmith.cli.__main__ import cli

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "tinsmith.service"


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze")
    # Only what is installed on this machine can be executed.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text("utf-8").replace("/opt/tinsmith/bin/tinsmith", "/bin/true"))
    done = subprocess.run(
        [program, "verify", str(copy)], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not complaints
    copy.write_text(copy.read_text() + "[Service]\nStateDirectoryMod=1\n")
    done = subprocess.run([program, "verify", str(copy)], capture_output=True, text=True)
    assert "StateDirectoryMod" in done.stderr, "systemd looks at every line"


def test_the_unit_starts_a_command_that_there_is() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names are as they are
    unit.read_string(UNIT.read_text("utf-8"))
    program, command, option, _ = unit["Service"]["ExecStart"].split()
    assert program.endswith("/bin/tinsmith")
    told = CliRunner().invoke(cli, [command, "--help"])
    assert told.exit_code == 0 and option in told.output
