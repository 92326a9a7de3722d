"""`tinsmith eval` and `tinsmith data preview` against a server on the fake engine."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.cli.training import evaluation
from tinsmith.cli.training.rewards import Case
from tinsmith.client import tokenizers
from tinsmith.client.service import ServiceClient

if TYPE_CHECKING:
    from tests.cli.conftest import Run
    from tests.support.server_process import ServerProcess

FAKE = "tinsmith/fake"
CHAT = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho!"}]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{n}:", "answer": n}) for n in range(4)))
    return file


def test_answers_are_scored_by_checks_and_a_judge(
    run: Run, run_json: Any, prompts: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "6")
    scored = tmp_path / "scored.jsonl"
    facts = run_json(
        *("eval", FAKE, str(prompts), *options, "--check", "length:0..", "--check", "exact:no"),
        *("--judge", FAKE, "-o", str(scored)),
    )
    assert facts["prompts"] == 4
    assert facts["scores"]["length:0.."] == {"mean": 1.0, "standard_error": 0.0}
    assert facts["scores"]["exact:no"]["mean"] == 0.0
    assert 0 < facts["scores"]["judge"]["mean"] < 1
    lines = [json.loads(line) for line in scored.read_text("utf-8").splitlines()]
    assert [line["record"]["answer"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["scores"]["length:0.."] == 1.0
    limited = run("eval", FAKE, str(prompts), *options, "--check", "length:0..", "--limit", "2")
    assert limited.exit_code == 0, limited.output
    assert "2 answers of tinsmith/fake" in limited.stdout and "1.000" in limited.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "Say how answers are scored"),
        (("--check", "exakt"), "no such check: 'exakt'"),
        (("--check", "exact", "--rubric", "Is it kind?"), "--rubric needs --judge"),
        (("--check", "contains:{missing}"), "no field 'missing'"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(
    run: Run, prompts: Path, byte_tokenizer: Path, options: tuple[str, ...], complaint: str
) -> None:
    refused = run("eval", FAKE, str(prompts), "--tokenizer", str(byte_tokenizer), *options)
    assert refused.exit_code == 1
    assert complaint in refused.stderr


def test_a_judge_that_learned_to_say_yes_says_yes(
    run_json: Any, server: ServerProcess, byte_tokenizer: Path, tmp_path: Path
) -> None:
    """The toy model knows only the last token before its verdict: a space."""
    file = tmp_path / "yes.jsonl"
    file.write_text(json.dumps({"prompt": "assistant: ", "completion": "Yes"}))
    trained = run_json(
        *("train", "sft", str(file), "--tokenizer", str(byte_tokenizer), "--held-out", "0"),
        *("--steps", "20", "--learning-rate", "0.02", "--samples", "0"),
    )
    tokenizer = tokenizers.load(str(byte_tokenizer))
    case = Case("2 + 2?", "4", {"answer": "4"})
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        opinions = [
            evaluation.Judge(sampler, tokenizer).opinions([case])[0]
            for sampler in (
                service.create_sampling_client(base_model=FAKE),
                service.create_sampling_client(model_path=trained["sampler_checkpoint"]),
            )
        ]
    assert opinions[1] > max(0.95, opinions[0])


# --- data preview -----------------------------------------------------------------------------


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    file = tmp_path / "talks.jsonl"
    lines: list[dict[str, Any]] = [{"messages": CHAT}, {"prompt": "ab", "completion": "c" * 50}]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_a_preview_shows_what_is_learned_token_by_token(
    run: Run, run_json: Any, talks: Path, byte_tokenizer: Path
) -> None:
    options = ("data", "preview", str(talks), "--tokenizer", str(byte_tokenizer))
    shown = run(*options, "-n", "1", "--max-length", "40")
    assert shown.exit_code == 0, shown.output
    assert "line 1, example" in shown.stdout
    assert "?|\n|a|s|s|i|s|t|a|n|t|:| |«H|o|!|<end>|\n»" in shown.stdout
    assert "2 sequences" in shown.stdout and "1 are over 40" in shown.stdout
    facts = run_json(*options)
    assert facts["learned_tokens"] == 5 + 51
    first = facts["shown"][0]
    assert "".join(first["texts"]) == "user: Hi?\nassistant: Ho!<end>\n"
    assert len(first["texts"]) == len(first["tokens"]) == len(first["weights"])


def test_a_preview_is_of_what_a_method_reads(
    run_json: Any, run: Run, tmp_path: Path, byte_tokenizer: Path
) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "ab", "chosen": "c", "rejected": "d"}))
    options = ("data", "preview", str(file), "--tokenizer", str(byte_tokenizer))
    kinds = [each["kind"] for each in run_json(*options, "--method", "dpo")["shown"]]
    assert kinds == ["chosen", "rejected"]
    assert run_json(*options, "--method", "rl")["learned_tokens"] == 0
    mistaken = run(*options)
    assert mistaken.exit_code == 1
    assert "line 1, completion" in mistaken.stderr


def test_a_preview_is_in_colours_on_a_terminal(talks: Path, byte_tokenizer: Path) -> None:
    parent, child = pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "tinsmith.cli", "data", "preview", str(talks), "-n", "1"]
    process = subprocess.Popen(
        [*command, "--tokenizer", str(byte_tokenizer)], stdout=child, env=environment
    )
    os.close(child)
    shown = b""
    try:
        while piece := os.read(parent, 65536):
            shown += piece
    except OSError:  # a terminal whose other end is closed
        pass
    os.close(parent)
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "\x1b[30;42mH" in text or "\x1b[30;102mH" in text, "what is learned is on green"
    assert "\x1b[30;42mu" not in text and "\x1b[30;102mu" not in text
