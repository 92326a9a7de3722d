"""Every command shows its result to people and, with --json, to programs.

The commands are read from the tree, so one without a case here fails. What each of them does in
detail is tested beside this file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

from chaos import tiny_model
from tests.support import server_process
from tests.support.child import Child
from tests.support.server_process import ServerProcess
from tinsmith.cli.__main__ import cli
from tinsmith.client.service import ServiceClient

if TYPE_CHECKING:
    from tests.cli.conftest import Paths, Run

FAKE = "tinsmith/fake"


def leaves(group: click.Group, path: str = "") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, f"{path}{name} ")
        else:
            yield f"{path}{name}"


@dataclass(frozen=True)
class World:
    """What a case may use; `tmp_path` is its own."""

    server: ServerProcess
    paths: Paths
    tmp_path: Path
    tokenizer: Path
    run: Run

    def new_checkpoint(self) -> str:
        with ServiceClient(base_url=self.server.url, api_key=self.server.key) as service:
            training = service.create_lora_training_client(FAKE, rank=8)
            return training.save_weights_for_sampler("spare").result().path

    @property
    def data_dir(self) -> tuple[str, str]:
        return "--data-dir", str(self.server.data_dir)

    @property
    def credentials(self) -> dict[str, str]:
        file = str(self.tmp_path / "keys.json")
        return {"TINSMITH_CREDENTIALS_FILE": file, "TINKER_API_KEY": ""}


@dataclass(frozen=True)
class Call:
    arguments: tuple[str, ...]
    shows: str
    """A pattern that the table has."""
    has: tuple[str, ...]
    """Keys of the JSON object; none for a command that is silent."""
    env: dict[str, str] = field(default_factory=dict)
    stdin: str | None = None


CASES: dict[str, Callable[[World], Call]] = {
    "auth login": lambda w: Call(
        (), "Stored API key", ("key_id", "name"), w.credentials, f"{w.server.key}\n"
    ),
    "auth logout": lambda w: _logged_in(
        w, Call((), "still active", ("key_id", "active"), w.credentials)
    ),
    "auth status": lambda w: Call((), "accessible: yes", ("credentials", "accessible")),
    "backup create": lambda w: Call(
        (str(w.tmp_path / "b"), *w.data_dir), "Backed up to .* files", ("files", "bytes")
    ),
    "backup restore": lambda w: Call(
        (_backup(w), "--data-dir", str(w.tmp_path / "new")), "Restored to ", ("made_at", "files")
    ),
    "backup verify": lambda w: Call((_backup(w),), "The backup is whole: ", ("release", "files")),
    "billing checkpoint-storage": lambda w: Call(
        (), "Current checkpoint storage", ("effective_rate_usd_per_gigabyte_month", "data")
    ),
    "billing usage": lambda w: Call(_this_hour(), "hourly usage", ("data", "sessions")),
    "chat": lambda w: Call(
        (FAKE, "--tokenizer", str(w.tokenizer), "--max-tokens", "5"),
        ".",
        ("user", "assistant"),
        stdin="hello\n",
    ),
    "checkpoint delete": lambda w: Call(
        ("-y", w.new_checkpoint()), r"Deleted 1 checkpoint", ("deleted_count", "failed")
    ),
    "checkpoint download": lambda w: Call(
        (w.paths.state, "-o", str(w.tmp_path)), "Downloaded to", ("destination", "file_size_bytes")
    ),
    "checkpoint info": lambda w: Call(
        (w.paths.state,), "Tinker Path +tinker://", ("tinker_path", "lora_rank")
    ),
    "checkpoint list": lambda w: Call((), "Checkpoint ID +Type", ("checkpoints",)),
    "checkpoint publish": lambda w: Call((w.new_checkpoint(),), "^$", ()),
    "checkpoint set-ttl": lambda w: Call((w.new_checkpoint(), "--ttl", "7200"), "^$", ()),
    "checkpoint unpublish": lambda w: Call((w.new_checkpoint(),), "^$", ()),
    "cluster drain": lambda w: Call(
        ("1", "--data-dir", str(w.tmp_path)), "Slot 1 is being emptied", ("slot", "is_draining")
    ),
    "cluster resume": lambda w: Call(
        ("1", "--data-dir", str(w.tmp_path)), "Slot 1 is in use", ("slot", "is_draining")
    ),
    "cluster status": lambda w: Call((), r"^ *0 +both .* up ", ("slots",)),
    "data preview": lambda w: Call(
        (_prompts(w), "--method", "rl", "--tokenizer", str(w.tokenizer)),
        "1 sequences, 2 tokens",
        ("sequences", "learned_tokens", "shown"),
    ),
    "doctor": lambda w: Call((), r"server +ok", ("ok", "findings")),
    "eval": lambda w: Call(
        (FAKE, _prompts(w), "--check", "length:0..", "--tokenizer", str(w.tokenizer)),
        r"length:0\.\. +1\.000",
        ("prompts", "scores"),
    ),
    "export": lambda w: Call(
        (w.paths.state, "-o", str(w.tmp_path / "out")), "PEFT adapter", ("kind", "destination")
    ),
    "key create": lambda w: Call(("x", *w.data_dir), "^tml-", ("key", "key_id", "name")),
    "key list": lambda w: Call(w.data_dir, "Key ID +Name", ("keys",)),
    "key revoke": lambda w: Call((_new_key(w), *w.data_dir), r"Revoked key \d+", ("revoked",)),
    "model check": lambda w: Call((str(_tiny_model(w)),), "Runs on +our own decoder", ("runs_on",)),
    "model list": lambda w: Call((), f"{FAKE} +4096", ("models",)),
    "model move": lambda w: Call(
        (w.paths.run_id, "0"), "goes on in slot 0", ("run", "before", "slot")
    ),
    "run info": lambda w: Call((w.paths.run_id,), "Base Model +tin", ("training_run_id",)),
    "run list": lambda w: Call((), r"\d+ training run", ("runs",)),
    "run show": lambda w: Call((w.paths.run_id,), "Loss per token: ", ("run", "curve", "waiting")),
    "sample": lambda w: Call(
        (FAKE, "hi", "--tokenizer", str(w.tokenizer), "--max-tokens", "5", "--temperature", "0"),
        ".",
        ("samples", "prompt", "model"),
    ),
    "session export-trace": lambda w: Call(
        (w.paths.session_id, "-o", str(w.tmp_path / "trace")), "Saved to", ("destination",)
    ),
    "session list": lambda w: Call(("--limit", "0"), w.paths.session_id, ("sessions",)),
    "storage adopt": lambda w: Call(
        ("--yes", "--data-dir", str(w.tmp_path)), "Bound", ("known", "missing")
    ),
    "storage check": lambda w: Call(w.data_dir, "are there and whole", ("known", "faults")),
    "storage repair": lambda w: Call(
        ("--data-dir", str(w.tmp_path)), "are there and whole", ("known", "faults")
    ),
    "storage restore": lambda w: Call(
        (_deleted(w), *w.data_dir), "Restored tinker://", ("restored",)
    ),
    "storage show": lambda w: Call(w.data_dir, r"checkpoints +owner +\d", ("storage",)),
    "storage trash": lambda w: Call(w.data_dir, "ID +Moved|is empty", ("trash",)),
    "top": lambda w: Call(("--interval", "0.1"), "Engine +up", ("engine", "queued_operations")),
    "train distill": lambda w: _training(
        w, {"prompt": "ab"}, "kl", "--teacher", FAKE, "--max-tokens", "4"
    ),
    "train dpo": lambda w: _training(
        w, {"prompt": "ab", "chosen": "c", "rejected": "d"}, "margin", "--beta", "1"
    ),
    "train rl": lambda w: _training(
        w, {"prompt": "ab"}, "reward", "--check", "length:..9", "--max-tokens", "4"
    ),
    "train sft": lambda w: _training(w, {"prompt": "ab", "completion": "cd"}, "loss"),
    "version": lambda w: Call((), r"^tinsmith \d", ("tinsmith", "protocol")),
}

ELSEWHERE = {
    "auth whoami": "test_every_command.py::test_whoami_in_both_forms",
    "checkpoint import": "test_checkpoint_import.py::test_the_command_in_both_forms",
    "checkpoint push-hf": "test_hub.py::test_a_checkpoint_is_pushed_with_a_card",
    "demo": "test_demo.py::test_the_demo_tells_people_what_it_did_and_what_to_do_next",
    "engine": "test_every_command.py::test_an_engine_without_credentials_says_where_they_are",
    "serve": "test_every_command.py::test_serve_in_both_forms",
}
"""Commands that need more than a call: where they are tested in both forms."""


def _logged_in(world: World, call: Call) -> Call:
    done = world.run("auth", "login", env=call.env, stdin=f"{world.server.key}\n")
    assert done.exit_code == 0, done.output
    return call


def _this_hour() -> tuple[str, str]:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    first, last = hour - timedelta(hours=1), hour + timedelta(hours=1)
    return f"{first:%Y-%m-%dT%H:00:00Z}", f"{last:%Y-%m-%dT%H:00:00Z}"


def _deleted(world: World) -> str:
    """The trash's id of a checkpoint that was just deleted."""
    world.run("checkpoint", "delete", "--yes", world.new_checkpoint())
    listed = world.run("--json", "storage", "trash", *world.data_dir)
    return str(json.loads(listed.stdout)["trash"][0]["id"])


