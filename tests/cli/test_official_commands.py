"""The commands of the official `tinker`, in table and JSON form, beside the official ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Finished, Official, Paths, Run


def drawn_cells(official: Finished) -> list[list[str]]:
    """Rows of a table that the official command draws, header first."""
    lines = [line for line in official.out.splitlines() if line[:1] in "┃│"]
    return [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]


def without_times(text: str) -> str:
    """Relative times differ by the moment of asking."""
    return re.sub(r"\d+ (minute|second)s? ago|just now", "NOW", text)


LISTS = [
    ("run", "list"),
    ("run", "list", "--columns", "id,owner,checkpoint,checkpoint_time"),
    ("checkpoint", "list"),
    ("checkpoint", "list", "--limit", "1"),
    ("model", "list"),
    ("billing", "checkpoint-storage"),
]


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_lists_have_the_rows_and_the_json_of_the_official_command(
    command: tuple[str, ...], run: Run, run_json: Any, official: Official, paths: Paths
) -> None:
    """S104: the same columns, rows and JSON."""
    ours, theirs = run(*command), official(*command)
    assert (ours.exit_code, theirs.code) == (0, 0), ours.output + theirs.err
    wanted = drawn_cells(theirs)
    lines = ours.stdout.splitlines()
    table = "\n".join(lines[-len(wanted) :])
    have = [re.split(r" {2,}", line.strip()) for line in without_times(table).splitlines()]
    assert have == [[without_times(cell) for cell in row if cell] for row in wanted]
    title = lines[: -len(wanted)]
    assert " ".join(title) in theirs.out
    assert run_json(*command) == official("--format", "json", *command).json


def test_details_have_the_lines_and_the_json_of_the_official_command(
    run: Run, run_json: Any, official: Official, paths: Paths
) -> None:
    for command in (("run", "info", paths.run_id), ("checkpoint", "info", paths.state)):
        ours, theirs = run(*command), official(*command)
        assert (ours.exit_code, theirs.code) == (0, 0), ours.output + theirs.err
        title, *lines = without_times(ours.stdout).splitlines()
        assert title in theirs.out
        have = [re.split(r" {2,}", line.strip()) for line in lines]
        have = [row for row in have if row[0] != "LoRA Seed"]  # ours alone
        assert have == [
            [without_times(cell) for cell in row if cell] for row in drawn_cells(theirs)
        ]
        answer = run_json(*command)
        answer.pop("lora_seed", None)
        assert answer == official("--format", "json", *command).json


def test_checkpoints_of_a_run_are_listed_with_the_run(
    run: Run, run_json: Any, paths: Paths
) -> None:
    listed = run_json("checkpoint", "list", "--run-id", paths.run_id)
    assert listed["run_id"] == paths.run_id
    found = {each["tinker_path"] for each in listed["checkpoints"]}
    assert {paths.state, paths.sampler, paths.external} <= found
    assert f"for run {paths.run_id}" in run("checkpoint", "list", "--run-id", paths.run_id).stdout


MISTAKES = [
    (("run", "info", "no-such-run"), 1),
    (("run", "list", "--columns", "id,nothing"), 1),
    (("run", "list", "--limit", "many"), 2),
    (("checkpoint", "info", "not-a-path"), 1),
    (("checkpoint", "info", "tinker://nobody/b"), 1),
    (("checkpoint", "publish", "not-a-path"), 1),
    (("checkpoint", "set-ttl", "tinker://a/weights/b"), 1),
    (("checkpoint", "set-ttl", "tinker://a/weights/b", "--ttl", "9", "--remove"), 1),
    (("checkpoint", "delete"), 1),
    (("checkpoint", "delete", "--type", "weights", "tinker://a/weights/b"), 1),
    (("checkpoint", "download", "tinker://a/sampler_weights/b"), 1),
    (("checkpoint", "nothing"), 2),
    (("nothing",), 2),
]


@pytest.mark.parametrize(("command", "code"), MISTAKES, ids=lambda value: str(value))
def test_mistakes_end_in_one_sentence_and_the_official_exit_code(
    command: tuple[str, ...], code: int, run: Run
) -> None:
    """S106. The codes are those of the official command; `test_official_codes` compares some."""
    result = run(*command)
    assert result.exit_code == code, result.output
    assert "Error: " in result.stderr
    assert "Traceback" not in result.output


def test_official_codes(official: Official) -> None:
    """A sample of the list above, asked of the official command."""
    for command, code in (MISTAKES[0], MISTAKES[1], MISTAKES[2], MISTAKES[6]):
        assert official(*command).code == code


def test_a_wrong_key_is_one_line_with_advice(run: Run) -> None:
    """S106"""
    result = run("run", "list", env={"TINKER_API_KEY": "tml-wrong"})
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Authentication failed\nPlease check your API key")


def test_checkpoints_are_published_expired_and_deleted(
    run: Run, run_json: Any, paths: Paths, official: Official
) -> None:
    def checkpoint() -> Any:
        return run_json("checkpoint", "info", paths.sampler)

    assert checkpoint()["public"] is False
    assert run("checkpoint", "publish", paths.sampler).output == ""
    assert checkpoint()["public"] is True
    assert run("checkpoint", "unpublish", paths.sampler).exit_code == 0
    assert checkpoint()["public"] is False
    assert run("checkpoint", "set-ttl", paths.sampler, "--ttl", "7200").exit_code == 0
    assert checkpoint()["expires_at"] is not None
    assert run("checkpoint", "set-ttl", paths.sampler, "--remove").exit_code == 0
    assert checkpoint()["expires_at"] is None
    refused = run("checkpoint", "delete", paths.sampler, stdin="n\n")
    assert refused.exit_code == 0
    assert "Deletion cancelled." in refused.stdout
    missing = f"tinker://{paths.run_id}/sampler_weights/missing"
    deleted = run("--format", "json", "checkpoint", "delete", "-y", paths.sampler, missing)
    assert deleted.exit_code == 0
    answer = json.loads(deleted.stdout)
    assert answer["deleted_count"] == 1
    assert [each["tinker_path"] for each in answer["failed"]] == [missing]
    gone = run("checkpoint", "info", paths.sampler)
    assert (gone.exit_code, gone.stderr) == (1, f"Error: Checkpoint not found: {paths.sampler}\n")
    filtered = run("checkpoint", "delete", "--run-id", paths.run_id, "--before", "2020-01-01")
    assert "No checkpoints found" in filtered.stdout


@pytest.mark.parametrize("kind", ["state", "external"])
def test_a_checkpoint_is_downloaded_as_an_adapter(
    kind: str, run: Run, run_json: Any, paths: Paths, tmp_path: Path
) -> None:
    path = getattr(paths, kind)
    answer = run_json("checkpoint", "download", path, "-o", str(tmp_path))
    folder = Path(answer["destination"])
    assert folder.parent == tmp_path
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) == answer["file_size_bytes"] > 0
    again = run("checkpoint", "download", path, "-o", str(tmp_path))
    assert again.exit_code == 1
    assert "Target directory already exists" in again.stderr
    forced = run("checkpoint", "download", path, "-o", str(tmp_path), "--force")
    assert forced.exit_code == 0, forced.output
    assert f"Downloaded to    {folder}" in forced.stdout


def test_pushing_to_the_hub_needs_an_account(run: Run, paths: Paths, tmp_path: Path) -> None:
    nobody = {"HF_HOME": str(tmp_path), "HF_TOKEN": "", "HF_HUB_OFFLINE": "1"}
    result = run("checkpoint", "push-hf", paths.external, env=nobody)
    assert result.exit_code == 1
    assert "Error: Not logged in" in result.stderr


def test_a_session_trace_is_exported(
    run: Run, run_json: Any, official: Official, paths: Paths, tmp_path: Path
) -> None:
    url = run("session", "export-trace", paths.session_id, "--url-only")
    assert url.stdout.startswith("http")
    target = tmp_path / "deep" / "trace.pftrace"
    answer = run_json("session", "export-trace", paths.session_id, "-o", str(target))
    theirs = official(
        *("-f", "json", "session", "export-trace", paths.session_id),
        *("-o", str(tmp_path / "theirs")),
    )
    assert answer.keys() == theirs.json.keys()
    assert target.stat().st_size == answer["file_size_bytes"]


def test_usage_is_shown_as_table_json_and_csv(
    run: Run, run_json: Any, official: Official, paths: Paths, tmp_path: Path
) -> None:
    from datetime import UTC, datetime, timedelta

    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [f"{hour + timedelta(hours=n):%Y-%m-%dT%H:00:00Z}" for n in (-1, 1)]
    command = ("billing", "usage", *window)
    answer = run_json(*command)
    assert answer == official("-f", "json", *command).json
    assert any(row["event_info"]["type"] == "training" for row in answer["data"])
    assert "null" in run(*command).stdout
    assert run(*command, "--csv", "-").stdout.startswith("bucket_start,")
    assert run(*command, "--sessions-csv", str(tmp_path / "s.csv")).exit_code == 0
    assert (tmp_path / "s.csv").read_text().startswith("session_id,user_metadata")


def test_version_is_one_line(run: Run, run_json: Any) -> None:
    assert re.fullmatch(r"tinsmith \d+\.\d+\.\d+\n", run("version").stdout)
    assert run_json("version")["tinsmith"]


def test_json_can_be_asked_for_in_three_ways(run: Run, paths: Paths) -> None:
    outputs = {
        run("-f", "json", "run", "list").stdout,
        run("--json", "run", "list").stdout,
        run("run", "list", "--json").stdout,
    }
    assert len(outputs) == 1
    assert "runs" in json.loads(outputs.pop())
