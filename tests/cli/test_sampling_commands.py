"""`tinsmith sample`, `chat` and `train sft` against a server on the fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from tinsmith.cli.__main__ import cli
from tinsmith.cli.training import conversation, training_data
from tinsmith.cli.training.supervised import METRICS_FILE, RUN_FILE
from tinsmith.client import tokenizers

if TYPE_CHECKING:
    from tests.cli.conftest import Paths, Run, Trained

FAKE = "tinsmith/fake"
CHAT = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho!"}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "talks.jsonl"
    lines: list[dict[str, Any]] = [{"messages": CHAT}] * 7
    lines += [{"prompt": "ab", "completion": "cd"}] * 3
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_samples_come_as_text_and_as_json(run: Run, run_json: Any, byte_tokenizer: Path) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "5", "--seed", "3")
    result = run("sample", FAKE, "hello", *options)
    assert result.exit_code == 0, result.output
    answer = run_json("sample", FAKE, "hello", "-n", "3", *options)
    assert answer["prompt"] == "hello"
    assert len(answer["samples"]) == 3
    first = answer["samples"][0]
    assert len(first["tokens"]) == len(first["logprobs"]) <= 5
    assert first["stop_reason"] in ("stop", "length")
    assert result.stdout.rstrip("\n") == first["text"].rstrip("\n")
    assert "--- 2 ---" in run("sample", FAKE, "hello", "-n", "2", *options).stdout


def test_a_prompt_may_come_from_a_file_and_be_a_turn_of_a_chat(
    run_json: Any, run: Run, byte_tokenizer: Path, paths: Paths
) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "4", "--temperature", "0")
    piped = run_json("sample", paths.sampler, "--file", "-", *options, stdin="hello")
    given = run_json("sample", paths.sampler, "hello", *options)
    assert piped["samples"] == given["samples"]
    chat = run("sample", FAKE, "hello", "--chat", "--system", "Be brief.", *options)
    assert chat.exit_code == 0, chat.output
    both = run("sample", FAKE, "hello", "--file", "-", *options, stdin="x")
    assert both.exit_code == 1


def test_a_chat_keeps_its_history(
    run: Run, byte_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    render = conversation.prompt_tokens

    def counted(tokenizer: Any, messages: Any) -> list[int]:
        seen.append(len(messages))
        return render(tokenizer, messages)

    monkeypatch.setattr(conversation, "prompt_tokens", counted)
    result = run(
        *("chat", FAKE, "--tokenizer", str(byte_tokenizer), "--max-tokens", "20"),
        *("--system", "Be brief.", "--json"),
        stdin="one\ntwo\n/reset\nthree\n/exit\nnever\n",
    )
    assert result.exit_code == 0, result.output
    turns = [json.loads(line) for line in result.stdout.splitlines()]
    assert [turn["user"] for turn in turns] == ["one", "two", "three"]
    assert seen == [2, 4, 2]


def test_a_chat_with_saved_weights_prints_the_reply(
    run: Run, byte_tokenizer: Path, paths: Paths
) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--max-tokens", "20")
    result = run("chat", paths.sampler, *options, stdin="hello\n")
    assert result.exit_code == 0, result.output


def test_only_the_words_of_the_assistant_are_learned(byte_tokenizer: Path) -> None:
    tokenizer = tokenizers.load(str(byte_tokenizer))
    tokens, weights = conversation.chat_example(tokenizer, [*CHAT, *CHAT])
    text = "user: Hi?\nassistant: Ho!<end>\n"
    assert tokenizer.decode(tokens) == text + text
    learned = [token for token, weight in zip(tokens, weights, strict=True) if weight]
    assert tokenizer.decode(learned) == "Ho!<end>\nHo!<end>\n"


def test_training_on_a_file_learns_saves_and_reports(
    run: Run, run_json: Any, data: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--learning-rate", "0.05", "--batch-size", "3")
    folder = tmp_path / "run"
    facts = run_json("train", "sft", str(data), "--steps", "6", *options, "-o", str(folder))
    assert (facts["examples"], facts["held_out"], facts["steps"]) == (9, 1, 6)
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["eval_loss"] == facts["eval_loss"]
    assert run("checkpoint", "info", facts["checkpoint"]).exit_code == 0
    assert run("sample", facts["sampler_checkpoint"], "x", *options[:2]).exit_code == 0
    again = run("train", "sft", str(data), *options, "-o", str(folder))
    assert again.exit_code == 1
    assert "has a run in it" in again.stderr
    table = run("train", "sft", str(data), "--epochs", "0.5", *options)
    assert table.exit_code == 0, table.output
    assert "sampler_checkpoint" in table.stdout
    assert "Loss per token" in table.stdout


def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(
    run_json: Any, run: Run, data: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--steps", "6", "--save-every", "2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def losses(folder: Path) -> list[float]:
        lines = (folder / METRICS_FILE).read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    run_json("train", "sft", str(data), *options, "-o", str(whole))
    run_json("train", "sft", str(data), *options, "-o", str(broken))
    # As if it had been killed in step 6, after the checkpoint of step 4.
    saved = json.loads((broken / RUN_FILE).read_text())
    run_id = saved["progress"]["state_path"].split("/")[2]
    saved["progress"] = {
        "step": 4,
        "state_path": f"tinker://{run_id}/weights/step-000004",
        "sampler_path": None,
    }
    (broken / RUN_FILE).write_text(json.dumps(saved))
    facts = run_json("train", "sft", str(data), *options, "-o", str(broken), "--resume")
    assert facts["steps"] == 6
    assert losses(broken) == losses(whole)
    other = run("train", "sft", str(data), *options, "--rank", "4", "-o", str(broken), "--resume")
    assert other.exit_code == 1
    assert "rank was 32" in other.stderr


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "line 2"),
        ('{"prompt": "a"}', "'completion'"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "messages[0]"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "assistant"),
    ],
)
def test_a_mistake_in_the_data_is_reported_with_its_line(
    line: str, complaint: str, run: Run, tmp_path: Path, byte_tokenizer: Path
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n' + line)
    result = run("train", "sft", str(file), "--tokenizer", str(byte_tokenizer))
    assert result.exit_code == 1
    assert "line 2" in result.stderr
    assert complaint in result.stderr


def test_long_examples_are_counted_and_left_out(byte_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = tokenizers.load(str(byte_tokenizer))
    file = tmp_path / "data.jsonl"
    lines = [{"prompt": "a", "completion": "b" * size} for size in (1, 50)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    examples, num_too_long = training_data.read(file, tokenizer, 10)
    assert (len(examples), num_too_long) == (1, 1)


def test_every_example_is_seen_once_in_an_epoch() -> None:
    examples = [training_data.Example([i], [1.0]) for i in range(7)]
    batches = training_data.Batches(examples, 2, 1)
    seen = [e.tokens[0] for step in range(7) for e in batches.of_step(step)]
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    assert seen[:7] != seen[7:]


def test_the_server_brings_the_tokenizer_wherever_the_command_runs(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder, offline, and a stranger's folder of the model's name in it."""
    (tmp_path / "test" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    env = trained.server.environment | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    done = CliRunner().invoke(
        cli, ["--format", "json", "sample", "test/tiny", "it", "--max-tokens", "3"], env=env
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["samples"][0]["tokens"]
