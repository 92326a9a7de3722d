"""What a new user stumbles over first."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tinsmith
from tinsmith.cli.failures import CommandError, explained

if TYPE_CHECKING:
    from tests.cli.conftest import Paths, Run

LINES = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(3)]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", ["tinsmith", "tinsmith.cli"])
def test_the_version_is_an_option_too(module: str) -> None:
    shown = python("-m", module, "--version")
    assert (shown.returncode, shown.stdout) == (0, f"tinsmith {tinsmith.__version__}\n")


def test_a_plain_install_says_what_the_command_needs_in_words_that_pip_understands(
    tmp_path: Path,
) -> None:
    """It puts a `tinsmith` on the path, and there is no 'tinsmith[cli]' that pip could find."""
    info = tmp_path / "tinsmith-1.dist-info"
    info.mkdir()
    needs = [line for line in importlib.metadata.requires("tinsmith") or [] if "'cli'" in line]
    lines = ["Metadata-Version: 2.4", "Name: tinsmith", "Version: 1"]
    (info / "METADATA").write_text("\n".join(lines + [f"Requires-Dist: {each}" for each in needs]))
    source = Path(tinsmith.__file__).parents[1]
    told = subprocess.run(
        # -S: nothing but the standard library and these two folders.
        [sys.executable, "-S", "-m", "tinsmith", "--help"],
        env={"PYTHONPATH": f"{tmp_path}:{source}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 1
    assert len(told.stderr.splitlines()) == 1, told.stderr
    assert "extra 'cli'" in told.stderr and "pip install 'click>=" in told.stderr


def test_a_missing_package_is_named_with_a_line_that_installs_it() -> None:
    with pytest.raises(CommandError) as caught, explained():
        raise ModuleNotFoundError("No module named 'datasets'", name="datasets")
    assert caught.value.details == "Install it with: pip install datasets"


def test_no_message_names_a_package_that_is_not_published() -> None:
    source = Path(tinsmith.__file__).parent
    for file in source.rglob("*.py"):
        assert "pip install 'tinsmith" not in file.read_text(), file


def test_sessions_are_listed(run: Run, run_json: Any, paths: Paths) -> None:
    assert paths.session_id in run_json("session", "list", "--limit", "0")["sessions"]
    assert paths.session_id in run("session", "list").stdout
    assert len(run_json("session", "list", "--limit", "1")["sessions"]) == 1


def test_a_deletion_that_deletes_nothing_fails(run: Run, paths: Paths) -> None:
    missing = f"tinker://{paths.run_id}/weights/missing"
    for form in ("table", "json"):
        deleted = run("--format", form, "checkpoint", "delete", "-y", missing)
        assert deleted.exit_code == 1
        assert "missing" in deleted.stdout


def test_an_error_shows_the_reason_without_braces(run: Run) -> None:
    shown = run("checkpoint", "publish", "tinker://nobody/weights/x")
    assert shown.exit_code == 1
    assert "nobody" in shown.stderr and "{" not in shown.stderr


@pytest.mark.parametrize("columns", [40, 80, 120, 400])
def test_ids_are_whole_on_a_terminal_of_any_width(columns: int) -> None:
    """A path that is cut off cannot be copied."""
    path = "tinker://0b7e1c52-93c7-4e51-9a56-1b0f1f7f4a11:train:0/sampler_weights/step-000100"
    code = (
        "from tinsmith.cli.output import Output, Table\n"
        "names = ['Checkpoint ID', 'Type', 'Size', 'Public', 'Created', 'Path']\n"
        f"row = ['sampler_weights/step-000100', 'sampler', '1 MB', 'No', 'just now', {path!r}]\n"
        "Output().show({}, Table(names, [row], 'title'))\n"
        f"Output().show({{}}, Table(['Property', 'Value'], [['Path', {path!r}]]))\n"
    )
    parent, child = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code], stdout=child, env=environment, timeout=60)
    os.close(child)
    shown = b""
    try:
        while piece := os.read(parent, 65536):
            shown += piece
    except OSError:  # a terminal whose other end is closed
        pass
    os.close(parent)
    assert done.returncode == 0
    text = shown.decode()
    assert text.count(path) == 2, text
    assert "sampler_weights/step-000100" in text.replace(path, "")


def test_a_model_that_the_server_does_not_have_is_noticed_before_its_tokenizer_is_looked_for(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    refused = run("train", "sft", str(file), "--model", "tinsmith/fak")
    assert refused.exit_code == 1
    assert "'tinsmith/fak'" in refused.stderr and "tinsmith/fake" in refused.stderr


def test_help_in_a_chat_is_not_sent_to_the_model(run: Run, byte_tokenizer: Path) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "4", "--json")
    talked = run("chat", "tinsmith/fake", *options, stdin="/help\nhello\n/exit\n")
    assert talked.exit_code == 0, talked.output
    assert [json.loads(line)["user"] for line in talked.stdout.splitlines()] == ["hello"]
    assert "/reset" in talked.stderr