def _backup(world: World) -> str:
    folder = str(world.tmp_path / "backup")
    assert world.run("backup", "create", folder, *world.data_dir).exit_code == 0
    return folder


def _new_key(world: World) -> str:
    made = world.run("--json", "key", "create", "spare", *world.data_dir)
    return str(json.loads(made.stdout)["key_id"])


def _tiny_model(world: World) -> Path:
    tiny_model.build(world.tmp_path / "model")
    return world.tmp_path / "model"


def _prompts(world: World) -> str:
    file = world.tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab"}\n')
    return str(file)


def _training(world: World, record: dict[str, str], metric: str, *options: str) -> Call:
    file = world.tmp_path / "data.jsonl"
    file.write_text(f"{json.dumps(record)}\n" * 4)
    arguments = (str(file), "--steps", "2", "--tokenizer", str(world.tokenizer), *options)
    return Call(arguments, rf"^{metric} +\S", ("checkpoint", "steps", metric))


def test_every_command_has_a_case() -> None:
    """S104"""
    assert sorted(leaves(cli)) == sorted([*CASES, *ELSEWHERE])
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in Path(__file__).with_name(file).read_text("utf-8")


@pytest.mark.parametrize("command", CASES)
def test_a_command_in_both_forms(
    command: str,
    server: ServerProcess,
    paths: Paths,
    byte_tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run: Run,
) -> None:
    """S104"""

    def invoke(*flags: str) -> tuple[Call, Any]:
        world = World(server, paths, tmp_path_factory.mktemp("world"), byte_tokenizer, run)
        call = CASES[command](world)
        result = run(*command.split(), *call.arguments, *flags, env=call.env, stdin=call.stdin)
        assert result.exit_code == 0, result.output
        return call, result

    call, table = invoke()
    assert re.search(call.shows, table.stdout, re.MULTILINE), table.stdout
    call, result = invoke("--json")
    if call.has:
        assert set(call.has) <= json.loads(result.stdout).keys()
    else:
        assert result.stdout == ""


