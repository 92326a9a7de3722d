"""Our commands beside the official `tinker` of the same names, against one server.

Options and arguments are read from both trees; then the same lines are typed to both, good and bad.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click
import pytest
from tinker.cli.__main__ import main_cli

from tinsmith.cli.__main__ import cli

if TYPE_CHECKING:
    from tests.cli.conftest import Official, Paths, Run


def leaves(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


THEIRS = dict(leaves(main_cli))
OURS = dict(leaves(cli))


def described(command: click.Command) -> dict[str, dict[str, Any]]:
    """Each parameter as far as a user of the command can tell."""
    found = {}
    for each in command.params:
        facts = each.to_info_dict()
        # A default that is not given, and one of None, are the same to the user.
        default = facts["default"] if isinstance(facts["default"], int | str) else None
        name = " ".join(sorted(each.opts)) if isinstance(each, click.Option) else each.name
        assert name is not None
        found[name] = {
            "default": default or None,
            "nargs": facts["nargs"],
            "multiple": facts["multiple"],
            "required": facts["required"],
            "is_flag": facts.get("is_flag"),
            "type": facts["type"]["param_type"],
        }
    return found


BEYOND = {"auth login": ["address"], "auth logout": ["address"]}


@pytest.mark.parametrize("name", THEIRS)
def test_every_official_command_is_there_with_its_options(name: str) -> None:
    ours, theirs = described(OURS[name]), described(THEIRS[name])
    # What ours have beyond theirs.
    for extra in ("--json", *BEYOND.get(name, ())):
        ours.pop(extra)
    if name == "run list":
        # Theirs is filled in later, with the columns that are ours from the start.
        assert ours["--columns -c"]["default"] == "id,model,lora,updated,status"
        ours["--columns -c"]["default"] = None
    assert ours == theirs


def hours(first: int, last: int) -> tuple[str, str]:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    begin, end = now + timedelta(hours=first), now + timedelta(hours=last)
    return f"{begin:%Y-%m-%dT%H:00:00Z}", f"{end:%Y-%m-%dT%H:00:00Z}"


Line = Callable[["Paths"], tuple[str, ...]]

GOOD: dict[str, Line] = {
    "run list all": lambda p: ("run", "list", "--limit", "0"),
    "run list negative": lambda p: ("run", "list", "--limit", "-1"),
    "run list no columns": lambda p: ("run", "list", "--columns", ""),
    "run info": lambda p: ("run", "info", p.run_id),
    "checkpoint list all": lambda p: ("checkpoint", "list", "--limit", "0"),
    "checkpoint list run": lambda p: ("checkpoint", "list", "--run-id", p.run_id),
    "checkpoint info": lambda p: ("checkpoint", "info", p.state),
    "checkpoint publish": lambda p: ("checkpoint", "publish", p.external),
    "checkpoint unpublish": lambda p: ("checkpoint", "unpublish", p.external),
    "checkpoint set-ttl": lambda p: ("checkpoint", "set-ttl", p.external, "--ttl", "7200"),
    "checkpoint set-ttl remove": lambda p: ("checkpoint", "set-ttl", p.external, "--remove"),
    "checkpoint delete none": lambda p: (
        *("checkpoint", "delete", "-y", "--run-id", p.run_id),
        *("--type", "weights", "--before", "2020-01-01"),
    ),
    "model list": lambda p: ("model", "list"),
    "model list some": lambda p: ("model", "list", "FAKE"),
    "billing usage": lambda p: ("billing", "usage", *hours(-1, 1)),
    "billing usage csv": lambda p: ("billing", "usage", *hours(-1, 1), "--csv", "-"),
    "billing sessions csv": lambda p: ("billing", "usage", *hours(-1, 1), "--sessions-csv", "-"),
    "billing storage": lambda p: ("billing", "checkpoint-storage"),
    "billing storage project": lambda p: ("billing", "checkpoint-storage", "--project-id", "x"),
    "delete, answered no": lambda p: ("checkpoint", "delete", p.state),
    "delete run, answered no": lambda p: ("checkpoint", "delete", "--run-id", p.run_id),
}

BAD: dict[str, Line] = {
    "checkpoint list unknown run": lambda p: ("checkpoint", "list", "--run-id", "nope"),
    "run info unknown": lambda p: ("run", "info", "nope"),
    "run info nothing": lambda p: ("run", "info"),
    "run list columns": lambda p: ("run", "list", "--columns", "id,nothing"),
    "run list limit": lambda p: ("run", "list", "--limit", "many"),
    "checkpoint info missing": lambda p: ("checkpoint", "info", _missing(p)),
    "checkpoint info word": lambda p: ("checkpoint", "info", "x"),
    "checkpoint info path": lambda p: ("checkpoint", "info", "tinker://nobody/b"),
    "publish missing": lambda p: ("checkpoint", "publish", _missing(p)),
    "publish word": lambda p: ("checkpoint", "publish", "x"),
    "publish path": lambda p: ("checkpoint", "publish", "tinker://nobody/b"),
    "unpublish missing": lambda p: ("checkpoint", "unpublish", _missing(p)),
    "set-ttl missing": lambda p: ("checkpoint", "set-ttl", _missing(p), "--ttl", "7200"),
    "set-ttl negative": lambda p: ("checkpoint", "set-ttl", p.state, "--ttl", "-5"),
    "set-ttl nothing": lambda p: ("checkpoint", "set-ttl", p.state),
    "set-ttl both": lambda p: ("checkpoint", "set-ttl", p.state, "--ttl", "9", "--remove"),
    "set-ttl word": lambda p: ("checkpoint", "set-ttl", p.state, "--ttl", "x"),
    "delete nothing": lambda p: ("checkpoint", "delete"),
    "delete word": lambda p: ("checkpoint", "delete", "-y", "x"),
    "delete filter": lambda p: ("checkpoint", "delete", "--type", "weights", p.state),
    "delete both": lambda p: ("checkpoint", "delete", "--run-id", p.run_id, p.state),
    "delete type": lambda p: ("checkpoint", "delete", "--run-id", p.run_id, "--type", "bad"),
    "delete date": lambda p: ("checkpoint", "delete", "--run-id", p.run_id, "--before", "bad"),
    "delete unknown run": lambda p: ("checkpoint", "delete", "-y", "--run-id", "nope"),
    "download missing": lambda p: ("checkpoint", "download", _missing(p)),
    "download sampler": lambda p: ("checkpoint", "download", p.sampler),
    "download word": lambda p: ("checkpoint", "download", "x"),
    "push-hf sampler": lambda p: ("checkpoint", "push-hf", p.sampler),
    "push-hf word": lambda p: ("checkpoint", "push-hf", "x"),
    "trace unknown": lambda p: ("session", "export-trace", "nope"),
    "usage words": lambda p: ("billing", "usage", "a", "b"),
    "usage backwards": lambda p: ("billing", "usage", *hours(1, -1)),
    "no such command": lambda p: ("nothing",),
    "no such part": lambda p: ("run", "nothing"),
    "group alone": lambda p: ("run",),
    "no such format": lambda p: ("-f", "xml", "run", "list"),
    "no such option": lambda p: ("run", "list", "--colour"),
}

# Where the sentence is ours: theirs is the text of a Python exception, or knows no column `name`.
OWN_WORDS = {
    "run list columns",
    "checkpoint info path",
    "publish path",
    "download word",
    "push-hf word",
    "usage words",
}


def _missing(paths: Paths) -> str:
    return f"tinker://{paths.run_id}/weights/missing"


def first_error(text: str) -> str:
    line = next((line for line in text.splitlines() if line.startswith("Error: ")), "")
    return line.replace("Unexpected error occurred: ", "")


@pytest.mark.parametrize("case", GOOD)
def test_good_lines_have_the_official_exit_code_and_json(
    case: str, run: Run, official: Official, paths: Paths
) -> None:
    line = GOOD[case](paths)
    ours = run("-f", "json", *line, stdin="n\n")
    theirs = official("-f", "json", *line, stdin="n\n")
    assert (ours.exit_code, theirs.code) == (0, 0), ours.output + theirs.err
    # A terminal shows what was typed; only our test runner imitates that.
    shown = ours.stdout.replace("[y/N]: n\n", "[y/N]: ").replace("\r\n", "\n")
    wanted = theirs.out.replace("\r\n", "\n")
    assert _readable(shown) == _readable(wanted)


def _readable(text: str) -> Any:
    try:
        answer = json.loads(text)
        if isinstance(answer, dict):
            answer.pop("lora_seed", None)  # ours alone
        return answer
    except ValueError:
        return re.sub(r"\d+ (minute|second)s? ago|just now", "NOW", text)


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("form", ["table", "json"])
def test_bad_lines_have_the_official_exit_code_and_sentence(
    case: str, form: str, run: Run, official: Official, paths: Paths
) -> None:
    """S106"""
    line = BAD[case](paths)
    ours, theirs = run("-f", form, *line), official("-f", form, *line)
    assert ours.exit_code == theirs.code != 0
    assert ours.stdout == theirs.out
    assert "Traceback" not in ours.output
    if case not in OWN_WORDS:
        assert first_error(ours.stderr) == first_error(theirs.err)
    else:
        assert first_error(ours.stderr)


def test_a_download_is_the_official_one(
    run: Run, official: Official, paths: Paths, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    line = ("-f", "json", "checkpoint", "download", paths.external, "-o")
    answer = json.loads(run(*line, str(ours)).stdout)
    wanted = official(*line, str(theirs)).json
    assert answer == {**wanted, "destination": answer["destination"]}
    files = {
        path.relative_to(ours): path.read_bytes() for path in ours.rglob("*") if path.is_file()
    }
    assert files == {
        path.relative_to(theirs): path.read_bytes() for path in theirs.rglob("*") if path.is_file()
    }
    again = run(*line, str(ours)), official(*line, str(theirs))
    assert again[0].exit_code == again[1].code == 1
