"""Data to train on: files of every format, what their records mean, and what of them is learned."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from tinsmith.cli.training import batches, conversation, forms, records
from tinsmith.cli.training.batches import Batches
from tinsmith.client import tokenizers
from tinsmith.errors import ValidationError

LINES = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(3)]
CHAT = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho!"}]

FORGETS_THOUGHTS = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'assistant' %}"
    "{% if loop.last %}<think></think>{% endif %}{{ m.content }}<end>"
    "{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""As Qwen3's: the thoughts of the last reply are kept, those of earlier ones are dropped."""

OPENS_WITH_A_THOUGHT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>{{ '\\n' }}{% endif %}"
)
"""As DeepSeek R1's: a reply is opened with a word that a finished one does not have."""


@pytest.fixture
def tokenizer(byte_tokenizer: Path) -> Any:
    return tokenizers.load(str(byte_tokenizer))


def learned(tokenizer: Any, example: conversation.Example) -> str:
    pairs = zip(example.tokens, example.weights, strict=True)
    return str(tokenizer.decode([token for token, weight in pairs if weight]))


# --- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("form", ["lines", "array", "indented array", "csv", "tsv"])
def test_a_file_of_any_format_has_the_same_records_with_and_without_a_mark(
    tmp_path: Path, form: str, mark: str
) -> None:
    text = {
        "lines": "\n".join(map(json.dumps, LINES)),
        "array": json.dumps(LINES),
        "indented array": "\n " + json.dumps(LINES, indent=2),
        "csv": "prompt,completion\n0+1=,1\n1+1=,2\n2+1=,3\n",
        "tsv": "prompt\tcompletion\n0+1=\t1\n1+1=\t2\n2+1=\t3\n",
    }[form]
    file = tmp_path / f"data.{form if form in ('csv', 'tsv') else 'json'}"
    file.write_text(mark + text, encoding="utf-8")
    assert [record.fields for record in records.read(str(file))] == LINES