def test_whoami_in_both_forms(run: Run, tmp_path: Path) -> None:
    """Only a server with tokens knows."""
    with server_process.serving(tmp_path, "--set", "pjwt-auth-enabled=true") as server:
        table = run("auth", "whoami", env=server.environment)
        assert table.exit_code == 0, table.output
        assert re.search(r"^Organization +\S", table.stdout, re.MULTILINE)
        shown = json.loads(run("auth", "whoami", "--json", env=server.environment).stdout)
        assert {"user_urn", "org_urn", "email"} <= shown.keys()


@pytest.mark.parametrize("form", ["table", "json"])
def test_serve_in_both_forms(form: str, tmp_path: Path) -> None:
    child = Child(
        [
            *(sys.executable, "-m", "tinsmith.cli", "--format", form, "serve", "--engine", "fake"),
            *("--port", "0", "--data-dir", str(tmp_path)),
        ],
        env=server_process.clean_environment(),
    )
    try:
        said = "\n".join(child.out.take(4)) + "\n"
    finally:
        child.process.terminate()
        rest, errors = child.finish(30)
    assert child.process.returncode == 0, errors
    if form == "json":
        answer = json.loads(said + rest)
        assert answer["base_url"].startswith("http://127.0.0.1:")
        assert answer["api_key"].startswith("tml-")
    else:
        assert re.search(
            r"^export TINKER_BASE_URL=http://\S+\nexport TINKER_API_KEY=tml-", said, re.M
        )


def said_by_serve(folder: Path, num_lines: int, *options: str) -> tuple[str, str]:
    child = Child(
        [
            *(sys.executable, "-m", "tinsmith.cli", "serve", "--engine", "fake", "--port", "0"),
            *("--data-dir", str(folder), *options),
        ],
        env=server_process.clean_environment(),
    )
    try:
        said = "\n".join(child.out.take(num_lines))
        shown = "\n".join(child.err.take(1))
    finally:
        child.process.terminate()
        _, errors = child.finish(30)
    return said, shown + errors


def test_serve_names_its_models_and_a_later_start_says_where_keys_come_from(tmp_path: Path) -> None:
    first, shown = said_by_serve(tmp_path, 4)
    assert "export TINKER_API_KEY=tml-" in first
    assert "Serves tinsmith/fake (4,096 tokens) on no device: the fake engine" in shown
    second, _ = said_by_serve(tmp_path, 3)
    assert "TINKER_API_KEY" not in second
    assert f"tinsmith key create --data-dir {tmp_path}" in second


def test_an_engine_without_credentials_says_where_they_are(run: Run, tmp_path: Path) -> None:
    """What it does with them is in tests/engine/remote."""
    file = tmp_path / "slot-0.json"
    file.write_text("{}")
    refused = run("engine", "--credentials", str(file))
    assert refused.exit_code == 1
    assert "the server writes them to engines/slot-NUMBER.json" in refused.output


def test_serve_without_authentication_prints_exports_that_work(tmp_path: Path) -> None:
    said, _ = said_by_serve(tmp_path, 4, "--no-auth")
    assert "export TINKER_API_KEY=tml-none" in said
    assert "any key will do" in said
