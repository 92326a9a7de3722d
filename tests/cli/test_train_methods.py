"""`tinsmith train dpo`, `rl` and `distill` on the fake engine: what each should raise or lower."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.cli.training import rewards
from tinsmith.cli.training.forms import Prompt
from tinsmith.cli.training.methods import rollouts
from tinsmith.cli.training.methods.rollouts import Answer
from tinsmith.cli.training.rewards import Case
from tinsmith.cli.training.run_folder import RunFolder
from tinsmith.errors import TinkerError, ValidationError
from tinsmith.types import PromptProvenanceSpan, ProvenanceSpans, SampledProvenanceSpan

if TYPE_CHECKING:
    from tests.cli.conftest import Run

Train = Any
"""(method, records, *options) -> (facts, metrics of the steps)"""


@pytest.fixture
def train(run_json: Any, byte_tokenizer: Path, tmp_path: Path) -> Train:
    def train(
        method: str, data: list[dict[str, Any]], *options: str
    ) -> tuple[dict[str, Any], list[dict[str, float]]]:
        file = tmp_path / f"{method}.jsonl"
        file.write_text("\n".join(map(json.dumps, data)))
        facts = run_json(
            *("train", method, str(file), "--tokenizer", str(byte_tokenizer)),
            *("--samples", "1", "--sample-tokens", "4", *options),
        )
        return facts, RunFolder.open(Path(facts["folder"])).metrics()

    return train


PROMPTS = [{"prompt": f"{number}:"} for number in range(20)]
PAIRS = [{**each, "chosen": "aaa", "rejected": "bbb"} for each in PROMPTS]


def mean(lines: list[dict[str, float]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


def test_preferences_raise_the_margin_of_what_was_chosen(train: Train) -> None:
    options = ("--steps", "6", "--batch-size", "4", "--learning-rate", "0.01", "--beta", "0.5")
    facts, lines = train("dpo", PAIRS, *options)
    assert lines[0]["margin"] == pytest.approx(0.0, abs=1e-5), "nothing is gained at the start"
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[-1]["margin"] > 2
    assert lines[-1]["accuracy"] == 1
    assert facts["eval_margin"] > 2, "pairs that it has not seen, too"


def test_preferences_are_compared_with_the_checkpoint_that_the_run_began_with(
    train: Train, run_json: Any, run: Run
) -> None:
    """And not with the base model; also when the run is resumed, and has another client."""
    options = ("--batch-size", "4", "--learning-rate", "0.01", "--beta", "0.5")
    first, _ = train("dpo", PAIRS, "--steps", "4", *options)
    start = ("--from", first["checkpoint"], "-o", str(Path(first["folder"]).with_name("second")))
    second, lines = train("dpo", PAIRS, "--steps", "2", *options, *start)
    assert lines[0]["margin"] == pytest.approx(0.0, abs=1e-5)
    listed = run("checkpoint", "list", "--limit", "0").stdout
    assert second["checkpoint"] in listed
    assert "sampler_weights/start" not in listed, "it is of no more use"


def test_a_reward_rises(train: Train) -> None:
    options = ("--steps", "15", "--learning-rate", "0.02", "--max-tokens", "8")
    facts, lines = train("rl", PROMPTS, *options, "--check", "regex:a", "--eval-every", "5")
    assert mean(lines[-3:], "reward") > mean(lines[:3], "reward") + 0.15
    assert facts["best_checkpoint"]


def test_an_answer_says_which_sample_its_tokens_came_from() -> None:
    """Every token that is read, and every one that is scored."""
    prompt = Prompt([1, 2, 3], "text", None, {})
    datum = rollouts.datum(prompt, Answer([4, 5], [-1.0, -2.0], "", "sample-1:0"), [1.0, 1.0])
    whole = {PromptProvenanceSpan: [1, 2, 3], SampledProvenanceSpan: [4, 5]}

    def named(spans: ProvenanceSpans | None) -> list[int]:
        assert spans is not None and {span.sequence_id for span in spans} == {"sample-1:0"}
        runs = [whole[type(span)][span.offset :][: span.length] for span in spans]
        return [token for run in runs for token in run]

    assert named(datum.model_input_spans) == datum.model_input.to_ints() == [1, 2, 3, 4]
    assert named(datum.loss_fn_input_spans) == [2, 3, 4, 5]
    unnamed = rollouts.datum(prompt, Answer([4, 5], [-1.0, -2.0], ""), [1.0, 1.0])
    assert unnamed.model_input_spans is None


def test_rewards_and_evaluations_are_among_the_run_s_curves_on_the_server(
    train: Train, run_json: Any
) -> None:
    facts, lines = train("rl", PROMPTS, "--check", "regex:a", "--max-tokens", "8", "--steps", "2")
    run_id = facts["checkpoint"].split("/")[2]
    for name in ("reward", "eval_reward"):
        curve = run_json("run", "show", run_id, "--metric", name)["curve"]
        here = {line["step"]: line[name] for line in lines if name in line}
        assert here
        assert dict(zip(curve["x"], curve["mean"], strict=True)) == pytest.approx(here, rel=1e-4)


def test_several_passes_over_the_same_answers_have_the_bounded_loss(train: Train) -> None:
    options = ("--steps", "6", "--learning-rate", "0.02", "--max-tokens", "8", "--passes", "2")
    _, lines = train("rl", PROMPTS, *options, "--check", "regex:a", "--loss", "ppo")
    assert mean(lines[-2:], "reward") > mean(lines[:2], "reward")


def test_a_group_of_equal_rewards_is_no_reason_to_stop(train: Train, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def same(answer, record):\n    return 1\n")
    reward = f"{tmp_path / 'judge.py'}:same"
    _, lines = train("rl", PROMPTS, "--steps", "2", "--reward", reward, "--max-tokens", "2")
    assert [line["equal_groups"] for line in lines] == [1.0, 1.0]


def test_distillation_lowers_the_divergence_from_the_teacher(train: Train, tmp_path: Path) -> None:
    """Both know a and b alone; the teacher has them take turns."""
    mixed = [{"text": text} for text in ("aabbaabbaabb", "abbaabbaabba", "bbaabbaabbaa") * 3]
    lessons = ("--steps", "15", "--learning-rate", "0.03", "-o")
    student, _ = train("sft", mixed, *lessons, str(tmp_path / "student"))
    teacher, _ = train("sft", [{"text": "abababababab"}] * 8, *lessons, str(tmp_path / "teacher"))
    facts, lines = train(
        *(
            "distill",
            [{"prompt": letter} for letter in "abab" * 4],
            "--from",
            student["checkpoint"],
        ),
        *("--teacher", teacher["sampler_checkpoint"], "--steps", "10", "--learning-rate", "0.02"),
        *("--max-tokens", "4", "--batch-size", "4", "--group-size", "8"),
    )
    assert mean(lines[-3:], "kl") < lines[0]["kl"] / 10
    assert facts["eval_kl"] < lines[0]["kl"] / 10


def test_a_teacher_may_be_the_model_itself_with_a_system_prompt(train: Train) -> None:
    options = ("--steps", "1", "--max-tokens", "4", "--held-out", "0")
    chats = [{"messages": [{"role": "user", "content": "Hi?"}]}]
    _, lines = train("distill", chats, *options, "--teacher-system", "Be brief.")
    assert "kl" in lines[0]


# --- rewards ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "answer", "passes"),
    [
        ("exact", " 4 ", True),
        ("exact", "It is 4", False),
        ("exact:four", "four", True),
        ("contains", "It is 4.", True),
        ("contains:{unit}", "4 apples", True),
        ("contains:{unit}", "4 pears", False),
        ("regex:^\\d{1,2}$", "42", True),
        ("regex:\\b{answer}\\b", "It is 4.", True),
        ("regex:\\b{answer}\\b", "It is 44.", False),
        ("length:2..4", "abc", True),
        ("length:..2", "abc", False),
        ("json", '{"a": 1}', True),
        ("json", "{a: 1}", False),
        ("json:a", '{"a": 1}', True),
        ("json:b", '{"a": 1}', False),
    ],
)
def test_a_check_passes_or_fails(check: str, answer: str, passes: bool) -> None:
    case = Case("2 + 2?", answer, {"answer": "4", "unit": "apples"})
    assert rewards.check(check)(case) is passes
    assert rewards.build(None, [check, "length:0.."])([case]) == [(1 + passes) / 2]


@pytest.mark.parametrize(
    ("check", "complaint"),
    [("exakt", "no such check"), ("regex:(", "not a regular"), ("length:3", "no such check")],
)
def test_a_check_that_is_none_is_refused_before_the_run(check: str, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        rewards.build(None, [check])


def test_a_check_of_a_field_that_a_record_lacks_names_it() -> None:
    with pytest.raises(ValidationError, match="no field 'answer'"):
        rewards.check("exact")(Case("", "x", {}))


def test_a_function_s_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text("def nothing(answer, record):\n    return None\n")
    with pytest.raises(TinkerError, match="gave None"):
        rewards.build(f"{file}:nothing", [])([Case("", "x", {})])
    with pytest.raises(ValidationError, match="no function 'other'"):
        rewards.build(f"{file}:other", [])
    with pytest.raises(ValidationError, match="no file"):
        rewards.build("missing.py:other", [])
    with pytest.raises(ValidationError, match="not both"):
        rewards.build(f"{file}:nothing", ["exact"])


class _Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        cases = json.loads(self.rfile.read(int(self.headers["content-length"])))["cases"]
        lengths = [len(case["answer"]) + case["record"]["more"] for case in cases]
        if self.path == "/short":
            lengths = lengths[:-1]
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"rewards": lengths}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_url_gives_rewards(judge: str) -> None:
    cases = [Case("p", "abc", {"more": 1}), Case("p", "a", {"more": 0})]
    assert rewards.build(judge, [])(cases) == [4.0, 1.0]
    with pytest.raises(TinkerError, match="a list of 2 numbers"):
        rewards.build(f"{judge}/short", [])(cases)
    with pytest.raises(TinkerError, match="404"):
        rewards.build(f"{judge}/missing", [])(cases)