def test_paragraphs_of_a_text_are_records_with_the_lines_they_begin_at(tmp_path: Path) -> None:
    file = tmp_path / "data.txt"
    file.write_text("\none\ntwo\n\n\nthree\n")
    found = [(each.place.partition(", ")[2], each.fields) for each in records.read(str(file))]
    assert found == [("line 2", {"text": "one\ntwo"}), ("line 6", {"text": "three"})]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("data.jsonl", '{"prompt": "a"}\nnonsense', "line 2.*not JSON"),
        ("data.jsonl", '{"prompt": "a"}\n3', "line 2.*expected an object, got int"),
        ("data.json", '[{"prompt": "a"}, "text"]', "item 2"),
        ("data.json", "[{", "data.json.*not JSON"),
        ("data.csv", "prompt,completion\na,b\nc,d,e\n", "line 3.*expected 2 cells"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_with_its_place(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValidationError, match=complaint):
        list(records.read(str(file)))


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.txt"
    file.write_bytes("Käse".encode("latin-1"))
    with pytest.raises(ValidationError, match=r"data\.txt: is not UTF-8"):
        list(records.read(str(file)))


def test_a_cell_may_be_as_long_as_a_book(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text("text\n" + "a" * 200_000 + "\n")
    assert len(next(records.read(str(file))).fields["text"]) == 200_000


def test_a_parquet_file_is_read_where_pyarrow_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.parquet"
    file.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValidationError, match="pip install pyarrow"):
        list(records.read(str(file)))
    monkeypatch.delitem(sys.modules, "pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(LINES), file)
    assert [each.fields for each in records.read(str(file))] == LINES


def test_what_is_no_file_is_a_data_set_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        return LINES

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]  # the real one is large
    monkeypatch.setitem(sys.modules, "datasets", library)
    found = list(records.read("owner/name:test"))
    assert [each.fields for each in found] == LINES
    assert found[1].place == "owner/name, test, row 2"
    assert asked == [("owner/name", "test")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValidationError, match="pip install datasets"):
        list(records.read("owner/name"))
    with pytest.raises(ValidationError, match="no such file"):
        list(records.read("talks.jsonl"))


FROM_FOLDERS = """
import json, sys
import datasets
from tinsmith.cli.training import records
from tinsmith.errors import ValidationError

rows = json.loads(sys.argv[1])
whole = datasets.Dataset.from_list(rows)
whole.save_to_disk("alone")
datasets.DatasetDict(train=whole.select([0]), test=whole.select([1, 2])).save_to_disk("splits")
for source in sys.argv[2:]:
    try:
        found = [(each.place, each.fields) for each in records.read(source)]
    except ValidationError as error:
        found = str(error)
    print(json.dumps(found))
"""


def test_the_datasets_library_reads_folders_of_files_and_what_it_has_saved(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs datasets, which is not among the test packages")
    (tmp_path / "files").mkdir()
    for name, lines in (("train", LINES[:1]), ("test", LINES[1:])):
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / "files" / f"{name}.jsonl").write_text(text)
    done = subprocess.run(
        [
            *(sys.executable, "-c", FROM_FOLDERS, json.dumps(LINES)),
            *("files", "files:test", "alone", "splits", "splits:test"),
            *("alone:test", "nothing/here"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    *rows, wrong, missing = found
    assert [[fields for _, fields in each] for each in rows] == [
        *(LINES[:1], LINES[1:], LINES, LINES[:1], LINES[1:])
    ]
    assert [place for place, _ in rows[1]] == ["files, test, row 1", "files, test, row 2"]
    assert "the data set 'alone:test' cannot be read" in wrong
    assert "the data set 'nothing/here' cannot be read" in missing


# --- records ----------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHAT},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho!"}]
    },
    "Alpaca": {"instruction": "Hi?", "input": "", "output": "Ho!"},
    "prompt of messages": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "prompt of messages, completion of text": {"prompt": CHAT[:1], "completion": "Ho!"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_conversation_gives_the_same_example_and_prompt(
    tokenizer: Any, form: str
) -> None:
    record = records.Record("data, line 1", FORMS[form])
    (example,) = forms.examples(record, tokenizer)
    assert tokenizer.decode(example.tokens) == "user: Hi?\nassistant: Ho!<end>\n"
    assert learned(tokenizer, example) == "Ho!<end>\n"
    prompt = forms.prompt(record, tokenizer, "Be brief.")
    assert tokenizer.decode(prompt.tokens) == "system: Be brief.\nuser: Hi?\nassistant: "
    assert (prompt.text, prompt.fields["answer"]) == ("Hi?", "Ho!")


def test_texts_are_taken_as_they_are(tokenizer: Any) -> None:
    (whole,) = forms.examples(records.Record("", {"text": "abc"}), tokenizer)
    assert learned(tokenizer, whole) == "abc<end>"
    (example,) = forms.examples(records.Record("", LINES[0]), tokenizer)
    assert tokenizer.decode(example.tokens) == "0+1=1<end>"
    assert learned(tokenizer, example) == "1<end>"
    alpaca = records.Record("", {"instruction": "Add.", "input": "1 2", "output": "3"})
    assert "Add.\n\n1 2" in tokenizer.decode(forms.examples(alpaca, tokenizer)[0].tokens)


def test_a_text_begins_with_the_token_that_begins_every_text(tokenizer: Any) -> None:
    """Llama and Gemma are lost without it; it was left out."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = "<end>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 0)]
    )
    (example,) = forms.examples(records.Record("", LINES[0]), tokenizer)
    assert tokenizer.decode(example.tokens) == "<end>0+1=1<end>"
    assert conversation.text_tokens(tokenizer, "<end>a")[:2] != [0, 0]
    (chat,) = forms.examples(records.Record("", {"messages": CHAT}), tokenizer)
    assert chat.tokens[0] != 0, "a template writes it itself"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": "a"}, "line 2, completion.*missing"),
        ({"prompt": 3, "completion": "b"}, "line 2, prompt.*not int"),
        ({"prompt": "", "completion": "b"}, "line 2, prompt.*empty"),
        ({"messages": []}, "line 2, messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"line 2, messages\[0\].*role"),
        ({"messages": [{"role": "user", "content": 3}]}, r"line 2, messages\[0\].*content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "line 2.*assistant"),
        ({"conversations": [{"from": "me", "value": "x"}]}, r"line 2, conversations\[0\].*from"),
        ({"instruction": "x"}, "line 2, output"),
        ({"question": "x"}, "line 2.*none of the known fields"),
    ],
)
def test_a_mistake_in_a_record_is_reported_with_its_place_and_field(
    tokenizer: Any, fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint):
        forms.examples(records.Record("data.jsonl, line 2", fields), tokenizer)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "user: Hi?\nassistant: ", "chosen": "Ho!", "rejected": "No."},
        {"prompt": CHAT[:1], "chosen": "Ho!", "rejected": "No."},
        {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "No."}]},
        {
            "prompt": CHAT[:1],
            "chosen": CHAT[1:],
            "rejected": [{"role": "assistant", "content": "No."}],
        },
    ],
    ids=["texts", "messages and texts", "conversations", "messages"],
)
def test_a_pair_has_one_prompt_and_two_answers(tokenizer: Any, fields: dict[str, Any]) -> None:
    pair = forms.pair(records.Record("", fields), tokenizer)
    assert learned(tokenizer, pair.chosen).rstrip() == "Ho!<end>"
    assert learned(tokenizer, pair.rejected).rstrip() == "No.<end>"
    with pytest.raises(ValidationError, match=r"line 3, rejected.*the same"):
        same = {**fields, "rejected": fields["chosen"]}
        forms.pair(records.Record("data, line 3", same), tokenizer)


# --- what is learned --------------------------------------------------------------------------


def test_only_the_words_of_the_assistant_are_learned(tokenizer: Any) -> None:
    (example,) = conversation.chat_examples(tokenizer, [*CHAT, *CHAT])
    text = "user: Hi?\nassistant: Ho!<end>\n"
    assert tokenizer.decode(example.tokens) == text + text
    assert learned(tokenizer, example) == "Ho!<end>\nHo!<end>\n"


def test_a_reply_of_weight_zero_is_read_and_not_learned(tokenizer: Any) -> None:
    silent = [CHAT[0], {**CHAT[1], "weight": 0}]
    (example,) = conversation.chat_examples(tokenizer, [*silent, *CHAT])
    assert tokenizer.decode(example.tokens).count("Ho!") == 2
    assert learned(tokenizer, example) == "Ho!<end>\n"


def test_a_template_that_rewrites_the_past_has_an_example_for_each_reply(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such conversations were refused. Each reply follows what the model will have seen then."""
    monkeypatch.setattr(tokenizer, "chat_template", FORGETS_THOUGHTS)
    second = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "No."}]
    examples = conversation.chat_examples(tokenizer, [*CHAT, *second])
    assert [tokenizer.decode(each.tokens) for each in examples] == [
        "user: Hi?\nassistant: <think></think>Ho!<end>\n",
        "user: Hi?\nassistant: Ho!<end>\nuser: So?\nassistant: <think></think>No.<end>\n",
    ]
    assert [learned(tokenizer, each) for each in examples] == [
        "<think></think>Ho!<end>\n",
        "<think></think>No.<end>\n",
    ]
    for each, messages in zip(examples, [CHAT[:1], [*CHAT, second[0]]], strict=True):
        seen = conversation.prompt_tokens(tokenizer, messages)
        assert each.tokens[: len(seen)] == seen
        assert not any(each.weights[: len(seen)])


def test_a_reply_follows_the_words_that_the_template_opens_it_with(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", OPENS_WITH_A_THOUGHT)
    (example,) = conversation.chat_examples(tokenizer, CHAT)
    assert tokenizer.decode(example.tokens) == "user: Hi?\nassistant: <think>\nHo!<end>\n"
    assert learned(tokenizer, example) == "Ho!<end>\n"


def test_a_model_without_a_template_is_told_what_to_use(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValidationError, match=r"line 1.*no chat template.*'prompt'"):
        forms.examples(records.Record("data, line 1", {"messages": CHAT}), tokenizer)


def test_a_template_that_refuses_a_conversation_is_an_error_with_its_place(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was forty lines of traceback."""
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValidationError, match=r"line 1.*chat template.*roles must alternate"):
        forms.examples(records.Record("data, line 1", {"messages": CHAT}), tokenizer)


# --- batches ----------------------------------------------------------------------------------


def test_every_example_is_seen_once_in_an_epoch() -> None:
    seen = [each for step in range(7) for each in Batches(range(7), 2, 1).of_step(step)]
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    assert seen[:7] != seen[7:]


def test_a_step_does_not_shuffle_everything() -> None:
    """It did, once for every example: 1.3 s a step at 100,000."""
    many = Batches(range(100_000), 8, seed=0)
    many.of_step(0)
    started = time.process_time()
    for step in range(1, 200):
        many.of_step(step)
    assert time.process_time() - started < 1.0


def test_a_resumed_run_sees_the_batches_of_an_undisturbed_one() -> None:
    undisturbed = Batches(range(7), 3, seed=5)
    expected = [undisturbed.of_step(step) for step in range(10)]
    for step in range(10):
        assert Batches(range(7), 3, seed=5).of_step(step) == expected[step]


def test_what_is_held_out_is_not_trained_on() -> None:
    kept, held_out = batches.split(range(20), 0.1, seed=3)
    assert sorted([*kept, *held_out]) == list(range(20))
    assert len(held_out) == 2
    assert batches.split(range(20), 0.1, seed=3) == (kept, held_out)
    assert batches.split(range(4), 0.1, seed=3)[1], "a small set has one example held out"
    assert batches.split(range(4), 0.0, seed=3)[1] == []
